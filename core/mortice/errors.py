"""The errors a user can cause, and how a nearest match is found.

Every one of them is shown as a single message without a traceback, and the command ends with
exit code 2. Errors in mortice itself stay ordinary exceptions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MorticeError(Exception):
    """A mistake in what the user gave, described in one message. Exit code 2."""


class ConfigError(MorticeError):
    """The run file, a flag or an option is wrong."""


class DataError(MorticeError):
    """A data file or a record in it is wrong."""


class CheckpointError(MorticeError):
    """A model or adapter folder is missing, damaged or of another shape than its config says."""


class TrainingError(MorticeError):
    """A run cannot go on: nothing to train, nothing to score, too many non-finite gradients."""


class PluginError(MorticeError):
    """Base of the five ways in which a strategy can be out of reach."""


class PluginNotInstalled(PluginError):
    """`[plugins]` names an entry point that no installed distribution has."""


class PluginImportFailed(PluginError):
    """The plugin that is needed raised while it was imported or while it registered."""


class PluginNotEnabled(PluginError):
    """The strategy is installed, in a plugin that this run does not enable."""


class UnknownStrategy(PluginError):
    """No installed plugin has a strategy of that name."""


class StrategyClaimedTwice(PluginError):
    """Two distributions registered one name; `dist:name` chooses."""


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name closest to `name`, or None where nothing is close."""
    names = list(allowed)
    folded = {n.lower().replace("_", "-"): n for n in names}
    hits = difflib.get_close_matches(name.lower().replace("_", "-"), list(folded), n=1, cutoff=0.6)
    return folded[hits[0]] if hits else None


def suggest(name: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` or an empty string."""
    hit = nearest(name, allowed)
    return f"; did you mean {hit!r}?" if hit else ""
