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
from configparser import RawConfigParser
from importlib.metadata import distributions
from operator import itemgetter
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import parse_tag, sys_tags

# The local_sgd.py that this tree subclasses and was tested with: 0.2.0 and the nightlies up to 2026.10.26.
TESTED_LOCAL_SGD = "ce73169ab277adc47f18bb03d4c777d76077d439194363d6ce7b17e5e75f8b50"

# What pip must know to reach a package index or a folder of wheels.
PLACE = ("INDEX_URL", "PYPI_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX", "CACHE_DIR", "NO_CACHE_DIR")
ACCESS = ("PROXY", "NO_PROXY_ENV", "TRUSTED_HOST", "CERT", "CLIENT_CERT", "KEYRING_PROVIDER")
PATIENCE = ("TIMEOUT", "DEFAULT_TIMEOUT", "RETRIES", "RESUME_RETRIES")
INDEX_SETTINGS = {f"PIP_{name}" for name in PLACE + ACCESS + PATIENCE}

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
        build_data["tag"] = "-".join(wheel.stem.split("-")[-3:])
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
    """The wheel to patch: the release that ``upstream.txt`` pins, or the one that TORCHFT_BASE names."""
    base = os.environ.get("TORCHFT_BASE", "")
    if base:
        if not re.fullmatch(r"torchft(-nightly)?==[\w.!+]+", base):
            raise refuse(f"TORCHFT_BASE is {base!r}: pass torchft==VERSION or torchft-nightly==VERSION.")
        return download([base], base, folder)
    exist = re.findall(r"torchft-[^-]+-(\S+)\.whl", pins.read_text(encoding="utf-8"))
    if all(parse_tag(tag).isdisjoint(sys_tags()) for tag in exist):
        raise refuse(
            f"the release has no wheel for this Python and platform ({next(sys_tags())})."
            f" Wheels that exist: {', '.join(exist)}."
        )
    return download(["--require-hashes", "-r", str(pins)], "the release", folder)


def download(what: list[str], name: str, folder: Path) -> Path:
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check")
    settings = {"PIP_CONFIG_FILE": os.devnull, **index_settings()}
    pip = run_pip(settings, "download", *options, "--dest", str(folder), *what)
    if pip.returncode == 0:
        return next(folder.glob("*.whl"))
    mismatch = re.search(r"Got\s+(\w{64})", pip.stdout)
    if mismatch:
        raise refuse(
            f"pip got a wheel with sha256 {mismatch[1]}, which upstream.txt does not pin: a damaged download"
            " (try again with PIP_NO_CACHE_DIR=1) or a wheel that is not the release (do not install it)."
        )
    errors = re.findall("ERROR: (.*)", pip.stdout) or pip.stdout.splitlines()[-1:]
    raise refuse(
        f"pip cannot download {name} for this Python ({next(sys_tags())}): no network, or neither the package"
        " index nor PIP_FIND_LINKS has such a wheel. Set PIP_INDEX_URL to an index that has it, or"
        f" PIP_FIND_LINKS to the absolute path of a folder that does. pip said: {errors[0]}"
    )


def index_settings() -> dict[str, str]:
    """What the user's variables and configuration files tell pip of where wheels come from, as variables.

    Every other setting is about what the user installs, and could only misdirect the download of the one
    wheel that is wanted here: a constraint on torchft, a requirements file, another platform.
    """
    named = os.environ.get("PIP_CONFIG_FILE", "")
    listed = run_pip({"PIP_CONFIG_FILE": named, "PIP_QUIET": "0"}, "config", "list", "--verbose")
    if listed.returncode != 0:
        raise refuse(f"python -m pip config list fails: {' '.join(listed.stdout.split())}")
    files = re.findall("will try loading '(.*)'", listed.stdout)
    files.sort(key=lambda file: file == named)  # what it says counts most; pip before 24 lists it first
    parser = RawConfigParser()
    parser.read(files)
    settings: dict[str, str] = {}
    for section in filter(parser.has_section, ("global", "download")):
        for name, value in filter(itemgetter(1), parser.items(section)):
            settings["PIP_" + name.lstrip("-").replace("-", "_").upper()] = value
    settings |= {name: value for name, value in os.environ.items() if value}
    return {name: value for name, value in settings.items() if name in INDEX_SETTINGS}


def run_pip(settings: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs pip with these settings and no others of the environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        env=environment | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )


def unpack(wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        found = hashlib.sha256((folder / "torchft" / "local_sgd.py").read_bytes()).hexdigest()
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
