"""The strategies that ship with mortice. They use only the public hooks."""
