"""The bench as a command: real lighthouse, replica groups and Gloo, at small sizes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from children import gone
from places import ROOT, SUPPORT

from torchft.local_sgd_bench import __main__ as local_sgd_bench

LIMIT = 120
KIB = 1024


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    env.pop("TORCHFT_LIGHTHOUSE", None)
    return env


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchft.local_sgd_bench", "--device", "cpu", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.fixture(scope="module")
def run_of_the_classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, dict[str, Any], Path]:
    """stdout, stderr, JSON and folder of one run that all tests of a good run share."""
    folder = tmp_path_factory.mktemp("bench")
    done = bench(
        *("--model", "bench_models:classifier", "--pairs", "3", "--warm-up", "1", "--sync-every", "2"),
        *("--window-mb", "0", "--window-mb", "0.5"),
        *("--json", str(folder / "r.json"), "--plot", str(folder / "r.png")),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr, json.loads((folder / "r.json").read_text()), folder


def test_every_case_trains_alike(run_of_the_classifier: tuple[str, str, dict[str, Any], Path]) -> None:
    stdout, _, results, _ = run_of_the_classifier
    assert results["cases"] == ["original", "staged", "window 0", "window 0.5"]
    assert stdout.count("identical at every step") == 3
    first = [sample for sample in results["samples"] if sample["case"] == "original"]
    # Training is real: losses change from step to step, and groups see batches of their own.
    losses = {tuple(sample["losses"]) for sample in first}
    assert len(losses) == len(first) == 2 * 4
    assert all(len(sample["losses"]) == 2 for sample in first)
    assert all(norm > 0 for sample in first for norm in sample["gradient_norms"])
    assert results["same_weights"]["0"] == dict.fromkeys(results["cases"], True)


def test_memory_is_the_theory(run_of_the_classifier: tuple[str, str, dict[str, Any], Path]) -> None:
    _, _, results, _ = run_of_the_classifier
    total, largest = results["model"]["total_bytes"], results["model"]["largest_bytes"]
    summary = {case["case"]: case for case in results["summary"]}
    assert (total, largest) == (4 * (8 * 64 + 64 + 64 * 4 + 4), 4 * 8 * 64)
    assert summary["original"]["extra"] == total
    assert summary["staged"]["extra"] == largest
    assert largest * 0.5 < summary["window 0"]["extra"] <= largest
    # slots are aligned
    assert total <= summary["window 0.5"]["extra"] <= total + 4 * 64
    assert summary["original"]["host_buffers"] == 0
    assert all(summary[case]["host_buffers"] == total for case in results["cases"][1:])
    assert all(case["left"] == 0 for case in results["summary"])


def test_all_samples_are_in_the_json(run_of_the_classifier: tuple[str, str, dict[str, Any], Path]) -> None:
    _, _, results, _ = run_of_the_classifier
    assert len(results["samples"]) == 4 * 4 * 2
    # What can be published as it is names no file of this machine.
    assert str(ROOT) not in json.dumps(results)
    assert "r.json" not in json.dumps(results)
    orders = {
        tuple(
            sample["case"]
            for sample in results["samples"]
            if (sample["group"], sample["round"]) == (0, number)
        )
        for number in range(4)
    }
    assert len(orders) > 1, "the order of the cases must change from round to round"
    assert all(sample["sync_milliseconds"] < 1e3 * sample["train_seconds"] for sample in results["samples"])


def test_progress_and_the_machine_are_shown(
    run_of_the_classifier: tuple[str, str, dict[str, Any], Path],
) -> None:
    stdout, stderr, results, folder = run_of_the_classifier
    assert stderr.count("round ") == 4
    assert "round   1/4 (warm-up)  original " in stderr
    assert stdout.startswith(f"torch {results['machine']['torch']}, torchft ")
    assert "OMP_NUM_THREADS=1" in stdout
    assert "cores" in stdout.splitlines()[0]
    assert (folder / "r.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("*.partial"))


def test_the_file_gives_the_same_report_and_plot(
    run_of_the_classifier: tuple[str, str, dict[str, Any], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    stdout, _, _, folder = run_of_the_classifier
    code = local_sgd_bench.main(["--from-json", str(folder / "r.json"), "--plot", str(folder / "again.png")])
    assert code == 0
    assert capsys.readouterr().out == stdout
    assert (folder / "again.png").read_bytes() == (folder / "r.png").read_bytes()


def test_a_case_that_trains_otherwise_fails_the_run(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    done = bench("--model", "bench_models:unequal", "--pairs", "3", "--warm-up", "1", "--json", str(path))
    assert done.returncode == 1
    assert "staged: training differs from original, first at step 3: loss" in done.stderr
    assert "DIFFERENT, first at step 3" in done.stdout
    assert json.loads(path.read_text())["summary"][1]["first_difference"].startswith("first at step 3")


@pytest.mark.slow
def test_nan_in_all_cases_alike_is_no_difference() -> None:
    done = bench("--model", "bench_models:diverging", "--pairs", "1", "--warm-up", "1")
    assert done.returncode == 0, done.stderr


def test_a_group_that_crashes_fails_the_run_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    done = bench("--model", "bench_models:crashing", "--pairs", "2", "--json", str(path))
    assert done.returncode == 1
    assert "group 1 rank 0 failed (exit code 1)" in done.stderr
    assert "RuntimeError: out of luck" in done.stderr
    assert not path.exists()


def test_a_model_that_fails_is_one_line() -> None:
    done = bench("--model", "bench_models:failing")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last == (
        "python -m torchft.local_sgd_bench: building 'bench_models:failing' failed, OSError: no weights "
        "here; pass a callable that takes no arguments"
    )
    assert "Traceback" not in done.stderr


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torchft.local_sgd_bench", "--device", "cpu"),
            *("--model", "bench_models:classifier", "--pairs", "100000", "--json", str(path)),
        ],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        while "round   1/" not in process.stderr.readline():
            assert process.poll() is None
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    assert process.returncode == 130
    assert rest.endswith("python -m torchft.local_sgd_bench: interrupted\n")
    assert gone(children)
    assert not path.exists()
