"""The run file's meaning: tables to options and strategies, with the origin of every value.

Precedence: flag > file > profile of the loss > default, also for false, 0 and empty lists. All errors come in one
message, each with file and line, dotted key, what was found, what is allowed and the nearest valid name.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen

from mortice import blas
from mortice.errors import ConfigError, PluginError, nearest, suggest
from mortice.hub import looks_like_hub_id
from mortice.plugins import ALWAYS, Plugins, load_plugins
from mortice.registry import Strategy
from mortice.runfile import Key, RunFile, apply_settings, from_tables, read_run_file
from mortice.structure import fields, kind_of, structure, takes_path, value_of
from mortice.tables import (
    BESIDE,
    CORE_TABLES,
    LISTS,
    OPTIONAL,
    PATHS,
    STRATEGY_TABLES,
    ContextOptions,
    DataOptions,
    ModelOptions,
    PluginOptions,
    ReferenceOptions,
    SamplingOptions,
    TrainOptions,
)


@frozen
class Chosen:
    """A strategy of a run with its options."""

    kind: str
    name: str
    provider: str
    options: Any
    """The configured instance."""
    weight: float = 1.0
    init: Path | None = None
    """Of an adapter: the folder of the one that a run starts from."""
    beside: Any = None
    """The core's own options of its table (`mortice.tables.BESIDE`)."""


@frozen(eq=False)
class RunConfig:
    """A run as it is in force."""

    file: RunFile = field(repr=False)
    plugins: Plugins = field(repr=False)
    model: ModelOptions
    data: DataOptions
    train: TrainOptions
    context: ContextOptions
    reference: ReferenceOptions
    chosen: tuple[Chosen, ...]
    """Every strategy, in the order of the tables; the data format among them."""
    run_path: Path
    """The run folder, absolute."""
    origins: Mapping[Key, str] = field(factory=dict, repr=False)

    @property
    def notices(self) -> list[str]:
        return self.file.notices

    def all(self, kind: str) -> list[Chosen]:
        return [c for c in self.chosen if c.kind == kind]

    def one(self, kind: str) -> Any:
        """The configured strategy of a kind, or None."""
        found = self.all(kind)
        return found[0].options if found else None

    @property
    def losses(self) -> list[tuple[float, Any]]:
        return [(c.weight, c.options) for c in self.all("loss")]

    @property
    def loss_names(self) -> list[str]:
        return [c.name for c in self.all("loss")]

    @property
    def trackers(self) -> list[Any]:
        return [c.options for c in self.all("tracker")]

    @property
    def rewards(self) -> list[Any]:
        return [c.options for c in self.all("reward")]

    @property
    def samples(self) -> bool:
        """Whether the source samples from the model: `[rollout]`, its temperature above all, is for no other."""
        return "rollout" in getattr(self.source, "uses", ())

    @property
    def sampling(self) -> SamplingOptions:
        """How answers are sampled, where the run samples."""
        found = self.all("rollout")
        return found[0].beside if found else SamplingOptions()

    @property
    def filters(self) -> tuple[tuple[str, Any], ...]:
        return tuple((c.name, c.options) for c in self.all("filter"))

    @property
    def controllers(self) -> list[tuple[str, Any]]:
        return [(c.name, c.options) for c in self.all("controller")]

    @property
    def format(self) -> Any:
        return self.one("data")

    @property
    def adapter_init(self) -> Path | None:
        """The folder of the adapter that the run starts from."""
        return self.all("adapter")[0].init

    def given(self, kind: str) -> frozenset[str]:
        """Options of a strategy that file or flags name."""
        return frozenset(_table(self.file, kind)) - {"name", "init", "weight"}

    def formats(self) -> dict[str, Any]:
        """Every format that can be had without options, by name."""
        return formats_of(self.plugins)

    def __getattr__(self, name: str) -> Any:
        if name in STRATEGY_TABLES and name not in LISTS:
            return self.one(name)
        raise AttributeError(name)

    def with_overrides(self, changes: Mapping[str, Any], origin: str = "controller") -> RunConfig:
        """The same run with other values, checked like those of a file. Raises ConfigError."""
        file = from_tables(self.file.tables)
        file = evolve(file, base=self.file.base, label=self.file.label, origins=dict(self.file.origins))
        for name, value in changes.items():
            key = tuple(name.split("."))
            if key[0] in LISTS and isinstance(file.tables.get(key[0]), list) and not key[1].isdigit():
                key = (key[0], "0", *key[1:])
            file.put(key, value, origin)
        return evolve(_build(file, self.plugins, check_files=False), run_path=self.run_path)

    def effective_toml(self) -> str:
        """The run as a file that reproduces it from any folder, with the origin of every value as a comment."""
        from mortice.effective import effective_toml

        return effective_toml(self)


