"""A decoder of mlx-lm, taken apart into mortice's blocks without a line for any family.

mlx-lm builds the model from its config. What becomes of it here:

- **Embedding and end.** mlx-lm's own inner model runs with *stand-ins* for its layers: one that notes what comes in
  gives the embedding with whatever scale the family has; one that gives back a hidden state gives what the family does
  behind its last layer. No class is changed; the inner model that runs is a shallow copy.
- **Attention.** Families import `scaled_dot_product_attention` into their own module. Each attention instance gets a
  subclass of its own class whose `__call__` is the same code over a copy of that module's names, in which this one name
  leads to `ctx.attend`. Masks and caches are not passed: windows come from the caches that the model would make.
- **Positions.** An attribute that turns queries and keys (`rope` and the like) is replaced, in the instance, by one
  that calls it for each stretch of consecutive positions.

Relied upon are those names and conventions of mlx-lm, not its internals; so every architecture is proved before use: a
small twin with random weights must give mlx-lm's own logits, on a plain row and on one that branches. What does not is
refused by name.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from attrs import define, frozen

from mortice.batch import Row, Span
from mortice.context import Context, SpanContext, current
from mortice.errors import CheckpointError
from mortice.linear import Embedding, Linear
from mortice.model import Block, Carry, Model, Output, Part, output_of
from mortice.modules import leaves

ATTENTION = "scaled_dot_product_attention"
ROTARY = ("rope", "rotary_emb", "rotary", "rope_local", "rope_global")
"""Attributes of an attention module that turn queries and keys."""
OUTPUTS = ("lm_head", "output", "embed_out")
"""Attributes of an outer model that hold its output matrix."""
TOLERANCE = 1e-4
"""Of a twin's logits, relative to the largest."""


class Refused(Exception):
    """Why an architecture cannot be taken apart."""


# Taking a model apart


@define
class StandIn:
    """In the place of a layer: notes what comes in, and gives back `out` where there is one."""

    layer: Any
    out: Any = None
    seen: Any = None

    def __call__(self, x: mx.array, *_: Any, **__: Any) -> mx.array:
        self.seen = x
        return x if self.out is None else self.out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class Layer(Block):
    """One layer of mlx-lm. Its parameters keep their names."""

    wraps = "_layer_of_mlx_lm"

    def __init__(self, path: str, index: int, layer: nn.Module) -> None:
        super().__init__(path, index)
        self._layer_of_mlx_lm = layer

    def __call__(self, carry: Carry, ctx: Context) -> Carry:
        out = self._layer_of_mlx_lm(carry["h"][None], None, None)
        return carry | {"h": out[0]}


class Children(Part):
    """Some modules of mlx-lm's inner or outer model, under their own names."""

    def __init__(self, path: str, modules: Mapping[str, Any]) -> None:
        super().__init__(path)
        for name, module in modules.items():
            self[name] = module


class MlxLmModel(Model):
    """A model of mlx-lm as mortice sees one. Raises Refused for what it cannot address."""

    def __init__(self, config: Mapping[str, Any], outer: nn.Module) -> None:
        self.config, self._outer = config, outer
        self._windows = windows(outer)
        path, inner = _inner(outer)
        name = next((n for n, v in inner.items() if _are_layers(v, len(self._windows))), None)
        if name is None:
            raise Refused(f"{type(inner).__name__} has no list of its {len(self._windows)} layers")
        own_linear(outer)
        layers = inner[name]
        for index, layer in enumerate(layers):
            address(layer, index, self._windows[index])
        modules = {n: v for n, v in inner.items() if n != name and isinstance(v, (nn.Module, list, dict))}
        before = {n: v for n, v in modules.items() if isinstance(v, Embedding) or n.startswith("embed")}
        after = {n: v for n, v in modules.items() if n not in before}
        if not any(isinstance(v, Embedding) for v in before.values()):
            raise Refused(f"{type(inner).__name__} has no embedding of its own")
        self._shell, self._name = copy.copy(inner), name
        self._before, self._after = Children(path, before), Children(path, after)
        self.blocks = [Layer(f"{path}.{name}.{i}", i, layer) for i, layer in enumerate(layers)]
        self.parts = [self._before, *self.blocks, self._after]
        head = next((n for n in OUTPUTS if isinstance(outer.get(n), Linear)), None)
        self._head = None if head is None else Children("", {head: outer[head]})
        if self._head is not None:
            self.parts.append(self._head)
            if "bias" in outer[head]:
                raise Refused(f"its output layer {head} has a bias, which no head knows")
        self._softcap = _softcap(outer)
        self._factor = logit_factor(config)
        """What the family multiplies its logits by."""

    def embed(self, tokens: mx.array, ctx: Context) -> Carry:
        stand_in = self._run(tokens, None)
        return {"h": stand_in.seen[0].astype(self.dtype)}

    def finish(self, carry: Carry) -> mx.array:
        h = carry["h"]
        hidden = self._run(mx.zeros((h.shape[0],), mx.int32), h[None], result=True)[0]
        return hidden if self._factor == 1.0 else hidden * self._factor

    def _run(self, tokens: mx.array, out: mx.array | None, *, result: bool = False) -> Any:
        """mlx-lm's inner model with stand-ins for its layers: the first stand-in, or the result."""
        shell = self._shell
        for part in (self._before, self._after):
            for name, module in part.items():
                shell[name] = module
        stand_ins = [StandIn(block._layer_of_mlx_lm, out) for block in self.blocks]
        shell[self._name] = stand_ins
        found = shell(tokens[None], cache=[None] * len(self._windows))
        shell[self._name] = []
        return found if result else stand_ins[0]

    @property
    def output(self) -> Output:
        if self._head is not None:
            ((name, module),) = self._head.items()
            return output_of(module, name, self._softcap)
        name, module = next((n, m) for n, m in self._before.items() if isinstance(m, nn.Module) and "weight" in m)
        return output_of(module, f"{self._before.path}.{name}", self._softcap)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """As mlx-lm's own model wants it."""
        own = getattr(self._outer, "sanitize", None)
        return weights if own is None else own(dict(weights))


