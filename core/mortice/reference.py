"""Log-probabilities under the reference policy: the adapter that the run started from, the base, or what a path names.

One model is resident at any time. A reference that the run's own model can be is a set of values for its trainable
parameters, bound for a forward and taken out again. Any other one (an adapter of another shape, another checkpoint)
is loaded, scored and let go before the run's own weights are read. Where the source knows its groups, all that
training will need is scored before the first step, kept on disk (`reference_cache`), and the reference is dropped.

The reference is scored by the forward of training itself: in its layout, in its micro-batches, and inside a trace or
outside, as the backward has it. So a policy that is its own reference starts at a margin of exactly 0.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from attrs import define, evolve, frozen

from mortice.batch import Group, MicroBatch
from mortice.errors import CheckpointError, ConfigError, TrainingError
from mortice.fingerprint import SIZE, of_group
from mortice.model import Model
from mortice.protocols import Adapter, LiveSource, Params
from mortice.reference_cache import ReferenceCache, flat
from mortice.step import Engine

if TYPE_CHECKING:
    from mortice.pretrained import Pretrained
    from mortice.tokenizer import Tokenizer

ALONE = bytes(SIZE)
"""What stands beside a group that is a micro-batch by itself."""
TRAINED, EVALUATED, ELSEWHERE = b"t", b"e", b"o"
"""How a group was scored: by the forward of training, by that of evaluation, by another model."""
MANY = 100
"""Groups to score from which on progress is told."""


@frozen(eq=False)
class Other:
    """A reference that the run's own model cannot be."""

    load: Callable[[], Pretrained]
    path: Path
    """Of the model that it is, or below it."""
    adapter: Path | None = None


def is_model(path: Path) -> bool:
    """Whether a folder holds a whole checkpoint, else an adapter. Raises ConfigError where it is neither."""
    if (path / "config.json").exists():
        return True
    if (path / "adapter_config.json").exists():
        return False
    inner = path / "adapter"
    hint = f"; did you mean {inner}?" if (inner / "adapter_config.json").exists() else ""
    raise ConfigError(
        f"reference.policy: {path} is neither an adapter (adapter_config.json) nor a model (config.json){hint}"
    )


def reference_params(policy: str, adapter: Adapter, model: Model, params: Params) -> Params | None:
    """What the run's own model binds to be the reference. `initial`: a copy of `params`; `base`: the values that leave
    the base model as it is; else those of an adapter folder. None where the own model cannot be it.

    Raises ConfigError for a folder that is neither adapter nor model.
    """
    if policy == "initial":
        return dict(params)
    try:
        if policy == "base":
            return adapter.base(params)
        return None if is_model(Path(policy)) else adapter.load(model, Path(policy), params)
    except CheckpointError:  # of another shape, rank or kind; what is damaged is found out when it is opened alone
        return None
    except ConfigError:
        if policy == "base":
            return None
        raise


def check_tokenizer(own: Tokenizer, path: Path) -> None:
    """Raises ConfigError where another model's token ids do not mean the same."""
    from mortice.tokenizer import Tokenizer

    if not (path / "tokenizer.json").exists():
        raise ConfigError(f"reference.policy: {path} has no tokenizer.json, so nobody can say what its token ids mean")
    if differing := own.differences(Tokenizer.load(path)):
        raise ConfigError(
            f"reference.policy: {path} has another tokenizer, so its log-probabilities are those of other text "
            f"({differing})"
        )


