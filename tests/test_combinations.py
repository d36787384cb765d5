"""Any loss × head × backward × layout × model × adapter equals `dense` × `full` × `separate`.

Parametrized over the registry: a plugin joins by being registered. Of each strategy there is the default instance, one
for every other value of each option with a closed choice (also true and false), and small values of whole numbers, so
that tiles, segments and chunks are many. A class that needs more than its defaults, or that has a code path which no
such option reaches, offers `examples`: configured instances, or a function that returns them (of a model adapter:
`config.json` mappings).

Every registered loss × head × backward × layout runs on one small Llama. The product with all variants, models and
adapters would be a hundred times as large: there every *pair* of choices that can go together meets at least once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import metadata
from typing import Any, ClassVar, Literal, get_args, get_origin

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from attrs import evolve, field, frozen
from tiny_llama import CONFIG
from tiny_run import plugin

from mortice.batch import LABEL, SCORE, Completion, Group, Limits, LossOutput, TokenLogprobs
from mortice.context import Randomness
from mortice.data import with_unrelated
from mortice.errors import ConfigError
from mortice.linear import Embedding, Linear, Quantization, quantized
from mortice.model import Model, Output, Part
from mortice.objective import WeightedLoss
from mortice.options import option
from mortice.plugins import Plugins, load_plugins
from mortice.pretrained import random_model
from mortice.protocols import Params
from mortice.randomness import stable_key
from mortice.registry import Strategy
from mortice.rows import micro_batches, separate_rows
from mortice.step import Engine
from mortice.structure import fields, kind_of
from mortice.testing.losses import REQUIREMENTS, number
from mortice_plugins.backwards.full import Full
from mortice_plugins.heads.dense import Dense
from mortice_plugins.layouts.separate import Separate
from mortice_plugins.models.llama import Llama

SMALL = (1, 3)
"""Values tried of every option that is a whole number."""
VOCAB = 41
TINY = CONFIG | {"hidden_size": 32, "intermediate_size": 64, "vocab_size": VOCAB, "initializer_range": 0.3}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "llama-tied": TINY | {"tie_word_embeddings": True},
    "qwen3": TINY | {"model_type": "qwen3", "head_dim": 16},
    "mistral-window": TINY | {"model_type": "mistral", "sliding_window": 3},
}
"""Tiny models by name; a model adapter that handles none of them brings its own `examples`."""
PACKED = Quantization(4, 32)


def _groups() -> list[Group]:
    """Groups that offer whatever a loss may require: pairs (also with several rejected answers, and with the chosen one
    behind), unequal lengths, one-token answers, masked tokens, different prompts, weights, old and reference
    log-probabilities, advantages, rewards, labels, ratings, and answers to other prompts."""
    rng = np.random.default_rng(0)

    def completion(length: int, *, mask: Sequence[bool] | None = None, **more: Any) -> Completion:
        ids = rng.integers(0, VOCAB, length).tolist()
        near = -math.log(VOCAB) + 0.5 * rng.normal(size=(2, length))
        found = Completion(
            ids,
            old_logprobs=near[0].tolist(),
            ref_logprobs=near[1].tolist(),
            advantage=float(rng.normal()),
            reward=float(rng.normal()),
            extras={LABEL: float(rng.integers(2)), SCORE: float(rng.normal())},
            **more,
        )
        return found if mask is None else evolve(found, loss_mask=mask)

    groups = [
        Group("pair", [1, 2, 3, 4], [completion(3, weight=0.5), completion(1)], ((0, 1),)),
        Group(
            "several",
            [5, 6],
            [completion(4, mask=[True, False, True, True]), completion(2), completion(5)],
            ((0, 1), (0, 2)),
        ),
        Group("prompts", [7, 8], [completion(2), completion(3, prompt_ids=(9, 10, 11))], ((0, 1),)),
        Group("behind", [12], [completion(1), completion(6, mask=[False, True, True, False, True, True])], ((1, 0),)),
    ]
    beside = with_unrelated(groups, 99)
    unrelated = [group.unrelated.with_completions([completion(2 + i)]) for i, group in enumerate(beside)]
    return [evolve(group, unrelated=other) for group, other in zip(groups, unrelated)]


GROUPS = _groups()
LIMITS = Limits(groups=3)


@frozen(eq=False)
class Choice:
    """One instance of a registered strategy."""

    kind: str
    label: str
    value: Any
    """The instance; of a model, what makes one."""
    plain: bool = field(default=False, kw_only=True)
    """Whether all options are their defaults."""

    @property
    def requires(self) -> frozenset[str]:
        return frozenset(getattr(self.value, "requires", ()))

    @property
    def provides(self) -> frozenset[str]:
        return frozenset(getattr(self.value, "provides", ()))


# What is registered, as choices


def offered(cls: type) -> list[Any]:
    """The `examples` of a class: an iterable, or a function that returns one."""
    examples: Any = getattr(cls, "examples", ())
    return list(examples() if callable(examples) else examples)


def variants(cls: type) -> Iterator[dict[str, Any]]:
    """One changed option at a time: every other value of a closed choice, small values of whole numbers."""
    for name, attribute in fields(cls).items():
        kind = kind_of(attribute)
        values: Iterable[Any] = getattr(attribute.validator, "options", ())
        if get_origin(kind) is Literal:
            values = get_args(kind)
        elif kind is bool:
            values = (False, True)
        elif kind is int or (int in get_args(kind) and get_origin(kind) is not Mapping):
            values = (SMALL,) if get_origin(kind) in (tuple, list) else SMALL
        yield from ({name: value} for value in values if value != attribute.default)


@cache
def choices(plugins: Plugins, kind: str) -> list[Choice]:
    """Every instance of every registered strategy of a kind that the tests use."""
    return [choice for strategy in plugins.registry.all(kind) for choice in _instances(strategy)]


def _instances(strategy: Strategy) -> Iterator[Choice]:
    cls, kind = strategy.load(), strategy.kind
    label = strategy.name if strategy.provider == "mortice" else strategy.qualified
    examples = offered(cls)
    required = [name for name, a in fields(cls).items() if a.default is attrs.NOTHING]
    if required and not examples:
        pytest.fail(
            f"{kind} {strategy.qualified!r} has required options ({', '.join(required)}): to join the tests of all "
            f"combinations, give {cls.__name__} an attribute `examples` that holds configured instances"
        )
    if not required:
        yield Choice(kind, label, cls(), plain=True)
        for changed in variants(cls):
            try:
                value = cls(**changed)
            except ValueError:
                continue  # a small value that a validator refuses
            yield Choice(kind, f"{label}({', '.join(f'{k}={v}' for k, v in changed.items())})", value)
    for i, value in enumerate(examples):
        yield Choice(kind, f"{label}-example{i}", value, plain=bool(required) and i == 0)


@cache
def adapters(plugins: Plugins) -> list[Choice]:
    """Every registered adapter with its defaults, and its examples."""
    return [c for c in choices(plugins, "adapter") if c.plain or "-example" in c.label]


@cache
def models(plugins: Plugins) -> list[Choice]:
    """Tiny models of every registered adapter, and one packed twin of the first of each."""
    found = []
    for strategy in plugins.registry.all("model"):
        adapter = strategy.load()()
        own = {f"{strategy.name}-example{i}": config for i, config in enumerate(offered(type(adapter)))}
        configs = {name: c for name, c in (CONFIGS | own).items() if adapter.handles(c)}
        if not configs:
            pytest.fail(
                f"model {strategy.qualified!r} handles none of {', '.join(CONFIGS)}: to join the tests of all "
                f"combinations, give {type(adapter).__name__} an attribute `examples` that holds config.json mappings "
                f"of tiny models (2 layers, vocab_size {VOCAB}, widths that are multiples of {PACKED.group_size})"
            )
        found += [Choice("model", name, _maker(config, plugins), plain=True) for name, config in configs.items()]
        for name in [n for n in configs if n in ("llama", "llama-tied")] or list(configs)[:1]:
            found.append(Choice("model", f"{name}-4bit", _maker(configs[name], plugins, packed=True)))
    return found


def _maker(config: Mapping[str, Any], plugins: Plugins, *, packed: bool = False) -> Callable[[], Model]:
    def make() -> Model:
        model = random_model(config, 0, plugins=plugins).model
        for name, module, put in list(model.named_modules()) if packed else ():
            if isinstance(module, (Linear, Embedding)):
                parts = mx.quantize(module.weight, group_size=PACKED.group_size, bits=PACKED.bits)
                put(quantized(module, PACKED))
                model.invalidate()
                model.bind({f"{name}.{part}": value for part, value in zip(("weight", "scales", "biases"), parts)})
        return model

    return make


# Which choices go together


@frozen(eq=False)
class Combination:
    loss: Choice
    head: Choice
    backward: Choice
    layout: Choice
    model: Choice
    adapter: Choice

    @property
    def choices(self) -> tuple[Choice, ...]:
        return attrs.astuple(self, recurse=False)

    def __str__(self) -> str:
        return "|".join(choice.label for choice in self.choices)


def scores_with(loss: Choice, head: Choice) -> bool:
    """Whether a head provides what a loss wants to see: values, or log-probabilities and maybe their entropy."""
    return (loss.requires & {"values", "entropy"}) <= head.provides and (
        ("values" in loss.requires) == ("values" in head.provides)
    )


def go_together(a: Choice, b: Choice) -> bool:
    """Whether two choices can meet in one run."""
    pair = {a.kind: a, b.kind: b}
    if set(pair) == {"loss", "head"}:
        return scores_with(pair["loss"], pair["head"])
    if set(pair) == {"model", "adapter"}:
        return prepared(pair["model"], pair["adapter"], None) is not None
    return True


def full_product(plugins: Plugins) -> list[Combination]:
    """All registered losses, heads, backwards and layouts with their defaults, on a small Llama with the default
    adapter."""
    kinds = [[c for c in choices(plugins, kind) if c.plain] for kind in ("loss", "head", "backward", "layout")]
    model = next(c for c in models(plugins) if c.label == "llama")
    default = {strategy.name for strategy in plugins.registry.defaults("adapter")}
    adapter = next(c for c in adapters(plugins) if c.label in default)
    return [
        Combination(loss, head, backward, layout, model, adapter)
        for loss, head, backward, layout in itertools.product(*kinds)
        if scores_with(loss, head)
    ]


def every_pair(plugins: Plugins) -> list[Combination]:
    """Combinations in which every two choices that go together meet at least once. Greedy, and always the same."""
    factors = [choices(plugins, kind) for kind in ("loss", "head", "backward", "layout")]
    factors += [models(plugins), adapters(plugins)]
    pairs = [
        (a, b)
        for one, other in itertools.combinations(factors, 2)
        for a, b in itertools.product(one, other)
        if go_together(a, b)
    ]
    allowed = {(id(x), id(y)) for pair in pairs for x, y in (pair, pair[::-1])}
    open_pairs = dict.fromkeys(allowed)
    found = []
    for a, b in pairs:
        if (id(a), id(b)) not in open_pairs:
            continue
        picked = {a.kind: a, b.kind: b}
        for factor in sorted(factors, key=len, reverse=True):
            if factor[0].kind in picked:
                continue
            fitting = [c for c in factor if all((id(c), id(p)) in allowed for p in picked.values())]
            assert fitting, f"no {factor[0].kind} goes with {', '.join(p.label for p in picked.values())}"
            best = max(fitting, key=lambda c: sum((id(c), id(p)) in open_pairs for p in picked.values()))
            picked[best.kind] = best
        for x, y in itertools.permutations(picked.values(), 2):
            open_pairs.pop((id(x), id(y)), None)
        found.append(Combination(**picked))
    return found


# What they compute


@cache
def prepared(model: Choice, adapter: Choice, head: Choice | None) -> tuple[Model, Params] | None:
    """The model with its adapter and the head's own weights, every trainable weight away from its initial value. None
    where the adapter refuses the model."""
    made = model.value()
    try:
        params = dict(adapter.value.attach(made, 0))
    except ConfigError:
        return None
    if head is not None:
        params |= head.value.attach(made, 0)
    params = {
        name: value + 0.05 * mx.random.normal(value.shape, key=stable_key("moved", name))
        for name, value in params.items()
    }
    made.mark_trainable(params)
    mx.eval(params)
    return made, params


@frozen(eq=False)
class Found:
    loss: float
    evaluated: float
    logprobs: dict[str, list[tuple[float, ...]]]
    gradients: dict[str, mx.array]


def compute(
    loss: Choice, head: Choice, backward: Any, layout: Any, model: Choice, adapter: Choice, limits: Limits
) -> Found:
    assert loss.requires <= REQUIREMENTS, f"loss {loss.label} requires {set(loss.requires - REQUIREMENTS)}"
    ready = prepared(model, adapter, head if hasattr(head.value, "attach") else None)
    assert ready is not None, f"adapter {adapter.label} refuses model {model.label}"
    made, params = ready
    engine = Engine(made, head.value, backward, layout, (WeightedLoss("loss", loss.value),), limits)
    tally, gradients = engine.gradients(params, GROUPS, Randomness(0, 0))
    logprobs = dict(zip([group.id for group in GROUPS], tally.scores(GROUPS), strict=True))
    return Found(tally.loss, engine.evaluate(params, GROUPS).loss, logprobs, gradients)


@cache
def reference(loss: Choice, head: Choice, model: Choice, adapter: Choice) -> Found:
    return compute(loss, head, Full(), Separate(), model, adapter, Limits(groups=len(GROUPS)))


DENSE = Choice("head", "dense", Dense(), plain=True)


def check(combination: Combination) -> None:
    """Loss and log-probabilities to 1e-5, the gradient and that of every tensor to 1e-4 relative."""
    c = combination
    plain_head = DENSE if scores_with(c.loss, DENSE) else c.head
    expected = reference(c.loss, plain_head, c.model, c.adapter)
    found = compute(c.loss, c.head, c.backward.value, c.layout.value, c.model, c.adapter, LIMITS)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-5)
    assert found.evaluated == pytest.approx(expected.evaluated, rel=1e-5, abs=1e-5)
    assert set(found.logprobs) == {group.id for group in GROUPS}
    for group, rows in expected.logprobs.items():
        for row, plain in zip(found.logprobs[group], rows, strict=True):
            np.testing.assert_allclose(row, plain, rtol=0, atol=1e-5, equal_nan=True)

    assert set(found.gradients) == set(expected.gradients)
    norms = {name: norm(value) for name, value in expected.gradients.items()}
    whole = math.hypot(*norms.values())
    assert whole > 1e-3
    apart = {name: norm(found.gradients[name] - expected.gradients[name]) for name in norms}
    assert math.hypot(*apart.values()) <= 1e-4 * whole
    # A gradient that cancels to nothing next to all others is rounding: it is held to the whole.
    wrong = {name: apart[name] for name in norms if apart[name] > 1e-4 * max(norms[name], 1e-2 * whole)}
    assert not wrong


def norm(value: mx.array) -> float:
    return number(mx.sqrt(mx.square(value).sum()))


INSTALLED = load_plugins()


@pytest.mark.slow  # every pair of their parts is among those below anyway
@pytest.mark.parametrize("combination", full_product(INSTALLED), ids=str)
def test_every_combination_of_what_is_registered(combination):
    check(combination)


@pytest.mark.parametrize("combination", every_pair(INSTALLED), ids=str)
def test_every_pair_of_options_models_and_adapters(combination):
    check(combination)


# Plugins of others


@frozen
class Hinge:
    """Hinge on the mean log-probabilities, with a margin that has no default."""

    requires: ClassVar = frozenset({"pairs", "ref_logprobs"})
    gamma: float = option(help="wanted margin")

    @classmethod
    def examples(cls):
        return [cls(gamma=0.5), cls(gamma=5.0)]

    def __call__(self, scores, batch):
        mean = batch.mean(scores.logprobs - batch.ref_logprobs)  # [C]
        loss = mx.maximum(0.0, self.gamma - mean[batch.pairs[:, 0]] + mean[batch.pairs[:, 1]])  # [N]
        return LossOutput({"hinge": (loss.sum(), loss.size)})


@frozen
class Ranking:
    """Chosen above rejected, by a value."""

    requires: ClassVar = frozenset({"pairs", "values"})

    def __call__(self, scores, batch):
        last = batch.last(scores.values)
        loss = mx.logaddexp(0.0, last[batch.pairs[:, 1]] - last[batch.pairs[:, 0]])
        return LossOutput({"rank": (loss.sum(), loss.size)})


@frozen
class Value:
    """One number a token, by weights of its own."""

    provides: ClassVar = frozenset({"values"})

    def attach(self, model, seed):
        part = Part("")
        part.value_head = nn.Linear(model.config["hidden_size"], 1, bias=False)
        model.parts.append(part)
        model.invalidate()
        return {"value_head.weight": mx.full(part.value_head.weight.shape, 0.1)}

    def output_for(self, model):
        return Output(model.named_parameters()["value_head.weight"], "value_head.weight")

    def score(self, hidden, targets, output, *, grad=False, entropy=False, traced=False):
        values = (hidden @ output.weight.T)[:, 0]
        unit = mx.broadcast_to(output.weight, hidden.shape) if grad else None
        return TokenLogprobs(mx.zeros_like(values), lse=mx.zeros_like(values), values=values, dhidden=unit)

    def output_gradients(self, hidden, targets, output, dlogprobs, lse, *, traced=False):
        return {"value_head.weight": (dlogprobs[:, None] * hidden).sum(axis=0, keepdims=True)}


@frozen
class LastFirst:
    """Separate rows, groups in the other order."""

    style: Literal["plain", "fancy"] = "plain"

    def __call__(self, groups, limits, /, *, prompt_targets=False):
        return micro_batches(groups[::-1], limits, partial(separate_rows, prompt_targets=prompt_targets))


@frozen
class Other:
    """A family of its own."""

    examples: ClassVar = (TINY | {"model_type": "other"},)

    def handles(self, config, /):
        return config["model_type"] == "other"

    def build(self, config, /):
        return Llama(config | {"model_type": "llama"})


def with_plugins(*registered: tuple[str, str, type]) -> Plugins:
    return load_plugins(entry_points=[*metadata.entry_points(group="mortice"), *(plugin(*r) for r in registered)])


def test_a_plugin_joins_by_being_registered():
    plugins = with_plugins(
        ("loss", "hinge", Hinge), ("loss", "ranking", Ranking), ("head", "value", Value),
        ("layout", "last-first", LastFirst), ("model", "other", Other),
    )  # fmt: skip
    product = {str(c) for c in full_product(plugins)}
    assert {str(c) for c in full_product(INSTALLED)} < product
    for mine in (
        "test-plugins:hinge-example0|dense|full|test-plugins:last-first|llama|lora",
        "test-plugins:ranking|test-plugins:value|segmented|prefix-shared|llama|lora",
    ):
        assert mine in product
    assert not any("ranking|dense" in name or "hinge-example0|test-plugins:value" in name for name in product)

    pairs = every_pair(plugins)
    met = {frozenset((a.label, b.label)) for c in pairs for a, b in itertools.combinations(c.choices, 2)}
    for one, other in (
        ("test-plugins:hinge-example1", "llama-4bit"),
        ("test-plugins:last-first(style=fancy)", "segmented(segment_size=1)"),
        ("other-example0-4bit", "prefix-shared"),
        ("test-plugins:value", "full"),
    ):
        assert frozenset((one, other)) in met
    for label in ("hinge-example0", "hinge-example1", "ranking", "value", "last-first", "other-example0-4bit"):
        for combination in [c for c in pairs if f"{label}|" in str(c)][:2]:
            check(combination)


def test_every_pair_that_can_meet_meets():
    kinds = [choices(INSTALLED, kind) for kind in ("loss", "head", "backward", "layout")]
    kinds += [models(INSTALLED), adapters(INSTALLED)]
    met = {frozenset(map(id, pair)) for c in every_pair(INSTALLED) for pair in itertools.combinations(c.choices, 2)}
    for one, other in itertools.combinations(kinds, 2):
        for a, b in itertools.product(one, other):
            assert (frozenset((id(a), id(b))) in met) == go_together(a, b)


def test_a_strategy_with_required_options_says_how_to_join():
    @frozen
    class Needy:
        """Cannot be used by default."""

        gamma: float = option(help="wanted margin")

    with pytest.raises(
        pytest.fail.Exception, match=r"'test-plugins:needy' has required options \(gamma\).*Needy.*`examples`"
    ):
        full_product(with_plugins(("loss", "needy", Needy)))

    @frozen
    class Stranger:
        def handles(self, config, /):
            return False

    with pytest.raises(
        pytest.fail.Exception, match=r"'test-plugins:stranger' handles none of llama, .*Stranger.*`examples`"
    ):
        models(with_plugins(("model", "stranger", Stranger)))


def a_wrong_gradient():
    def backward(model, params, contexts, objective):
        result, gradients = Full()(model, params, contexts, objective)
        first = next(name for name in gradients if name.endswith("layers.0.self_attn.k_proj.lora_a"))
        return result, gradients | {first: gradients[first] * 1.001}

    return {"backward": backward}


def a_wrong_place():
    """Every token one position too far, completions alone."""

    def layout(groups, limits, /, *, prompt_targets=False):
        return [
            evolve(micro, rows=[
                evolve(row, spans=[evolve(s, position=s.position + (s.parent is not None)) for s in row.spans])
                for row in micro.rows
            ])
            for micro in Separate()(groups, limits, prompt_targets=prompt_targets)
        ]  # fmt: skip

    return {"layout": layout}


def a_wrong_head():
    @frozen
    class Off(Dense):
        def score(self, *args, **kwargs):
            found = Dense.score(self, *args, **kwargs)
            return evolve(found, logprobs=found.logprobs + 3e-5)

    return {"head": Off()}


@pytest.mark.parametrize("wrong", [a_wrong_gradient, a_wrong_place, a_wrong_head])
def test_the_check_can_fail(wrong):
    right = full_product(INSTALLED)[0]
    check(right)
    changed = {kind: Choice(kind, "wrong", value) for kind, value in wrong().items()}
    with pytest.raises(AssertionError):
        check(evolve(right, **changed))
