"""Sizes with units."""

from __future__ import annotations

import pytest
from attrs import frozen

from mortice.options import option
from mortice.sizes import parse_size, size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16GB", 16_000_000_000),
        ("512 MB", 512_000_000),
        ("1GiB", 2**30),
        (" 1.5 kib ", 1536),
        ("3 tb", 3 * 10**12),
        ("7B", 7),
        ("0.5TiB", 2**39),
    ],
)
def test_units(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16", "'16' has no unit: one of B, kB, MB, GB"),
        (16, 'such as "16GB" or "512 MiB", found 16'),
        (True, "found True"),
        (None, "found None"),
        ("16 GBB", "unknown unit 'GBB'; did you mean 'GB'?"),
        ("5 lightyears", "unknown unit 'lightyears' (allowed: B, kB, MB"),
        ("-1GB", "expected a size with a unit"),
        ("1e3MB", "expected a size with a unit"),
        ("GB", "expected a size with a unit"),
        ("", "expected a size with a unit"),
        ("0GB", "'0GB' is less than a byte"),
        ("0.4B", "'0.4B' is less than a byte"),
    ],
)
def test_what_is_no_size(text, message):
    with pytest.raises(ValueError) as error:
        parse_size(text)
    assert message in str(error.value)


def test_as_a_validator():
    @frozen
    class Limits:
        memory: str = option("1GB", help="most memory", validator=size)

    assert Limits(memory="2 GB").memory == "2 GB"
    with pytest.raises(ValueError, match="no unit"):
        Limits(memory="2")
