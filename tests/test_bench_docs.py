"""The published tables say what the committed measurements say."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchft._bench_results import Results

CHECKOUT = Path(__file__).resolve().parent.parent
MEASURED = sorted((CHECKOUT / "benchmarks").glob("*.json"))


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the documented command makes of the measurements."""
    folder = tmp_path_factory.mktemp("figures")
    subprocess.run(
        ["make", "-s", "-C", "docs", "figures"]
        + [f"PYTHON={sys.executable}", f"TABLES={folder}", f"PICTURES={folder}"],
        cwd=CHECKOUT,
        check=True,
        timeout=200,
    )
    return folder


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_tables_are_made_from_the_measurements(path: Path, figures: Path) -> None:
    made = (figures / f"{path.stem}.txt").read_text()
    assert made == path.with_suffix(".txt").read_text(), "run make -C docs figures"


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_measurements_are_sound(path: Path) -> None:
    results = Results.read(str(path))
    assert not results.problems()
    assert results.pairs >= 20


def test_all_pictures_are_made_anew(figures: Path) -> None:
    """Each picture of the pages is one that the command makes, in the size in which it is committed."""
    pages = "".join(page.read_text() for page in (CHECKOUT / "docs" / "source").glob("*.rst"))
    shown = set(re.findall(r"\.\. image:: (\S+)", pages))
    assert shown == {path.name for path in figures.glob("*.png")}
    for name in shown:
        # Width and height; the rest depends on fonts and on the version of matplotlib.
        assert _size(figures / name) == _size(CHECKOUT / "docs" / "source" / name)


def _size(png: Path) -> bytes:
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG")
    return data[16:24]


def test_readme_quotes_the_measurements() -> None:
    results = Results.read(str(CHECKOUT / "benchmarks" / "cpu-rfc.json"))
    staged, window = (results.summary(case).sync_ratio.median for case in ("staged", "window 0"))
    readme = " ".join((CHECKOUT / "README.md").read_text().split())
    assert f"takes {staged:.2f} times as long, and {window:.2f} times with `offload_window_mb=0`" in readme


@pytest.mark.parametrize(
    ("name", "total", "largest"), [("half_gigabyte", 506, 125), ("two_gigabytes", 2024, 500)]
)
def test_models_for_a_gpu_have_their_sizes(
    monkeypatch: pytest.MonkeyPatch, name: str, total: int, largest: int
) -> None:
    monkeypatch.syspath_prepend(str(CHECKOUT / "benchmarks"))
    with torch.device("meta"):
        model, _ = getattr(importlib.import_module("gpu_models"), name)()
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert (sum(sizes) // 1024**2, max(sizes) // 1024**2) == (total, largest)
