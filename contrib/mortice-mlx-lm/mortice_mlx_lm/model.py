"""A decoder of mlx-lm, taken apart into mortice's blocks without a line for any family.

mlx-lm builds the model from its config. Its own inner model then runs with *stand-ins* for its layers. One that notes
what comes in gives the embedding with whatever scale and positions the family has, and the arguments that each layer is
called with; one that gives back a hidden state gives what the family does behind its last layer. No class is changed;
the inner model that runs is a shallow copy.

A layer runs in one of two ways:

- `Addressed`: its attention and positions are led to the context (`attention.py`). Nothing is quadratic in the row's
  length but time, and rows may branch and be cut in every way that mortice has.
- `Carried`: mlx-lm's own code throughout, as a recurrence over the tokens of each sequence whose state is what mlx-lm
  keeps in a cache (`caches.py`). That takes state-space layers, convolutions and attention of every kind, at the cost
  that mlx-lm's code has when it trains.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from attrs import define, field, frozen

from mortice.context import Context
from mortice.linear import Embedding, Linear, Packed, QuantizedEmbedding, Stacked
from mortice.model import Block, Carry, Model, Output, Part, output_of
from mortice.modules import join, leaves
from mortice_mlx_lm import caches
from mortice_mlx_lm.attention import address, attentions
from mortice_mlx_lm.experts import own_experts
from mortice_mlx_lm.refusal import Refused

OUTPUTS = ("lm_head", "output", "embed_out")
"""Attributes of an outer model that hold its output matrix."""
INNER = ("model", "language_model.model", "transformer", "backbone", "language_model")
"""Where an outer model keeps embedding and layers."""


TABLES = (Embedding, QuantizedEmbedding)
MORTICE = (Linear, Embedding, Stacked, Packed)
"""Modules that compute in float32 whatever their weights are stored in."""


# The inner model without its layers


class StandIn:
    """In the place of a layer: tells `visits` what it is called with, and gives back `out` or what came in."""

    def __init__(self, layer: nn.Module, index: int, visits: list[Visit], out: mx.array | None) -> None:
        self._layer, self._index, self._visits, self._out = layer, index, visits, out

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        self._visits.append(Visit(self._index, x, args, kwargs))
        return x if self._out is None else self._out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@frozen(eq=False)
class Visit:
    """A call of a layer: what came in `[1, T, D]`, and what beside it."""

    index: int
    x: mx.array
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def given(self) -> list[Any]:
        return [*self.args, *self.kwargs.values()]


class Halt(Exception):
    """The layer that was asked for is reached."""


class Halting(StandIn):
    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        super().__call__(x, *args, **kwargs)
        raise Halt


@define(eq=False)
class Shell:
    """mlx-lm's inner model, runnable without its layers. Modules that mortice replaces are put back before each run."""

    inner: Any
    name: str
    """Of the list of layers."""
    layers: Sequence[nn.Module]
    caches: Sequence[Any]
    """One of each that mlx-lm would make, in its order, by its stand-in."""
    parts: Sequence[Part] = field(factory=list)
    dtype: mx.Dtype = mx.float32
    """Of the activations."""

    def run(
        self, tokens: mx.array, kept: Sequence[Any], *, until: int | None = None, out: mx.array | None = None
    ) -> tuple[list[Visit], Any]:
        """Calls of layers in order, and the result: None where it stops before layer `until`."""
        for part in self.parts:
            for name, module in part.items():
                self.inner[name] = Widened(module, self.dtype) if isinstance(module, TABLES) else module
        visits: list[Visit] = []
        kinds = [Halting if i == until else StandIn for i in range(len(self.layers))]
        self.inner[self.name] = [kind(layer, i, visits, out) for i, (kind, layer) in enumerate(zip(kinds, self.layers))]
        try:
            return visits, self.inner(tokens[None], cache=list(kept))
        except Halt:
            return visits, None
        finally:
            self.inner[self.name] = []

    def kept_at(self, offset: int) -> list[Any]:
        """Caches that are empty, behind `offset` tokens."""
        return [caches.at(cache, offset) for cache in self.caches]


class Widened:
    """In the place of an embedding: its rows in the type of the activations, before a family scales or adds them."""

    def __init__(self, table: nn.Module, dtype: mx.Dtype) -> None:
        self._table, self._dtype = table, dtype

    def __call__(self, ids: mx.array) -> mx.array:
        return self._table(ids).astype(self._dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)


# Layers


