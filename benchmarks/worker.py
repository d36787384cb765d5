"""One measurement in this process: `python -m benchmarks.worker MODULE:FUNCTION`, arguments as JSON on standard input.

A fast BLAS is loaded before anything imports mlx. The result is the last line of standard output.
"""

from __future__ import annotations

import importlib
import json
import sys

from mortice import blas


def main(target: str) -> None:
    blas.load()
    module, _, function = target.partition(":")
    found = getattr(importlib.import_module(module), function)(**json.load(sys.stdin))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
