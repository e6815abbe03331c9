"""Sizes and aligned tables, as people read and write them. Sizes are bytes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import zip_longest

MIB = 1024**2
GIB = 1024**3

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# As SLURM, Docker and Kubernetes write sizes: 64G, 64g and 64Gi are 64 GiB. 64GB is decimal.
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(|i|iB|B)", re.IGNORECASE)


def format_bytes(nbytes: int) -> str:
    """Returns a size with two decimals, in the unit from B to GiB that fits it best."""
    power = 0
    while power < 3 and abs(nbytes) >= 1024 ** (power + 1):
        power += 1
    return f"{nbytes:,} B" if power == 0 else f"{nbytes / 1024**power:,.2f} {_UNITS[power]}"


def parse_bytes(text: str) -> int:
    """Argparse type: a size such as ``64GiB``, ``64G``, ``64Gi`` or a number of bytes.

    Args:
        text: what the user passed.

    Returns:
        Bytes.

    Raises:
        argparse.ArgumentTypeError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[2] == "" and match[3].lower().startswith("i")):
        raise argparse.ArgumentTypeError(f"got {text!r}, pass a size such as 64GiB or 512MiB")
    decimal = match[2] != "" and match[3].lower() == "b"
    return round(float(match[1]) * (1000 if decimal else 1024) ** " KMGT".index(match[2].upper() or " "))


def table(rows: Sequence[Sequence[str]], alignment: str, least: Sequence[int] = ()) -> str:
    """Aligns rows of cells; a row of one string is a heading, which may be longer than any column.

    Args:
        rows: the cells of each row, all as many.
        alignment: ``l`` or ``r`` for each column.
        least: widths that the first columns have at least, in characters, so that tables printed below one
            another align as well.
    """
    widths = [
        max([minimum, *(len(row[column]) for row in rows if len(row) > 1)])
        for column, minimum in zip_longest(range(len(alignment)), least, fillvalue=0)
    ]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if side == "l" else cell.rjust(width)
            for cell, width, side in zip(row, widths if len(row) > 1 else [0], alignment, strict=False)
        ).rstrip()
        for row in rows
    )
