"""The release under the patch: where the build takes it from, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest
from index_behind_proxy import index_behind_proxy
from packaging_builds import VERSION, build, hatchling, refusal
from packaging_environments import copy_tree, run
from packaging_wheels import contents, rewrite

pytestmark = pytest.mark.packaging

# Settings of pip for what a user installs, which the build's own download must not obey. Each of them alone
# would end it, or hide what pip says.
ALIEN = {
    "constraint": "{tmp}/constraints.txt",
    "requirement": "{tmp}/constraints.txt",
    "platform": "win_amd64",
    "python-version": "3.9",
    "implementation": "pp",
    "abi": "none",
    "only-deps": "yes",
    "quiet": "3",
}


@pytest.fixture
def alien(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "constraints.txt").write_text("torchft==0.1.0\n", encoding="utf-8")
    return {name: value.format(tmp=tmp_path) for name, value in ALIEN.items()}


def variables(settings: dict[str, str]) -> dict[str, str]:
    return {"PIP_" + name.replace("-", "_").upper(): value for name, value in settings.items()}


def lines(settings: dict[str, str]) -> str:
    return "".join(f"{name} = {value}\n" for name, value in settings.items())


def test_variables_of_pip_for_something_else(
    tree: Path, from_disk: dict[str, str], tmp_path: Path, alien: dict[str, str]
) -> None:
    hatchling(tree, tmp_path / "out", {**variables(alien), "PIP_PYTHON": "/no/python", **from_disk})


def test_configuration_of_pip_for_something_else(
    tree: Path, release: Path, tmp_path: Path, alien: dict[str, str]
) -> None:
    here, there = (dict(list(alien.items())[start::2]) for start in (0, 1))
    links = {"no-index": "yes", "find_links": f"\n  {tmp_path}\n  {release.parent}"}
    file = tmp_path / "pip" / "pip.conf"
    file.parent.mkdir()
    file.write_text(f"[download]\n{lines(here | links)}[global]\n{lines(there)}", encoding="utf-8")
    elsewhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": ""}
    hatchling(tree, tmp_path / "out", {"XDG_CONFIG_HOME": str(tmp_path), **elsewhere})


def test_constraint_that_the_patched_version_meets(
    tree: Path, from_disk: dict[str, str], tmp_path: Path
) -> None:
    """As images of GPU vendors have one: pip obeys it for what it installs, the download does not."""
    file = tmp_path / "constraints.txt"
    file.write_text(f"torchft=={VERSION}\n", encoding="utf-8")
    build(tree, tmp_path / "out", {"PIP_CONSTRAINT": str(file), **from_disk})


def test_index_behind_a_proxy(tree: Path, release: Path, tmp_path: Path) -> None:
    """Everything that is about the way to the index counts: a file, another section of it, a variable."""
    with index_behind_proxy(release) as (proxy, index):
        (tmp_path / "pip.conf").write_text(
            f"[global]\nindex-url = {index}\nproxy = http://127.0.0.1:9\ncache-dir = {tmp_path}/cache\n"
            f"[download]\nproxy = {proxy}\n",
            encoding="utf-8",
        )
        ways = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_FIND_LINKS": "", "PIP_RETRIES": "0"}
        hatchling(tree, tmp_path / "out", {"PIP_TRUSTED_HOST": index.split("/")[2], **ways})
    assert list((tmp_path / "cache").iterdir())


def test_whose_settings_count(tree: Path, tmp_path: Path) -> None:
    """pip's own order: the variable, the command's section, the user's file, the machine's."""
    for place, value in (("machine", "1"), ("user", "2")):
        (tmp_path / place / "pip").mkdir(parents=True)
        (tmp_path / place / "pip" / "pip.conf").write_text(
            f"[download]\ntimeout = {value}\n[global]\ntimeout = 3\nretries = {value}\nclient_cert = file\n",
            encoding="utf-8",
        )
    places = {"XDG_CONFIG_DIRS": str(tmp_path / "machine"), "XDG_CONFIG_HOME": str(tmp_path / "user")}
    certificates = {"PIP_CLIENT_CERT": "variable", "PIP_CERT": "c", "PIP_TRUSTED_HOST": "t"}
    others = {"PIP_EXTRA_INDEX_URL": "a b", "PIP_KEYRING_PROVIDER": "import", "PIP_DEFAULT_TIMEOUT": "9"}
    program = "import hatch_build, json; print(json.dumps(hatch_build.index_settings()))"
    variables = {"PIP_RETRIES": "", **places, **certificates, **others}
    ran = run(sys.executable, "-B", "-c", program, cwd=tree, variables=variables)
    expected = certificates | others | {"PIP_TIMEOUT": "2", "PIP_RETRIES": "2"}
    assert json.loads(ran.stdout).items() >= expected.items()


def test_refuses_a_broken_configuration_of_pip(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("index-url = nowhere\n", encoding="utf-8")
    said = refusal(
        hatchling(tree, tmp_path / "out", {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}, check=False)
    )
    assert said.startswith("torchft: python -m pip config list fails: ")
    assert "File contains no section headers" in said


def test_refuses_without_network(tree: Path, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}/simple"
        ways = {"PIP_INDEX_URL": nobody, "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
        said = refusal(build(tree, tmp_path / "out", {**ways, "PIP_RETRIES": "0"}, check=False))
    assert said.startswith("torchft: pip cannot download the release for this Python (cp3")
    assert "PIP_FIND_LINKS to the absolute path of a folder that does" in said


def test_refuses_a_wheel_with_another_hash(tree: Path, release: Path, tmp_path: Path) -> None:
    rewrite(release, tmp_path / release.name, manager=b"")
    folder = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    said = refusal(hatchling(tree, tmp_path / "out", folder, check=False))
    assert re.search(r"pip got a wheel with sha256 \w{64}, which upstream.txt does not pin", said)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_refuses_a_python_or_platform_without_a_wheel(
    tree: Path, release: Path, from_disk: dict[str, str], tmp_path: Path
) -> None:
    """The pins of a release without a wheel for the running interpreter, and a folder of another one."""
    elsewhere = copy_tree(tmp_path / "tree")
    pins = (elsewhere / "upstream.txt").read_text(encoding="utf-8")
    (elsewhere / "upstream.txt").write_text(pins.replace("manylinux", "toaster"), encoding="utf-8")
    said = refusal(hatchling(elsewhere, tmp_path / "out", from_disk, check=False))
    assert said.startswith("torchft: the release has no wheel for this Python and platform (cp3")
    assert all(f"cp3{minor}-cp3{minor}-toaster_2_17_x86_64" in said for minor in (9, 10, 11, 12, 13))
    shutil.copy(release, tmp_path / "torchft-0.2.0-cp38-cp38-manylinux2014_x86_64.whl")
    folder = from_disk | {"PIP_FIND_LINKS": str(tmp_path)}
    said = refusal(hatchling(tree, tmp_path / "out", folder, check=False))
    assert said.startswith("torchft: pip cannot download the release for this Python (cp3")


def test_refuses_an_untested_base_unless_the_user_insists(tree: Path, release: Path, tmp_path: Path) -> None:
    other = rewrite(release, tmp_path / release.name, local_sgd=b"# the next one\n")
    base = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "TORCHFT_BASE": "torchft==0.2.0"}
    said = refusal(hatchling(tree, tmp_path / "out", base, check=False))
    assert f"{other.name} has a local_sgd.py (sha256 " in said
    assert "TORCHFT_BASE_UNTESTED=1" in said
    hatchling(tree, tmp_path / "out", {"TORCHFT_BASE_UNTESTED": "1", **base})
    inside = contents(next((tmp_path / "out").iterdir()))
    assert inside["torchft/_upstream_local_sgd.py"] == b"# the next one\n"


def test_refuses_a_damaged_base(tree: Path, release: Path, tmp_path: Path) -> None:
    stored = rewrite(release, tmp_path / release.name, local_sgd=b"class LocalSGD: ...\n")
    stored.write_bytes(stored.read_bytes().replace(b"class LocalSGD: ...", b"class LocalSGX: ..."))
    base = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "TORCHFT_BASE": "torchft==0.2.0"}
    said = refusal(hatchling(tree, tmp_path / "out", base, check=False))
    assert said.startswith(f"torchft: {release.name} is not a wheel of TorchFT: Bad CRC-32")


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("torch==2.9", "TORCHFT_BASE is 'torch==2.9': pass torchft==VERSION or torchft-nightly==VERSION."),
        ("torchft==0.0.7", "pip cannot download torchft==0.0.7 for this Python (cp3"),
    ],
)
def test_refuses_a_base_that_is_not_one(
    tree: Path, from_disk: dict[str, str], tmp_path: Path, base: str, said: str
) -> None:
    result = hatchling(tree, tmp_path / "out", {"TORCHFT_BASE": base, **from_disk}, check=False)
    assert refusal(result).startswith(f"torchft: {said}")
