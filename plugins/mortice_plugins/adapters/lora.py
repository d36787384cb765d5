"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): `y = W x + scale · (x A) B`, with A and B in float32.

Saved as mlx-lm saves them (`adapters.safetensors`, `adapter_config.json`); mlx-lm's and PEFT's folders are read.
What this leaves out: DoRA, adapters on embeddings and on the output matrix.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from attrs import asdict, evolve, field, frozen

from mortice import atomic
from mortice.context import current
from mortice.errors import CheckpointError, ConfigError, suggest
from mortice.linear import Linear, QuantizedLinear, QuantizedStacked, Stacked, gathered
from mortice.matching import matches
from mortice.model import Model
from mortice.options import and_, ge, gt, lt, option, optional
from mortice.pretrained import open_weights, read_json, some
from mortice.protocols import Params
from mortice.randomness import stable_key

DEFAULT_SCALE = 2.0
UNSUPPORTED = (
    "alora_invocation_tokens", "arrow_config", "corda_config", "fan_in_fan_out", "kasa_config", "layer_replication",
    "loftq_config", "lora_bias", "lora_ga_config", "modules_to_save", "monteclora_config", "target_parameters",
    "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora", "velora_config",
)  # fmt: skip
"""PEFT options that change what an adapter computes, or the weights below it, and have no counterpart here."""
EXACT = "exact.safetensors"
"""Tensors as they train, where layers have ranks and scales of their own, which mlx-lm's folder cannot say."""
CHANGED_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Values of PEFT's `init_lora_weights` under which the adapter belongs to changed base weights."""


