"""docs/run-file.md is what the classes say."""

from __future__ import annotations

from attrs import frozen
from conftest import ROOT

from mortice.options import option
from mortice.plugins import installed, load_plugins
from mortice.run_file_reference import Option, options_of, reference


@frozen
class Sample:
    rate: float = option(1e-5, help="how fast")
    names: list[str] = option(factory=list, help="which")
    limit: int | None = option(None, help="at most")
    path: str = option(help="where")


def test_options_as_a_user_reads_them():
    assert options_of(Sample) == [
        Option("rate", "a finite number", "1e-05", "how fast"),
        Option("names", "a list of strings", "[]", "which"),
        Option("limit", "a whole number", "not set", "at most"),
        Option("path", "a string", "", "where"),
    ]


def test_the_page_is_current():
    plugins = load_plugins(entry_points=[e.point for e in installed() if e.dist == "mortice"], strict=True)
    page = (ROOT / "docs" / "run-file.md").read_text("utf-8")
    assert page == reference(plugins), "run: python -m mortice.run_file_reference > docs/run-file.md"


def test_every_option_has_help():
    plugins = load_plugins(entry_points=[e.point for e in installed() if e.dist == "mortice"], strict=True)
    silent = [f"{s.kind} {s.name}.{o.name}" for s in plugins.registry.all() for o in options_of(s.load()) if not o.help]
    assert silent == []
