"""Fitting a run into `[train] memory_limit`: which options to change, found by measuring what each needs.

Only what the user left open is changed: options that neither the file nor a flag sets, and strategies that it does not
name. Strategies say themselves which of their options trade memory, in `leaner`: values of an option, most memory
first. Nothing is changed in a run that fits. Else, of the changes that make it fit, the one with the fastest step is
taken; where no single change is enough, the one that saves most is made and the search goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen

from mortice.batch import Group
from mortice.config import check_requirements
from mortice.errors import ConfigError, MorticeError
from mortice.planning import Estimate, Workload, estimate, machine_memory, workload
from mortice.sizes import parse_size, readable
from mortice.structure import fields, structure

if TYPE_CHECKING:
    from mortice.config import RunConfig
    from mortice.model import Model
    from mortice.protocols import Params
    from mortice.step import Engine

SPARE = 0.05
"""Share of the limit that is left free, for what a prediction misses."""
GAIN = 0.01
"""A change that saves less than this share of the peak is none."""
KINDS = ("layout", "head", "backward")
"""Kinds whose strategies give the same numbers, so that one may stand in for another."""
TABLES = (*KINDS, "context", "train")
"""Tables whose options may be traded."""

Changes = Mapping[str, Any]
"""Dotted keys to values."""


@frozen(eq=False)
class Fitted:
    """A run that fits."""

    config: RunConfig
    estimate: Estimate
    changes: Changes
    reasons: tuple[str, ...]
    """One line for each change: what it saves, and what the step takes."""
    limit: int

    @property
    def spare(self) -> int:
        """Bytes of the limit that the run leaves, for the allocator's cache."""
        return max(0, self.limit - self.estimate.peak)


@frozen(eq=False)
class _Candidate:
    changes: Changes
    config: RunConfig
    estimate: Estimate | None
    """None where a quarter of the rows showed that it is beyond the machine."""

    @property
    def peak(self) -> float:
        return float("inf") if self.estimate is None else self.estimate.peak

    @property
    def seconds(self) -> float:
        return float("inf") if self.estimate is None else self.estimate.seconds


