"""`mortice.score`: the loss, per-token log-probabilities and gradients of given token ids.

For whoever checks mortice against another implementation or builds on it. No data files, no tokenizer, no run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from mortice.batch import LABEL, SCORE, Completion, Gradients, Group, Limits
from mortice.errors import ConfigError, DataError, suggest

if TYPE_CHECKING:
    from mortice.plugins import Plugins

_KEYS = (
    "prompt_ids", "completions", "loss_masks", "labels", "scores", "rewards", "advantages", "old_logprobs",
    "ref_logprobs",
)  # fmt: skip


@frozen
class Scores:
    """What `score` found."""

    loss: float
    metrics: Mapping[str, float]
    """Each term of the loss and each of its metrics."""
    logprobs: list[list[float]]
    """One list for each completion, groups in order: a float32 log-probability a token, NaN outside its loss mask. Of a
    head that gives values, these."""
    ref_logprobs: list[list[float]] | None = None
    """The same under the reference policy, where the loss needs it."""
    gradients: Gradients | None = field(default=None, repr=False)
    """By full name: `model.layers.0.self_attn.q_proj.lora_a [in, r]`, `.lora_b [r, out]`."""


def score(
    model: str | Path,
    groups: Sequence[Mapping[str, Any]],
    *,
    loss: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
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
    `layout` are names or tables as in the run file (`{"name": "orpo", "beta": 0.1}`); a list of losses is added up by
    their weights. Each group is a mapping with `prompt_ids` and `completions` (lists of ids) and optionally
    `loss_masks`, `labels` (true for a desirable one), `scores`, `rewards`, `advantages`, `old_logprobs` and
    `ref_logprobs`, one entry a completion; for a loss of pairs the first completion is the chosen one.
    `reference` is `initial` (the adapter as given, or the base where there is none), `base`, or a folder: an adapter,
    or another model of the same tokenizer.

    With `gradients`, of the adapter's parameters, or of every float weight where there is no adapter.
    `micro_batch_size` groups go in one micro-batch (all by default).

    Raises DataError for a malformed group, PluginError for a strategy out of reach, CheckpointError for a model or
    an adapter that cannot be read, ConfigError for a wrong option.
    """
    from mortice import blas

    blas.load()
    from mortice.config import at_odds, build_strategy
    from mortice.data import with_unrelated
    from mortice.objective import WeightedLoss, requirements
    from mortice.plugins import load_plugins
    from mortice.pretrained import load
    from mortice.step import Engine

    plugins = plugins or load_plugins()
    chosen = {
        kind: build_strategy(plugins, kind, table)
        for kind, table in (("head", head), ("backward", backward), ("layout", layout))
    }
    tables = [loss] if isinstance(loss, (str, Mapping)) else list(loss)
    named = [build_strategy(plugins, "loss", table) for table in tables]
    losses = tuple(WeightedLoss(each.name, each.options, each.weight) for each in named)
    if temperature <= 0:
        raise ConfigError(f"temperature must be > 0, found {temperature}")
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ConfigError(f"micro_batch_size must be at least 1, found {micro_batch_size}")
    requires = requirements(losses)
    found = parse_groups(groups, pairs="pairs" in requires)
    for each in losses:
        _check_requirements(each.name, each.requires, found)
    if "unrelated" in requires:
        longest = max(len(g.prompt_of(k)) + len(c.ids) for g in found for k, c in enumerate(g.completions))
        found = with_unrelated(found, 2 * longest)

    if wrong := at_odds(chosen["head"], named):
        raise ConfigError(wrong)

    pretrained = load(model, plugins=plugins, adapter=adapter)
    params = dict(pretrained.params)
    if gradients and not params:
        params = _float_weights(pretrained.model)
    scorer, own = _with_weights(chosen["head"].options, pretrained.model, adapter)
    params |= own
    pretrained.model.mark_trainable(params)
    engine = Engine(
        pretrained.model,
        scorer,
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
        logprobs=[list(tokens) for group in tally.scores(found) for tokens in group],
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
        ("old_logprobs", "old_logprobs"), ("ref_logprobs", "ref_logprobs"), ("labels", "labels"), ("scores", "scores"),
    ):  # fmt: skip
        if given.get(key) is not None:
            if not hasattr(given[key], "__len__") or isinstance(given[key], str):
                raise DataError(f"{where}: {key!r} must be a list, one entry a completion, found {given[key]!r}")
            if len(given[key]) != count:
                raise DataError(f"{where}: {key!r} has {len(given[key])} entries for {count} completions")
            columns[name] = given[key]
    if odd := [label for label in columns.get("labels", ()) if label not in (0, 1)]:
        raise DataError(f"{where}: 'labels' must be true or false, or 1 or 0, found {odd[0]!r}")
    extras: list[dict[str, float]] = [{} for _ in range(count)]
    for key, name in (("labels", LABEL), ("scores", SCORE)):
        for own, value in zip(extras, columns.pop(key, ())):
            own[name] = float(value)
    try:
        completions = [
            Completion(ids, extras=extras[k], **{name: column[k] for name, column in columns.items()})
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
    have |= {"pairs", "labels"} if all(group.pairs for group in groups) else set()
    have |= {"unrelated"} if len({group.prompt_ids for group in groups}) > 1 else set()
    for name, key in (("labels", LABEL), ("scores", SCORE)):
        if all(key in c.extras for g in groups for c in g.completions):
            have.add(name)
    have |= {"groups"} if all(len(group.completions) > 1 for group in groups) else set()
    for name in ("advantage", "old_logprobs"):
        if all(getattr(c, name) is not None for g in groups for c in g.completions):
            have.add("advantages" if name == "advantage" else name)
    lacking = sorted(requires - have - {"values"})
    if lacking:
        raise ConfigError(f"loss {loss!r} needs {', '.join(lacking)}, which not every group has")


def _with_weights(head: Any, model: Any, adapter: str | Path | None) -> tuple[Any, dict[str, Any]]:
    """A head with the weights that it brings: those in the adapter's folder, or fresh ones."""
    if not hasattr(head, "attach"):
        return head, {}
    if adapter is not None and hasattr(head, "claims") and head.claims(Path(adapter)):
        return head.from_folder(Path(adapter), model)
    return head, dict(head.attach(model, 0))


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
