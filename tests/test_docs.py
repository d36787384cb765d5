"""Every hook and command is documented, and what is written from the code is current."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path

from mortice.cli import COMMANDS
from mortice.hook_reference import reference
from mortice.plugins import load_plugins

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_of_hooks_is_current():
    assert (ROOT / "docs" / "plugins.md").read_text("utf-8") == reference()


def test_every_command_has_help_and_stands_in_the_readme():
    pages = " ".join((ROOT / "README.md").read_text("utf-8").split())
    for name, (_, help) in COMMANDS.items():
        assert help.endswith(".")
        assert f"mortice {name}" in pages, name


def test_the_readme_names_every_shipped_strategy():
    text = (ROOT / "README.md").read_text("utf-8")
    for strategy in load_plugins().registry.all():
        if strategy.provider == "mortice":
            assert f"`{strategy.name}`" in text, strategy


def test_the_run_file_of_the_readme_is_the_quickstarts():
    """Shortened, but with the same values."""
    block = re.search(r"```toml\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    short = tomllib.loads(block[1])
    whole = tomllib.loads(resources.files("mortice_plugins.quickstart").joinpath("run.toml").read_text("utf-8"))
    for table, values in short.items():
        for key, value in values.items():
            assert whole[table][key] == value, (table, key)
