"""Models by hub id. Needs the extra `hub`; everything else works on local folders."""

from __future__ import annotations

import re
from pathlib import Path

from mortice.errors import CheckpointError

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model")
"""What a model folder needs. Pickled weights are never fetched."""


def looks_like_hub_id(name: str) -> bool:
    """`org/name`, with nothing that only a path has."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def fetch(name: str) -> Path:
    """The local folder of a hub id, downloaded where it is not cached.

    Raises CheckpointError where huggingface_hub is missing or the id cannot be fetched.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{name!r} is no folder here; to fetch it by hub id: pip install 'mortice[hub]' (needs huggingface_hub)"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(PATTERNS)))
    except Exception as error:  # the hub's client raises many kinds, all of them the same to a user
        raise CheckpointError(
            f"cannot fetch {name!r} from the hub: {type(error).__name__}: {str(error).splitlines()[0]}. "
            "A local folder works as well"
        ) from error
