"""The state of a layer between tokens: what mlx-lm keeps in a cache, as arrays that a context hands on.

mlx-lm gives every layer a cache object, and its state-space layers, convolutions and attention alike read from it and
write to it. A layer that runs so is a recurrence (`Context.scan`): it goes over consecutive tokens with a fresh cache
that holds the state before them, and what the cache holds then is the state behind them. A prompt's state goes to each
of its completions.

Keys and values are kept whole, also behind a sliding window, which a mask does: a window that moves in place could not
be branched from, nor differentiated through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    create_attention_mask,
)

from mortice_mlx_lm.refusal import Refused


class Keys(ConcatenateKVCache):
    """All keys and values of a path, with the mask of a sliding window where there is one."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        if window is not None:  # families ask for the attribute
            self.max_size = window

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        window = window_size or getattr(self, "max_size", None)
        if window is not None and N + self.offset <= window:
            window = None  # nothing to hide
        return create_attention_mask(N, self.offset, return_array, window)


def emptied(cache: Any) -> Any:
    """The cache that stands in for one of mlx-lm's. Raises Refused for a kind that is not known."""
    kind = type(cache)
    if kind in (KVCache, ConcatenateKVCache):
        return Keys()
    if kind is RotatingKVCache:
        if cache.keep:
            raise Refused(f"it keeps the first {cache.keep} tokens beside a window, which no context knows")
        return Keys(cache.max_size)
    if kind is ArraysCache:
        return ArraysCache(len(cache.cache))
    if kind is CacheList:
        return CacheList(*(emptied(one) for one in cache.caches))
    raise Refused(f"it keeps a {kind.__name__}, which is not known")


def at(cache: Any, offset: int) -> Any:
    """A fresh cache of the same kind that says `offset` tokens are behind it, and holds none."""
    fresh = _fresh(cache)
    for one in _each(fresh):
        if isinstance(one, Keys):
            one.offset = offset
    return fresh


def holding(cache: Any, state: Sequence[mx.array] | None) -> Any:
    """A fresh cache of the same kind with a state from `held`; empty where there is none."""
    fresh = _fresh(cache)
    if state is None:
        return fresh
    left = [None if _is_missing(array) else array for array in state]
    for one in _each(fresh):
        if isinstance(one, Keys):
            one.keys, one.values, *left = left
            one.offset = 0 if one.keys is None else one.keys.shape[-2]
        else:
            count = len(one.cache)
            one.cache, left = left[:count], left[count:]
    return fresh


def held(cache: Any) -> tuple[mx.array, ...]:
    """What a cache holds."""
    found: list[mx.array | None] = []
    for one in _each(cache):
        found += [one.keys, one.values] if isinstance(one, Keys) else one.cache
    return tuple(_MISSING if array is None else array for array in found)


_MISSING = mx.zeros((0,))
"""In the place of an array that a layer never keeps."""


def _is_missing(array: mx.array) -> bool:
    return array.ndim == 1 and array.size == 0


def _fresh(cache: Any) -> Any:
    if isinstance(cache, Keys):
        return Keys(getattr(cache, "max_size", None))
    if isinstance(cache, CacheList):
        return CacheList(*(_fresh(one) for one in cache.caches))
    return ArraysCache(len(cache.cache))


def _each(cache: Any) -> list[Any]:
    return [found for one in cache.caches for found in _each(one)] if isinstance(cache, CacheList) else [cache]


def length(cache: Any) -> int:
    """Tokens behind a cache, 0 where nothing in it says so."""
    return max((one.offset for one in _each(cache) if isinstance(one, Keys)), default=0)