def load_config(
    path: str | Path,
    *,
    settings: Sequence[str] = (),
    strategies: Mapping[str, str] | None = None,
    run_path: Path | None = None,
    entry_points: Any = None,
) -> RunConfig:
    """Read a run file. `settings` are `table.key=value` strings, `strategies` names by kind, as flags give them.

    Raises ConfigError (or PluginError) with everything that is wrong.
    """
    return _load(read_run_file(path), settings, strategies or {}, run_path, entry_points, Path(path).stem)


def config_from_dict(
    tables: Mapping[str, Any],
    *,
    settings: Sequence[str] = (),
    strategies: Mapping[str, str] | None = None,
    entry_points: Any = None,
) -> RunConfig:
    """The same from a mapping of tables; paths are relative to the working directory."""
    return _load(from_tables(tables), settings, strategies or {}, None, entry_points, "run")


def _load(
    file: RunFile,
    settings: Sequence[str],
    strategies: Mapping[str, str],
    run_path: Path | None,
    entry_points: Any,
    stem: str,
) -> RunConfig:
    blas.load()  # options are read from classes, whose modules import mlx
    for kind, name in strategies.items():
        _swap(file, kind, name)
    apply_settings(file, settings)
    for given, other in (("steps", "epochs"), ("epochs", "steps")):  # a flag for one takes the place of the other
        if file.from_flag(("train", given)) and not file.from_flag(("train", other)):
            file.forget(("train", other))
    if run_path is not None:
        file.put(("run", "path"), str(run_path), "--run")
    own, errors = structure(PluginOptions, _table(file, "plugins"))
    if errors:
        raise ConfigError("\n".join(_lines(file, ("plugins",), PluginOptions, errors)))
    plugins = load_plugins(
        own.enable, own.disable, strategies=strategies.items(), strict=own.strict, entry_points=entry_points
    )
    if own.enable is not None:
        on = [p.entry for p in plugins.plugins if p.status != "off"]
        added = [e.name for e in on if e.name != ALWAYS and not any(e.called(name) for name in own.enable)]
        if added:
            file.put(("plugins", "enable"), [*own.enable, *added], f"--{next(iter(strategies))}")
    return _build(file, plugins, stem=stem)


def _swap(file: RunFile, kind: str, name: str) -> None:
    """Take another strategy of a kind. Options of the one in the file go with it, and that is said; what stands beside
    them in its table, for any strategy of the kind, stays."""
    table = file.tables.get(kind)
    given = table.get("name") if isinstance(table, dict) else None
    same = isinstance(given, str) and given.rpartition(":")[2] == name.rpartition(":")[2]
    if table and not same:
        had = [t.get("name") for t in (table if isinstance(table, list) else [table]) if isinstance(t, dict)]
        beside = fields(BESIDE[kind]) if kind in BESIDE else {}
        options = [k for k in table if k != "name" and k not in beside] if isinstance(table, dict) else []
        left = f"; its options ({', '.join(options)}) are left out" if options else ""
        names = ", ".join(repr(each) for each in had if each is not None)
        if names or options:
            file.notices.append(f"--{kind} {name} takes the place of {kind} {names or 'options'} in {file.label}{left}")
        if beside and isinstance(table, dict):
            for key in options:
                file.forget((kind, key))
        else:
            file.drop((kind,))
    if given != name:
        file.put((kind, "name"), name, f"--{kind}")


def _table(file: RunFile, name: str) -> Mapping[str, Any]:
    value = file.tables.get(name, {})
    return value if isinstance(value, dict) else {}


