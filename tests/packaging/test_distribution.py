"""The distribution: what its wheel holds, how it installs, and what the build refuses.

The builds and installations are real ones, with pip, build and uv, of copies of this tree.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from packaging_environments import Environment, copy_tree, run
from packaging_wheels import contents, dist_info, headers, record, record_hash, rewrite
from places import ROOT
from uv import find_uv_bin

pytestmark = pytest.mark.packaging

NIGHTLY = "torchft-nightly==2026.10.26"
VERSION = "0.2.0+staging.1"
# A package below torchft/ like examples/local_sgd and titan: relative imports, python -m, a traceback.
PROBE = {
    "__init__.py": "from .part import WHAT\n",
    "part.py": "WHAT = 'before'\n\n\ndef fail():\n    raise RuntimeError('on purpose')\n",
    "__main__.py": "from . import WHAT, part\n\nprint(WHAT, __file__, __name__, __package__)\npart.fail()\n",
}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release's wheel for this interpreter, as the package index has it."""
    folder = tmp_path_factory.mktemp("release")
    options = ("--no-deps", "--only-binary=:all:", "--require-hashes", "-r", ROOT / "upstream.txt")
    run(sys.executable, "-m", "pip", "download", *options, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with an sdist, and with the wheel that was built from it in isolation, from the index."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--outdir", folder, tree, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


def build(tree: Path, out: Path, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", out, tree)
    return run(*command, cwd=tree, check=check, **variables)


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The line that the hook says, which installers indent."""
    assert result.returncode != 0, result.stdout
    assert "Traceback" not in result.stdout
    lines = [line.strip() for line in result.stdout.splitlines() if line.strip().startswith("torchft: ")]
    assert len(lines) == 1, result.stdout
    return lines[0]


def test_wheel_is_the_release_byte_for_byte_and_our_files(wheel: Path, release: Path, tree: Path) -> None:
    inside = {name: data for name, data in contents(wheel).items() if name.startswith("torchft/")}
    theirs = {name: digest for name, digest in record(release).items() if name.startswith("torchft/")}
    theirs["torchft/_upstream_local_sgd.py"] = theirs.pop("torchft/local_sgd.py")
    files = [path for path in (tree / "torchft").rglob("*") if path.is_file()]
    ours = {path.relative_to(tree).as_posix(): path.read_bytes() for path in files}

    assert {name: record_hash(inside[name]) for name in theirs} == theirs
    assert {name: inside[name] for name in ours} == ours
    assert set(inside) == set(theirs) | set(ours)
    assert "torchft/local_sgd.py" in ours
    assert "torchft/__init__.py" not in ours, "it would take the place of the release's package"


def test_wheel_record_is_true(wheel: Path) -> None:
    hashed = {
        name: record_hash(data) for name, data in contents(wheel).items() if not name.endswith("/RECORD")
    }
    assert record(wheel) == hashed


def test_wheel_has_the_platform_tag_of_the_release(wheel: Path, release: Path) -> None:
    name, version, _, tags = parse_wheel_filename(wheel.name)
    assert (name, str(version)) == ("torchft", VERSION)
    assert wheel.name.split("-")[2:] == release.name.split("-")[2:]
    written = headers(wheel, "WHEEL")
    assert written["Root-Is-Purelib"] == "false"
    assert set(written.get_all("Tag", [])) == {str(tag) for tag in tags}


def test_metadata_keeps_what_the_release_has(wheel: Path, release: Path) -> None:
    def needed(metadata: Message) -> set[Requirement]:
        return {Requirement(line) for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}

    def scripts(path: Path) -> set[str]:
        return set(dist_info(path)["entry_points.txt"].decode().replace(" ", "").split())

    ours, theirs = headers(wheel, "METADATA"), headers(release, "METADATA")
    assert needed(ours) == needed(theirs)
    # The release says 3.9, and does not import there.
    assert (ours["Requires-Python"], theirs["Requires-Python"]) == (">=3.10", ">=3.9")
    assert ours["License-Expression"] == "BSD-3-Clause"
    assert ours.get_all("License-File") == theirs.get_all("License-File")
    assert scripts(wheel) == scripts(release)
    for kept in ("licenses/LICENSE", "sboms/torchft.cyclonedx.json"):
        assert dist_info(wheel)[kept] == dist_info(release)[kept]


def test_sdist_has_the_tree_and_nothing_else(built: Path, tree: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    assert names - {"PKG-INFO"} == {name for name in files if "__pycache__" not in name}
    assert {"hatch_build.py", "upstream.txt", "LICENSE", "torchft/local_sgd.py"} <= names


def test_wheel_is_reproducible(tree: Path, release: Path, tmp_path: Path) -> None:
    """Another folder, other file times, permissions, time zone and locale: the same bytes."""
    build(tree, tmp_path / "one", TORCHFT_BASE_WHEEL=str(release))
    other = copy_tree(tmp_path / "a checkout elsewhere")
    for path in other.rglob("*"):
        os.utime(path, (10**9, 10**9))
        path.chmod(0o700 if path.is_dir() else 0o600)
    before = os.umask(0o077)
    try:
        build(other, tmp_path / "two", TORCHFT_BASE_WHEEL=str(release), TZ="Asia/Tokyo", LC_ALL="C")
    finally:
        os.umask(before)
    one, two = next((tmp_path / "one").iterdir()), next((tmp_path / "two").iterdir())
    assert (one.name, one.read_bytes()) == (two.name, two.read_bytes())


def test_installs_over_everything_and_uninstalls_without_a_trace(
    environment: Environment, wheel: Path, release: Path, tree: Path
) -> None:
    before = environment.listing()
    for what in ([release], [wheel], ["--force-reinstall", wheel], ["-e", tree], ["-e", tree], [wheel]):
        environment.install(*what, TORCHFT_BASE_WHEEL=str(release))
        assert environment.strays() == set(), what
    assert "No broken requirements" in environment.pip("check").stdout
    version = "import importlib.metadata as metadata; print(metadata.version('torchft'))"
    assert environment.python("-c", version).stdout.strip() == VERSION
    lighthouse = run(environment.folder / "bin" / "torchft_lighthouse", "--help", cwd=environment.folder)
    assert "--min_replicas" in lighthouse.stdout
    environment.pip("uninstall", "-y", "torchft")
    assert environment.listing() == before


def test_editable_runs_the_checkout(environment: Environment, release: Path, tmp_path: Path) -> None:
    before = environment.listing()
    checkout = copy_tree(tmp_path / "it's a checkout")
    probe = checkout / "torchft" / "probe"
    probe.mkdir()
    for name, source in PROBE.items():
        (probe / name).write_text(source, encoding="utf-8")
    environment.install("-e", checkout, TORCHFT_BASE_WHEEL=str(release))
    for name in ("__init__.py", "local_sgd.py", "manager.py"):
        assert (environment.site / "torchft" / name).is_file()
    assert not (checkout / "torchft" / "__init__.py").exists(), "the release was unpacked into the checkout"

    main, part = probe / "__main__.py", probe / "part.py"
    for folder in (checkout, tmp_path):
        ran = environment.python("-m", "torchft.probe", cwd=folder, check=False)
        assert f"before {main} __main__ torchft.probe" in ran.stdout
        assert f'File "{part}", line 5, in fail\n    raise RuntimeError' in ran.stdout

    part.write_text("WHAT = 'after'\n", encoding="utf-8")
    (checkout / "torchft" / "later.py").touch()
    script = "import torchft.probe as probe; print(probe.WHAT, probe.__file__)\nimport torchft.later"
    ran = environment.python("-c", script, check=False)
    assert f"after {probe / '__init__.py'}" in ran.stdout
    assert "No module named 'torchft.later'" in ran.stdout
    environment.install("-e", checkout, TORCHFT_BASE_WHEEL=str(release))
    environment.python("-c", script)

    checkout.rename(tmp_path / "moved")
    ran = environment.python("-c", script, check=False)
    said = ran.stdout.splitlines()[-1]
    assert said.startswith(f"ImportError: {probe / '__init__.py'} is gone")
    assert "pip install -e ." in said
    environment.pip("uninstall", "-y", "torchft")
    assert environment.listing() == before


@pytest.mark.parametrize("editable", [False, True])
def test_uv_installs(environment: Environment, release: Path, tree: Path, editable: bool) -> None:
    what = ["-e", tree] if editable else [tree]
    options = ["--python", environment.executable, "--no-deps", "--no-build-isolation", "--offline"]
    command = [find_uv_bin(), "pip", "install", *options]
    for _ in range(2):
        run(*command, "--reinstall", *what, cwd=environment.folder, TORCHFT_BASE_WHEEL=str(release))
        assert environment.strays() == set()
    assert ("_editable" in (environment.site / "torchft" / "local_sgd.py").read_text()) is editable


def test_refuses_a_wheel_with_another_hash(tree: Path, release: Path, tmp_path: Path) -> None:
    broken = copy_tree(tmp_path / "tree")
    pins = (broken / "upstream.txt").read_text(encoding="utf-8")
    (broken / "upstream.txt").write_text(re.sub(r"sha256:\w{8}", "sha256:00000000", pins), encoding="utf-8")
    said = refusal(build(broken, tmp_path / "out", check=False))
    assert re.search(r"pip got a wheel with sha256 \w{64}, which upstream.txt does not pin", said)
    changed = rewrite(release, tmp_path / release.name, manager=b"")
    said = refusal(build(tree, tmp_path / "out", check=False, TORCHFT_BASE_WHEEL=str(changed)))
    assert f"{changed} does not have its sha256 of upstream.txt" in said
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_refuses_a_python_or_platform_without_a_wheel(tree: Path, release: Path, tmp_path: Path) -> None:
    """The pins of a release without a wheel for the running interpreter, and a wheel of another one."""
    elsewhere = copy_tree(tmp_path / "tree")
    pins = (elsewhere / "upstream.txt").read_text(encoding="utf-8")
    (elsewhere / "upstream.txt").write_text(pins.replace("manylinux", "toaster"), encoding="utf-8")
    said = refusal(build(elsewhere, tmp_path / "out", check=False))
    assert said.startswith("torchft: the release has no wheel for this Python and platform (cp3")
    assert all(f"cp3{minor}-cp3{minor}-toaster_2_17_x86_64" in said for minor in (9, 10, 11, 12, 13))
    other = tmp_path / "torchft-0.2.0-cp38-cp38-manylinux2014_x86_64.whl"
    shutil.copy(release, other)
    for local in (other, tmp_path):
        said = refusal(build(tree, tmp_path / "out", check=False, TORCHFT_BASE_WHEEL=str(local)))
        assert said.startswith(f"torchft: {local} has no wheel for this Python and platform (cp3")
        assert said.endswith("Wheels that exist: cp38-cp38-manylinux2014_x86_64.")


def test_without_network(tree: Path, release: Path, tmp_path: Path) -> None:
    """An index that nothing listens on: a clear refusal, and a folder of wheels is the way out."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        offline: dict[str, str] = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{unused.getsockname()[1]}/simple",
            "PIP_FIND_LINKS": "",
            "PIP_RETRIES": "0",
        }
        said = refusal(build(tree, tmp_path / "out", False, **offline))
        assert said.startswith("torchft: pip cannot download the release: no network, or the package index")
        assert "TORCHFT_BASE_WHEEL" in said
        build(tree, tmp_path / "out", True, TORCHFT_BASE_WHEEL=str(release.parent), **offline)
    assert len(list((tmp_path / "out").glob(f"torchft-{VERSION}-*.whl"))) == 1


def test_refuses_an_untested_base_unless_the_user_insists(tree: Path, release: Path, tmp_path: Path) -> None:
    other = rewrite(release, tmp_path / release.name.replace("0.2.0", "0.3.0"), local_sgd=b"# the next one\n")
    said = refusal(build(tree, tmp_path / "out", check=False, TORCHFT_BASE_WHEEL=str(other)))
    assert f"{other.name} has a local_sgd.py (sha256 " in said
    assert "TORCHFT_BASE_UNTESTED=1" in said
    build(tree, tmp_path / "out", TORCHFT_BASE_WHEEL=str(other), TORCHFT_BASE_UNTESTED="1")
    inside = contents(next((tmp_path / "out").iterdir()))
    assert inside["torchft/_upstream_local_sgd.py"] == b"# the next one\n"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TORCHFT_BASE": "torch==2.9"}, "TORCHFT_BASE is 'torch==2.9': pass torchft==VERSION or"),
        ({"TORCHFT_BASE_WHEEL": "here.whl"}, "TORCHFT_BASE_WHEEL is 'here.whl': pass the absolute path"),
        ({"TORCHFT_BASE_WHEEL": "{tmp}/none"}, "TORCHFT_BASE_WHEEL is '{tmp}/none': pass the absolute path"),
        ({"TORCHFT_BASE_WHEEL": "{tmp}"}, "{tmp} has no wheel for this Python and platform"),
        (
            {"TORCHFT_BASE": NIGHTLY, "TORCHFT_BASE_WHEEL": "{release}"},
            "TORCHFT_BASE_WHEEL is a file, which leaves nothing to choose: unset TORCHFT_BASE.",
        ),
        ({"TORCHFT_BASE": "torchft==0.0.7"}, "pip cannot download torchft==0.0.7: no network, or"),
    ],
)
def test_refuses_a_base_that_is_not_one(
    tree: Path, release: Path, tmp_path: Path, variables: dict[str, str], said: str
) -> None:
    filled = {name: value.format(tmp=tmp_path, release=release) for name, value in variables.items()}
    result = build(tree, tmp_path / "out", check=False, **filled)
    assert refusal(result).startswith("torchft: " + said.format(tmp=tmp_path))


