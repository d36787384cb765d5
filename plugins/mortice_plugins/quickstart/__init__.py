"""Data and run file of `mortice quickstart`."""