@define
class _Reader:
    """Collects what is wrong while tables are read."""

    file: RunFile
    plugins: Plugins
    errors: list[str] = field(factory=list)
    profile: dict[tuple[str, str], tuple[Any, str]] = field(factory=dict)
    format_class: type | None = None
    check_files: bool = True
    used: frozenset[str] = frozenset()
    """Optional kinds that the source works with."""

    def say(self, key: Key, text: str) -> None:
        self.errors.append(f"{self.file.where(key)}{'.'.join(key)}: {text}")

    def core(self, name: str) -> Any:
        """One of the core's tables."""
        cls = CORE_TABLES[name]
        table = self.tables(name)[0][1]
        known = fields(cls)
        values = {k: v for k, v in table.items() if k in known}
        values = self.with_profile(name, cls, values)
        for key in table:
            if key in known or (name == "data" and self.of_format(key)):
                continue
            more = fields(self.format_class) if name == "data" and self.format_class is not None else {}
            self.unknown((name,), key, [*known, *more])
        return self.instance((name,), cls, values)

    def format(self) -> Chosen | None:
        """The data format with its options, which stand in [data] among the core's own."""
        table = _table(self.file, "data")
        name = table.get("format", (self.profile.get(("data", "format")) or (None,))[0])
        found = self.lookup(("data", "format"), "data", name) if isinstance(name, str) else None
        if found is None:
            return None
        self.format_class = found.load()
        values = {k: v for k, v in table.items() if k in fields(self.format_class)}
        return Chosen("data", found.name, found.provider, self.instance(("data",), self.format_class, values))

    def of_format(self, key: str) -> bool:
        """Whether a key of [data] is the format's. Of a format that nobody knows, every key may be."""
        if self.format_class is None:
            return "format" in _table(self.file, "data")
        return key in fields(self.format_class)

    def with_profile(self, table: str, cls: type, given: dict[str, Any]) -> dict[str, Any]:
        """What is given, and below it the profile of the loss, but for what it excludes (a scale beside an alpha)."""
        values = dict(given)
        for (home, key), (value, _) in self.profile.items():
            if home == table and key in fields(cls) and key not in values:
                _, errors = structure(cls, values | {key: value})
                if "" not in errors:
                    values[key] = value
        return values

    def tables(self, name: str) -> list[tuple[Key, dict[str, Any]]]:
        """The tables of a name with their keys: one, or those of a list."""
        value = self.file.tables.get(name, {})
        if isinstance(value, dict):
            return [((name,), value)]
        if isinstance(value, list) and name in LISTS and all(isinstance(item, dict) for item in value):
            return [((name, str(i)), item) for i, item in enumerate(value)]
        want = f"a table [{name}]" + (f" or a list of tables [[{name}]]" if name in LISTS else "")
        self.say((name,), f"expected {want}, found {value!r}")
        return [((name,), {})]

    def strategies(self, kind: str) -> list[Chosen]:
        """The strategies of a kind that the file names, or the default ones."""
        if kind not in self.file.tables:
            profiled = self.profile.get((kind, "name"))
            if profiled is not None:
                return self.some([self.strategy((kind,), kind, {"name": profiled[0]})])
            if kind in OPTIONAL and kind not in self.used:
                return []
            defaults = self.plugins.registry.defaults(kind)
            if not defaults:
                names = ", ".join(self.plugins.registry.names(kind)) or "none"
                self.say((kind,), f"required: add a table [{kind}] with a name (available: {names})")
            return self.some([self.strategy((kind,), kind, {"name": s.name}) for s in defaults])
        return self.some([self.strategy(key, kind, table) for key, table in self.tables(kind)])

    @staticmethod
    def some(found: list[Chosen | None]) -> list[Chosen]:
        return [c for c in found if c is not None]

    def strategy(self, where: Key, kind: str, table: Mapping[str, Any]) -> Chosen | None:
        name = table.get("name", (self.profile.get((kind, "name")) or (None,))[0])
        if name is None:
            defaults = self.plugins.registry.defaults(kind)
            if len(defaults) != 1:
                self.say((*where, "name"), f"required (available: {', '.join(self.plugins.registry.names(kind))})")
                return None
            name = defaults[0].name
        if not isinstance(name, str):
            self.say((*where, "name"), f"expected a string, found {name!r}")
            return None
        found = self.lookup((*where, "name"), kind, name)
        if found is None:
            return None
        cls = found.load()
        own = fields(cls)
        values = {k: v for k, v in table.items() if k != "name"}
        weight, weighted = 1.0, kind == "loss" and "weight" not in own
        if weighted:
            try:
                weight = value_of(values.pop("weight", 1.0), float)
                if weight <= 0:
                    raise ValueError(f"must be > 0, found {weight}")
            except ValueError as error:
                self.say((*where, "weight"), str(error))
        init, begins = None, kind == "adapter" and "init" not in own
        if begins and "init" in values:
            init = self.adapter_folder((*where, "init"), values.pop("init"))
        common, beside = BESIDE.get(kind), None
        if common is not None:
            shared = {key: values.pop(key) for key in fields(common) if key in values and key not in own}
            beside = self.instance(where, common, self.with_profile(kind, common, shared))
        values = self.with_profile(kind, cls, values)
        more = [*(["weight"] if weighted else []), *(["init"] if begins else []), *(fields(common) if common else ())]
        for key in list(values):
            if key not in own:
                self.unknown(where, key, [*own, *more])
                del values[key]
        instance = self.instance(where, cls, values)
        if instance is None or (common is not None and beside is None):
            return None
        return Chosen(kind, found.name, found.provider, instance, weight, init, beside)

    def adapter_folder(self, key: Key, value: Any) -> Path | None:
        try:
            folder = Path(self.path(key, value_of(value, str)))
        except ValueError as error:
            self.say(key, str(error))
            return None
        inner = folder / "adapter"
        if not self.check_files or (folder / "adapter_config.json").exists():
            return folder
        hint = f"; did you mean {inner}?" if (inner / "adapter_config.json").exists() else ""
        self.say(key, f"{folder} is no adapter folder (it has no adapter_config.json){hint}")
        return None

    def lookup(self, key: Key, kind: str, name: str) -> Strategy | None:
        """Raises PluginImportFailed, whose cause is worth a message of its own; other errors are collected."""
        try:
            return self.plugins.get(kind, name)
        except PluginError as error:
            if error.__cause__ is not None:
                raise
            self.errors.append(f"{self.file.where(key)}{'.'.join(key)}: {error}")
            return None

    def instance(self, where: Key, cls: type, values: Mapping[str, Any]) -> Any:
        paths = {a.name for a in fields(cls).values() if takes_path(kind_of(a))}
        values = {
            key: self.path((*where, key), value)
            if isinstance(value, str) and (key in paths or (*where, key) in PATHS)
            else value
            for key, value in values.items()
        }
        found, errors = structure(cls, values)
        self.errors += _lines(self.file, where, cls, errors)
        return found

    def unknown(self, where: Key, key: str, known: Sequence[str]) -> None:
        """A key that its table does not have: who has it, and what it may be meant for."""
        owners = list(dict.fromkeys(owner for name, _, owner in self.homes() if name == key))
        has = f"; {' and '.join(owners)} {'has' if len(owners) == 1 else 'have'} it" if owners else ""
        allowed = ", ".join(sorted(known)) or "none"
        self.say((*where, key), f"unknown key{has}{suggest(key, known)} (allowed here: {allowed})")

    def homes(self) -> Iterator[tuple[str, str, str]]:
        """(key, table, owner) of all that a run file may hold, for hints."""
        for table, cls in (CORE_TABLES | BESIDE).items():
            yield from ((key, table, f"[{table}]") for key in fields(cls))
        for kind in ("data", *STRATEGY_TABLES):
            for strategy in self.plugins.registry.all(kind):
                with contextlib.suppress(PluginError):  # one that cannot be imported has no say in a hint
                    owner = f"{kind} {strategy.name!r}"
                    yield from [(key, kind, owner) for key in fields(strategy.load())]

    def path(self, key: Key, value: str) -> str:
        """A path made absolute: relative to the file, or to the working directory where a flag gave it."""
        if key == ("reference", "policy") and value in ("initial", "base"):
            return value
        if key == ("model", "chat_template") and not value.endswith(".jinja"):
            return value
        base = Path.cwd() if self.file.from_flag(key) else self.file.base
        full = Path(value).expanduser()
        full = full if full.is_absolute() else base / full
        full = full.resolve() if ".." in full.parts else full
        if key == ("model", "path") and not full.exists() and looks_like_hub_id(value) and not full.parent.is_dir():
            return value
        return str(full)

    def top(self) -> None:
        """Tables and keys at the top that mean nothing."""
        known = [*CORE_TABLES, *STRATEGY_TABLES]
        for name, value in self.file.tables.items():
            if name in known:
                continue
            if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value)):
                self.say((name,), f"unknown table{suggest(name, known)} (tables: {', '.join(known)})")
                continue
            tables: dict[str, str] = {}
            for key, table, _ in self.homes():
                tables.setdefault(key, table)
            hit = nearest(name, tables)
            hint = f"; did you mean {hit}, in the table [{tables[hit]}]?" if hit else ""
            self.say((name,), f"unknown key outside any table{hint}")


