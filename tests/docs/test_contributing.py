"""CONTRIBUTING.md: the tree is the one that is there, a commit is checked, pytest finds what it should."""

from __future__ import annotations

import shutil
from pathlib import Path

from docs_blocks import block, commands, shell
from places import ROOT


def test_layout() -> None:
    shown = set()
    folder = ""
    for line in block("CONTRIBUTING.md", "_distribution_check.py").splitlines():
        name = line.split()[0]
        folder, path = (folder, folder + name) if line.startswith(" ") else (name, name)
        assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file(), path
        shown.add(path)
    folders = {
        f"{source.parent.relative_to(ROOT)}/"
        for top in ("torchft", "tests")
        for source in (ROOT / top).rglob("*.py")
    }
    assert folders <= shown
    assert {f"torchft/{module.name}" for module in (ROOT / "torchft").glob("*.py")} <= shown


def test_commit_is_checked(tmp_path: Path) -> None:
    shutil.copy(ROOT / ".pre-commit-config.yaml", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "unused.py").write_text("import os\n")
    (tmp_path / "crooked.py").write_text("x  =  1\n")
    (tmp_path / "fine.py").write_text("x = 1\n")
    git = "git -c user.name=name -c user.email=name@example.com"

    def commit(*names: str) -> bool:
        script = f"git reset -q && git add {' '.join(names)} && {git} commit -qm message"
        done = shell(script, tmp_path, PRE_COMMIT_HOME=str(tmp_path / "hooks"))
        return done.returncode == 0

    install = block("CONTRIBUTING.md", "pre-commit install").rstrip()
    first = f"{git} commit -qm first --no-verify .pre-commit-config.yaml pyproject.toml"
    done = shell(f"git init -q . && git add . && {install} && {first}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert commit("fine.py")
    assert not commit("unused.py")
    assert not commit("crooked.py")
    # The hook has put it right.
    assert commit("crooked.py")


def test_tests_are_found() -> None:
    (quick,) = commands(block("CONTRIBUTING.md", "pytest tests/unit"))
    whole, slow = commands(block("CONTRIBUTING.md", "pytest --slow"))
    # The README's command, which .ci/run carries out.
    assert block("README.md", ".venv-dev/bin/python -m pytest").endswith(f" -m {whole}\n")

    def found(command: str) -> set[str]:
        done = shell(command, ROOT, PYTEST_ADDOPTS="--collect-only -q")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "deselected" not in done.stdout
        return {line for line in done.stdout.splitlines() if "::" in line}

    units = found(quick)
    assert units
    assert units < found(slow)
