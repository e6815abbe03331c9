"""Builds of a copy of this tree, for the tests of the distribution."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import CompletedProcess

from packaging_environments import NONE, Variables, run

VERSION = "0.2.0+staging.1"
NIGHTLY = "torchft-nightly==2026.10.26"


def build(tree: Path, out: Path, variables: Variables = NONE, check: bool = True) -> CompletedProcess[str]:
    """A wheel by pip, with the build tools that are installed."""
    command = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", out, tree)
    return run(*command, cwd=tree, variables=variables, check=check)


def hatchling(
    tree: Path, out: Path, variables: Variables = NONE, check: bool = True
) -> CompletedProcess[str]:
    """A wheel without pip around it, which itself would obey the settings of pip that a test is about."""
    command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out)
    return run(*command, cwd=tree, variables=variables, check=check)


def refusal(result: CompletedProcess[str]) -> str:
    """The line that the build hook says, which installers indent."""
    assert result.returncode != 0, result.stdout
    assert "Traceback" not in result.stdout
    lines = [line.strip() for line in result.stdout.splitlines() if line.strip().startswith("torchft: ")]
    assert len(lines) == 1, result.stdout
    return lines[0]
