"""Files of records to groups: reading, checking, filtering, cutting to length, counting. Nothing is lost in silence.

JSON Lines (UTF-8 with or without BOM, any line ending, blank lines allowed), or a .json file that holds one list.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import asdict, define, evolve, frozen

from mortice.batch import SCORE, Completion, Group
from mortice.errors import DataError, nearest
from mortice.protocols import DataFormat, Filter
from mortice.tokenizer import Tokenizer

MOST_PROBLEMS = 20
"""Bad rows that one message lists."""
MOST_EXAMPLES = 5
"""Rows that a filter's message names."""


class Lengths(Protocol):
    """The part of the `[data]` table that reading needs."""

    @property
    def max_length(self) -> int: ...

    @property
    def truncation(self) -> str: ...

    @property
    def limit(self) -> int | None: ...


@frozen
class Filtered:
    """What one filter left out of one file."""

    filter: str
    reason: str
    rows: int
    """Dropped whole."""
    pairs: int
    """Taken from rows that stay."""
    examples: tuple[str, ...]
    """The first of these rows: their lines."""

    def __str__(self) -> str:
        counted = ((self.rows, "row", ""), (self.pairs, "pair", " of other rows"))
        parts = [f"{n} {what}{'s' * (n > 1)}{more}" for n, what, more in counted if n]
        return f"filter {self.filter} drops {' and '.join(parts)}: {self.reason} ({_lines(self.examples, self.total)})"

    @property
    def total(self) -> int:
        return self.rows + self.pairs


@define
class DataCounts:
    """What became of the rows of one file."""

    rows: int = 0
    kept: int = 0
    prompts_cut: int = 0
    """Groups whose prompt was shortened."""
    completions_cut: int = 0
    """Groups whose longest completion alone did not fit; its end is gone, EOS included."""
    dropped: int = 0
    """Groups that were left with nothing to score."""
    weightless: int = 0
    """Groups with a weight of 0, which leaves nothing to learn."""
    tied: int = 0
    """Rows of a format of pairs that made none: all answers tie."""
    tied_examples: tuple[str, ...] = ()
    """Lines of the first of them."""
    filtered: tuple[Filtered, ...] = ()
    """What each filter left out."""
    pairs: int = 0
    """Pairs of the rows that are kept."""
    identical_pairs: int = 0
    """Pairs whose two answers are the same: no preference to learn."""
    different_prompts: int = 0
    """Groups whose completions were tokenized with different prompts; no layout can share those."""
    extra_keys: tuple[str, ...] = ()
    """Keys of the records that the format does not read."""

    def messages(self, file: Path, max_length: int) -> Iterator[tuple[str, tuple[str, int]]]:
        """(what to say, (name, count)) of everything a user should know."""
        for name, text in (
            ("prompts_cut", f"prompts shortened to fit max_length {max_length}"),
            ("completions_cut", f"answers longer than max_length {max_length}, cut at their end"),
            ("dropped", "rows dropped, with nothing left to score"),
            ("weightless", "rows dropped, whose weight is 0"),
            ("identical_pairs", "pairs whose chosen and rejected answers are identical: no preference signal"),
            ("different_prompts", "groups whose answers follow different prompts: they cannot share one"),
        ):
            count = getattr(self, name)
            if count:
                of = self.pairs if name == "identical_pairs" else self.rows
                yield f"{file.name}: {count} of {of} {text}", (f"data_{name}", count)
        if self.tied:
            lines = _lines(self.tied_examples, self.tied)
            text = f"{file.name}: {self.tied} of {self.rows} rows dropped, whose answers tie: no pair ({lines})"
            yield text, ("data_tied", self.tied)
        for left in self.filtered:
            if left.total:
                yield f"{file.name}: {left}", (f"data_filter_{left.filter.replace('-', '_')}", left.total)
        if self.extra_keys:
            yield f"{file.name}: keys not read: {', '.join(self.extra_keys)}", ("data_extra_keys", len(self.extra_keys))

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def read_records(file: Path) -> Iterator[tuple[str, Any]]:
    """(`file:line`, record or the DataError that says why there is none) for each record.

    Raises DataError for a file that is missing or empty, or a .json file that holds no list.
    """
    try:
        text = file.read_text("utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(f"data file not found: {file.absolute()}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file.absolute()} is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise DataError(f"cannot read {file.absolute()}: {error.strerror}") from error
    if not text.strip():
        raise DataError(f"data file is empty: {file.absolute()}")
    if file.suffix == ".json":
        try:
            records = json.loads(text)
        except ValueError as error:
            raise DataError(f"{file}: {error}") from error
        if not isinstance(records, list):
            raise DataError(f"{file}: a .json file must hold a list of records, found {type(records).__name__}")
        yield from ((f"{file.name}[{i}]", record) for i, record in enumerate(records))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file.name}:{number}"
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            yield where, DataError(f"no JSON: {error}")