def _lines(file: RunFile, where: Key, cls: type, errors: Mapping[str, str]) -> list[str]:
    lines = []
    for name, text in errors.items():
        key = (*where, name) if name else where
        lines.append(f"{file.where(key)}{'.'.join(key)}: {text}")
    return lines


def _build(file: RunFile, plugins: Plugins, *, stem: str = "run", check_files: bool = True) -> RunConfig:
    reader = _Reader(file, plugins, check_files=check_files)
    reader.top()
    losses = reader.strategies("loss")
    for place, loss in enumerate(losses):
        asked = getattr(loss.options, "brings", {})
        for name, value in {**getattr(type(loss.options), "profile", {}), **asked}.items():
            table, _, key = name.partition(".")
            if len(losses) > 1 and isinstance(value, str) and value.startswith("loss."):  # an option of its own
                value = f"loss.{place}.{value.removeprefix('loss.')}"
            reader.profile.setdefault((table, key), (value, f"profile of {loss.name}"))
    form = reader.format()
    core = {name: reader.core(name) for name in CORE_TABLES}
    chosen = list(losses)
    for kind in STRATEGY_TABLES:
        if kind != "loss":
            found = reader.strategies(kind)
            if kind == "source":
                reader.used = frozenset().union(*(getattr(each.options, "uses", ()) for each in found))
            chosen += found
    policy = core["reference"].policy if core["reference"] is not None else "initial"
    if check_files and policy not in ("initial", "base") and not Path(policy).is_dir():
        text = f'must be "initial", "base" or a folder (an adapter, or a model), found no folder {policy}'
        reader.say(("reference", "policy"), text)
    if check_files and core["data"] is not None:
        _check_files(reader, core["data"])
    if reader.errors:
        raise ConfigError("\n".join(dict.fromkeys(reader.errors)))
    run_path = core["run"].path or free_path(file.base / "runs" / stem)
    if core["run"].path is not None and check_files and _in_use(run_path):
        raise ConfigError(f"{file.where(('run', 'path'))}run.path: {run_path} exists and is not an empty folder")
    profiled: dict[Key, str] = {key: origin for key, (_, origin) in reader.profile.items()}
    origins = {**profiled, **file.origins}
    return RunConfig(
        file, plugins, core["model"], core["data"], core["train"], core["context"], core["reference"],
        (*chosen, *([form] if form else [])), run_path, origins,
    )  # fmt: skip