class Layer(Block):
    """One layer of mlx-lm. Its parameters keep their names."""

    wraps = "_layer_of_mlx_lm"

    def __init__(self, path: str, index: int, layer: nn.Module) -> None:
        super().__init__(path, index)
        self._layer_of_mlx_lm = layer

    def through(self, h: mx.array, args: Sequence[Any], kwargs: Mapping[str, Any]) -> mx.array:
        """`h [T, D]` → `[T, D]`."""
        out = self._layer_of_mlx_lm(h[None], *args, **kwargs)
        if not isinstance(out, mx.array):
            raise Refused(f"{self.named} gives back more than a hidden state")
        return out[0]

    @property
    def named(self) -> str:
        return f"layer {self.layer} ({type(self._layer_of_mlx_lm).__name__})"


class Addressed(Layer):
    """A layer whose attention and positions belong to the context: it is given neither a mask nor a cache."""

    def __init__(self, path: str, layer: nn.Module, visit: Visit) -> None:
        super().__init__(path, visit.index, layer)
        self._args = [_without(value) for value in visit.args]
        self._kwargs = {name: _without(value) for name, value in visit.kwargs.items()}

    def __call__(self, carry: Carry, ctx: Context) -> Carry:
        return carry | {"h": self.through(carry["h"], self._args, self._kwargs)}


def _without(value: Any) -> Any:
    """An argument of a layer, None for a mask or a cache."""
    mask = isinstance(value, str) or (isinstance(value, mx.array) and value.dtype == mx.bool_)
    return None if mask or _is_cache(value) else value


def _is_cache(value: Any) -> bool:
    return isinstance(value, (caches.Keys, caches.ArraysCache, caches.CacheList))


