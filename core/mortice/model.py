"""What a model adapter builds: parts with Hugging Face names, and the output matrix.

A model is `embed(tokens, ctx) → carry`, a list of `blocks`, each `(carry, ctx) → carry`, and
`finish(carry) → hidden [T, D]`. The carry is a small dict of arrays, `{"h": [T, D]}` at least. A
decoder layer is two blocks, attention and MLP, because the residual stream is one tensor wide at both
places, so a backward strategy may cut anywhere.

Every part (embedding, block, final norm, output) is an `mlx.nn` module with a `path`: the prefix that
makes its parameters' names those of the Hugging Face checkpoint (`model.layers.0` for both blocks of
layer 0). Loading, adapters, gradients and saving all speak these names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from attrs import evolve, frozen

from mortice.batch import Gradients
from mortice.context import Context, activate
from mortice.linear import FEW, on_cpu, unpack
from mortice.modules import leaves, slots

Carry: TypeAlias = "dict[str, mx.array]"


class Part(nn.Module):
    """An `mlx.nn` module whose parameters belong under `path` in the checkpoint."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    @property
    def path(self) -> str:
        return self._path


class Block(Part):
    """One step of the residual stream. `layer` is the decoder layer it belongs to."""

    def __init__(self, path: str, layer: int) -> None:
        super().__init__(path)
        self._layer = layer

    @property
    def layer(self) -> int:
        return self._layer

    def __call__(self, carry: Carry, ctx: Context) -> Carry:
        raise NotImplementedError