@define(eq=False)
class Reference:
    """The reference policy of a run."""

    engine: Engine
    params: Params | None = None
    """What the run's own model binds to be it; None for another model, and once all groups are scored."""
    known: bool = False
    """Whether every group is scored before training, and kept."""
    other: Other | None = None
    open_cache: Callable[[], ReferenceCache] = lambda: ReferenceCache(None, {}, {})
    _cache: ReferenceCache | None = None
    _scored: int = 0
    """Groups that were scored, not found."""

    @property
    def cache(self) -> ReferenceCache:
        if self._cache is None:
            self._cache = self.open_cache()
            self.open_cache = _opened  # it held the parameters, which are to go
        return self._cache

    def fill(self, groups: Sequence[Group], *, training: bool = False, exact: bool = False) -> list[Group]:
        """The groups with `ref_logprobs` on every completion, also of their `unrelated` ones; those that have them keep
        them.

        `training`: scored by the forward of training, else by that of evaluation, which `unrelated` ones always are.
        `exact`: to the last bit as it would be in just these micro-batches; else what was scored beside other groups
        will do.
        """
        if any(group.unrelated is not None for group in groups):
            others = iter(self.fill([g.unrelated for g in groups if g.unrelated is not None], exact=exact))
            groups = [g if g.unrelated is None else evolve(g, unrelated=next(others)) for g in groups]
        lacking = {id(group) for group in groups if _lacks(group)}
        if not lacking:
            return list(groups)
        filled: dict[int, Group] = {}
        for micro in self.engine.lay_out(groups):
            if any(id(group) in lacking for group in micro.groups):
                scores = self._of_micro(micro, training=training, exact=exact)
                filled |= {id(group): _with(group, own) for group, own in zip(micro.groups, scores)}
        return [filled[id(group)] if id(group) in lacking else group for group in groups]

    def ahead(
        self, steps: Iterable[Sequence[Group]], *, exact: bool, poll: Callable[[], None], tell: Callable[[str], None]
    ) -> None:
        """Score the groups of coming steps, `exact` for the first of them. What is scored is kept also where `poll`
        raises."""
        if not self.known or self.other is not None:
            return
        steps = list(steps)
        open_groups = [group for groups in steps for group in groups if _lacks(group)]
        lacking = sum(not self._has(group, TRAINED) for group in open_groups)
        self._announce(lacking, len(open_groups), tell)
        try:
            for i, groups in enumerate(steps):
                poll()
                self.fill(groups, training=True, exact=exact and i == 0)
                _progress(self._scored, len(groups), lacking, tell)
        finally:
            self.cache.save()

    def settle(self) -> None:
        """All groups are scored: from here on there is no reference but its numbers."""
        if self.known:
            self.cache.save()
            self.params = None
            gc.collect()

    def score_other(self, source: LiveSource, total: int, batch_size: int, tell: Callable[[str], None]) -> None:
        """Load the other model, score all groups of a run of so many steps that are not kept yet, and let it go."""
        assert self.other is not None
        both = (one for group in needed(source, total) for one in (group, group.unrelated))
        groups = [group for group in both if group is not None and _lacks(group)]
        lacking = [group for group in groups if not self._has(group, ELSEWHERE)]
        self._announce(len(lacking), len(groups), tell)
        if not lacking:
            return
        try:
            self._score_with(self.other.load(), lacking, batch_size, tell)
        finally:
            gc.collect()
            mx.clear_cache()
            self.cache.save()

    def _score_with(
        self, pretrained: Pretrained, groups: Sequence[Group], batch_size: int, tell: Callable[[str], None]
    ) -> None:
        engine = evolve(self.engine, model=pretrained.model)
        for start in range(0, len(groups), batch_size):
            chunk = groups[start : start + batch_size]
            for micro in engine.lay_out(chunk):
                self._keep(micro, engine.scores(pretrained.params, micro), ELSEWHERE)
            _progress(self._scored, len(chunk), len(groups), tell)

    def _of_micro(self, micro: MicroBatch, *, training: bool, exact: bool) -> list[np.ndarray]:
        way = ELSEWHERE if self.other is not None else TRAINED if training else EVALUATED
        if self.known:
            found = [
                self.cache.find(way, key, beside, exact=exact and self.params is not None)
                for key, beside in _keys(micro)
            ]
            kept = [scores for scores in found if scores is not None]
            if len(kept) == len(found):
                return kept
        if self.params is None:
            lacking = ", ".join(group.id for group in micro.groups)
            raise TrainingError(
                f"{lacking}: not scored under the reference policy before training; a source that gives all its groups "
                "in known() may not bring others later"
            )
        scores = self.engine.scores(self.params, micro, as_trained=training)
        return self._keep(micro, scores, way) if self.known else [flat(own) for own in scores]

    def _keep(self, micro: MicroBatch, scores: Sequence[Sequence[Sequence[float]]], way: bytes) -> list[np.ndarray]:
        flattened = [flat(own) for own in scores]
        for (key, beside), own in zip(_keys(micro), flattened):
            self.cache.put(way, key, beside, own)
        self._scored += len(flattened)
        return flattened

    def _has(self, group: Group, way: bytes) -> bool:
        return self.cache.find(way, of_group(group), ALONE, exact=False) is not None

    def _announce(self, lacking: int, total: int, tell: Callable[[str], None]) -> None:
        if not total:
            return
        if not lacking:
            tell(f"reference: all {total} groups are scored already, in {self.cache.file}")
            return
        changes = self.cache.differences()
        since = f"; since the others were: {changes}" if changes else ""
        tell(f"reference: scoring {lacking} of {total} groups, once{since}")


def _lacks(group: Group) -> bool:
    return any(completion.ref_logprobs is None for completion in group.completions)


def _opened() -> ReferenceCache:
    raise AssertionError("the cache is open")


def _progress(done: int, more: int, total: int, tell: Callable[[str], None]) -> None:
    """A line at every tenth of a long work."""
    if total >= MANY and 10 * done // total > 10 * (done - more) // total and done < total:
        tell(f"reference: {done} of {total} groups")


def _keys(micro: MicroBatch) -> Iterator[tuple[bytes, bytes]]:
    """(group, what stands beside it) of each group: the place among all the others, by their content."""
    own = [of_group(group) for group in micro.groups]
    for place, key in enumerate(own):
        if len(own) == 1:
            yield key, ALONE
        else:
            yield key, hashlib.blake2b(b"".join(own) + place.to_bytes(4, "little"), digest_size=SIZE).digest()


def _with(group: Group, scores: np.ndarray) -> Group:
    """The group with these scores where completions lack them."""
    cuts = np.cumsum([len(c.ids) for c in group.completions])[:-1]
    return group.with_completions(
        [
            evolve(c, ref_logprobs=c.ref_logprobs or own.tolist())
            for c, own in zip(group.completions, np.split(scores, cuts))
        ]
    )


def coming(source: LiveSource, step: int, total: int) -> Iterator[Sequence[Group]]:
    """The groups of the steps from `step` on, each once: an epoch, or what is left of the run."""
    last = total if source.steps_per_epoch is None else min(total, step + source.steps_per_epoch)
    while step < last:
        groups, passes = source.next(step)
        yield groups
        step += passes


def needed(source: LiveSource, total: int) -> Iterable[Group]:
    """Every group that a run of so many steps sees, once: of its steps, and those that no step of an epoch gives, which
    are held out."""
    known: Any = source
    trained = [group for groups in coming(source, 0, source.steps_per_epoch or 0) for group in groups]
    seen = {id(group) for group in trained}
    found = {id(group): group for groups in coming(source, 0, total) for group in groups}
    return (found | {id(group): group for group in known.known() if id(group) not in seen}).values()