def load_groups(
    file: Path, form: DataFormat, tokenizer: Tokenizer, options: Lengths, *, name: str = "",
    formats: Callable[[], Mapping[str, DataFormat]] = dict, filters: Sequence[tuple[str, Filter]] = (),
    training: bool = True, to_sample: int | None = None,
) -> tuple[list[Group], DataCounts]:  # fmt: skip
    """Every usable record of a file as a group, and the counts of what was cut and dropped.

    `filters` go by name over all groups, in order, before any is cut to length. Where answers of `to_sample` tokens are
    to be sampled, records are taken as prompts: one that leaves no room for these is dropped, none is cut. Without
    `training`, rows stay that nothing could be learned from: of weight 0, with answers that tie, or with identical ones
    alone. For messages: `name` is the format's, `formats` gives all formats by name.

    Raises one DataError that lists all bad rows (the first 20 and how many more), or that says why nothing is left to
    train on.
    """
    counts = DataCounts()
    read: list[Group] = []
    tied: list[Group] = []
    problems: list[str] = []
    misshapen: list[Any] = []
    extra: dict[str, None] = {}
    for where, record in read_records(file):
        if options.limit is not None and counts.rows >= options.limit:
            break
        counts.rows += 1
        try:
            if isinstance(record, DataError):
                raise record
            if wrong := _misshape(record, form):
                misshapen.append(record)
                raise DataError(wrong)
            if to_sample is None:  # rewards read what they please
                extra |= dict.fromkeys(key for key in record if key not in form.keys)
            group = form(record, tokenizer, source=where).group
            if to_sample is not None:
                group = Group(group.id, group.prompt_ids, ())
            elif not group.completions:
                raise DataError("a prompt without an answer is for a source that samples answers")
        except DataError as error:
            problems.append(f"{where}: {error}")
            continue
        paired = bool(group.pairs) or "pairs" not in form.provides
        (read if paired or to_sample is not None or not training else tied).append(group)
    if problems:
        accepted = _accepted(form, name, misshapen, formats) if misshapen else ""
        raise DataError(bad_rows(file, problems, counts.rows) + accepted)
    if not counts.rows:
        raise DataError(f"data file holds no record: {file.absolute()}")
    counts.extra_keys = tuple(extra)
    counts.tied, counts.tied_examples = len(tied), _examples(tied)
    counts.filtered = tuple(_filter(read, *named, file) for named in filters)
    groups: list[Group] = []
    if to_sample is not None:
        groups = [group for group in read if len(group.prompt_ids) <= options.max_length - to_sample]
        counts.kept, counts.dropped = len(groups), len(read) - len(groups)
        return groups, counts
    for group in read:
        cut = truncate(group, options.max_length, options.truncation, tokenizer.bos_id, counts)
        if training and cut is not None and not any(c.weight for c in cut.completions):
            counts.weightless += 1
        elif cut is not None:
            groups.append(cut)
            counts.pairs += len(cut.pairs)
            counts.identical_pairs += sum(cut.completions[c].ids == cut.completions[r].ids for c, r in cut.pairs)
            counts.different_prompts += not cut.one_prompt
    counts.kept = len(groups)
    if not groups:
        raise DataError(_nothing_left(file, counts, options.max_length))
    if training and "pairs" in form.provides and counts.identical_pairs == counts.pairs:
        raise DataError(
            f"{file.absolute()}: in every one of the {counts.pairs} pairs chosen and rejected are identical; "
            "there is nothing to prefer"
        )
    return groups, counts