@define(eq=False)
class Search:
    """Configurations of one run, each looked at once."""

    config: RunConfig
    model: Model
    params: Params
    groups: Sequence[Group]
    make_engine: Callable[[RunConfig, Model], Engine]
    tell: Callable[[str], None] = lambda _: None
    _seen: dict[tuple[tuple[str, str], ...], _Candidate] = field(factory=dict)

    def look(self, changes: Changes) -> _Candidate:
        """What the run needs with these changes. Raises ConfigError where they cannot be made."""
        key = tuple(sorted((name, repr(value)) for name, value in changes.items()))
        if key not in self._seen:
            config = self.config.with_overrides(changes, origin="train.memory_limit") if changes else self.config
            check_requirements(config)
            self.tell(f"measuring {_spell(changes) or 'the run as it is'}")
            self._seen[key] = _Candidate(changes, config, self._estimate(config))
        return self._seen[key]

    def _estimate(self, config: RunConfig, groups: Sequence[Group] | None = None) -> Estimate | None:
        groups = self.groups if groups is None else groups
        engine = self.make_engine(config, self.model)
        work = workload(engine, groups, config.train.batch_size)
        if self._beyond(engine, config, work):
            return None
        return estimate(engine, self.params, config.optimizer.build(), work)

    def _beyond(self, engine: Engine, config: RunConfig, work: Workload) -> bool:
        """Whether a quarter of each row already shows that the machine cannot hold whole ones."""
        quarter = workload(engine, [shortened(g, 0.25) for g in work.groups], config.train.batch_size)
        small = estimate(engine, self.params, config.optimizer.build(), quarter)
        return 4 * (small.parts["kept"] + small.parts["working"]) > machine_memory()

    def fit(self, limit: int) -> Fitted:
        """The run, changed as little as it takes. Raises ConfigError that says what comes nearest."""
        room = limit * (1 - SPARE)
        here = self.look({})
        reasons: list[str] = []
        while here.peak > room:
            found = list(self._neighbours(here, room))
            fitting = [c for c in found if c.peak <= room]
            best = min(fitting, key=lambda c: c.seconds) if fitting else min(found, key=lambda c: c.peak, default=here)
            if best.peak > here.peak * (1 - GAIN):
                raise ConfigError(self._refusal(here, limit))
            reasons.append(_reason(here, best))
            here = best
        assert here.estimate is not None
        return Fitted(here.config, here.estimate, here.changes, tuple(reasons), limit)

    def _neighbours(self, here: _Candidate, room: float) -> Iterator[_Candidate]:
        """One open option changed: another strategy, or the least lean value that fits, or the leanest."""
        for kind, name in self._others(here.config, self._is_open):
            dropped = {k: v for k, v in here.changes.items() if not k.startswith(f"{kind}.")}
            yield from self._tried(dropped | {f"{kind}.name": name})
        for key, values in _trades(here.config):
            if not self._is_open(key):
                continue
            leanest = list(self._tried({**here.changes, key: values[-1]}))
            yield from leanest
            if leanest and leanest[0].peak <= room:
                for value in reversed(values[:-1]):
                    wider = list(self._tried({**here.changes, key: value}))
                    if not wider or wider[0].peak > room:
                        break
                    yield from wider

    def _tried(self, changes: Changes) -> Iterator[_Candidate]:
        with suppress(MorticeError):
            yield self.look(changes)

    def _is_open(self, key: str) -> bool:
        return tuple(key.split(".")) not in self.config.file.origins

    def _others(self, config: RunConfig, wanted: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
        """(kind, name) of strategies that could stand in for the run's own."""
        for kind in KINDS:
            own = config.all(kind)
            if len(own) != 1 or not wanted(f"{kind}.name") or hasattr(own[0].options, "attach"):
                continue
            for strategy in self.config.plugins.registry.all(kind):
                cls = strategy.load()
                if strategy.name != own[0].name and not hasattr(cls, "attach") and not structure(cls, {})[1]:
                    yield kind, strategy.name

    def _refusal(self, leanest: _Candidate, limit: int) -> str:
        """What was tried, and the changes nearest to the run that would make it fit."""
        room = limit * (1 - SPARE)
        lines = [f"train.memory_limit: the run does not fit {readable(limit)}"]
        if leanest.estimate is None:
            lines.append(f"even the leanest of what was tried is beyond this machine ({readable(machine_memory())})")
        else:
            parts = ", ".join(f"{name} {readable(size)}" for name, size in leanest.estimate.parts.items() if size)
            with_ = f" with {_spell(leanest.changes)}" if leanest.changes else ""
            lines.append(f"the leanest that was tried needs {readable(leanest.estimate.peak)}{with_} ({parts})")
        remedies = []
        for candidate, key in self._fixed(leanest):
            if candidate.peak <= room:
                where = self.config.file.where(tuple(key.split("."))).rstrip(": ")
                set_by = f" (set in {where})" if where else ""
                remedies.append(f"{_spell({key: candidate.changes[key]})}{set_by}: {readable(candidate.peak)}")
        remedies += self._shorter(leanest, room)
        if leanest.estimate is not None:
            remedies.append(f'train.memory_limit = "{readable(leanest.estimate.peak / (1 - SPARE) * 1.01, "")}"')
        return "\n".join([*lines, "what would fit:", *(f"  {remedy}" for remedy in remedies)])

    def _fixed(self, here: _Candidate) -> Iterator[tuple[_Candidate, str]]:
        """Changes of what the user has set, which are not made but proposed."""
        for kind, name in self._others(here.config, lambda key: not self._is_open(key)):
            dropped = {k: v for k, v in here.changes.items() if not k.startswith(f"{kind}.")}
            own = [k for k in fields(type(here.config.one(kind))) if not self._is_open(f"{kind}.{k}")]
            if not own:
                for found in self._tried(dropped | {f"{kind}.name": name}):
                    yield found, f"{kind}.name"
        for key, values in _trades(here.config):
            if not self._is_open(key):
                for found in self._tried({**here.changes, key: values[-1]}):
                    yield found, key

    def _shorter(self, here: _Candidate, room: float) -> list[str]:
        """How long rows may be, from the needs of whole and of half rows."""
        if here.estimate is None:
            return []
        half = self._estimate(here.config, [shortened(g, 0.5) for g in self.groups])
        if half is None or half.peak >= here.estimate.peak:
            return []
        share = 1 - 0.5 * (here.estimate.peak - room) / (here.estimate.peak - half.peak)
        longest = max(
            len(g.prompt_ids) + max(len(c.ids) for c in g.completions) for g in self.groups
        )  # fmt: skip
        length = int(share * longest)
        return [f"data.max_length = {length} or less (the longest now: {longest})"] if length >= 16 else []


def fit(search: Search, limit: str) -> Fitted:
    """The configuration of a run that keeps to `limit` (`"16GB"`). Raises ConfigError where none does."""
    return search.fit(parse_size(limit))


def shortened(group: Group, share: float) -> Group:
    """The group with a share of each prompt and completion, to measure on."""

    def cut(count: int) -> int:
        return max(1, round(count * share))

    def shorter(c: Any) -> Any:
        keep = cut(len(c.ids))
        vectors = {n: None if (v := getattr(c, n)) is None else v[:keep] for n in ("ref_logprobs", "old_logprobs")}
        own = None if c.prompt_ids is None else c.prompt_ids[: cut(len(c.prompt_ids))]
        mask = (True,) * keep
        return evolve(c, ids=c.ids[:keep], loss_mask=mask, prompt_ids=own, **vectors)

    prompt = group.prompt_ids[: cut(len(group.prompt_ids))]
    return evolve(group, prompt_ids=prompt, completions=[shorter(c) for c in group.completions])


def _trades(config: RunConfig) -> Iterator[tuple[str, list[Any]]]:
    """(dotted key, leaner values than the one in force, the leanest last) of every option that trades memory."""
    for table in TABLES:
        options = config.one(table) if table in KINDS else getattr(config, table)
        for name, values in getattr(type(options), "leaner", {}).items():
            own = getattr(options, name)
            if own in values:
                later = list(values[list(values).index(own) + 1 :])
            elif isinstance(own, int):
                later = [value for value in values if isinstance(value, int) and value < own]
            else:
                later = list(values)
            if later:
                yield f"{table}.{name}", later


def _spell(changes: Changes) -> str:
    return ", ".join(f"{key} = {_toml(value)}" for key, value in changes.items())


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _reason(before: _Candidate, after: _Candidate) -> str:
    changed = {key: value for key, value in after.changes.items() if before.changes.get(key) != value}
    assert after.estimate is not None
    was = "beyond this machine" if before.estimate is None else readable(before.estimate.peak)
    pace = ""
    if before.estimate is not None and before.estimate.seconds > 0:
        pace = f"; a step takes {after.estimate.seconds / before.estimate.seconds:.2f} times as long"
    return f"{_spell(changed)}: {was} → {readable(after.estimate.peak)}{pace}"
