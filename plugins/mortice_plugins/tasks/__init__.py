"""Tasks: problems whose answers can be checked."""
