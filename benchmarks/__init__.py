"""Memory and speed of mortice, measured: `python -m benchmarks`. See README.md for what is compared with what."""
