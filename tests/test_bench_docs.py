"""The published tables say what the committed measurements say."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from torchft._bench_results import Results
from torchft._bench_tables import report

CHECKOUT = Path(__file__).resolve().parent.parent
MEASURED = sorted((CHECKOUT / "benchmarks").glob("*.json"))


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_tables_are_made_from_the_measurements(path: Path) -> None:
    results = Results.read(str(path))
    assert report(results) + "\n" == path.with_suffix(".txt").read_text(), (
        f"run python -m torchft.local_sgd_bench --from-json benchmarks/{path.name} "
        f"> benchmarks/{path.stem}.txt"
    )
    assert not results.problems()
    assert results.pairs >= 20


def test_the_page_shows_a_table_of_both_models() -> None:
    assert {Results.read(str(path)).options["model"] for path in MEASURED} >= {"rfc", "many"}
    page = (CHECKOUT / "docs" / "source" / "bench.rst").read_text()
    for name in ("cpu-rfc", "cpu-many"):
        assert f"literalinclude:: ../../benchmarks/{name}.txt" in page


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
