"""Patterns of module names, as `targets` and rules give them."""

from __future__ import annotations

import fnmatch


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern is the whole name or a dotted end of it; `*` and `?` as in the shell."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")
