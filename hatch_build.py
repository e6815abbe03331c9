"""Build hook: lays the files of this tree over the pinned TorchFT release.

The wheel holds the release's files byte for byte, its ``local_sgd.py`` as ``_upstream_local_sgd.py``, and the
files of ``torchft/`` beside them. In an editable install a stub stands in place of each of our modules and
runs the checkout's file. ``docs/source/install.rst`` is the user's page: ways to install, every refusal.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import parse_tag, sys_tags

# The local_sgd.py that this tree subclasses and was tested with: 0.2.0 and the nightlies up to 2026.10.26.
TESTED_LOCAL_SGD = "ce73169ab277adc47f18bb03d4c777d76077d439194363d6ce7b17e5e75f8b50"

STUB = """\
__file__ = {path!r}
from torchft._editable import load as _load
exec(_load(__file__))
"""
LOADER = '''\
"""Editable installs only: finds the checkout's files for the stubs that stand in their place."""


def load(path):
    try:
        with open(path, "rb") as source:
            return compile(source.read(), path, "exec", dont_inherit=True)
    except (FileNotFoundError, NotADirectoryError):
        raise ImportError(
            path + " is gone: torchft is an editable install of a checkout that was moved or deleted, or that"
            " no longer has this file. Run `pip install -e .` in the checkout, or `pip uninstall torchft`."
        ) from None
'''


class LayOverRelease(BuildHookInterface):
    """Fills the wheel. A refusal ends the build with one line on stderr and no traceback."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        refuse_installed_nightly()
        self.scratch = tempfile.TemporaryDirectory(prefix="torchft-build-")
        base = Path(self.scratch.name) / "base"
        wheel = find_base(Path(self.root) / "upstream.txt", Path(self.scratch.name))
        unpack(wheel, base)
        lay_over(Path(self.root) / "torchft", base / "torchft", editable=version == "editable")

        build_data["pure_python"] = False
        build_data["tag"] = tag_of(wheel)
        build_data["force_include"][str(base / "torchft")] = "torchft"
        metadata = f"{self.build_config.builder.artifact_project_id}.dist-info"
        for sboms in base.glob("*.dist-info/sboms"):
            build_data["force_include"][str(sboms)] = f"{metadata}/sboms"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.scratch.cleanup()


def refuse(message: str) -> SystemExit:
    return SystemExit(f"torchft: {message}")


def refuse_installed_nightly() -> None:
    # An isolated build of pip still runs with the prefix of the environment that it installs into; uv and
    # `python -m build` hide it, and importing torchft.local_sgd makes up for that.
    for site in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        for nightly in distributions(name="torchft-nightly", path=[site]):
            raise refuse(
                f"torchft-nightly {nightly.version} in {site} owns the same files as torchft."
                " Run `pip uninstall -y torchft-nightly torchft`, then this again."
            )


def find_base(pins: Path, folder: Path) -> Path:
    """The wheel to patch: TORCHFT_BASE says which, TORCHFT_BASE_WHEEL where it is, if not on the index."""
    requirement, local = os.environ.get("TORCHFT_BASE", ""), os.environ.get("TORCHFT_BASE_WHEEL", "")
    if requirement and not re.fullmatch(r"torchft(-nightly)?==[\w.!+]+", requirement):
        raise refuse(f"TORCHFT_BASE is {requirement!r}: pass torchft==VERSION or torchft-nightly==VERSION.")
    what = [requirement] if requirement else ["--require-hashes", "-r", str(pins)]
    name = requirement or "the release"
    text = pins.read_text(encoding="utf-8")
    exist = [Path(wheel) for wheel in re.findall(r"torchft-\S+\.whl", text)]
    path = Path(local)
    if local:
        if not path.is_absolute() or not path.exists():
            raise refuse(f"TORCHFT_BASE_WHEEL is {local!r}: pass the absolute path of a wheel or its folder.")
        if path.is_file() and requirement:
            raise refuse("TORCHFT_BASE_WHEEL is a file, which leaves nothing to choose: unset TORCHFT_BASE.")
        if path.name in [pin.name for pin in exist] and sha256(path) not in text:
            raise refuse(f"{local} does not have its sha256 of upstream.txt: damaged, or not the release.")
        what += ["--no-index", "--find-links", local]
        name += f" from {local}"
        exist = [path] if path.is_file() else sorted(path.glob("torchft*.whl"))
    if (local or not requirement) and not any(map(is_usable, exist)):
        raise refuse(
            f"{local or name} has no wheel for this Python and platform ({next(sys_tags())})."
            f" Wheels that exist: {', '.join(map(tag_of, exist)) or 'none'}."
        )
    return path if path.is_file() else download(what, name, folder)


def tag_of(wheel: Path) -> str:
    return "-".join(wheel.stem.split("-")[-3:])


def is_usable(wheel: Path) -> bool:
    return wheel.name.count("-") >= 4 and not parse_tag(tag_of(wheel)).isdisjoint(sys_tags())


def download(what: list[str], name: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    pip = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(folder), *what],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    if pip.returncode == 0:
        return next(folder.glob("*.whl"))
    mismatch = re.search(r"Got\s+(\w{64})", pip.stdout)
    if mismatch:
        raise refuse(
            f"pip got a wheel with sha256 {mismatch[1]}, which upstream.txt does not pin: a damaged download"
            " (try again with PIP_NO_CACHE_DIR=1) or a wheel that is not the release (do not install it)."
        )
    said = re.findall("ERROR: (.*)", pip.stdout) or pip.stdout.strip().splitlines()[-1:]
    raise refuse(
        f"pip cannot download {name}: no network, or the package index has no such wheel for this Python."
        " Set PIP_INDEX_URL to an index that has it, or TORCHFT_BASE_WHEEL to a wheel on disk."
        f" pip said: {said[0]}"
    )


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def unpack(wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        found = sha256(folder / "torchft" / "local_sgd.py")
    except (OSError, zipfile.BadZipFile) as error:
        raise refuse(f"{wheel.name} is not a wheel of TorchFT: {error}.") from None
    if found != TESTED_LOCAL_SGD and os.environ.get("TORCHFT_BASE_UNTESTED") != "1":
        raise refuse(
            f"{wheel.name} has a local_sgd.py (sha256 {found[:12]}...) that this patch was not tested with."
            " Choose another base, or set TORCHFT_BASE_UNTESTED=1 and run the tests on the result."
        )


def lay_over(ours: Path, package: Path, editable: bool) -> None:
    (package / "local_sgd.py").rename(package / "_upstream_local_sgd.py")
    for source in sorted(ours.rglob("*")):
        relative = source.relative_to(ours)
        if source.is_dir() or any(part == "__pycache__" or part[0] == "." for part in relative.parts):
            continue
        target = package / relative
        if target.exists():
            raise refuse(f"the base has a torchft/{relative} of its own, which this patch would hide.")
        target.parent.mkdir(parents=True, exist_ok=True)
        if editable and source.suffix == ".py":
            target.write_text(STUB.format(path=str(source)), encoding="utf-8")
        else:
            shutil.copy(source, target)
    if editable:
        (package / "_editable.py").write_text(LOADER, encoding="utf-8")
