"""Discovery: what one broken, missing or doubled plugin does to the others."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest
from conftest import ROOT

import mortice.protocols
from mortice import hookspecs
from mortice.errors import (
    PluginImportFailed,
    PluginNotEnabled,
    PluginNotInstalled,
    StrategyClaimedTwice,
    UnknownStrategy,
)
from mortice.hookspecs import HOOKS, hookimpl
from mortice.plugins import installed, load_plugins
from mortice.registry import Register


class First:
    """The first line.

    More.
    """


class Second:
    pass


def module(**hooks) -> ModuleType:
    """A plugin with these hook implementations."""
    made = ModuleType("made")
    for name, function in hooks.items():
        setattr(made, name, hookimpl(function))
    return made


def rewards(*names: str, cls: type = First) -> ModuleType:
    def register_rewards(register):
        for name in names:
            register(name, cls)

    return module(register_rewards=register_rewards)


def point(name: str, plugin: ModuleType | BaseException, dist: str = "alpha", version: str = "1.0") -> SimpleNamespace:
    """An entry point that gives a module, or raises when it is loaded."""

    def load():
        if isinstance(plugin, BaseException):
            raise plugin
        return plugin

    return SimpleNamespace(
        name=name, value=f"{dist}.{name}", dist=SimpleNamespace(name=dist, version=version), load=load
    )


def half() -> ModuleType:
    """Registers one strategy and raises before the second."""

    def register_rewards(register):
        register("half-one", First)
        raise RuntimeError("no second one")

    return module(register_rewards=register_rewards, register_losses=lambda register: register("half-loss", First))


def three() -> list[SimpleNamespace]:
    return [
        point("good", rewards("len")),
        point("absent", ImportError("No module named 'gizmo'"), dist="beta", version="2.1"),
        point("half", half(), dist="gamma"),
        point("stale", ModuleNotFoundError("No module named 'gone'"), dist="delta"),
    ]


# B58: plugins that fail


def test_case_b58_one_good_plugin_works_beside_three_broken_ones():
    plugins = load_plugins(entry_points=three())
    assert plugins.get("reward", "len").load() is First
    assert {p.entry.name: p.status for p in plugins.plugins} == {
        "good": "on", "absent": "failed", "half": "failed", "stale": "failed",
    }  # fmt: skip


def test_case_b58_a_failure_names_distribution_entry_point_and_exception():
    lines = [p.failure() for p in load_plugins(entry_points=three()).failed]
    assert lines == [
        "plugin 'absent' of beta 2.1 failed to load: ImportError: No module named 'gizmo'",
        "plugin 'half' of gamma 1.0 failed to load: RuntimeError: no second one",
        "plugin 'stale' of delta 1.0 failed to load: ModuleNotFoundError: No module named 'gone'",
    ]


def test_case_b58_nothing_of_a_half_registered_plugin_stays():
    plugins = load_plugins(entry_points=three())
    assert [s.name for s in plugins.registry.all()] == ["len"]
    assert [name for name, _ in plugins.manager.list_name_plugin()] == ["alpha:good"]
    half_one = next(p for p in plugins.plugins if p.entry.name == "half")
    assert half_one.strategies == [] and "no second one" in half_one.details()


def test_case_b58_a_run_that_needs_the_broken_one_gets_its_error_as_cause():
    plugins = load_plugins(entry_points=three())
    with pytest.raises(PluginImportFailed, match="No module named 'gizmo'") as caught:
        plugins.get("loss", "absent")
    assert isinstance(caught.value.__cause__, ImportError)


def test_case_b58_an_unknown_name_may_belong_to_a_broken_plugin():
    plugins = load_plugins(entry_points=three())
    with pytest.raises(UnknownStrategy, match="No module named 'gizmo'"):
        plugins.get("loss", "some-loss")


def test_case_b58_strict_raises_the_first_failure():
    with pytest.raises(PluginImportFailed, match="'absent' of beta") as caught:
        load_plugins(entry_points=three(), strict=True)
    assert isinstance(caught.value.__cause__, ImportError)


def test_case_b58_a_disabled_plugin_is_not_imported():
    plugins = load_plugins(disable=["absent", "half", "stale"], entry_points=three(), strict=True)
    assert [p.entry.name for p in plugins.plugins if p.status == "off"] == ["absent", "half", "stale"]


def test_a_plugin_that_calls_exit_is_a_failure_like_others():
    plugins = load_plugins(entry_points=[point("exits", SystemExit(3)), point("good", rewards("len"))])
    assert [p.entry.name for p in plugins.failed] == ["exits"]
    assert plugins.get("reward", "len")


def test_misspelt_hook_is_a_failure_with_the_nearest_hook():
    plugins = load_plugins(entry_points=[point("typo", module(register_loses=lambda register: None))])
    (failed,) = plugins.failed
    assert "unknown hook 'register_loses'; did you mean 'register_losses'?" in failed.failure()


def test_hooks_of_a_plugin_are_listed():
    plugin = module(register_losses=lambda register: None, on_step_end=lambda step, metrics: None)
    (loaded,) = load_plugins(entry_points=[point("two", plugin)]).plugins
    assert sorted(loaded.hooks) == ["on_step_end", "register_losses"]


def test_observers_hear_of_a_step():
    heard = []
    plugin = module(on_step_end=lambda step, metrics: heard.append((step, metrics["loss"])))
    load_plugins(entry_points=[point("observer", plugin)]).hook.on_step_end(step=3, metrics={"loss": 0.5})
    assert heard == [(3, 0.5)]


# B59: names that are claimed twice


def doubled() -> list[SimpleNamespace]:
    return [
        point("a", rewards("len"), dist="alpha"),
        point("b", rewards("len", cls=Second), dist="beta"),
        point("c", rewards("other"), dist="gamma"),
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_case_b59_two_claims_name_both_distributions_in_any_order(order):
    points = doubled()
    plugins = load_plugins(entry_points=[points[i] for i in order])
    with pytest.raises(StrategyClaimedTwice) as caught:
        plugins.get("reward", "len")
    assert "reward 'len' is claimed twice, by alpha:len and beta:len" in str(caught.value)
    assert plugins.get("reward", "other").provider == "gamma"
    assert plugins.failed == []


def test_case_b59_the_distribution_chooses():
    plugins = load_plugins(entry_points=doubled())
    assert plugins.get("reward", "alpha:len").load() is First
    assert plugins.get("reward", "beta:len").load() is Second


def test_case_b59_a_name_of_a_builtin_claimed_by_another_distribution():
    points = [e.point for e in installed()] + [
        point("mine", module(register_heads=lambda register: register("dense", First)))
    ]
    with pytest.raises(StrategyClaimedTwice, match="alpha:dense and mortice:dense"):
        load_plugins(entry_points=points).get("head", "dense")


def test_case_b59_one_distribution_listed_twice_is_no_conflict():
    plugins = load_plugins(entry_points=[point("a", rewards("len")), point("a", rewards("len"))])
    assert plugins.get("reward", "len").provider == "alpha"
    assert len(plugins.plugins) == 1


def test_case_b59_one_distribution_that_claims_a_name_by_two_plugins():
    plugins = load_plugins(entry_points=[point("a", rewards("len")), point("b", rewards("len"))])
    with pytest.raises(StrategyClaimedTwice, match=r"plugin 'a' of alpha.*plugin 'b' of alpha.*disable"):
        plugins.get("reward", "len")


def test_case_b59_entry_points_of_one_name_are_chosen_by_distribution():
    points = [point("same", rewards("one"), dist="alpha"), point("same", rewards("two"), dist="beta")]
    plugins = load_plugins(enable=["beta:same"], entry_points=points)
    assert [s.name for s in plugins.registry.all()] == ["two"]
    assert [s.name for s in load_plugins(enable=["same"], entry_points=points).registry.all()] == ["one", "two"]
    assert [s.name for s in load_plugins(disable=["alpha:same"], entry_points=points).registry.all()] == ["two"]


# Enabling, and the five errors


def test_enable_imports_the_named_plugins_and_the_basics_only():
    points = [point("basics", rewards("plain")), point("x", rewards("ex")), point("y", ImportError("not looked at"))]
    plugins = load_plugins(enable=["x"], entry_points=points, strict=True)
    assert {p.entry.name: p.status for p in plugins.plugins} == {"basics": "on", "x": "on", "y": "off"}
    nothing = load_plugins(enable=[], disable=["basics"], entry_points=points)
    assert [p.status for p in nothing.plugins] == ["off", "off", "off"]


def test_a_flag_enables_the_plugin_of_its_strategy():
    points = [point("x", rewards("ex")), point("pack", rewards("why", "zed"))]
    plugins = load_plugins(enable=["x"], strategies=[("reward", "zed")], entry_points=points)
    assert plugins.get("reward", "zed").plugin == "pack"
    blocked = load_plugins(enable=["x"], disable=["pack"], strategies=[("reward", "zed")], entry_points=points)
    with pytest.raises(PluginNotEnabled, match="disables"):
        blocked.get("reward", "zed")


def test_five_errors_are_distinct():
    points = [
        *doubled(),
        point("off", rewards("hidden")),
        point("broken", ImportError("gizmo")),
    ]
    enable = ["a", "b", "c", "broken"]
    with pytest.raises(PluginNotInstalled, match="no installed plugin is called 'brokne'; did you mean 'broken'"):
        load_plugins(enable=["brokne"], entry_points=points)
    plugins = load_plugins(enable=enable, entry_points=points)
    with pytest.raises(PluginImportFailed, match="gizmo"):
        plugins.get("reward", "broken")
    with pytest.raises(PluginNotEnabled, match='add "off" to enable'):
        plugins.get("reward", "hidden")
    with pytest.raises(StrategyClaimedTwice):
        plugins.get("reward", "len")
    sound = load_plugins(enable=["a", "c"], entry_points=points)
    with pytest.raises(
        UnknownStrategy, match=r"unknown reward 'othr'; did you mean 'other'\? \(available: len, other\)"
    ):
        sound.get("reward", "othr")


def test_looking_for_a_name_leaves_the_run_as_it_was():
    points = [point("x", rewards("ex")), point("off", rewards("hidden"))]
    plugins = load_plugins(enable=["x"], entry_points=points)
    with pytest.raises(PluginNotEnabled):
        plugins.get("reward", "hidden")
    assert [s.name for s in plugins.registry.all()] == ["ex"]
    assert [name for name, _ in plugins.manager.list_name_plugin()] == ["alpha:x"]


def test_an_unknown_name_in_a_kind_without_strategies():
    with pytest.raises(UnknownStrategy, match="no enabled plugin has a rollout"):
        load_plugins(entry_points=[point("x", rewards("ex"))]).get("rollout", "any")


# Registering


@pytest.mark.parametrize("name", ["", "Len", "two words", "-"])
def test_a_strategy_name_is_lowercase_with_hyphens(name):
    with pytest.raises(ValueError, match="lowercase"):
        Register("reward", "alpha", "x")(name, First)


def test_a_strategy_is_a_class_or_where_one_is():
    register = Register("reward", "alpha", "x")
    for target in (First(), "no_colon", None):
        with pytest.raises(TypeError, match="class"):
            register("len", target)
    register("lazy", "collections:OrderedDict", help="in order")
    register("plain", First)
    lazy, plain = register.strategies
    assert lazy.load().__name__ == "OrderedDict" and lazy.summary == "in order"
    assert plain.summary == "The first line."


@pytest.mark.parametrize("target", ["no_such_module:X", "collections:Missing"])
def test_a_lazy_target_that_is_not_there_names_plugin_and_cause(target):
    register = Register("reward", "alpha", "x")
    register("lazy", target)
    with pytest.raises(PluginImportFailed, match=r"alpha.*plugin 'x'") as caught:
        register.strategies[0].load()
    assert caught.value.__cause__ is not None


# Hooks, metadata, light imports


def test_every_kind_has_a_hook_whose_docstring_names_kind_and_protocol():
    register_hooks = {n for n, f in vars(hookspecs).items() if n.startswith("register_") and inspect.isfunction(f)}
    assert set(HOOKS.values()) == register_hooks
    for kind, hook in HOOKS.items():
        doc = inspect.getdoc(getattr(hookspecs, hook)) or ""
        assert doc.startswith(f"`{kind}`"), hook
        protocol = doc.rpartition("mortice.protocols.")[2].rstrip("`.")
        assert inspect.isclass(getattr(mortice.protocols, protocol)), hook


def test_entry_points_of_pyproject_are_those_installed():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]["mortice"]
    points = metadata.entry_points(group="mortice")
    found = {p.name: p.value for p in points if p.dist is not None and p.dist.name == "mortice"}
    assert found == wanted, "install again: entry points freeze at installation"


def test_every_shipped_plugin_loads_and_every_lazy_class_is_there():
    plugins = load_plugins(entry_points=[e.point for e in installed() if e.dist == "mortice"], strict=True)
    for strategy in plugins.registry.all():
        assert isinstance(strategy.load(), type), strategy.qualified
        assert strategy.summary, strategy.qualified
        assert inspect.getdoc(strategy.load()), strategy.qualified


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["list"], ["list", "loss", "--json"], ["plugins"]])
def test_looking_around_imports_no_mlx(arguments):
    points = "[e.point for e in mortice.plugins.installed() if e.dist == 'mortice']"
    code = (
        "import sys, mortice.plugins\n"
        f"points = {points}\n"
        "mortice.plugins.metadata.entry_points = lambda group: points\n"  # what others installed may import it
        "from mortice.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'mlx' not in sys.modules and 'mlx.core' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
