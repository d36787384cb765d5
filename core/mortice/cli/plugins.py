"""`mortice plugins`: what is installed, what each plugin brings, and what failed to load."""

from __future__ import annotations

from mortice.cli.output import print_json, print_table, warn


def plugins(*, strict: bool = False, json: bool = False) -> int:
    """List installed plugins.

    Parameters
    ----------
    strict
        Exit with 2 when a plugin fails to load.
    json
        Print JSON.
    """
    from mortice.plugins import load_plugins

    found = load_plugins()
    if json:
        print_json(
            [
                {"name": p.entry.name, "dist": p.entry.dist, "version": p.entry.version, "status": p.status,
                 "hooks": p.hooks, "strategies": [f"{s.kind} {s.name}" for s in p.strategies],
                 "error": p.failure() if p.error else None}
                for p in found.plugins
            ]
        )  # fmt: skip
    else:
        rows = [
            (
                p.entry.name,
                p.entry.dist,
                p.entry.version,
                p.status,
                ", ".join(f"{s.kind} {s.name}" for s in p.strategies),
            )
            for p in found.plugins
        ]
        print_table(None, ("plugin", "from", "version", "status", "strategies"), rows)
        for plugin in found.failed:
            warn(plugin.failure())
    return 2 if strict and found.failed else 0
