"""What the bench makes of its samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchft._launch.cli import UserError
from torchft._staging.units import MIB
from torchft.local_sgd_bench.results import Results, Spread
from torchft.local_sgd_bench.tables import report


def sample(case: str, round_number: int, group: int, sync: float, **fields: Any) -> dict[str, Any]:
    return {
        "case": case,
        "round": round_number,
        "group": group,
        "warm_up": round_number == 0,
        "losses": [1.0 + round_number, 2.0],
        "gradient_norms": [0.5, 0.25],
        "train_seconds": sync / 100,
        "sync_milliseconds": sync,
        "rejected": 0,
        "extra": 8 * MIB if round_number == 0 else None,
        "left": 0 if round_number == 0 else None,
        "reserved_before": None,
        "reserved_after": None,
        "host_buffers": 0 if case == "original" else 8 * MIB,
        "resident": 4 * MIB,
        **fields,
    }


@pytest.fixture
def results() -> Results:
    """Three pairs after a warm-up; the ratios are 2, 3 and 1, of the slower group."""
    results = Results(
        machine={"torch": "2", "torchft": "1", "cores": 2, "processor": "P", "environment": {"A": "1"}},
        options={"sync_every": 2, "model": "rfc", "replicas": 2, "process_group": "gloo"},
        cases=["original", "staged"],
        model={"total_bytes": 8 * MIB, "largest_bytes": MIB, "tensors": 9},
        device="cpu",
        same_weights={"0": {"original": True, "staged": True}, "1": {"original": True, "staged": True}},
    )
    for round_number, (original, staged) in enumerate(
        [(1.0, 1000.0), (10.0, 20.0), (10.0, 30.0), (40.0, 40.0)]
    ):
        for group in (0, 1):
            results.samples.append(sample("original", round_number, group, original - group / 2))
            results.samples.append(sample("staged", round_number, group, staged + group - 1))
    return results


def test_quartiles() -> None:
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)


def test_ratios_are_pairwise_of_the_slower_group_and_without_warm_up(results: Results) -> None:
    summary = results.summary("staged")
    assert results.ratios("staged", "sync_milliseconds") == [2.0, 3.0, 1.0]
    assert summary.sync_ratio == Spread(2.0, 1.5, 2.5)
    # not the ratio of medians, which is 3
    assert summary.sync.median / results.summary("original").sync.median == 3.0
    assert summary.steps == 6
    assert summary.steps_per_second == 2 / 0.3
    assert summary.speed.median == 0.5
    assert not results.problems()


def test_added_time_is_spread_over_the_steps(results: Results) -> None:
    # Medians: 10 ms of a synchronization, 30 ms of a staged one, 100 ms of a round of two steps.
    assert results.step_milliseconds == pytest.approx(100 / 2 - 10 / 2)
    assert results.added_per_step("staged", 1) == pytest.approx((20, 20 / (45 + 10)))
    assert results.added_per_step("staged", 100) == pytest.approx((0.2, 0.2 / 45.1))
    lines = report(results).splitlines()
    assert "staged          +20.00 ms (+36.4 %)  +2.00 ms (+4.3 %)  +0.20 ms (+0.4 %)" in lines
    assert "  of original: 45.0 ms, the wait for the quorum included, and its ms / sync_every." in lines


def test_a_rejected_pair_does_not_count(results: Results) -> None:
    for entry in results.samples:
        if entry["case"] == "original" and entry["round"] == 2:
            entry["rejected"] = 1
    assert results.ratios("staged", "sync_milliseconds") == [2.0, 1.0]
    assert (results.pairs, results.rejected) == (2, 1)
    assert "2 pairs, cases interleaved, 1 rejected and repeated" in report(results)


@pytest.mark.parametrize(
    ("what", "words"), [("losses", "loss 7.0 instead of 2.0"), ("gradient_norms", "gradient norm 7.0")]
)
def test_the_first_different_step_is_named(results: Results, what: str, words: str) -> None:
    for entry in results.samples:
        if entry["case"] == "staged" and entry["round"] >= 2 and entry["group"] == 1:
            entry[what][1] = 7.0
    (problem,) = results.problems()
    assert "staged: training differs from original, first at step 6: " in problem
    assert words in problem
    assert "DIFFERENT, first at step 6" in report(results)


def test_nan_equals_itself_also_out_of_a_file(results: Results, tmp_path: Path) -> None:
    for entry in results.samples:
        entry["losses"][0] = float("nan")
    assert not results.problems()
    results.write(str(tmp_path / "r.json"))
    assert not Results.read(str(tmp_path / "r.json")).problems()


def test_different_weights_at_the_end_are_a_problem(results: Results) -> None:
    results.same_weights["1"]["staged"] = False
    assert results.problems() == ["staged: training differs from original, in the weights at the end"]


def test_a_leak_is_a_problem(results: Results) -> None:
    for entry in results.samples:
        if entry["case"] == "staged" and entry["left"] is not None:
            entry["left"] = MIB
    assert results.problems() == [
        "staged: every synchronization left at least 1,048,576 bytes in use on the device"
    ]
    assert "NO, 1.00" in report(results)


def test_the_file_holds_every_sample_and_gives_the_same_report(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results.write(str(path))
    assert json.loads(path.read_text())["samples"] == results.samples
    assert sum(line.startswith('    {"case": ') for line in path.read_text().splitlines()) == 16 + 2
    assert json.loads(path.read_text())["summary"][1]["sync_ratio"]["median"] == 2.0
    assert report(Results.read(str(path))) == report(results)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"summary": 0, "cases": []}', "null"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(UserError, match="is no result of this bench"):
        Results.read(str(path))


def test_a_device_with_statistics_gets_other_columns(results: Results) -> None:
    results.device_statistics = True
    for entry in results.samples:
        entry.update(reserved_before=64 * MIB, reserved_after=96 * MIB)
    text = report(results)
    assert "extra memory" in text
    assert "temporaries" not in text
    assert "64.00 > 96.00" in text
