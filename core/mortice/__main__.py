"""`python -m mortice` is the command `mortice`."""

from mortice.cli import main

main()
