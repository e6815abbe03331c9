"""What the tests of the distribution share: one copy of this tree, the release, and one built wheel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from packaging_environments import ROOT, Environment, copy_tree, link_dependencies, run


@pytest.fixture(scope="session")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the package needs, linked from this environment."""
    return link_dependencies(tmp_path_factory.mktemp("dependencies") / "site-packages")


@pytest.fixture
def environment(tmp_path: Path, dependencies: Path) -> Environment:
    """A virtual environment without the package."""
    return Environment(tmp_path / "environment", dependencies)


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout, for tests that leave it as it is."""
    return copy_tree(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release's wheel for this interpreter, as the package index has it, alone in its folder."""
    folder = tmp_path_factory.mktemp("release")
    options = ("--no-deps", "--only-binary=:all:", "--require-hashes", "-r", ROOT / "upstream.txt")
    run(sys.executable, "-m", "pip", "download", *options, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def from_disk(release: Path) -> dict[str, str]:
    """Variables with which a build takes the release from disk, and asks no index."""
    return {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(release.parent)}


@pytest.fixture(scope="session")
def built(tree: Path, from_disk: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with an sdist, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree)
    run(*command, cwd=folder, variables=from_disk)
    return folder


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))
