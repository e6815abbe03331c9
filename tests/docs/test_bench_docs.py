"""The committed measurements are sound, and the README quotes them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from docs_blocks import prose
from places import BENCHMARKS

from torchft.local_sgd_bench.results import Results

MEASURED = sorted(BENCHMARKS.glob("*.json"))


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_measurements_are_sound(path: Path) -> None:
    results = Results.read(str(path))
    assert not results.problems()
    assert results.pairs >= 20


def test_readme_quotes_the_measurements() -> None:
    results = Results.read(str(BENCHMARKS / "cpu-rfc.json"))
    cases = ("staged", "window 0", "host all-reduce")
    staged, window, host = (results.summary(case).sync_ratio.median for case in cases)
    readme = prose("README.md")
    assert f"takes {staged:.2f} times as long, and {window:.2f} times with `offload_window_mb=0`" in readme
    assert f"with `offload_allreduce_to_cpu=True` {host:.2f} times." in readme


@pytest.mark.parametrize(
    ("name", "total", "largest"), [("half_gigabyte", 506, 125), ("two_gigabytes", 2024, 500)]
)
def test_models_for_a_gpu_have_their_sizes(name: str, total: int, largest: int) -> None:
    with torch.device("meta"):
        model, _ = getattr(importlib.import_module("gpu_models"), name)()
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert (sum(sizes) // 1024**2, max(sizes) // 1024**2) == (total, largest)
