"""Sizes and tables as people read and write them."""

from __future__ import annotations

import argparse

import pytest

from torchft._staging.units import GIB, format_bytes, parse_bytes, table


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1023", 1023),
        ("64GiB", 64 * GIB),
        ("64G", 64 * GIB),
        ("64g", 64 * GIB),
        ("64Gi", 64 * GIB),
        ("1.5 TiB", 1536 * GIB),
        ("512MiB", GIB // 2),
        ("3 KiB", 3072),
        ("80GB", 80 * 10**9),
        ("7B", 7),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1.GiB", "1 GiBs", "1i", "nan", "1e3"])
def test_not_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="pass a size such as 64GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (2000 * GIB, "2,000.00 GiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_sizes_are_written_in_the_unit_that_fits(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_columns_are_aligned_and_headings_are_not() -> None:
    rows = [["a heading that is longer than its column"], ["a", "1", ""], ["bcd", "22", "note"]]
    assert table(rows, "lrl").splitlines() == [
        "a heading that is longer than its column",
        "a     1",
        "bcd  22  note",
    ]
    assert table(rows[1:], "lrl", (5, 3)).splitlines() == ["a        1", "bcd     22  note"]
