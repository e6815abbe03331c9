"""
Text as bytes: a part of its own for every rank, and a part that nobody trains on.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

import torch

from torchft._launch.cli import UserError
from torchft._staging.units import MIB

__all__ = ["Corpus", "read_text"]

# Several of the standard library's size; a limit, since every rank holds the text in memory.
_MAX_BYTES = 64 * MIB
# One block in this many is held out.
_HELD_OUT = 20


def read_text(path: Optional[str]) -> bytes:
    """Reads the text to train on, at most 64 MiB of it.

    Args:
        path: a file, or a folder whose text files are read in order of their paths (hidden ones and
            binary ones left out); None: the source files of the running Python's standard library.

    Raises:
        UserError: there is no such file or folder, or no text in it.
    """
    files = _standard_library() if path is None else _files(path)
    parts: list[bytes] = []
    size = 0
    for file in files:
        try:
            with open(file, "rb") as stream:
                part = stream.read(_MAX_BYTES - size)
        except OSError as error:
            raise UserError(f"--data: can't read {str(file)!r}: {error.strerror}") from None
        if b"\0" in part[:4096]:
            continue
        parts.append(part)
        size += len(part)
        if size >= _MAX_BYTES:
            break
    if size == 0:
        what = f"no text in {path!r}" if path is not None else "this Python has no source files"
        raise UserError(f"--data: {what}; pass a text file, or a folder that has some")
    return b"".join(parts)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    # third-party packages and tests differ from machine to machine
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    return [
        file for file in sorted(root.rglob("*.py")) if not skipped.intersection(file.relative_to(root).parts)
    ]


def _files(path: str) -> list[Path]:
    root = Path(path)
    if root.is_dir():
        return [
            file
            for file in sorted(root.rglob("*"))
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts)
        ]
    if not root.exists():
        raise UserError(f"--data {path!r} does not exist; pass a text file or a folder")
    if not root.is_file():
        raise UserError(f"--data {path!r} is neither a file nor a folder; pass one of them")
    if os.path.getsize(root) == 0:
        raise UserError(f"--data {path!r} is empty; pass a text file or a folder")
    return [root]


class Corpus:
    """The part of a text that one rank trains on, and the part held out for validation.

    The text is cut into blocks, one in twenty is held out, and the others are dealt to the parts in turn.

    Args:
        text: all of it, the same on every rank.
        part: which part to train on, 0 to ``parts - 1``.
        parts: how many ranks share the text, over all replica groups.
        length: bytes per sequence.

    Raises:
        UserError: the text is too short for so many parts.
    """

    def __init__(self, text: bytes, part: int, parts: int, length: int) -> None:
        block = min(64 * 1024, len(text) // (_HELD_OUT * parts))
        # a sequence and the byte after it
        if block <= length:
            needed = _HELD_OUT * parts * (length + 1)
            raise UserError(
                f"the data has {len(text)} bytes, and {parts} ranks with sequences of {length} need "
                f"{needed}; pass more with --data, or a shorter --sequence-length"
            )
        blocks = torch.frombuffer(bytearray(text[: len(text) // block * block]), dtype=torch.uint8)
        blocks = blocks.view(-1, block)
        held_out = torch.arange(len(blocks)) % _HELD_OUT == _HELD_OUT - 1
        self._length = length
        self._validation = blocks[held_out].flatten()
        self._training = blocks[~held_out][part::parts].flatten()

    def batch(self, size: int, key: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws sequences at random places of this rank's part.

        Args:
            size: number of sequences.
            key: numbers that decide the draw, such as seed, group, rank and step. The place in the data
                is then no state that a checkpoint would have to carry.

        Returns:
            inputs and, one byte later, targets: [size, length], int64.
        """
        seed = 0
        for number in key:
            seed = (seed * 1_000_003 + number + 1) % 2**63
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self._training) - self._length, (size,), generator=generator)
        return self._cut(self._training, starts)

    def validation(self, size: int, batches: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields batches of held-out sequences, evenly spread, the same on every rank.

        Args:
            size: sequences per batch.
            batches: number of batches.
        """
        starts = torch.linspace(0, len(self._validation) - self._length - 1, size * batches).long()
        for chunk in starts.split(size):
            yield self._cut(self._validation, chunk)

    def _cut(self, text: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = text[starts[:, None] + torch.arange(self._length + 1)].long()
        return window[:, :-1], window[:, 1:]