class Carried(Layer):
    """A layer that runs as mlx-lm wrote it, over the tokens of each sequence, with its cache as the state."""

    def __init__(self, path: str, layer: nn.Module, visit: Visit, shell: Shell, cache: int | None) -> None:
        super().__init__(path, visit.index, layer)
        self._shell, self._cache = shell, cache
        """Which of the model's caches is its own; None for a layer that keeps nothing."""

    def __call__(self, carry: Carry, ctx: Context) -> Carry:
        if self._cache is None:
            h, _ = self._piece((carry["h"],), None)
        else:
            h = ctx.scan(self._piece, carry["h"], layer=self.layer)
        return carry | {"h": h}

    def _piece(
        self, inputs: tuple[mx.array, ...], state: tuple[mx.array, ...] | None
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Consecutive tokens `[T, D]` behind a state, with the arguments that the family gives there."""
        (h,) = inputs
        shell, own = self._shell, None
        kept = shell.kept_at(0)
        if self._cache is not None:
            own = caches.holding(shell.caches[self._cache], state)
            kept = shell.kept_at(caches.length(own))
            kept[self._cache] = own
        visits, _ = shell.run(mx.zeros((h.shape[0],), mx.int32), kept, until=self.layer)
        visit = visits[-1]
        out = self.through(h, visit.args, visit.kwargs)
        return out, () if own is None else caches.held(own)


class Children(Part):
    """Some modules of mlx-lm's inner or outer model, under their own names."""

    def __init__(self, path: str, modules: Mapping[str, Any]) -> None:
        super().__init__(path)
        for name, module in modules.items():
            self[name] = module


# The model


class MlxLmModel(Model):
    """A model of mlx-lm as mortice sees one. Raises Refused for what it cannot take apart.

    `carried`: every layer runs as mlx-lm wrote it, else only those that cannot be addressed. `law` is what the family
    does to its logits.
    """

    def __init__(self, config: Mapping[str, Any], outer: nn.Module, law: LogitLaw, *, carried: bool = False) -> None:
        self.config, self._outer, self._law = config, outer, law
        path, inner = inner_of(outer)
        own_experts(outer)
        own_linear(outer)
        self._shell = shell_of(outer, inner)
        name, layers = self._shell.name, self._shell.layers
        modules = {n: v for n, v in inner.items() if n != name and isinstance(v, (nn.Module, list, dict))}
        before = {n: v for n, v in modules.items() if isinstance(v, Embedding) or n.startswith("embed")}
        after = {n: v for n, v in modules.items() if n not in before}
        if not any(isinstance(v, Embedding) for v in before.values()):
            raise Refused(f"{type(inner).__name__} has no embedding of its own")
        self._before, self._after = Children(path, before), Children(path, after)
        self._shell.parts = [self._before, self._after]
        self.blocks = [
            self._block(f"{path}.{name}.{visit.index}", layers[visit.index], visit, kept, carried)
            for visit, kept in _first_visits(self._shell)
        ]
        self.parts = [self._before, *self.blocks, self._after]
        head = head_of(outer)
        self._head = None if head is None else Children(head[0], {head[1]: _under(outer, head[0])[head[1]]})
        if self._head is not None:
            self.parts.append(self._head)

    def _block(self, path: str, layer: nn.Module, visit: Visit, cache: int | None, carried: bool) -> Layer:
        kept = None if cache is None else self._shell.caches[cache]
        numbers = any(isinstance(_without(value), mx.array) for value in visit.given())  # of the row, not the layer's
        if carried or numbers or not attentions(layer) or not isinstance(kept, caches.Keys):
            return Carried(path, layer, visit, self._shell, cache)
        address(layer, visit.index, getattr(kept, "max_size", None))
        return Addressed(path, layer, visit)

    @property
    def dtype(self) -> mx.Dtype:
        return self._shell.dtype

    @dtype.setter
    def dtype(self, value: mx.Dtype) -> None:
        self._shell.dtype = value

    def bind(self, params: Mapping[str, mx.array]) -> None:
        """Where activations are float32, what mlx-lm's own code computes with (norms, convolutions, decays) is too: it
        would round in the type that is stored (`1 + weight`). mortice's own modules take any type as it is."""
        if self.dtype != mx.float32:
            return super().bind(params)
        own = {name for name in params if isinstance(self._place(name)[0], MORTICE)}
        floats = (mx.bfloat16, mx.float16)
        super().bind({n: v.astype(mx.float32) if n not in own and v.dtype in floats else v for n, v in params.items()})

    @property
    def carried(self) -> int:
        """How many layers run as a recurrence."""
        return sum(isinstance(block, Carried) for block in self.blocks)

    def embed(self, tokens: mx.array, ctx: Context) -> Carry:
        return {"h": ctx.rotated(self._embedded, tokens)}

    def _embedded(self, tokens: mx.array, offset: int) -> mx.array:
        visits, _ = self._shell.run(tokens, self._shell.kept_at(offset), until=0)
        return visits[0].x[0]

    def finish(self, carry: Carry) -> mx.array:
        h = carry["h"]
        _, result = self._shell.run(mx.zeros((h.shape[0],), mx.int32), self._shell.kept_at(0), out=h[None])
        return result[0] if self._law.factor == 1.0 else result[0] * self._law.factor

    @property
    def output(self) -> Output:
        if self._head is not None:
            ((name, module),) = self._head.items()
            return output_of(module, join(self._head.path, name), self._law.softcap)
        name, module = next((n, m) for n, m in self._before.items() if isinstance(m, nn.Module) and "weight" in m)
        return output_of(module, f"{self._before.path}.{name}", self._law.softcap)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """As mlx-lm's own model wants it."""
        own = getattr(self._outer, "sanitize", None)
        return weights if own is None else own(dict(weights))


def inner_of(outer: nn.Module) -> tuple[str, Any]:
    """Where embedding and layers are, and their path."""
    for path in INNER:
        node = _under(outer, path)
        if isinstance(node, nn.Module) and _lists(node):
            return path, node
    raise Refused(f"{type(outer).__module__} keeps its layers in none of the places that are known")


def _under(node: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        node = node.get(name) if isinstance(node, dict) else None
    return node


def _lists(inner: Any) -> dict[str, list[nn.Module]]:
    """Lists of modules, among which that of the layers is."""
    return {n: v for n, v in inner.items() if isinstance(v, list) and v and all(isinstance(m, nn.Module) for m in v)}


def head_of(outer: nn.Module) -> tuple[str, str] | None:
    """Path and name of the output matrix beside the inner model, None where it is the embedding's. Raises Refused for
    one with a bias."""
    path, _, _ = inner_of(outer)[0].rpartition(".")
    owner = _under(outer, path)
    name = next((n for n in OUTPUTS if isinstance(owner.get(n), (nn.Linear, Linear))), None)
    if name is None:
        return None
    if "bias" in owner[name]:
        raise Refused(f"its output layer {name} has a bias, which no head knows")
    return path, name


def shell_of(outer: nn.Module, inner: Any) -> Shell:
    """The inner model around its longest list of modules, with the caches that mlx-lm would make."""
    from mlx_lm.models.cache import make_prompt_cache

    lists = _lists(inner)
    name = max(lists, key=lambda n: len(lists[n]))
    layers = lists[name]
    kept = []
    for index, cache in enumerate(make_prompt_cache(outer)):
        try:
            kept.append(caches.emptied(cache))
        except Refused as error:
            kind = type(layers[index]).__name__ if index < len(layers) else "?"
            raise Refused(f"layer {index} ({kind}): {error}") from error
    return Shell(copy.copy(inner), name, layers, kept)


def _first_visits(shell: Shell) -> list[tuple[Visit, int | None]]:
    """How each layer is called, and the place of its cache. Raises Refused where they are not called once, in order."""
    kept = shell.kept_at(0)
    model = type(shell.inner).__name__
    try:
        visits, _ = shell.run(mx.zeros((2,), mx.int32), kept)
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        kind = type(shell.layers[0]).__name__
        raise Refused(f"{model} hands more than a hidden state from layer to layer ({kind}: {error})") from error
    if [visit.index for visit in visits] != list(range(len(shell.layers))):
        raise Refused(f"{model} does not call its {len(shell.layers)} layers once each, in order")
    places = {id(cache): place for place, cache in enumerate(kept)}
    found: list[tuple[Visit, int | None]] = []
    for visit in visits:
        own = [places[id(value)] for value in visit.given() if id(value) in places]
        kind = type(shell.layers[visit.index]).__name__
        if len(own) > 1 or any(isinstance(value, (list, tuple)) for value in visit.given()):
            raise Refused(f"layer {visit.index} ({kind}) is given what other layers keep")
        found.append((visit, own[0] if own else None))
    return found


def own_linear(outer: nn.Module) -> None:
    """mortice's linear layers and embeddings for mlx's plain ones: fast on a CPU, and packed where the file is."""
    for _, module, put in list(leaves("", outer)):
        if type(module) is nn.Linear:
            outputs, inputs = module.weight.shape
            put(Linear(inputs, outputs, "bias" in module))
        elif type(module) is nn.Embedding:
            put(Embedding(*module.weight.shape))


# Logits


@frozen
class LogitLaw:
    """What a family does to the product with its output matrix: a factor, then a soft cap."""

    factor: float = 1.0
    softcap: float | None = None

    def __call__(self, product: mx.array) -> mx.array:
        scaled = product * self.factor
        return scaled if self.softcap is None else self.softcap * mx.tanh(scaled / self.softcap)


class Ending:
    """In the place of an inner model: gives back a hidden state."""

    def __init__(self, inner: Any, hidden: mx.array) -> None:
        self._inner, self._hidden = inner, hidden

    def __call__(self, *_: Any, **__: Any) -> mx.array:
        return self._hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def logit_law(outer: nn.Module) -> LogitLaw:
    """Read off an outer model (with a small vocabulary, else with its real sizes) that runs on hidden states of our
    own; nothing else of it is computed. Raises Refused where it does something else."""
    path, inner = inner_of(outer)
    head = head_of(outer)
    matrix: Any = next((m for m in inner.values() if isinstance(m, nn.Embedding)), None)
    if head is not None:
        matrix = _under(outer, head[0])[head[1]]
    if matrix is None:
        raise Refused(f"{type(outer).__module__} has no output matrix that is known")
    width = matrix.weight.shape[1]
    matrix.weight = mx.random.normal(matrix.weight.shape, key=mx.random.key(1)) * width**-0.5
    hidden = mx.random.normal((1, 4, width), key=mx.random.key(0))
    outside, _, last = path.rpartition(".")

    def logits(scale: float) -> mx.array:
        setattr(_under(outer, outside), last, Ending(inner, scale * hidden))
        return outer(mx.zeros((1, 4), mx.int32)).astype(mx.float32)

    product = hidden @ matrix.weight.T
    if logits(1.0).shape != product.shape:
        raise Refused(f"{type(inner).__name__} gives back logits, not hidden states")
    largest = mx.abs(logits(1e6)).max().item()
    softcap = largest if largest < 1e4 * mx.abs(logits(1.0)).max().item() else None
    factor = _ratio(logits(1.0), product) if softcap is None else 1e3 * _ratio(logits(1e-3), product)
    law = LogitLaw(1.0 if abs(factor - 1) < 1e-5 else factor, softcap)
    apart = mx.abs(law(product) - logits(1.0)).max() / mx.abs(product).max()
    if not apart.item() < 1e-5:
        raise Refused("its logits are no multiple of the output matrix's product, soft-capped or not")
    return law


def _ratio(found: mx.array, product: mx.array) -> float:
    """The number that `product` was multiplied by."""
    x, y = np.asarray(product, np.float64), np.asarray(found, np.float64)
    return float((x * y).sum() / (x * x).sum())
