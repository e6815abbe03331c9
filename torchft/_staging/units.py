"""Sizes and small tables, read and written."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

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


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligns rows of a label, a value and a note; a row of one string is a heading.

    The columns have a least width, so that tables printed below one another align as well.

    Args:
        rows: strings, one or three per row.
    """
    full = [row for row in rows if len(row) > 1]
    label, value = (max([least, *(len(row[column]) for row in full)]) for column, least in ((0, 20), (1, 12)))
    return "\n".join(
        row[0] if len(row) == 1 else f"{row[0]:<{label}}  {row[1]:>{value}}  {row[2]}".rstrip()
        for row in rows
    )