def test_refuses_a_file_that_is_not_torchft(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "thing-1-py3-none-any.whl"
    other.write_bytes(b"not a zip file")
    said = refusal(build(tree, tmp_path / "out", check=False, TORCHFT_BASE_WHEEL=str(other)))
    assert said == f"torchft: {other.name} is not a wheel of TorchFT: File is not a zip file."


@pytest.mark.slow
def test_nightly_is_a_base_but_no_neighbour(
    environment: Environment, wheel: Path, tree: Path, tmp_path: Path
) -> None:
    build(tree, tmp_path / "out", TORCHFT_BASE=NIGHTLY)
    on_nightly = contents(next((tmp_path / "out").iterdir()))
    run(sys.executable, "-m", "pip", "download", "--no-deps", NIGHTLY, cwd=tmp_path)
    nightly = next(tmp_path.glob("torchft_nightly-*.whl"))
    theirs = {name: data for name, data in contents(nightly).items() if name.startswith("torchft/")}
    theirs["torchft/_upstream_local_sgd.py"] = theirs.pop("torchft/local_sgd.py")
    assert {name: on_nightly[name] for name in theirs} == theirs

    environment.install(nightly)
    for what in ([tree], ["-e", tree]):
        said = refusal(environment.install(*what, check=False))
        assert said.startswith(
            f"torchft: torchft-nightly 2026.10.26 in {environment.site} owns the same files"
        )
        assert "pip uninstall -y torchft-nightly torchft" in said
    # A wheel from elsewhere is not built here: only importing can tell.
    environment.install(wheel)
    ran = environment.python("-c", "import torchft.local_sgd", check=False)
    said = ran.stdout.splitlines()[-1]
    assert said.startswith(
        f"ImportError: torchft-nightly 2026.10.26 in {environment.site} owns the same files"
    )
    environment.pip("uninstall", "-y", "torchft-nightly", "torchft")
    environment.install(wheel)
    environment.python("-c", "import torchft.local_sgd")


def test_checkout_that_was_never_installed_says_so(environment: Environment, tree: Path) -> None:
    ran = environment.python("-c", "import torchft.local_sgd", cwd=tree, check=False)
    said = ran.stdout.splitlines()[-1]
    assert said.startswith("ImportError: this is a checkout of the patched torchft that is not installed in")
    assert "pip install -e ." in said
