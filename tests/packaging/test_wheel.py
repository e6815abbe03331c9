"""What the wheel holds: the release, this tree and nothing else."""

from __future__ import annotations

import os
import tarfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from packaging_builds import VERSION, build
from packaging_environments import copy_tree
from packaging_wheels import contents, dist_info, headers, record, record_hash

pytestmark = pytest.mark.packaging


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


def test_wheel_is_reproducible(wheel: Path, from_disk: dict[str, str], tmp_path: Path) -> None:
    """By another tool, not from an sdist, with other file times, permissions, time zone, locale: the same."""
    other = copy_tree(tmp_path / "a checkout elsewhere")
    for path in other.rglob("*"):
        os.utime(path, (10**9, 10**9))
        path.chmod(0o700 if path.is_dir() else 0o600)
    before = os.umask(0o077)
    try:
        build(other, tmp_path / "out", {**from_disk, "TZ": "Asia/Tokyo", "LC_ALL": "C"})
    finally:
        os.umask(before)
    again = next((tmp_path / "out").iterdir())
    assert (again.name, again.read_bytes()) == (wheel.name, wheel.read_bytes())