def bad_rows(file: Path, problems: Sequence[str], rows: int) -> str:
    """What is wrong with the rows of a file, in one message: the first 20, and how many more."""
    shown = "\n  ".join(problems[:MOST_PROBLEMS])
    more = f"\n  and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
    return f"{file.absolute()}: {len(problems)} bad of {rows} rows\n  {shown}{more}"


def _nothing_left(file: Path, counts: DataCounts, max_length: int) -> str:
    text = f"{file.absolute()}: nothing is left to train on; all {counts.rows} rows were dropped"
    if counts.dropped == counts.rows:
        return f"{text} because no token to score fits max_length {max_length}"
    return "\n  ".join([text, *(message for message, _ in counts.messages(file, max_length))])


def _filter(groups: list[Group], name: str, keep: Filter, file: Path) -> Filtered:
    """Let one filter go over the groups, in place. Raises DataError, naming the filter, where it cannot."""
    try:
        found = list(keep(tuple(groups)))
    except DataError as error:
        raise DataError(f"{file.absolute()}: filter {name}: {error}") from error
    if len(found) != len(groups):
        raise ValueError(f"filter {name} returned {len(found)} groups for {len(groups)}")
    touched = [g for g, left in zip(groups, found) if left is None or len(left.pairs) < len(g.pairs)]
    pairs = sum(len(g.pairs) - len(left.pairs) for g, left in zip(groups, found) if left is not None)
    groups[:] = [left for left in found if left is not None]
    return Filtered(name, keep.reason, found.count(None), pairs, _examples(touched))


def _examples(groups: Sequence[Group]) -> tuple[str, ...]:
    """Lines of the first groups: what stands behind the file's name in their ids."""
    return tuple(group.id.rpartition(":")[2] for group in groups[:MOST_EXAMPLES])


def _lines(examples: Sequence[str], total: int) -> str:
    return f"line{'s' * (total > 1)} {', '.join(examples)}{', …' * (total > len(examples))}"


def _misshape(record: Any, form: DataFormat) -> str | None:
    """Why a record has not the shape that the format reads."""
    if not isinstance(record, Mapping):
        return f"expected a JSON object, found {type(record).__name__}"
    if form.matches(record):
        return None
    lacking = [key for key in _required(form) if key not in record]
    found = ", ".join(map(repr, record)) or "no key at all"
    guess = next((f"; is {hit!r} meant as {key!r}?" for key in lacking if (hit := nearest(key, record))), "")
    return f"no {' and no '.join(map(repr, lacking))}, found {found}{guess}"


def _required(form: DataFormat) -> Sequence[str]:
    return getattr(form, "required", tuple(sorted(form.keys)))


def _accepted(
    form: DataFormat, name: str, misshapen: Sequence[Any], formats: Callable[[], Mapping[str, DataFormat]]
) -> str:
    """What the format reads, and which formats would read the records that it cannot."""
    schema = (inspect.getdoc(form) or "").partition("\n")[0]
    text = f"\nformat {name or type(form).__name__.lower()} reads {schema}"
    records = [record for record in misshapen if isinstance(record, Mapping)]
    fits = [other for other, reader in formats().items() if records and all(map(reader.matches, records))]
    return text + (f"\nformat = {' or '.join(repr(fit) for fit in fits)} would read them" if fits else "")


