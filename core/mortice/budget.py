"""Fitting a run into `[train] memory_limit`: which options to change, found by measuring what each needs.

Only what the user left open is changed: options that neither the file nor a flag sets, and strategies that it does not
name. Strategies say themselves which of their options trade memory, in `leaner`: values of an option, most memory
first.

Where the run does not fit, head, layout and backward are looked at in this order, what costs no second forward first,
and then one option after the other: of the changes that make it fit the one with the fastest step is taken, else the
one that saves most, and the search goes on from there, at last with the leanest value of every option. Where it fits
with room to spare, options that trade the other way are tried: what makes a step faster and still fits is taken, the
least recompute that the limit allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen

from mortice.batch import Group
from mortice.config import check_requirements
from mortice.data import truncate
from mortice.errors import ConfigError, MorticeError
from mortice.planning import Estimate, Workload, estimate, least_peak, machine_memory, workload
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
FASTER = 0.03
"""A change that takes room has to save more than this share of a step, twice in a row."""
PROBES = 40
"""Configurations that are measured before the search is over."""
SHORTEST = 16
"""Tokens of a row below which shorter ones are not proposed."""
ADVICE = 12
"""Configurations that are measured on top for what a refusal proposes."""
KINDS = ("head", "layout", "backward")
"""Kinds whose strategies give the same numbers, so that one may stand in for another."""
TABLES = (*KINDS, "context", "train")
"""Tables whose options may be traded."""

LIMIT = ("train", "memory_limit")
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
    def room(self) -> int:
        """Bytes that the run was fitted into."""
        return int(min(self.limit, machine_memory()) * (1 - SPARE))

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

    @property
    def fixed(self) -> int:
        """The part of the peak that no open option changes."""
        if self.estimate is None:
            return 0
        standing = sum(self.estimate.parts[name] for name in ("weights", "adapter", "optimizer"))
        return max(standing, self.estimate.update) + self.estimate.elsewhere


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
    _most: int = PROBES
    _done: set[str] = field(factory=set)
    """Kinds and options that have been looked at."""

    def look(self, changes: Changes) -> _Candidate:
        """What the run needs with these changes. Raises ConfigError where they cannot be made."""
        key = _key(changes)
        if key not in self._seen:
            config = self._configured(changes)
            self.tell(f"measuring {_spell(changes) or 'the run as it is'}")
            self._seen[key] = _Candidate(changes, config, self._estimate(config))
        return self._seen[key]

    def _configured(self, changes: Changes) -> RunConfig:
        config = self.config.with_overrides(changes, origin="train.memory_limit") if changes else self.config
        check_requirements(config)
        return config

    def _estimate(self, config: RunConfig, groups: Sequence[Group] | None = None) -> Estimate | None:
        groups = self.groups if groups is None else groups
        engine = self.make_engine(config, self.model)
        work = workload(engine, groups, config.train.batch_size)
        if self._beyond(engine, config, work):
            return None
        return estimate(engine, self.params, config.optimizer.build(), work, rough=True)

    def _beyond(self, engine: Engine, config: RunConfig, work: Workload) -> bool:
        """Whether a quarter of each row already shows that the machine cannot hold whole ones."""
        quarter = workload(engine, [shortened(group, 0.25) for group in work.largest], len(work.largest))
        return 4 * least_peak(engine, self.params, config.optimizer.build(), quarter) > machine_memory()

    def fit(self, limit: int) -> Fitted:
        """The run, changed as little as it takes. Raises ConfigError that says what comes nearest."""
        most = room = min(limit, machine_memory()) * (1 - SPARE)
        # A run as it is may come nearer: one that was fitted before is measured a little larger another time.
        near = edge = min(limit, machine_memory()) * (1 - SPARE / 4)
        here = self.look({})
        reasons: list[str] = []
        while True:
            while here.peak > (room if here.changes else max(room, near)):
                best = self._leaner(here, room) if here.fixed <= room else None
                if best is None:
                    raise ConfigError(self._refusal(here, limit))
                reasons.append(_reason(here, best))
                here = best
            for better in self._faster(here, room):
                reasons.append(f"room for {_reason(here, better)}")
                here = better
            found = self._exactly(here.config)
            if found.peak <= (most if here.changes else edge):
                return Fitted(here.config, found, here.changes, tuple(reasons), limit)
            room, near = room * 0.98 * most / found.peak, 0.0  # the rough look was too low by so much

    def _exactly(self, config: RunConfig) -> Estimate:
        """A careful estimate of what a rough one has chosen."""
        self.tell("measuring the choice")
        engine = self.make_engine(config, self.model)
        work = workload(engine, self.groups, config.train.batch_size)
        return estimate(engine, self.params, config.optimizer.build(), work)

    def _leaner(self, here: _Candidate, room: float) -> _Candidate | None:
        """The next step towards the limit; None where nothing saves memory any more.

        One kind of strategy, or one option, is looked at after the other, each once.
        """
        for name, family in self._families(here, room):
            self._done.add(name)
            found = list(family)
            fitting = [c for c in found if c.peak <= room]
            if fitting:
                return min(fitting, key=lambda c: c.seconds)
            best = min(found, key=lambda c: c.peak, default=here)
            if _saves(best, here):
                return best
        leanest = {key: values[-1] for key, values in _trades(here.config) if self._is_open(key)}
        together = next(self._tried({**here.changes, **leanest}), here)  # several may hold the peak up together
        return together if _saves(together, here) else None

    def _families(self, here: _Candidate, room: float) -> Iterator[tuple[str, Iterator[_Candidate]]]:
        """(what is changed, the run with each other strategy of a kind, or with one option at leaner values)."""
        for kind in KINDS:
            if kind not in self._done and self._is_open(f"{kind}.name"):
                yield kind, self._swapped(here, kind)
        for key, values in _trades(here.config):
            if key not in self._done and self._is_open(key):
                yield key, self._traded(here, key, values, room)

    def _swapped(self, here: _Candidate, kind: str) -> Iterator[_Candidate]:
        dropped = {k: v for k, v in here.changes.items() if not k.startswith(f"{kind}.")}
        for other, name in self._others(here.config, self._is_open):
            if other == kind:
                yield from self._tried(self._with(dropped, f"{kind}.name", name))

    def _traded(self, here: _Candidate, key: str, values: Sequence[Any], room: float) -> Iterator[_Candidate]:
        """The leanest value; where that fits, also the least lean one that does."""
        for leanest in self._tried({**here.changes, key: values[-1]}):
            yield leanest
            if leanest.peak <= room:
                yield from self._widest(here.changes, key, values[:-1], room)

    def _widest(self, changes: Changes, key: str, values: Sequence[Any], room: float) -> Iterator[_Candidate]:
        """The first of values, of which each takes less than the one before, that fits, if any: found by halving."""
        low, high, found = 0, len(values), None
        while low < high:
            middle = (low + high) // 2
            tried = next(self._tried({**changes, key: values[middle]}), None)
            if tried is not None and tried.peak <= room:
                high, found = middle, tried
            else:
                low = middle + 1
        if found is not None:
            yield found

    def _faster(self, here: _Candidate, room: float) -> Iterator[_Candidate]:
        """Each with one more open option at a value that takes more memory, fits, and makes the step faster."""
        for key, values in _trades(here.config, richer=True):
            for value in values if self._is_open(key) else ():
                found = next(self._tried(self._with(here.changes, key, value)), None)
                if found is None or found.peak > room or not self._pays(here, found):
                    break
                yield found
                here = found

    def _pays(self, before: _Candidate, after: _Candidate) -> bool:
        """Whether a step is faster by `FASTER`, and again when both are measured anew: time is not the same twice."""
        if after.seconds >= before.seconds * (1 - FASTER):
            return False
        was, now = self._estimate(before.config), self._estimate(after.config)
        return was is not None and now is not None and now.seconds < was.seconds * (1 - FASTER)

    def _with(self, changes: Changes, key: str, value: Any) -> Changes:
        """The changes with this one, and without it where it leaves the run as it is."""
        rest = {name: old for name, old in changes.items() if name != key}
        table, name = key.split(".")
        config = self._configured(rest)
        held = config.all(table)[0].name if name == "name" else getattr(_options(config, table), name)
        return rest if held == value else {**rest, key: value}

    def _tried(self, changes: Changes) -> Iterator[_Candidate]:
        if _key(changes) in self._seen or len(self._seen) < self._most:
            with suppress(MorticeError):
                yield self.look(changes)

    def _is_open(self, key: str) -> bool:
        """Whether neither the file nor a flag nor Python sets this option."""
        table, name = key.split(".")
        given = self.config.file.tables.get(table)
        return given is None or (isinstance(given, Mapping) and name not in given)

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
        room = min(limit, machine_memory()) * (1 - SPARE)
        self._most = len(self._seen) + ADVICE
        lines = [f"{self.config.file.where(LIMIT)}train.memory_limit: the run does not fit {readable(limit)}"]
        if leanest.estimate is None:
            lines.append(f"even the leanest of what was tried is beyond this machine ({readable(machine_memory())})")
        else:
            estimate = self._exactly(leanest.config)
            room *= 0.99 * min(1.0, leanest.peak / estimate.peak)  # the looks below are rough ones
            sizes = {**estimate.parts, "held elsewhere in the process": estimate.elsewhere}
            noteworthy = estimate.peak / 1000
            parts = ", ".join(f"{name} {readable(size)}" for name, size in sizes.items() if size > noteworthy)
            with_ = f" with {_spell(leanest.changes)}" if leanest.changes else ""
            lines.append(f"the leanest that was tried needs {readable(estimate.peak)}{with_} ({parts})")
            needed = max(leanest.peak, estimate.peak) / (1 - SPARE)
        remedies = []
        for candidate, key in self._fixed(leanest):
            if candidate.peak <= room:
                where = self.config.file.where(tuple(key.split("."))).rstrip(": ")
                set_by = f" (set in {where})" if where else ""
                remedies.append(f"{_spell({key: candidate.changes[key]})}{set_by}: {readable(candidate.peak)}")
        remedies += self._shorter(leanest, room)
        if leanest.estimate is not None:
            remedies.append(f'train.memory_limit = "{readable(needed * 1.01, "")}"')
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
        """How long rows may be: a straight line through what two lengths need, and a look at what it says."""
        if here.estimate is None or self.config.data.train is None:
            return []
        lengths = (len(g.prompt_of(k)) + len(c.ids) for g in self.groups for k, c in enumerate(g.completions))
        longest = max(lengths, default=0)
        length, seen = longest // 2, [(longest, here.peak)]
        for _ in range(4):
            if length < SHORTEST:
                return []
            cut = [truncate(group, length, self.config.data.truncation, None) for group in self.groups]
            found = self._estimate(here.config, [group for group in cut if group is not None])
            if found is None:
                return []
            if found.peak <= room and len(seen) > 1:
                return [f"data.max_length = {length} or less (the longest now: {longest}): {readable(found.peak)}"]
            (more, high), (less, low) = seen[-1], (length, found.peak)
            if low >= high:
                return []
            seen.append((less, low))
            length = min(longest - 1, int(0.99 * (less + (room - low) * (more - less) / (high - low))))
        return []


def fit(search: Search, limit: str) -> Fitted:
    """The configuration of a run that keeps to `limit` (`"16GB"`). Raises ConfigError where none does."""
    return search.fit(parse_size(limit))


def shortened(group: Group, share: float) -> Group:
    """The group with a share of each prompt and completion, to measure on."""

    def cut(count: int) -> int:
        return max(1, round(count * share))

    def shorter(c: Any) -> Any:
        keep = cut(len(c.ids))
        names = ("ref_logprobs", "old_logprobs", "sampler_logprobs")
        vectors = {n: None if (v := getattr(c, n)) is None else v[:keep] for n in names}
        own = None if c.prompt_ids is None else c.prompt_ids[: cut(len(c.prompt_ids))]
        mask = (True,) * keep
        return evolve(c, ids=c.ids[:keep], loss_mask=mask, prompt_ids=own, **vectors)

    prompt = group.prompt_ids[: cut(len(group.prompt_ids))]
    return evolve(group, prompt_ids=prompt, completions=[shorter(c) for c in group.completions])


def _options(config: RunConfig, table: str) -> Any:
    return config.one(table) if table in KINDS else getattr(config, table)


def _trades(config: RunConfig, *, richer: bool = False) -> Iterator[tuple[str, list[Any]]]:
    """(dotted key, leaner values than the one in force, the leanest last) of every option that trades memory.

    `richer`: values that take more memory instead, the most of it last.
    """
    for table in TABLES:
        options = _options(config, table)
        for name, values in getattr(type(options), "leaner", {}).items():
            more, less = around(getattr(options, name), values)
            found = more if richer else less
            if found:
                yield f"{table}.{name}", found


def around(own: Any, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(values that take more memory, values that take less), the nearest first, of values with the most memory first.

    A number that is not among them stands between those around it; 0 and words that are not stand before all.
    """
    if own in values:
        place, after = values.index(own), values.index(own) + 1
    else:
        number = own if isinstance(own, int) else 0
        smaller = (i for i, value in enumerate(values) if isinstance(value, int) and 0 < value < number)
        place = after = next(smaller, len(values) if number else 0)
    return list(values[:place])[::-1], list(values[after:])


def _key(changes: Changes) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, repr(value)) for name, value in changes.items()))


def _saves(after: _Candidate, before: _Candidate) -> bool:
    return after.peak < before.peak * (1 - GAIN)


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
