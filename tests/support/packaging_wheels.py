"""What a wheel says about itself, for the tests of the distribution."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel by their path."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def dist_info(wheel: Path) -> dict[str, bytes]:
    """The files below ``*.dist-info/``, by their path there."""
    split = [(name.partition(".dist-info/"), data) for name, data in contents(wheel).items()]
    return {inner: data for (_, slash, inner), data in split if slash}


def headers(wheel: Path, name: str) -> Message:
    """``METADATA`` or ``WHEEL``, parsed."""
    return Parser().parsestr(dist_info(wheel)[name].decode())


def record(wheel: Path) -> dict[str, str]:
    """The hashes in a wheel's RECORD, by path; RECORD itself has none."""
    entries = [line.rsplit(",", 2) for line in dist_info(wheel)["RECORD"].decode().splitlines()]
    return {name: digest for name, digest, _ in entries if digest}


def record_hash(data: bytes) -> str:
    """A hash as RECORD spells it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def rewrite(wheel: Path, to: Path, **changed: bytes) -> Path:
    """A copy of a wheel in which some files of torchft/ have other bytes; its RECORD is left as it was."""
    with zipfile.ZipFile(to, "w") as archive:
        for name, data in contents(wheel).items():
            module = name.partition("torchft/")[2].partition(".py")[0]
            archive.writestr(name, changed.get(module, data))
    return to
