"""Sizes in memory as people write them: `"16GB"`, `"512 MB"`, `"1GiB"`.

GB is 10⁹ bytes and GiB 2³⁰, as drives and memory counters have them. A number without a unit is refused, since
nobody could say whether it meant bytes, MB or GB.
"""

from __future__ import annotations

import re
from typing import Any

import attrs

from mortice.errors import suggest

UNITS = {
    "B": 1,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
"""Bytes in each unit; a user may write them in any case."""

LARGEST = 2**63

_FOLDED = {name.lower(): size for name, size in UNITS.items()}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-zA-Z]*)")


def parse_size(text: Any) -> int:
    """Bytes of a size such as `"16GB"`, rounded down to whole bytes.

    Raises ValueError, saying what was found and what is allowed, for anything but a positive number with a unit.
    """
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f'expected a size with a unit, such as "16GB" or "512 MiB", found {text!r}')
    number, unit = match["number"], match["unit"]
    allowed = ", ".join(UNITS)
    if not unit:
        raise ValueError(f"the size {text!r} has no unit: one of {allowed}")
    if unit.lower() not in _FOLDED:
        raise ValueError(f"the size {text!r} has the unknown unit {unit!r}{suggest(unit, UNITS)} (allowed: {allowed})")
    bytes_ = float(number) * _FOLDED[unit.lower()]
    if bytes_ > LARGEST:
        raise ValueError(f"the size {text!r} is more than any machine has")
    size = int(bytes_)
    if not size:
        raise ValueError(f"the size {text!r} is less than a byte")
    return size


def size(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validator: a size that `parse_size` reads."""
    parse_size(value)


def readable(size: float, space: str = " ") -> str:
    """`1.31 GB`: three digits, in the unit in which they are most."""
    unit = next((name for name in ("TB", "GB", "MB", "kB") if size >= 0.9995 * UNITS[name]), "B")
    return f"{size / UNITS[unit]:.3g}{space}{unit}"