def _are_layers(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(isinstance(v, nn.Module) for v in value)


def _softcap(outer: nn.Module) -> float | None:
    args = getattr(outer, "args", None) or getattr(outer, "config", None)
    return getattr(args, "final_logit_softcapping", None)


class Ending:
    """In the place of an inner model: gives back a hidden state."""

    def __init__(self, inner: Any, hidden: mx.array) -> None:
        self._inner, self._hidden = inner, hidden

    def __call__(self, *_: Any, **__: Any) -> mx.array:
        return self._hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def logit_factor(config: Mapping[str, Any]) -> float:
    """What a family multiplies its logits by, at the sizes of this config: its outer model runs on a hidden state of
    our own, with a small vocabulary; nothing else of it is computed. Raises Refused where it does something else."""
    outer = build(dict(config) | {"vocab_size": SMALL["vocab_size"]})
    path, inner = _inner(outer)
    head = next((outer[n] for n in OUTPUTS if n in outer), None)
    matrix = head if head is not None else next((m for m in inner.values() if isinstance(m, nn.Embedding)), None)
    if matrix is None or "weight" not in matrix:
        raise Refused(f"{type(outer).__module__} has no output matrix that is known")
    hidden = mx.random.normal((1, 4, matrix.weight.shape[1]), key=mx.random.key(0))
    matrix.weight = mx.random.normal(matrix.weight.shape, key=mx.random.key(1)) * hidden.shape[-1] ** -0.5
    *outside, last = path.split(".")
    owner: Any = outer
    for name in outside:
        owner = owner[name]
    setattr(owner, last, Ending(inner, hidden))
    found = outer(mx.zeros((1, 4), mx.int32)).astype(mx.float32)
    raw, cap = hidden @ matrix.weight.T, _softcap(outer)
    if cap is not None:
        _same(found, cap * mx.tanh(raw / cap), "its logits, soft-capped,")
        return 1.0
    factor = (mx.sum(raw * found) / mx.sum(raw * raw)).item()
    _same(found, factor * raw, "its logits and a multiple of the output matrix's product")
    return 1.0 if abs(factor - 1) < 1e-5 else factor


def windows(outer: nn.Module) -> list[int | None]:
    """The sliding window of each layer, None for full attention, from the cache that mlx-lm would make for it."""
    from mlx_lm.models import cache

    caches = cache.make_prompt_cache(outer)
    found: list[int | None] = []
    for i, one in enumerate(caches):
        if type(one) is cache.KVCache:
            found.append(None)
        elif type(one) is cache.RotatingKVCache:
            found.append(one.max_size)
        else:
            kind = type(one).__name__
            raise Refused(f"layer {i} keeps a {kind}: state-space, recurrent and mixed layers are not supported")
    return found


def _inner(outer: nn.Module) -> tuple[str, Any]:
    """Where embedding and layers are, and their path."""
    for path in ("model", "language_model.model", "transformer", "backbone"):
        node: Any = outer
        for name in path.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, nn.Module):
            return path, node
    raise Refused(f"{type(outer).__module__} keeps its layers in none of the places that are known")