def formats_of(plugins: Plugins) -> dict[str, Any]:
    """Every format that can be had without options, by name."""
    found = {}
    for strategy in plugins.registry.all("data"):
        with contextlib.suppress(PluginError, TypeError):
            found[strategy.name] = strategy.load()()
    return found


def free_path(path: Path) -> Path:
    """The path, or the first of path-2, path-3, … that does not exist or is empty."""
    number, found = 1, path
    while _in_use(found):
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found.absolute()


def _in_use(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def _check_files(reader: _Reader, data: DataOptions) -> None:
    for name in ("train", "valid"):
        path = getattr(data, name)
        if path is None or path.is_file():
            continue
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, [name for name in siblings if name != path.name], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        what = "is a folder" if path.is_dir() else "not found"
        reader.say(("data", name), f"file {what}: {path}{hint}")


def build_strategy(plugins: Plugins, kind: str, table: str | Mapping[str, Any]) -> Chosen:
    """One strategy from its name or a table of name and options. Raises PluginError or ConfigError."""
    given = {"name": table} if isinstance(table, str) else dict(table)
    reader = _Reader(from_tables({kind: given}), plugins)
    if "name" in given and isinstance(given["name"], str):
        plugins.get(kind, given["name"])
    found = reader.strategy((kind,), kind, given)
    if reader.errors or found is None:
        raise ConfigError("\n".join(reader.errors))
    return found


PROVIDERS = ("data", "source", "head", "layout")
"""Kinds that may bring what a loss requires."""
ALWAYS_PROVIDED = frozenset({"ref_logprobs", "prompt_logprobs"})


def check_requirements(config: RunConfig) -> None:
    """Whether data, source, head and layout bring what each loss and filter needs, and all strategies go together.

    Raises ConfigError naming what would."""
    have = set(ALWAYS_PROVIDED)
    for kind in PROVIDERS:
        for chosen in config.all(kind):
            have |= set(getattr(chosen.options, "provides", ()))
    if "pairs" in have:
        have.add("labels")  # chosen and rejected
    problems = []
    for chosen in (*config.all("loss"), *config.all("filter")):
        lacking = sorted(set(getattr(chosen.options, "requires", ())) - have)
        for need in lacking:
            givers = [f"{s.kind} {s.name!r}" for s in config.plugins.registry.all() if need in _provided(s)]
            givers += [
                f"{s.kind} {s.name!r} (plugin {s.plugin!r}, not enabled)"
                for s in config.plugins.others()
                if need in _provided(s)
            ]
            remedy = f"; it comes with {', '.join(givers)}" if givers else "; no installed plugin provides it"
            problems.append(f"{chosen.kind} {chosen.name!r} needs {need}, which this run does not have{remedy}")
    problems += _disagreements(config)
    if problems:
        raise ConfigError("\n".join(problems))


def _disagreements(config: RunConfig) -> Iterator[str]:
    """Options of one strategy that another one, or the core, cannot honour."""
    if getattr(config.head, "outside_traces", False) and not getattr(config.backward, "head_outside_traces", False):
        able = [
            s.name for s in config.plugins.registry.all("backward") if getattr(s.load(), "head_outside_traces", False)
        ]
        yield (
            f"head {config.all('head')[0].name!r} with these options runs outside traces only, and backward "
            f"{config.all('backward')[0].name!r} runs it inside one (outside: {', '.join(able) or 'none'})"
        )
    head = config.all("head")
    if head and "values" in getattr(config.head, "provides", ()) and (wrong := at_odds(head[0], config.all("loss"))):
        yield wrong
    key = ("train", "micro_batch_size")
    if getattr(config.layout, "by_tokens", False) and config.train.micro_batch_size != 1:
        yield (
            f"{config.file.where(key)}train.micro_batch_size: layout {config.all('layout')[0].name!r} fills rows up to "
            "its own budget of tokens; drop this key"
        )


def at_odds(head: Chosen, losses: Sequence[Chosen]) -> str | None:
    """What is wrong where a head gives values and a loss goes by log-probabilities, or the other way round."""
    gives = "values" in getattr(head.options, "provides", ())
    for loss in losses:
        takes = "values" in getattr(loss.options, "requires", ())
        if gives and not takes:
            return (
                f"loss {loss.name!r} goes by log-probabilities, and head {head.name!r} gives values instead; "
                "choose another head, or a loss of values"
            )
        if takes and not gives:
            return f"loss {loss.name!r} goes by values, and head {head.name!r} gives log-probabilities"
    return None


def _provided(strategy: Strategy) -> Any:
    """What a strategy provides as it is by default."""
    if strategy.kind not in PROVIDERS:
        return ()
    try:
        found, _ = structure(strategy.load(), {})
    except PluginError:
        return ()
    return getattr(found, "provides", ())
