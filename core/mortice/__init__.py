"""mortice: a plugin-based trainer for language models after pre-training, on Apple MLX.

Importing this package is light: mlx is imported by what is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "Batch": "mortice.batch",
    "Completion": "mortice.batch",
    "Group": "mortice.batch",
    "LossOutput": "mortice.batch",
    "TokenLogprobs": "mortice.batch",
    "Scores": "mortice.scoring",
    "hookimpl": "mortice.hookspecs",
    "load": "mortice.pretrained",
    "open_rater": "mortice.rating",
    "option": "mortice.options",
    "resume": "mortice.launch",
    "run": "mortice.launch",
    "score": "mortice.scoring",
}

_COMPUTE = {"mortice.launch", "mortice.pretrained", "mortice.rating", "mortice.scoring"}

if TYPE_CHECKING:
    from mortice.batch import Batch, Completion, Group, LossOutput, TokenLogprobs
    from mortice.hookspecs import hookimpl
    from mortice.launch import resume, run
    from mortice.options import option
    from mortice.pretrained import load
    from mortice.rating import open_rater
    from mortice.scoring import Scores, score

__all__ = [
    "Batch", "Completion", "Group", "LossOutput", "Scores", "TokenLogprobs",
    "hookimpl", "load", "open_rater", "option", "resume", "run", "score",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'mortice' has no attribute {name!r}")
    import importlib

    if _LAZY[name] in _COMPUTE:  # these import mlx: a fast BLAS has to be there first
        from mortice import blas

        blas.load()
    return getattr(importlib.import_module(_LAZY[name]), name)