def own_linear(outer: nn.Module) -> None:
    """mortice's linear layers and embeddings for mlx's plain ones: fast on a CPU, and packed where the file is."""
    for _, module, put in list(leaves("", outer)):
        if type(module) is nn.Linear:
            outputs, inputs = module.weight.shape
            put(Linear(inputs, outputs, "bias" in module))
        elif type(module) is nn.Embedding:
            put(Embedding(*module.weight.shape))


def address(layer: nn.Module, index: int, window: int | None) -> None:
    """Lead a layer's attention and positions to the context. Raises Refused where there is nothing to lead."""
    found = [m for m in layer.modules() if ATTENTION in getattr(type(m).__call__, "__code__", _NOTHING).co_names]
    if not found:
        raise Refused(f"layer {index} ({type(layer).__name__}) calls no {ATTENTION}: it attends in a way of its own")
    for module in found:
        module.__class__ = attending(type(module), index, window)
        turning = [name for name in ROTARY if callable(getattr(module, name, None))]
        for name in turning:
            rope = getattr(module, name)
            module.pop(name, None)
            object.__setattr__(module, name, Turning(rope))


_NOTHING = (lambda: None).__code__


def attending(kind: type, index: int, window: int | None) -> type:
    """A subclass whose `__call__` is the same code, with one name of its module leading to the context."""
    call = kind.__call__
    names = dict(call.__globals__) | {ATTENTION: partial(attend, layer=index, window=window)}
    own = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    own.__kwdefaults__ = call.__kwdefaults__
    return type(kind.__name__, (kind,), {"__call__": own, "__module__": kind.__module__})


def attend(
    q: mx.array, k: mx.array, v: mx.array, cache: Any = None, scale: float = 1.0, mask: Any = None, sinks: Any = None,
    *, layer: int, window: int | None,
) -> mx.array:  # fmt: skip
    """mlx-lm's `scaled_dot_product_attention` on `[1, H, T, d]`, by the context that runs."""
    if sinks is not None:
        raise Refused("its attention has sinks, which no context knows")
    ctx = current()
    assert ctx is not None
    q, k, v = (x[0].swapaxes(0, 1) for x in (q, k, v))
    return ctx.attend(q, k, v, scale=scale, window=window, layer=layer).swapaxes(0, 1)[None]


class Turning:
    """Rotary positions that belong to the context: mlx-lm's own, for each stretch of consecutive tokens."""

    def __init__(self, rope: Callable[..., mx.array]) -> None:
        self._rope = rope

    def __call__(self, x: mx.array, offset: Any = 0, *_: Any, **__: Any) -> mx.array:
        ctx = current()
        assert ctx is not None
        turned = ctx.rotated(self._turn, x[0].swapaxes(0, 1))  # [T, H, d]
        return turned.swapaxes(0, 1)[None]

    def _turn(self, x: mx.array, offset: int) -> mx.array:
        return self._rope(x.swapaxes(0, 1)[None], offset=offset)[0].swapaxes(0, 1)


# The proof


SMALL = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "intermediate_size": 96, "ffn_hidden_size": 96, "vocab_size": 97,
    "head_dim": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "sliding_window": 5, "sliding_window_size": 5,
    "max_position_embeddings": 256,
}  # fmt: skip
"""Sizes of a twin; keys that a config lacks stay absent."""
TOKENS = (3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28)


