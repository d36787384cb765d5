"""`mortice resume`: go on with a run that stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def resume(
    run: Path, *, set: Annotated[tuple[str, ...], Parameter(negative="")] = (), force: bool = False
) -> int:  # fmt: skip
    """Go on with the run in a folder, from its last whole checkpoint, as if it had never stopped.

    Exit code 130 after SIGINT, 143 after SIGTERM, as with `mortice train`.

    Parameters
    ----------
    run
        Run folder.
    set
        KEY=VALUE: a setting to change, e.g. train.steps=200; repeatable.
    force
        Go on even if data, model, plugins or settings have changed.
    """
    from mortice import blas

    blas.load()
    from mortice.cli.output import warn
    from mortice.cli.train import report
    from mortice.launch import Notices
    from mortice.launch import resume as launch

    return report(launch(run, settings=set, force=force, notices=Notices(show=warn, progress=warn)))