class Model:
    """Base of what `ModelAdapter.build` returns. Subclasses give `embed`, `finish` and `output`.

    `parts` must list every part once: embedding, blocks in order, final norm, output.
    """

    config: Mapping[str, Any]
    blocks: Sequence[Block]
    parts: Sequence[Part]
    dtype: mx.Dtype = mx.float32
    """Of the activations: float32 on the CPU, the checkpoint's own on a GPU."""
    trainable: frozenset[tuple[int, Any]] = frozenset()
    """(id of module, attribute) of every parameter that trains."""
    buffers: frozenset[str] = frozenset()
    """Full names of stored numbers that are part of the function and never train."""
    packing_rules: Mapping[str, int] = {}
    """Bits that modules need at least when a checkpoint is packed, by pattern of their names."""
    unread: bool = False
    """Whether the weights are to be cast as they are read: see `read`."""

    def embed(self, tokens: mx.array, ctx: Context) -> Carry:
        """Token ids `[T]` to the first carry. Constants (per-layer inputs) go into `ctx.constants`."""
        raise NotImplementedError

    def finish(self, carry: Carry) -> mx.array:
        """The last carry to hidden states `[T, D]`, after the final norm."""
        raise NotImplementedError

    @property
    def output(self) -> Output:
        """The output matrix with the parameters that are bound now."""
        raise NotImplementedError

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Names and shapes of a checkpoint to those of the parts: drop dead weights, split fused ones."""
        return weights

    def own_name(self, name: str) -> str:
        """The parts' own name of a parameter or module that transformers or mlx-lm call `name`."""
        return name

    def mlx_lm_name(self, name: str) -> str:
        """What mlx-lm calls a parameter: the name under which adapters are saved."""
        return name

    @property
    def mlx_lm_config(self) -> Mapping[str, Any]:
        """config.json with which mlx-lm loads weights under `mlx_lm_name`."""
        return self.config

    @property
    def num_layers(self) -> int:
        return 1 + max((block.layer for block in self.blocks), default=-1)

    def first_layers(self, count: int) -> Model:
        """The same model, its weights shared, with its first layers only."""
        small = copy(self)
        small.invalidate()
        small.blocks = [block for block in self.blocks if block.layer < count]
        left_out = {id(block) for block in self.blocks if block.layer >= count}
        small.parts = [part for part in self.parts if id(part) not in left_out]
        return small

    def parts_around(self) -> tuple[list[Part], list[Part]]:
        """The parts before the first block (embedding) and after the last (final norm, output)."""
        places = [i for i, part in enumerate(self.parts) if isinstance(part, Block)]
        return list(self.parts[: places[0]]), list(self.parts[places[-1] + 1 :])

    def mark_trainable(self, params: Mapping[str, Any]) -> None:
        """Say which parameters train, once modules are in place. Contexts that recompute need to know."""
        self.invalidate()
        places = (self._place(name) for name in params)
        self.trainable = frozenset((id(owner), key) for owner, key in places)

    def run(self, carry: Carry, ctx: Context, start: int = 0, stop: int | None = None) -> Carry:
        """Blocks `start` to `stop` under `ctx`."""
        ctx.trainable = self.trainable
        with activate(ctx):
            for block in self.blocks[start:stop]:
                carry = block(carry, ctx)
        return carry

    def begin(self, ctx: Context, tokens: mx.array) -> Carry:
        """`embed` under `ctx`."""
        with activate(ctx):
            return self.embed(tokens, ctx)

    def hidden(self, ctx: Context, tokens: mx.array) -> mx.array:
        """All of it at once: token ids `[T]` to hidden states `[T, D]`."""
        return self.finish(self.run(self.begin(ctx, tokens), ctx))

    def named_modules(self) -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], None]]]:
        """Every leaf module with its full name and a function that puts another module in its place."""
        for part in self.parts:
            yield from leaves(part.path, part)

    def named_parameters(self) -> dict[str, mx.array]:
        """All parameters by full name."""
        return {name: owner[key] for part in self.parts for name, owner, key in slots(part.path, part)}

    def bind(self, params: Mapping[str, mx.array]) -> None:
        """Put arrays (or tracers) in the places of these parameters. Raises KeyError for an unknown name."""
        for name, value in params.items():
            owner, key = self._place(name)
            owner[key] = value

    def read(self) -> None:
        """Read weights that are cast on the way, one after the other.

        A cast holds a tensor in both types, and a graph that needs many weights would hold many of them. Weights that
        stay as they are stored need no such order: each is read when it is first computed with.
        """
        if self.unread:
            for value in self.named_parameters().values():
                mx.eval(value)
            self.unread = False

    def invalidate(self) -> None:
        """Forget where parameters live, and compiled pieces; to be called after modules were replaced."""
        self.__dict__.pop("_places", None)
        self.__dict__.pop("compiled", None)

    @cached_property
    def compiled(self) -> dict[Hashable, Any]:
        """Pieces of the model that were compiled, by what they are and the shape of the row (`mortice.compiling`)."""
        return {}

    def names_of(self, parts: Sequence[Part], among: Mapping[str, Any]) -> list[str]:
        """Which of the names in `among` are parameters of these parts."""
        places = self._all_places()
        ids = {id(part) for part in parts}
        return [name for name in among if name in places and places[name][2] in ids]

    def _place(self, name: str) -> tuple[Any, str]:
        owner, key, _ = self._all_places()[name]
        return owner, key

    def _all_places(self) -> dict[str, tuple[Any, str, int]]:
        places = self.__dict__.get("_places")
        if places is None:
            places = {}
            for part in self.parts:
                for name, owner, key in slots(part.path, part):
                    places[name] = (owner, key, id(part))
            self.__dict__["_places"] = places
        return places


