"""`mortice.score`: the loss, per-token log-probabilities and gradients of given token ids.

For whoever checks mortice against another implementation or builds on it. No data files, no tokenizer, no run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from mortice.batch import Completion, Gradients, Group, Limits
from mortice.errors import ConfigError, DataError, suggest

if TYPE_CHECKING:
    from mortice.plugins import Plugins

_KEYS = ("prompt_ids", "completions", "loss_masks", "rewards", "advantages", "old_logprobs", "ref_logprobs")


@frozen
class Scores:
    """What `score` found."""

    loss: float
    metrics: Mapping[str, float]
    """Each term of the loss and each of its metrics."""
    logprobs: list[list[float]]
    """One list for each completion, groups in order: a float32 log-probability a token, NaN outside its loss mask."""
    ref_logprobs: list[list[float]] | None = None
    """The same under the reference policy, where the loss needs it."""
    gradients: Gradients | None = field(default=None, repr=False)
    """By full name: `model.layers.0.self_attn.q_proj.lora_a [in, r]`, `.lora_b [r, out]`."""


def score(
    model: str | Path,
    groups: Sequence[Mapping[str, Any]],
    *,
    loss: str | Mapping[str, Any],
    head: str | Mapping[str, Any] = "dense",
    backward: str | Mapping[str, Any] = "full",
    layout: str | Mapping[str, Any] = "separate",
    adapter: str | Path | None = None,
    reference: str = "initial",
    gradients: bool = False,
    micro_batch_size: int | None = None,
    temperature: float = 1.0,
    plugins: Plugins | None = None,
) -> Scores:
    """Score token ids with a model on disk.

    `model` is a folder or a hub id, `adapter` an mlx-lm or PEFT adapter folder. `loss`, `head`, `backward` and
    `layout` are names or tables as in the run file (`{"name": "orpo", "beta": 0.1}`). Each group is a mapping with
    `prompt_ids` and `completions` (lists of ids) and optionally `loss_masks`, `rewards`, `advantages`, `old_logprobs`
    and `ref_logprobs`, one entry a completion; for a loss of pairs the first completion is the chosen one.
    `reference` is `initial` (the adapter as given, or the base where there is none), `base`, or a folder: an adapter,
    or another model of the same tokenizer.

    With `gradients`, of the adapter's parameters, or of every float weight where there is no adapter.
    `micro_batch_size` groups go in one micro-batch (all by default).

    Raises DataError for a malformed group, PluginError for a strategy out of reach, CheckpointError for a model or
    an adapter that cannot be read, ConfigError for a wrong option.
    """
    from mortice import blas

    blas.load()
    from mortice.config import build_strategy
    from mortice.objective import WeightedLoss, requirements
    from mortice.plugins import load_plugins
    from mortice.pretrained import load
    from mortice.step import Engine

    plugins = plugins or load_plugins()
    chosen = {
        kind: build_strategy(plugins, kind, table)
        for kind, table in (("loss", loss), ("head", head), ("backward", backward), ("layout", layout))
    }
    losses = (WeightedLoss(chosen["loss"].name, chosen["loss"].options, chosen["loss"].weight),)
    if temperature <= 0:
        raise ConfigError(f"temperature must be > 0, found {temperature}")
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ConfigError(f"micro_batch_size must be at least 1, found {micro_batch_size}")
    requires = requirements(losses)
    found = parse_groups(groups, pairs="pairs" in requires)
    _check_requirements(chosen["loss"].name, requires, found)

    pretrained = load(model, plugins=plugins, adapter=adapter)
    params = dict(pretrained.params)
    if gradients and not params:
        params = _float_weights(pretrained.model)
    pretrained.model.mark_trainable(params)
    engine = Engine(
        pretrained.model,
        chosen["head"].options,
        chosen["backward"].options,
        chosen["layout"].options,
        losses,
        Limits(groups=micro_batch_size or len(found)),
        temperature=temperature,
    )
    ref_logprobs = None
    if "ref_logprobs" in requires:
        policy = _reference(reference, engine, pretrained, params, plugins)
        found = policy.fill(found, training=gradients and policy.engine is engine)
        ref_logprobs = [list(c.ref_logprobs or ()) for g in found for c in g.completions]
    if gradients:
        tally, grads = engine.gradients(params, found)
    else:
        tally, grads = engine.evaluate(params, found), None
    values = tally.values()
    return Scores(
        loss=values.pop("loss"),
        metrics=values,
        logprobs=[list(tokens) for group in tally.logprobs(found) for tokens in group],
        ref_logprobs=ref_logprobs,
        gradients=grads,
    )


def parse_groups(groups: Sequence[Mapping[str, Any]], *, pairs: bool = False) -> list[Group]:
    """Mappings of token ids to groups; with `pairs`, the first completion is preferred to each of the others.

    Raises DataError that names the group and the key.
    """
    if not groups:
        raise DataError("score: no groups given")
    return [_group(i, g, pairs) for i, g in enumerate(groups)]


def _group(index: int, given: Mapping[str, Any], with_pairs: bool) -> Group:
    where = f"groups[{index}]"
    if not isinstance(given, Mapping):
        raise DataError(f"{where} must be a mapping, found {type(given).__name__}")
    for key in given:
        if key not in _KEYS:
            raise DataError(f"{where}: unknown key {key!r}{suggest(key, _KEYS)} (accepted: {', '.join(_KEYS)})")
    for key in ("prompt_ids", "completions"):
        if given.get(key) is None or not hasattr(given[key], "__len__") or not len(given[key]):
            raise DataError(f"{where}: {key!r} is missing or empty")
    count = len(given["completions"])
    columns = {}
    for key, name in (
        ("loss_masks", "loss_mask"), ("rewards", "reward"), ("advantages", "advantage"),
        ("old_logprobs", "old_logprobs"), ("ref_logprobs", "ref_logprobs"),
    ):  # fmt: skip
        if given.get(key) is not None:
            if not hasattr(given[key], "__len__") or isinstance(given[key], str):
                raise DataError(f"{where}: {key!r} must be a list, one entry a completion, found {given[key]!r}")
            if len(given[key]) != count:
                raise DataError(f"{where}: {key!r} has {len(given[key])} entries for {count} completions")
            columns[name] = given[key]
    try:
        completions = [
            Completion(ids, **{name: column[k] for name, column in columns.items()})
            for k, ids in enumerate(given["completions"])
        ]
        pairs = tuple((0, k) for k in range(1, count)) if with_pairs else ()
        group = Group(where, given["prompt_ids"], completions, pairs)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: {error}") from error
    for k, completion in enumerate(completions):
        if not any(completion.loss_mask):
            raise DataError(f"{where}: completion {k} has no scored token, so it has no log-probability to speak of")
    return group


def _check_requirements(loss: str, requires: frozenset[str], groups: Sequence[Group]) -> None:
    have = {"ref_logprobs", "prompt_logprobs", "entropy"}
    have |= {"pairs"} if all(group.pairs for group in groups) else set()
    have |= {"groups"} if all(len(group.completions) > 1 for group in groups) else set()
    for name in ("advantage", "old_logprobs"):
        if all(getattr(c, name) is not None for g in groups for c in g.completions):
            have.add("advantages" if name == "advantage" else name)
    lacking = sorted(requires - have - {"values"})
    if lacking:
        raise ConfigError(f"loss {loss!r} needs {', '.join(lacking)}, which not every group has")


def _float_weights(model: Any) -> dict[str, Any]:
    import mlx.core as mx

    kinds = (mx.float32, mx.float16, mx.bfloat16)
    named = model.named_parameters()
    packed = {name.removesuffix(".scales") for name in named if name.endswith(".scales")}
    return {
        name: w.astype(mx.float32)
        for name, w in named.items()
        if w.dtype in kinds and name.rpartition(".")[0] not in packed
    }


def _reference(policy: str, engine: Any, pretrained: Any, params: Mapping[str, Any], plugins: Plugins) -> Any:
    """The reference policy: the model itself with other values, or another model."""
    from mortice.pretrained import load
    from mortice.reference import Reference, is_model, reference_params

    values: Any = None
    if pretrained.adapter is not None:
        values = reference_params(policy, pretrained.adapter, pretrained.model, dict(params))
    elif policy in ("initial", "base"):
        values = dict(params)
    if values is not None:
        return Reference(engine, values)
    path = Path(policy)
    if policy == "base":
        other = load(pretrained.path, plugins=plugins)
    elif is_model(path):
        other = load(path, plugins=plugins)
    else:
        other = load(pretrained.path, plugins=plugins, adapter=path)
    return Reference(evolve(engine, model=other.model), dict(other.params))
