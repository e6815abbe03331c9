"""Places for the tests of the distribution: copies of this tree, and virtual environments to install it into.

Nothing here imports torchft: what the tests look at runs in processes of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from places import ROOT

SOURCES = (".gitignore", "LICENSE", "README.md", "pyproject.toml", "hatch_build.py", "upstream.txt")
FOLDERS = ("torchft", "tests", "docs", "benchmarks")

Variables = Mapping[str, str]
NONE: Variables = {}


def inherited(variables: Variables = NONE) -> dict[str, str]:
    """Returns the variables of the caller without those that would steer a command, and further ones."""
    steering = ("TORCHFT_", "PYTHON", "VIRTUAL_ENV", "SOURCE_DATE_EPOCH", "HATCH_", "UV_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    return environment | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1", **variables}


def run(
    *command: object, cwd: Path, check: bool = True, variables: Variables = NONE
) -> subprocess.CompletedProcess[str]:
    """Runs a command, stdout and stderr in one, without the variables of the caller that would steer it."""
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    if check:
        assert result.returncode == 0, f"{command} ended with {result.returncode}:\n{result.stdout}"
    return result


def copy_tree(folder: Path) -> Path:
    """A checkout that a test may change."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "build"))
    return folder


def link_dependencies(folder: Path) -> Path:
    """Links to all that this interpreter has installed except TorchFT, so that no test downloads torch."""
    folder.mkdir(parents=True)
    for site in map(Path, sys.path):
        if site.name not in ("site-packages", "dist-packages"):
            continue
        for entry in sorted(site.iterdir()):
            is_torchft = entry.name.split("-")[0] in ("torchft", "torchft_nightly")
            if not is_torchft and entry.suffix != ".pth" and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return folder


class Environment:
    """A virtual environment that sees the dependencies of TorchFT and has no TorchFT."""

    def __init__(self, folder: Path, dependencies: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder = folder
        self.executable = folder / "bin" / "python"
        self.site = next(folder.glob("lib/python*/site-packages"))
        (self.site / "dependencies.pth").write_text(f"{dependencies}\n", encoding="utf-8")

    def pip(
        self, *arguments: object, check: bool = True, variables: Variables = NONE
    ) -> subprocess.CompletedProcess[str]:
        # pip is one of the dependencies that are linked.
        return run(
            self.executable, "-m", "pip", *arguments, cwd=self.folder, check=check, variables=variables
        )

    def install(
        self, *what: object, check: bool = True, variables: Variables = NONE
    ) -> subprocess.CompletedProcess[str]:
        command = ("install", "--no-deps", "--no-build-isolation", *what)
        return self.pip(*command, check=check, variables=variables)

    def python(
        self, *arguments: object, cwd: Optional[Path] = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return run(self.executable, *arguments, cwd=cwd or self.folder, check=check)

    def listing(self) -> set[str]:
        """All paths in the environment, folders and bytecode included."""
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}

    def strays(self) -> set[str]:
        """Files of torchft in site-packages that no RECORD lists, and listed files that are not there."""
        records = list(self.site.glob("torchft*.dist-info/RECORD"))
        assert len(records) == 1, records
        lines = records[0].read_text(encoding="utf-8").splitlines()
        listed = {line.rsplit(",", 2)[0] for line in lines}
        files = {path for path in self.site.glob("torchft*/**/*") if path.is_file()}
        there = {path.relative_to(self.site).as_posix() for path in files if "__pycache__" not in path.parts}
        return there ^ {name for name in listed if name.startswith("torchft") and "__pycache__" not in name}
