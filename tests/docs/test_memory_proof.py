"""The memory of the real LocalSGD at the size of real models is what the report and its page say."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import model_shapes
import pytest
import torch
from docs_blocks import block, prose
from places import ROOT

from torchft._staging.units import MIB
from torchft.local_sgd_memory import staging_memory


@pytest.mark.parametrize("name", model_shapes.PUBLISHED_TOTALS)
def test_shapes_add_up_to_the_published_totals(name: str) -> None:
    with torch.device("meta"):
        model = getattr(model_shapes, name)()
    total = model_shapes.PUBLISHED_TOTALS[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == total
    assert f"{total:,} parameters" in str(staging_memory(model))


# Rows of the table, by model, ranks and window.
Proof = dict[tuple[str, int, str], dict[str, Any]]

ON_ONE, ON_EIGHT = ("Llama 3 8B", 1, "M"), ("Llama 3 8B", 8, "M")
IN_A_WINDOW, ON_THE_HOST = ("Llama 3 8B", 8, "1024 MiB"), ("Llama 3 8B", 8, "none")
LARGE, LARGE_ON_THE_HOST = ("Llama 3.1 405B", 512, "M"), ("Llama 3.1 405B", 512, "none")
EXPERTS = ("DeepSeek-V3 671B", 64, "M")
# Their cases of the command.
SMALL_ROWS = {0: [ON_ONE], 1: [ON_EIGHT, IN_A_WINDOW, ON_THE_HOST]}
LARGE_ROWS = {9: [LARGE, LARGE_ON_THE_HOST], 11: [EXPERTS]}


@pytest.fixture(scope="module", params=[SMALL_ROWS, pytest.param(LARGE_ROWS, marks=pytest.mark.slow)])
def proof(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Proof:
    """Some rows of the table."""
    path = tmp_path_factory.mktemp("proof") / "proof.json"
    cases = [option for number in request.param for option in ("--case", str(number))]
    python, program = block("memory.rst", "memory_proof.py").split()
    assert python == "python"
    # A process of its own, which has the only simulated device and process group that there may be.
    finished = subprocess.run(
        [sys.executable, program, *cases, "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = json.loads(path.read_text())
    return dict(zip(itertools.chain(*request.param.values()), rows, strict=True))


def test_tracked_memory_is_the_reported_one(proof: Proof) -> None:
    for case in proof.values():
        original, staged = case["reported_device"]
        host = case["reported_host"]
        assert case["original"] == tracked(original, 0), case["row"]
        assert case["staged"] == tracked(staged, host), case["row"]
        assert case["rejected"] == tracked(staged, host), case["row"]
        assert host == original
        assert staged < original / 3
        assert (staged == 0) == case["way"]["allreduce_to_cpu"]


def tracked(device: int, host: int) -> dict[str, int]:
    return {"device_peak": device, "host_peak": host, "device_left": 0, "host_left": 0}


def test_known_figures(proof: Proof) -> None:
    """By hand: float32, the largest parameter is the token embedding."""
    parameters = {key: case["parameters"] for key, case in proof.items()}
    staged = {key: case["staged"]["device_peak"] for key, case in proof.items()}
    if ON_ONE in proof:
        assert parameters[ON_ONE] == 8_030_261_248
        assert proof[ON_ONE]["original"]["device_peak"] == 4 * 8_030_261_248
        assert staged[ON_ONE] == 4 * 128_256 * 4096
        assert staged[ON_EIGHT] == 4 * 128_256 * 4096 / 8
        assert 1000 < staged[IN_A_WINDOW] / MIB <= 1024
        assert staged[ON_THE_HOST] == 0
    else:
        assert parameters[LARGE] == parameters[LARGE_ON_THE_HOST] == 405_853_388_800
        # 128,256 rows are 250.5 per rank, 251 on the first; the norms of 16,384 come out even.
        assert staged[LARGE] == 4 * 251 * 16_384
        assert staged[LARGE_ON_THE_HOST] == 0
        assert parameters[EXPERTS] == 671_026_419_200
        # 4 of 256 experts, of which three tensors hold all: 2048 x 7168 each.
        assert staged[EXPERTS] == 4 * 4 * 2048 * 7168


def test_table_of_the_page(proof: Proof) -> None:
    rows = block("memory.rst", "as reported").splitlines()
    assert len(rows) == 1 + 16
    for (model, ranks, window), case in proof.items():
        (row,) = (row for row in rows if row.startswith(f"{model:<17} {ranks:>5} {window:>8}  "))
        assert row == case["row"].rstrip()
    assert all(row.endswith(" yes") for row in rows[1:])


def test_readme_has_rows_of_the_table() -> None:
    rows = [row.split() for row in block("memory.rst", "as reported").splitlines()]
    readme = prose("README.md")
    for name, ranks, label in [
        ("Llama 3 8B", "1", "Llama 3 8B on one rank"),
        ("Llama 3 8B", "8", "Llama 3 8B, FSDP2 over 8"),
        ("Llama 3 70B", "64", "Llama 3 70B, FSDP2 over 64"),
    ]:
        (row,) = (row for row in rows if row[:5] == [*name.split(), ranks, "M"])
        without, staged, host = (" ".join(row[at : at + 2]) for at in (5, 7, 9))
        assert f"| {label} | {without} | {staged} | {host} |" in readme


def test_worked_example_is_that_of_the_report() -> None:
    report = " ".join(block("memory.rst", "in 723 rounds").split())
    page = prose("local_sgd.rst")
    assert "16 = 16.43 GiB, and M = 128,256 x 8,192 x 4 bytes / 16 = 250.50 MiB" in page
    assert "S, all of a rank 16.43 GiB float32 M, the largest 250.50 MiB" in report
    assert "8 x 16.43 = 131.4 GiB" in page
    assert "8 ranks per host 131.42 GiB" in report
    assert "2 x 16.43 = 32.9 GiB" in page
    assert "committed 32.85 GiB" in report


def test_commands_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(block("memory.rst", "def build"))
    plain = block("memory.rst", "--shards 16 --ranks-per-host 8 --host-memory 1TiB\n")
    assert report_of(plain, tmp_path) == block("memory.rst", "in 723 rounds")
    with_peak = block("memory.rst", "--entry-memory")
    assert report_of(with_peak, tmp_path) == block("memory.rst", "in 17 rounds")

    page = prose("memory.rst")
    total, largest, saved = figures(report_of(block("memory.rst", "--shards 512"), tmp_path))
    assert f"It reports S = {total} and M = {largest} for the fullest rank, saved {saved}." in page
    total, largest, _ = figures(report_of(block("memory.rst", "my_model:build"), tmp_path))
    assert f"it reports S = {total} and M = {largest}." in page


def figures(report: str) -> tuple[str, ...]:
    """S, M and the share that is saved, as a report prints them."""
    rows = (r"S, all of a rank +(\S+ \S+)", r"M, the largest +(\S+ \S+)", r"saved +\S+ \S+ +(\S+ %)")
    found = re.search(".*".join(rows), report, re.DOTALL)
    assert found is not None, report
    return found.groups()


def report_of(command: str, folder: Path) -> str:
    """What a command of the page prints, with the modules of this folder."""
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "PYTHONPATH=benchmarks"
    assert words[1:4] == ["python", "-m", "torchft.local_sgd_memory"]
    finished = subprocess.run(
        [sys.executable, *words[2:]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"benchmarks{os.pathsep}{folder}", "LOCAL_WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.stderr == ""
    return finished.stdout
