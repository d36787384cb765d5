"""The page of all hooks, written from the hook specs: `python -m mortice.hook_reference > docs/plugins.md`."""

from __future__ import annotations

import inspect

from mortice import hookspecs

HEAD = """# Hooks

A plugin is a module (or any object) with implementations of these hooks, marked by `mortice.hookimpl`, and one line
under `[project.entry-points.mortice]`. One entry point may register several strategies. The shapes behind each kind
are in `mortice.protocols`; a run file names a strategy in the table of its kind.

```python
from mortice import hookimpl


@hookimpl
def register_losses(register):
    register("margin", "my_package.margin:Margin", help="Hinge on the mean margin.")  # imported when needed
```

`register(name, Class)` is the simple form. A plugin that fails to import, or that implements a hook that does not
exist, is shown by `mortice plugins` and stops only the runs that need it. Two distributions may claim one name; a run
then writes `name = "dist:name"`. Conformance suites for plugin authors are in `mortice.testing`: subclass `LossSuite`,
`HeadSuite` or `LayoutSuite` in a test file.

This page is written from the hook specs by `python -m mortice.hook_reference`.
"""


def reference() -> str:
    """The page."""
    kinds = {hook: kind for kind, hook in hookspecs.HOOKS.items()}
    parts = [HEAD]
    for name, function in vars(hookspecs).items():
        if name.startswith(("register_", "on_")):
            arguments = ", ".join(inspect.signature(function).parameters)
            table = f", table `[{kinds[name]}]`" if name in kinds else ""
            parts.append(f"## `{name}({arguments})`{table}\n\n{inspect.getdoc(function)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(reference(), end="")