class LoRALinear(nn.Module):
    """A linear layer with a low-rank term beside it. The layer's own parameters keep their names."""

    wraps = "_base"

    def __init__(self, base: nn.Module, rank: int, scale: float, name: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self._base = base
        self._scale = scale
        self._name, self._dropout = name, dropout
        outputs, inputs = shape_of(base)
        self.lora_a = mx.zeros((inputs, rank))
        self.lora_b = mx.zeros((rank, outputs))

    @property
    def scale(self) -> float:
        return self._scale

    def __call__(self, x: mx.array) -> mx.array:
        y = self._base(x)
        term = low_rank if x.dtype == mx.float32 else recomputed_low_rank
        return y + term(self._dropped(x), self.lora_a, self.lora_b, self._scale).astype(y.dtype)

    def _dropped(self, x: mx.array) -> mx.array:
        """What the low-rank term reads: in training some inputs are 0 and the others larger. Which ones is a function
        of names (`SpanContext.uniform`), the same in a recomputed forward, any layout and a resumed run."""
        ctx = current() if self._dropout else None
        numbers = None if ctx is None else ctx.uniform(self._name, x.shape[-1])
        if numbers is None:
            return x
        kept = numbers.reshape(x.shape) >= self._dropout
        return x * kept.astype(x.dtype) * (1 / (1 - self._dropout))


class LoRAStacked(nn.Module):
    """A stack of linear layers (experts) with a low-rank term beside each: `A [E, r, in]`, `B [E, out, r]`."""

    wraps = "_base"

    def __init__(self, base: nn.Module, rank: int, scale: float, name: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self._base, self._scale = base, scale
        count, outputs, inputs = base.shape
        self.lora_a = mx.zeros((count, rank, inputs))
        self.lora_b = mx.zeros((count, outputs, rank))

    @property
    def scale(self) -> float:
        return self._scale

    def __call__(self, x: mx.array, which: mx.array) -> mx.array:
        y = self._base(x, which)
        h = gathered(x.astype(mx.float32), self.lora_a, which)  # [N, r]
        return y + (self._scale * gathered(h, self.lora_b, which)).astype(y.dtype)


ADAPTED = (LoRALinear, LoRAStacked)


def low_rank(x: mx.array, a: mx.array, b: mx.array, scale: float) -> mx.array:
    """`scale · (x A) B` in float32, its backward by autodiff: `x [T, in]`, `A [in, r]`, `B [r, out]` → `[T, out]`."""
    return (scale * (x.astype(mx.float32) @ a)) @ b


def recomputed_low_rank(x: mx.array, a: mx.array, b: mx.array, scale: float) -> mx.array:
    """The same with a backward by hand, for half-precision activations.

    With h = x A: dB = s hᵀ dy, dA = s xᵀ (dy Bᵀ), dx = s (dy Bᵀ) Aᵀ. Autodiff would keep x once more in float32 for
    each layer that reads it; here x is kept as it is and cast again. On bfloat16 that is a quarter of the peak of
    `full` (docs/performance.md); on float32 nothing is gained, and `low_rank` runs.
    """

    @mx.custom_function
    def term(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        return low_rank(x, a, b, scale)

    @term.vjp
    def term_vjp(primals: Any, dy: mx.array, _: Any) -> tuple[mx.array, mx.array, mx.array]:
        x, a, b = primals
        floats, dy = x.astype(mx.float32).reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        pulled = scale * (dy @ b.T)  # [T, r]
        dx = (pulled @ a.T).astype(x.dtype).reshape(x.shape)
        return dx, floats.T @ pulled, scale * ((floats @ a).T @ dy)

    out: Any = term(x, a, b)
    return out


def shape_of(linear: nn.Module) -> tuple[int, int]:
    """Rows and columns of a linear layer's matrix, unpacked."""
    if "scales" not in linear:
        return linear.weight.shape
    if isinstance(linear, QuantizedLinear):
        return linear.shape
    return linear.weight.shape[0], linear.scales.shape[1] * linear.group_size


def _pattern_list(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else tuple(value)


def _names(instance: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, str) or value == ():
        raise ValueError(f"targets must be a list of at least one name, found {value!r}")


@frozen
class LoRA:
    """Low-rank adapters beside frozen linear layers (Hu et al. 2021, arXiv:2106.09685).

    y = W x + scale · (x A) B. A starts uniform in ±1/√in, keyed by the run's seed and the layer's name; B starts at
    zero, so that a fresh adapter changes nothing. Adapters are float32 whatever the weights are stored in.

    Layers may have ranks and alphas of their own, by the first pattern that names them; of those the rest follows: the
    scale is alpha / rank, or with `rslora` alpha / √rank (Kalajdzievski 2023, arXiv:2312.03732).
    """

    rank: int = option(16, help="columns of A, rows of B", validator=ge(1))
    scale: float | None = option(
        None, help="factor of the low-rank term (default 2.0); or give alpha", validator=optional(gt(0))
    )
    alpha: float | None = option(
        None, help="the same as scale = alpha / rank, or alpha / √rank with rslora", validator=optional(gt(0))
    )
    rslora: bool = option(False, help="alpha is divided by the root of the rank, not by the rank")
    dropout: float = option(
        0.0, help="share of a layer's inputs that its adapter does not see in a step", validator=and_(ge(0.0), lt(1.0))
    )
    rank_pattern: Mapping[str, int] = option(
        factory=dict, help='ranks of layers by name or pattern, such as { "v_proj" = 32, "layers.0.*" = 4 }'
    )
    alpha_pattern: Mapping[str, float] = option(factory=dict, help="alphas of layers, in the same way")
    targets: tuple[str, ...] | None = field(
        default=None,
        kw_only=True,
        converter=_pattern_list,
        validator=_names,
        metadata={
            "help": "linear layers to adapt: names (`q_proj`), parts of names (`self_attn.*`) or full names, "
            "with * and ?; default: every linear layer of the blocks, not the experts of a mixture"
        },
    )
    layers: int | None = option(
        None, help="adapt only the last n decoder layers (default: all)", validator=optional(ge(1))
    )

    def __attrs_post_init__(self) -> None:
        if self.scale is not None and self.alpha is not None:
            raise ValueError("scale and alpha say the same thing (scale = alpha / rank); give one of them")
        if self.alpha is None and (self.rslora or self.alpha_pattern):
            name = "rslora" if self.rslora else "alpha_pattern"
            raise ValueError(f"{name} goes by alpha, which is not given; a scale is the factor as it is")
        for name, least in (("rank_pattern", 1), ("alpha_pattern", 0)):
            for key, value in getattr(self, name).items():
                if isinstance(value, bool) or not value >= least or (name == "alpha_pattern" and not value > 0):
                    raise ValueError(f"{name}.{key} must be {'1 or more' if least else 'above 0'}, found {value!r}")

    @property
    def factor(self) -> float:
        """The scale in force, of layers that no pattern names."""
        if self.alpha is not None:
            return self.alpha / self._divisor(self.rank)
        return DEFAULT_SCALE if self.scale is None else self.scale

    def _divisor(self, rank: int) -> float:
        return math.sqrt(rank) if self.rslora else rank

    def _plan(self, model: Model, chosen: Sequence[str]) -> dict[str, tuple[int, float]]:
        """Rank and scale of each layer. Raises ConfigError for a pattern that names none of them."""
        for name in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, name):
                if not any(matches(pattern, layer) for layer in chosen):
                    have = sorted({block_name(layer).rpartition(".")[2] for layer in chosen})
                    raise ConfigError(
                        f"adapter.{name}: {pattern!r} names no adapted layer{suggest(pattern, have)} (there are "
                        f"{', '.join(have)})"
                    )

        def of(patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
            return next((value for pattern, value in patterns.items() if matches(pattern, layer)), default)

        plan = {}
        for layer in chosen:
            rank = of(self.rank_pattern, layer, self.rank)
            alpha = of(self.alpha_pattern, layer, self.alpha)
            plan[layer] = (rank, self.factor if alpha is None else alpha / self._divisor(rank))
        return plan

    def attach(self, model: Model, seed: int, /) -> Params:
        chosen = self._chosen(model)
        stacks = [name for name in chosen if name in expert_layers(model)] if self.dropout else []
        if stacks:
            raise ConfigError(f"adapter.dropout: experts are adapted without dropout ({some(stacks, 2)}); leave it out")
        params = wrap(model, self._plan(model, chosen), self.dropout)
        fresh = {}
        for name, place in params.items():
            if name.endswith("lora_a"):
                bound = 1 / math.sqrt(place.shape[0 if place.ndim == 2 else -1])
                key = stable_key(seed, "adapter", name)
                fresh[name] = mx.random.uniform(-bound, bound, place.shape, key=key)
        model.bind(fresh)
        return params | fresh

    def _chosen(self, model: Model) -> list[str]:
        """Full names of the layers to adapt. Raises ConfigError listing what matches nothing and what there is."""
        linear, stacks = linear_layers(model), expert_layers(model)
        if self.layers is not None and self.layers > model.num_layers:
            raise ConfigError(f"adapter.layers: {self.layers} asked for, the model has {model.num_layers}")
        if not linear:
            raise ConfigError("adapter: the model's blocks hold no linear layer that LoRA can adapt")
        if self.targets is None:
            chosen = list(linear)
        else:
            linear |= stacks
            hits = {pattern: [n for n in linear if matches(pattern, n)] for pattern in self.targets}
            unmatched = [pattern for pattern, names in hits.items() if not names]
            if unmatched:
                raise ConfigError(_unmatched(unmatched, linear))
            chosen = [name for name in linear if any(name in names for names in hits.values())]
        first = 0 if self.layers is None else model.num_layers - self.layers
        chosen = [name for name in chosen if linear[name] >= first]
        if not chosen:
            raise ConfigError(f"adapter: 0 trainable parameters; no target lies in the last {self.layers} layers")
        return chosen

    def base(self, params: Params, /) -> Params:
        return {name: mx.zeros_like(v) if name.endswith("lora_b") else v for name, v in params.items()}

    def save(self, model: Model, params: Params, path: Path, /) -> None:
        scales = scales_of(model)
        rank, scale, tensors = uniform(params, scales)
        config: dict[str, Any] = {
            "fine_tune_type": "lora",
            "num_layers": model.num_layers if self.layers is None else self.layers,
            "lora_parameters": {
                "rank": rank,
                "scale": scale,
                "dropout": self.dropout,
                "keys": sorted({block_name(name.rpartition(".")[0]) for name in tensors}),
            },
            "mortice": {"adapter": {"name": "lora"} | asdict(self, filter=lambda _, value: value is not None)},
        }
        exact = any(tensors[name] is not value for name, value in params.items())
        if exact:
            config["mortice"]["scales"] = scales
        with atomic.writing_folder(path) as folder:
            named = {model.mlx_lm_name(name): tensor for name, tensor in tensors.items()}
            mx.save_safetensors(str(folder / "adapters.safetensors"), named, metadata={"format": "mlx"})
            if exact:
                mx.save_safetensors(str(folder / EXACT), dict(params), metadata={"format": "mlx"})
            (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def load(self, model: Model, path: Path, params: Params, /) -> Params:
        saved = read_saved(path, model)
        values = saved.checked({name: value.shape for name, value in params.items()})
        here = scales_of(model)
        wrong = [f"{n} {s:g} (here {here[n]:g})" for n, s in saved.scales.items() if not math.isclose(s, here[n])]
        if wrong:
            raise CheckpointError(f"{path} was trained with another scale: {some(wrong)}")
        return values

    @classmethod
    def claims(cls, path: Path) -> bool:
        """Whether a folder holds a LoRA adapter of mlx-lm or PEFT."""
        if not (path / "adapter_config.json").exists():
            return False
        config = read_json(path / "adapter_config.json")
        return config.get("peft_type") is not None or config.get("fine_tune_type", "lora") in ("lora", "dora")

    @classmethod
    def from_folder(cls, path: Path, model: Model) -> tuple[LoRA, Params]:
        """Attach a saved adapter as it is, whatever its ranks; the strategy that comes with it has its main ones.

        Raises CheckpointError for an unknown feature or tensors that do not fit.
        """
        saved = read_saved(path, model)
        return cls._attached(model, saved, saved.plan(model))

    def attach_saved(self, model: Model, path: Path, given: frozenset[str]) -> tuple[LoRA, Params]:
        """The same for a run that starts from the folder. Raises ConfigError where an option that is `given` is another
        one there."""
        saved = read_saved(path, model)
        plan = saved.plan(model)
        rank, scale = max(plan.values())
        wrong = []
        if "rank" in given and self.rank != rank:
            wrong.append(f"adapter.rank is {rank} there, the run has {self.rank}")
        own = self.alpha / self._divisor(rank) if self.alpha is not None else self.factor
        if given & {"scale", "alpha"} and not math.isclose(own, scale):
            wrong.append(f"its scale (alpha / rank) is {scale:g}, the run has {own:g}")
        if given & {"targets", "layers"}:
            chosen = set(self._chosen(model))
            wrong += [f"it lacks {some(sorted(chosen - set(plan)))}"] if chosen - set(plan) else []
            wrong += [f"it also adapts {some(sorted(set(plan) - chosen))}"] if set(plan) - chosen else []
        if wrong:
            raise ConfigError(
                f"adapter.init: {path} is another adapter: {'; '.join(wrong)}. Leave these options out to take the "
                "folder's"
            )
        strategy, params = self._attached(model, saved, plan, self.dropout)
        kept = {"alpha": self.alpha, "scale": None} if "alpha" in given else {}
        kept |= {name: getattr(self, name) for name in given & {"targets", "layers"}}
        kept |= {"targets": self.targets} if "layers" in given else {}
        kept |= {"dropout": self.dropout}
        return evolve(strategy, **kept), params

    @classmethod
    def _attached(
        cls, model: Model, saved: Saved, plan: Mapping[str, tuple[int, float]], dropout: float = 0.0
    ) -> tuple[LoRA, Params]:
        targets = patterns(model, plan)
        params = saved.checked(places(model, plan))
        wrap(model, plan, dropout)
        model.bind(params)
        rank, scale = max(plan.values())
        return cls(rank=rank, scale=scale, targets=targets), params


def linear_layers(model: Model) -> dict[str, int]:
    """Full name → decoder layer of every linear layer in the blocks."""
    return _layers_of(model, (Linear, QuantizedLinear, nn.Linear, nn.QuantizedLinear))


def expert_layers(model: Model) -> dict[str, int]:
    """The same of stacks of linear layers."""
    return _layers_of(model, (Stacked, QuantizedStacked))


def _layers_of(model: Model, kinds: tuple[type, ...]) -> dict[str, int]:
    layers = {}
    for block in model.blocks:
        layers[block.path] = block.layer
    return {
        name: layer
        for name, module, _ in model.named_modules()
        if isinstance(module, kinds)
        for path, layer in layers.items()
        if name.startswith(f"{path}.")
    }


def patterns(model: Model, chosen: Iterable[str]) -> tuple[str, ...] | None:
    """`targets` that choose these layers, as short as can be: nothing for all, names for the same in every layer of the
    model, else full names. To be called before they are wrapped."""
    wanted, linear = set(chosen), linear_layers(model)
    if wanted == set(linear):
        return None
    kinds = {block_name(name) for name in wanted}
    every = {name for name in [*linear, *expert_layers(model)] if block_name(name) in kinds}
    return tuple(sorted(kinds if wanted == every else wanted))


def places(model: Model, plan: Mapping[str, tuple[int, float]]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that `wrap` would make, by full name."""
    found: dict[str, tuple[int, ...]] = {}
    for name, module, _ in model.named_modules():
        if name not in plan:
            continue
        rank, _ = plan[name]
        if isinstance(module, (Stacked, QuantizedStacked)):
            count, outputs, inputs = module.shape
            found |= {f"{name}.lora_a": (count, rank, inputs), f"{name}.lora_b": (count, outputs, rank)}
        else:
            outputs, inputs = shape_of(module)
            found |= {f"{name}.lora_a": (inputs, rank), f"{name}.lora_b": (rank, outputs)}
    return {f"{name}.{part}": found[f"{name}.{part}"] for name in plan for part in ("lora_a", "lora_b")}


def block_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj` → `self_attn.q_proj`."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[number + 1 :])


def _unmatched(patterns: list[str], linear: Mapping[str, int]) -> str:
    have = sorted({block_name(name) for name in linear})
    short = [name.rpartition(".")[2] for name in have] + have
    found = "; ".join(
        f"{pattern!r} matches no linear layer{_reserved(pattern)}{suggest(pattern, short)}" for pattern in patterns
    )
    return f"adapter.targets: {found} (this model has {', '.join(have)})"


def _reserved(pattern: str) -> str:
    if pattern.rpartition(".")[2] in ("lm_head", "embed_tokens"):
        return ", since LoRA on embeddings and output matrices is not supported"
    return ""


def wrap(model: Model, plan: Mapping[str, tuple[int, float]], dropout: float = 0.0) -> Params:
    """Put adapters of the planned rank and scale around linear layers; their zero parameters by full name."""
    for name, module, put in list(model.named_modules()):
        if name in plan:
            stacked = isinstance(module, (Stacked, QuantizedStacked))
            put((LoRAStacked if stacked else LoRALinear)(module, *plan[name], name, dropout))
    model.invalidate()
    named = model.named_parameters()
    return {f"{name}.{part}": named[f"{name}.{part}"] for name in plan for part in ("lora_a", "lora_b")}


def scales_of(model: Model) -> dict[str, float]:
    """The scale of every adapted layer by full name."""
    return {name: m.scale for name, m, _ in model.named_modules() if isinstance(m, ADAPTED)}


def uniform(params: Params, scales: Mapping[str, float]) -> tuple[int, float, Params]:
    """The same function with one rank and one scale, which is all that mlx-lm's folder can say: lower ranks are padded
    with zeros, other scales go into B."""
    rank = max(value.shape[1] for name, value in params.items() if name.endswith("lora_a"))
    modules = dict.fromkeys(name.rpartition(".")[0] for name in params)
    scale = scales[next(iter(modules))]
    tensors = {}
    for module in modules:
        a, b = params[f"{module}.lora_a"], params[f"{module}.lora_b"]
        short = rank - a.shape[1]
        if scales[module] != scale:
            b = b * (scales[module] / scale)
        if short:  # of an expert, A is [r, in] and B [out, r]; else A is [in, r] and B [r, out]
            rows, columns = [(0, short), (0, 0)], [(0, 0), (0, short)]
            stack = [(0, 0)] * (a.ndim - 2)
            a = mx.pad(a, [*stack, *(rows if stack else columns)])
            b = mx.pad(b, [*stack, *(columns if stack else rows)])
        tensors |= {f"{module}.lora_a": a, f"{module}.lora_b": b}
    return rank, scale, tensors


@frozen
class Saved:
    """An adapter folder, PEFT's or mlx-lm's, in mortice's names and orientation."""

    path: Path
    tensors: Mapping[str, mx.array]
    scales: Mapping[str, float]
    """Of each module."""

    def plan(self, model: Model) -> dict[str, tuple[int, float]]:
        """Rank and scale of every module. Raises CheckpointError for modules that the model does not have."""
        linear = linear_layers(model) | expert_layers(model)
        unknown = [name for name in self.scales if name not in linear]
        if unknown:
            raise CheckpointError(f"{self.path}: the model has no linear layer {some(unknown)}")
        lone = [name for name in self.scales if f"{name}.lora_a" not in self.tensors]
        if lone:
            raise CheckpointError(f"{self.path} lacks the first factor of {some(lone)}")
        return {name: (self.tensors[f"{name}.lora_a"].shape[1], scale) for name, scale in self.scales.items()}

    def checked(self, shapes: Mapping[str, tuple[int, ...]]) -> Params:
        """The tensors for places of these shapes. Raises CheckpointError that lists every mismatch."""
        wrong = [f"{name} is missing" for name in shapes if name not in self.tensors]
        wrong += [f"{name} has no place" for name in self.tensors if name not in shapes]
        wrong += [
            f"{name} is {list(t.shape)}, the model needs {list(shapes[name])}"
            for name, t in self.tensors.items()
            if name in shapes and t.shape != shapes[name]
        ]
        if wrong:
            raise CheckpointError(f"{self.path} does not fit the model: {some(wrong)}")
        return {name: self.tensors[name].astype(mx.float32) for name in shapes}


def read_saved(path: Path, model: Model) -> Saved:
    """Raises CheckpointError for a damaged folder or a feature that has no counterpart here."""
    config = read_json(path / "adapter_config.json")
    own = config.get("mortice", {}).get("scales")
    if own is not None and (path / EXACT).exists():
        return Saved(path, open_weights(path, EXACT), {name: float(scale) for name, scale in own.items()})
    tensors = open_weights(path, "adapters.safetensors", "adapter_model.safetensors")
    saved = _read_peft(path, config, tensors) if "peft_type" in config else _read_mlx(path, config, tensors)
    return evolve(
        saved,
        tensors={model.own_name(name): tensor for name, tensor in saved.tensors.items()},
        scales={model.own_name(name): scale for name, scale in saved.scales.items()},
    )


def _read_mlx(path: Path, config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> Saved:
    strange = [n for n in tensors if not n.endswith((".lora_a", ".lora_b"))]
    if config.get("fine_tune_type", "lora") != "lora" or strange:
        raise CheckpointError(f"{path}: only plain LoRA can be read here, found {some(strange) or 'DoRA'}")
    scale = config.get("lora_parameters", {}).get("scale")
    if scale is None:
        raise CheckpointError(f"{path / 'adapter_config.json'} lacks lora_parameters.scale")
    modules = sorted({name.rpartition(".")[0] for name in tensors})
    return Saved(path, tensors, {name: float(scale) for name in modules})


def _read_peft(path: Path, config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> Saved:
    """PEFT keeps A as `[r, in]` and B as `[out, r]`; its scale is alpha / r, or alpha / √r with rsLoRA."""
    refused = [key for key in UNSUPPORTED if config.get(key)]
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGED_BASE):
        refused.append(f"init_lora_weights = {start}")
    refused += ["bias"] if config.get("bias", "none") != "none" else []
    if config.get("peft_type") != "LORA":
        refused.append(f"peft_type = {config['peft_type']}")
    if refused:
        raise CheckpointError(f"{path}: PEFT features without a counterpart here: {', '.join(refused)}")
    found: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        module = name.removeprefix("base_model.model.")
        for theirs, ours in ((".lora_A.weight", ".lora_a"), (".lora_B.weight", ".lora_b")):
            if module.endswith(theirs):
                found[module.removesuffix(theirs) + ours] = tensor.T
                break
        else:
            raise CheckpointError(f"{path}: tensor {name!r} has no counterpart here")
    if "lora_alpha" not in config:
        raise CheckpointError(f"{path / 'adapter_config.json'} lacks lora_alpha")
    scales = {}
    for module in sorted({name.rpartition(".")[0] for name in found}):
        a = found.get(f"{module}.lora_a")
        rank = found[f"{module}.lora_b"].shape[0] if a is None else a.shape[1]
        alpha = _by_pattern(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
        scales[module] = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Saved(path, found, scales)


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """PEFT's rule: the first regular expression that matches the module's name or a dotted end of it."""
    return next((value for p, value in patterns.items() if re.fullmatch(rf"(.*\.)?({p})", module)), default)
