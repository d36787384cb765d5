"""Options of a strategy: attrs fields with a default, a validator and one line of help.

    @frozen
    class Margin:
        gamma: float = option(1.0, help="wanted margin", validator=gt(0))

`field(default=…)` works as well; `option` only puts the help where `mortice describe` and the
reference of the run file find it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from attrs.validators import and_, deep_iterable, ge, gt, in_, le, lt, min_len, optional

__all__ = [
    "and_", "deep_iterable", "fraction", "ge", "gt", "in_", "le", "lt", "min_len", "option", "optional",
]  # fmt: skip


def option(
    default: Any = attrs.NOTHING,
    *,
    help: str,
    validator: Callable[..., Any] | None = None,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """An attrs field with one line of help. Without `default` and `factory` the option is required."""
    kwargs: dict[str, Any] = {"metadata": {"help": help}, "validator": validator, "kw_only": True}
    if factory is not None:
        kwargs["factory"] = factory
    elif default is not attrs.NOTHING:
        kwargs["default"] = default
    return attrs.field(**kwargs)


def fraction(instance: Any, attribute: attrs.Attribute[Any], value: float) -> None:
    """Validator: 0 ≤ value ≤ 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{attribute.name!r} must be between 0 and 1, found {value!r}")