def small_twin(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same architecture with few and narrow layers."""
    twin = dict(config) | {key: value for key, value in SMALL.items() if config.get(key) is not None}
    layers = config.get("num_hidden_layers", config.get("n_layer", 2))
    kinds = config.get("layer_types")
    period = config.get("sliding_window_pattern") or config.get("full_attention_interval") or 2
    few = min(layers, max(2, period, _until_all(kinds) if kinds else 0))
    for key in ("num_hidden_layers", "n_layer"):
        if key in config:
            twin[key] = few
    if kinds:
        twin["layer_types"] = list(kinds)[:few]
    for key in ("no_rope_layers", "no_rope_layer_interval"):
        if isinstance(config.get(key), list):
            twin[key] = config[key][:few]
    heads = config.get("num_attention_heads", config.get("n_head"))
    kv = config.get("num_key_value_heads", heads)
    for key in ("num_attention_heads", "n_head"):
        if key in config:
            twin[key] = 4
    if config.get("num_key_value_heads") is not None:
        twin["num_key_value_heads"] = 4 if kv == heads else 2
    if config.get("query_pre_attn_scalar") is not None:
        twin["query_pre_attn_scalar"] = 16
    width = int(16 * (config.get("partial_rotary_factor") or 1.0)) // 2
    scaling = config.get("rope_scaling")
    if isinstance(scaling, Mapping):
        twin["rope_scaling"] = {k: v[:width] if isinstance(v, list) else v for k, v in scaling.items()}
    twin.pop("quantization", None)
    twin.pop("quantization_config", None)
    return twin


def _until_all(kinds: list[str]) -> int:
    """The first layers among which every kind is."""
    return 1 + max(kinds.index(kind) for kind in set(kinds))


def prove(config: Mapping[str, Any]) -> None:
    """Compare a small twin with mlx-lm's own forward. Raises Refused where they differ."""
    small = small_twin(config)
    theirs, ours = build(small), MlxLmModel(small, build(small))
    weights = _random_weights(theirs)
    theirs.load_weights(list(weights.items()))
    try:
        ours.bind(weights)
    except KeyError as error:
        raise Refused(f"parameter {error} has no place among its embedding, layers, norm and head") from error
    ids = list(TOKENS)
    expected = theirs(mx.array([ids]))[0].astype(mx.float32)
    _same(expected, _logits(ours, _row([(ids, None)])), "its logits on a plain row")
    # A prompt of 6 with two completions: what a shared prefix and a packed row need.
    first, second = ids[6:11], ids[11:]
    branched = _logits(ours, _row([(ids[:6], None), (first, 0), (second, 0)]))
    alone = theirs(mx.array([ids[:6] + second]))[0].astype(mx.float32)
    _same(
        alone[6:], branched[11:], "its logits on a row that branches (positions or attention that it keeps to itself)"
    )


def _random_weights(model: nn.Module) -> dict[str, mx.array]:
    from mlx.utils import tree_flatten

    drawn = {}
    for i, (name, value) in enumerate(tree_flatten(model.parameters())):
        noise = mx.random.normal(value.shape, key=mx.random.key(i))
        drawn[name] = 0.15 * noise if value.ndim > 1 else 1 + 0.2 * noise if name.endswith("weight") else 0.2 * noise
    return drawn


def _row(spans: list[tuple[list[int], int | None]]) -> Row:
    """A row of (tokens, parent): spans that begin behind their parents."""
    tokens: list[int] = []
    found: list[Span] = []
    for ids, parent in spans:
        position = 0 if parent is None else found[parent].position + found[parent].length
        found.append(Span(len(tokens), len(tokens) + len(ids), parent, position))
        tokens += ids
    return Row(tokens, found, [], [], [], [], [])


def _logits(model: MlxLmModel, row: Row) -> mx.array:
    ctx = SpanContext(row)
    output = model.output
    return output.finish(output.project(model.hidden(ctx, ctx.tokens)))


def _same(expected: mx.array, found: mx.array, what: str) -> None:
    apart = mx.abs(expected - found).max() / mx.maximum(mx.abs(expected).max(), 1e-6)
    if not apart.item() < TOLERANCE:
        raise Refused(f"{what} differ by {apart.item():.1e} of the largest")


# The adapter


def module_of(config: Mapping[str, Any]) -> str | None:
    """The name of mlx-lm's module for a config, None where it has none. Nothing outside of mlx-lm is ever imported."""
    from mlx_lm import utils

    kind = config.get("model_type")
    if not isinstance(kind, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", kind):
        return None
    kind = utils.MODEL_REMAPPING.get(kind, kind)
    name = f"mlx_lm.models.{kind}"
    return name if kind.isidentifier() and importlib.util.find_spec(name) is not None else None


def build(config: Mapping[str, Any]) -> nn.Module:
    """mlx-lm's model of a config, without weights."""
    name = module_of(config)
    assert name is not None
    module = importlib.import_module(name)
    return module.Model(module.ModelArgs.from_dict(copy.deepcopy(dict(config))))


@frozen
class MlxLmAdapter:
    """Any architecture of mlx-lm whose attention and positions can be addressed, where no other adapter claims it.

    Each is first proved on a small twin with random weights against mlx-lm's own forward; what differs is refused.
    """

    fallback: ClassVar = True
    examples: ClassVar = ()

    def handles(self, config: Mapping[str, Any], /) -> bool:
        return module_of(config) is not None

    def build(self, config: Mapping[str, Any], /) -> Model:
        kind = config.get("model_type")
        try:
            prove(config)
            return MlxLmModel(config, build(config))
        except Refused as error:
            raise CheckpointError(f"mlx-lm's {kind} cannot be trained here: {error}") from error
        except (Exception, SystemExit) as error:  # mlx-lm's own code; a module may even leave the process
            said = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"mlx-lm's {kind} cannot be built from this config: {said}") from error
