"""uv installs the distribution, and knows when a build that it keeps is out of date."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging_environments import NONE, SOURCES, Environment, Variables, copy_tree, run
from uv import find_uv_bin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.packaging


def test_uv_installs(environment: Environment, from_disk: dict[str, str], tree: Path) -> None:
    options = ["--python", environment.executable, "--no-deps", "--no-build-isolation", "--offline"]
    for what in ([tree], ["-e", tree]):
        command = [find_uv_bin(), "pip", "install", *options, "--reinstall", *what]
        run(*command, cwd=environment.folder, variables=from_disk)
        assert environment.strays() == set()
        installed = (environment.site / "torchft" / "local_sgd.py").read_text(encoding="utf-8")
        assert ("_editable" in installed) is ("-e" in what)


def test_uv_builds_again_when_the_checkout_changes(from_disk: dict[str, str], tmp_path: Path) -> None:
    """An edit, a removed file that git commits, another base; nothing changed is not a reason."""
    checkout = copy_tree(tmp_path / "checkout")
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"torchft @ {checkout.as_uri()}\n", encoding="utf-8")
    variables = {"UV_CACHE_DIR": str(tmp_path / "cache"), **from_disk}

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.com")
        run("git", *identity, *arguments, cwd=checkout)

    def install(name: str, more: Variables = NONE) -> Path:
        target = tmp_path / name
        options = ["--python", sys.executable, "--target", target, "--no-deps", "--no-build-isolation"]
        command = [find_uv_bin(), "pip", "install", *options, "-r", requirements]
        ran = run(*command, cwd=tmp_path, variables={**variables, **more})
        builds.append("Built torchft" in ran.stdout)
        return target / "torchft"

    builds: list[bool] = []
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    install("first")
    install("again")
    assert builds == [True, False]

    with (checkout / "torchft" / "local_sgd.py").open("a", encoding="utf-8") as file:
        file.write("# edited\n")
    assert (install("edited") / "local_sgd.py").read_text(encoding="utf-8").endswith("# edited\n")
    git("rm", "-q", "torchft/_distribution_check.py")
    git("commit", "-q", "-m", "two")
    assert not (install("removed") / "_distribution_check.py").exists()
    install("based", {"TORCHFT_BASE": "torchft==0.2.0"})
    assert builds[2:] == [True, True, True]


def test_uv_knows_all_that_a_build_depends_on(tree: Path) -> None:
    keys = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]["cache-keys"]
    known = {path for key in keys if "file" in key for path in tree.glob(key["file"]) if path.is_file()}
    files = {path for path in (tree / "torchft").rglob("*") if path.is_file()}
    assert known == files | {tree / name for name in SOURCES if name != ".gitignore"}

    variables = set(re.findall(r"\"(TORCHFT_\w+)\"", (tree / "hatch_build.py").read_text(encoding="utf-8")))
    assert "TORCHFT_BASE" in variables
    assert {key["env"] for key in keys if "env" in key} == variables
