"""Walking a tree of `mlx.nn` modules by full names, without their own freeze state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _items(node: Any) -> Iterator[tuple[Any, Any]]:
    """Children of a module, dict or list; attributes that begin with `_` are not part of the tree."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if not str(key).startswith("_"):
            yield key, value


def wrapped(node: Any) -> Any:
    """The module that this one stands in for, whose parameters keep their names: `wraps` names the attribute."""
    name = getattr(node, "wraps", None)
    return {} if name is None else node[name]


def slots(path: str, node: Any) -> Iterator[tuple[str, Any, Any]]:
    """(full name, owner, key) of every array below `node`: `owner[key]` is where it lives."""
    for key, value in _items(node):
        name = join(path, str(key))
        if isinstance(value, mx.array):
            yield name, node, key
        elif isinstance(value, (dict, list)):
            yield from slots(name, value)
    if wrapped(node):
        yield from slots(path, wrapped(node))


def leaves(path: str, node: Any) -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], None]]]:
    """(full name, module, put) of every module that holds no other module; `put(new)` replaces it."""
    for key, value in _items(node):
        if isinstance(value, nn.Module) and not any(isinstance(v, (nn.Module, list)) for _, v in _items(value)):

            def put(module: nn.Module, node: Any = node, key: Any = key) -> None:
                node[key] = module

            yield join(path, str(key)), value, put
        elif isinstance(value, (dict, list)):
            yield from leaves(join(path, str(key)), value)
    if wrapped(node):
        yield from leaves(path, wrapped(node))
