"""The commands that install, as the pages have them, in virtual environments and a copy of this checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from docs_blocks import block
from packaging_environments import NONE, Environment, Variables, copy_tree, run

from torchft import manager

# The other modules here test the same ways to install, each time.
pytestmark = [pytest.mark.packaging, pytest.mark.slow]

# Builds with what is installed, which is faster. Pip reads this variable the wrong way round.
QUICK = {"PIP_NO_BUILD_ISOLATION": "0"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_tree(tmp_path / "checkout")


def follow(text: str, environment: Environment, checkout: Path, variables: Variables = NONE) -> str:
    """What a block says when it is run in a checkout, in an activated environment."""
    bin = environment.executable.parent
    for module in ("pip", "pytest"):
        command = bin / module
        command.write_text(f'#!/bin/sh\nexec "{environment.executable}" -m {module} "$@"\n')
        command.chmod(0o755)
    path = os.pathsep.join([str(bin), os.environ["PATH"]])
    steered = {"PATH": path, **variables}
    return run("bash", "-euo", "pipefail", "-c", text, cwd=checkout, variables=steered).stdout


def patched(environment: Environment) -> bool:
    """Whether an installed torchft is this one, complete, and not the release; cheaper than to import it."""
    assert environment.strays() == set()
    return (environment.site / "torchft" / "_upstream_local_sgd.py").exists()


def test_install_look_and_remove(environment: Environment, checkout: Path) -> None:
    follow(block("install.rst", "pip install ."), environment, checkout, QUICK)
    assert patched(environment)
    look = block("install.rst", "pip list | grep torchft")
    said = follow(look, environment, checkout)
    # as the comment in the block says
    assert said.splitlines()[0].split() == look.splitlines()[0].split("# ")[1].split()
    assert "offload_averaged_parameters_to_cpu" in said

    remove, _ = block("install.rst", "pip uninstall torchft ").splitlines()
    # the answer to its question
    follow(remove, environment, checkout, {"PIP_YES": "1"})
    assert not any("torchft" in name for name in environment.listing())


def test_wheel_for_a_cluster_and_back_to_the_release(environment: Environment, checkout: Path) -> None:
    follow(block("install.rst", "pip wheel"), environment, checkout, QUICK)
    assert patched(environment)
    _, back = block("install.rst", "pip uninstall torchft ").splitlines()
    follow(back, environment, checkout)
    assert not patched(environment)


def test_build_without_network(environment: Environment, checkout: Path) -> None:
    with_network, without = block("install.rst", "PIP_NO_INDEX=1").split("# where there is none\n")
    follow(with_network, environment, checkout)
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    follow(without, environment, checkout, nowhere)
    assert patched(environment)


def test_on_a_nightly(environment: Environment, checkout: Path) -> None:
    follow(block("install.rst", "TORCHFT_BASE=torchft-nightly=="), environment, checkout, QUICK)
    assert patched(environment)
    # The files of the nightly, not those of the release that this interpreter has.
    installed = (environment.site / "torchft" / "manager.py").read_bytes()
    assert installed != Path(manager.__file__).read_bytes()


def test_to_work_on_it(environment: Environment, checkout: Path) -> None:
    """The tests refuse to run what is not the checkout; collecting some of them is enough to see that."""
    commands = block("CONTRIBUTING.md", "pip install -e '.[dev]'")
    assert commands == block("install.rst", "pip install -e '.[dev]'")
    some = "--collect-only -q tests/unit/test_cli.py"
    said = follow(commands + "pytest\n", environment, checkout, {"PYTEST_ADDOPTS": some, **QUICK})
    assert "tests/unit/test_cli.py::" in said


def test_for_titan(environment: Environment, checkout: Path) -> None:
    follow(block("titan.rst", "pip install"), environment, checkout, QUICK)
    assert patched(environment)