@frozen(eq=False)
class Output:
    """The output matrix `[V, D]`, maybe quantized, with soft cap and temperature. What a head multiplies by.

    Heads use `project`, `pull`, `rows` and `take` block by block and never look at how the matrix is stored. An
    adapter on the output gives a subclass that overrides them together with `parameters`, `with_parameters` and
    `accumulate`.
    """

    weight: mx.array
    """`[V, D]`, or packed."""
    name: str
    """Full parameter name, `lm_head.weight` or the embedding's where it is tied."""
    scales: mx.array | None = None
    biases: mx.array | None = None
    group_size: int = 64
    bits: int = 4
    mode: str = "affine"
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]

    @property
    def quantized(self) -> bool:
        return self.scales is not None

    def parameters(self) -> dict[str, mx.array]:
        """Those that can train, by full name: none of a quantized matrix."""
        return {} if self.quantized else {self.name: self.weight}

    def with_parameters(self, params: Mapping[str, mx.array]) -> Output:
        """The same output with other values."""
        return evolve(self, weight=params.get(self.name, self.weight))

    def at_temperature(self, temperature: float) -> Output:
        return evolve(self, temperature=temperature)

    def _packed(self, at: slice | mx.array) -> tuple[mx.array, mx.array, mx.array | None]:
        assert self.scales is not None
        return self.weight[at], self.scales[at], None if self.biases is None else self.biases[at]

    def _floats(self, at: slice | mx.array) -> mx.array:
        if not self.quantized:
            return self.weight[at].astype(mx.float32)
        weight, scales, biases = self._packed(at)
        if self.mode == "affine":  # else rows are rounded to the type of the scales
            scales, biases = scales.astype(mx.float32), None if biases is None else biases.astype(mx.float32)
        return unpack(weight, scales, biases, self.group_size, self.bits, self.mode).astype(mx.float32)

    def rows(self, start: int = 0, stop: int | None = None) -> mx.array:
        """Rows of the matrix as float32 `[stop − start, D]`."""
        return self._floats(slice(start, stop))

    def take(self, ids: mx.array) -> mx.array:
        """The rows of these ids as float32: `[M] → [M, D]`."""
        return self._floats(ids)

    def _packed_product(self, x: mx.array, start: int, stop: int, *, transpose: bool) -> mx.array:
        """`x` times the packed rows of a vocabulary block, or times their transpose, in float32."""
        packed = self._packed(slice(start, stop))
        product = mx.quantized_matmul(
            x, *packed, transpose=transpose, group_size=self.group_size, bits=self.bits, mode=self.mode
        )
        return product.astype(mx.float32)

    def project(self, hidden: mx.array, start: int = 0, stop: int | None = None) -> mx.array:
        """Raw logits of a vocabulary block: `[M, D] → [M, stop − start]` float32, without soft cap and temperature."""
        stop = self.vocab if stop is None else stop
        if self.quantized and (hidden.shape[0] <= FEW or not on_cpu()):
            return self._packed_product(hidden, start, stop, transpose=True)
        return hidden.astype(mx.float32) @ self.rows(start, stop).T

    def pull(self, g: mx.array, start: int = 0, stop: int | None = None) -> mx.array:
        """The transpose of `project`: `[M, stop − start] → [M, D]` float32."""
        stop = self.vocab if stop is None else stop
        if self.quantized and not on_cpu():
            return self._packed_product(g, start, stop, transpose=False)
        return g.astype(mx.float32) @ self.rows(start, stop)

    def finish(self, logits: mx.array) -> mx.array:
        """Soft cap, then temperature."""
        if self.softcap is not None:
            logits = self.softcap * mx.tanh(logits / self.softcap)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def slope(self, logits: mx.array) -> mx.array:
        """d finish / d raw logit, of raw logits."""
        scale = 1.0 / self.temperature
        if self.softcap is None:
            return mx.full(logits.shape, scale)
        return scale * (1.0 - mx.square(mx.tanh(logits / self.softcap)))

    def accumulate(self, hidden: mx.array, g: mx.array, start: int, stop: int, into: Gradients) -> None:
        """Add the gradient of a vocabulary block, from `hidden [M, D]` and d loss / d raw logits `g [M, stop − start]`.

        `into` maps this output's parameter names to running gradients; names that it lacks do not train.
        """
        if self.name in into:
            block = g.T @ hidden.astype(mx.float32)  # [v, D]
            into[self.name] = into[self.name].at[start:stop].add(block)  # in place; `+=` would copy the matrix


def output_of(module: nn.Module, path: str, softcap: float | None = None) -> Output:
    """The output matrix that a linear layer or an embedding holds. A module may give its own in `as_output`."""
    own = getattr(module, "as_output", None)
    if own is not None:
        return own(path, softcap)
    q = getattr(module, "quantization", None)
    if q is None:
        return Output(module.weight, f"{path}.weight", softcap=softcap)
    return Output(
        module.weight, f"{path}.weight", module.scales, module.get("biases"), q.group_size, q.bits, q.mode, softcap
    )