def with_unrelated(
    groups: Sequence[Group], max_length: int, side: str = "keep-end", bos_id: int | None = None
) -> list[Group]:
    """Each group with its prompt before an answer to another one (`Group.unrelated`), cut to length: the first answer
    of the next group that has another prompt, after the last one those of the beginning.

    Raises DataError where there is no other prompt.
    """
    count = len(groups)
    following = [0] * count
    for place in range(2 * count - 1, -1, -1):  # backwards, and twice around: the end looks beyond itself
        here, after = place % count, (place + 1) % count
        same = groups[here].prompt_ids == groups[after].prompt_ids
        following[here] = following[after] if same else after
    if any(groups[here].prompt_ids == groups[other].prompt_ids for here, other in enumerate(following)):
        raise DataError(
            f"an answer to another prompt is needed for each prompt, and {count} row{'s' * (count > 1)} "
            f"{'share' if count > 1 else 'has'} one prompt"
        )

    def beside(group: Group, other: Completion) -> Group:
        answer = Completion(other.ids, other.loss_mask, text=other.text)
        cut = truncate(Group(f"{group.id}/unrelated", group.prompt_ids, [answer]), max_length, side, bos_id)
        assert cut is not None  # the answer was cut to length, and had something to score, behind its own prompt
        return cut

    return [
        evolve(group, unrelated=beside(group, groups[other].completions[0]))
        for group, other in zip(groups, following)
    ]  # fmt: skip


def check_scores(groups: Iterable[Group]) -> None:
    """Raises DataError for answers without a rating, which a loss goes by."""
    bare = [group.id for group in groups if any(SCORE not in c.extras for c in group.completions)]
    if bare:
        more = f" and {len(bare) - 3} more" if len(bare) > 3 else ""
        raise DataError(f"the loss goes by ratings of the answers, and {', '.join(bare[:3])}{more} have none")


def check_vocabulary(groups: Iterable[Group], vocab: int) -> None:
    """Raises DataError for a token id that the model has no row for: reading past a table gives foreign memory."""
    for group in groups:
        own = [ids for c in group.completions for ids in (c.ids, c.prompt_ids or ())]
        highest = max((max(ids, default=0) for ids in (group.prompt_ids, *own)), default=0)
        if highest >= vocab:
            raise DataError(
                f"{group.id}: token id {highest}, but the model's vocabulary has {vocab} tokens (0 to {vocab - 1}); "
                "the tokenizer does not belong to this model"
            )


def truncate(
    group: Group, max_length: int, side: str, bos_id: int | None, counts: DataCounts | None = None
) -> Group | None:
    """The group with prompt and longest completion within `max_length` tokens, or None where nothing is left to score.

    Completions are kept and the prompt is shortened, one cut for the whole group: `keep-end` keeps its last tokens (and
    a leading BOS), `keep-start` its first. One prompt token always stays; a completion that does not fit behind it
    loses its end.
    """
    counts = counts or DataCounts()
    room = max_length - 1
    completions = [
        evolve(c, ids=c.ids[:room], loss_mask=c.loss_mask[:room]) if len(c.ids) > room else c
        for c in group.completions
    ]  # fmt: skip
    counts.completions_cut += any(len(c.ids) > room for c in group.completions)
    if not all(any(c.loss_mask) for c in completions):
        counts.dropped += 1
        return None
    budget = max_length - max(len(c.ids) for c in completions)
    counts.prompts_cut += any(len(group.prompt_of(k)) > budget for k in range(len(completions)))
    completions = [
        c if c.prompt_ids is None else evolve(c, prompt_ids=_cut(c.prompt_ids, budget, side, bos_id))
        for c in completions
    ]
    return evolve(group, prompt_ids=_cut(group.prompt_ids, budget, side, bos_id), completions=tuple(completions))


def _cut(ids: tuple[int, ...], budget: int, side: str, bos_id: int | None) -> tuple[int, ...]:
    if len(ids) <= budget:
        return ids
    if side == "keep-start":
        return ids[:budget]
    if bos_id is not None and ids[0] == bos_id and budget > 1:
        return (ids[0], *ids[len(ids) - budget + 1 :])
    return ids[len(ids) - budget :]
