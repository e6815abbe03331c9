"""TorchTitan trains two replica groups under LocalSGD on the CPU, with the flag and without it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("TorchTitan needs Python 3.11", allow_module_level=True)
else:
    pytest.register_assert_rewrite("titan_jobs")

from titan_jobs import FLAG, GROUPS, Job, check_trained, run_jobs

# One rank per group, two synchronizations; each test looks at some of them.
ONE_RANK = {
    "titan": ["titan"],
    "off": ["staging"],
    "host": ["staging", FLAG],
    "one_at_a_time": ["staging", FLAG, "--fault_tolerance.local_sgd_offload_allreduce_to_cpu", "False"],
    "window": ["staging", FLAG, "--fault_tolerance.local_sgd_offload_window_mb", "0.5"],
}
# What the log says of a plan.
ON_HOST = "CPU staging is on: 21 parameters reduced on the host; "
ROUNDS = "CPU staging is on: 21 parameters in {} rounds; "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def jobs(folder: Path) -> dict[str, Job]:
    return run_jobs(folder, ONE_RANK, ranks=1, sync_steps=2, steps=4)


def check_same_results(job: Job, other: Job) -> None:
    for group, other_group in zip(job, other, strict=True):
        for rank, other_rank in zip(group, other_group, strict=True):
            assert rank.losses == other_rank.losses
            assert rank.norms == other_rank.norms


def given(job: Job) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in rank.constructed[0].items() if name.startswith("offload")}
        for group in job
        for rank in group
    ]


def check_logged(folder: Path, plan: str, ranks: int) -> None:
    logs = [log.read_text(errors="replace") for log in folder.glob("*.log")]
    assert len(logs) == ranks * GROUPS
    for log in logs:
        assert log.count("CPU staging is on: ") == log.count(plan) == 1


def test_flag_off_is_titans_own_trainer(jobs: dict[str, Job], folder: Path) -> None:
    check_trained(jobs["off"], steps=4, synchronizations=2)
    check_same_results(jobs["off"], jobs["titan"])
    assert given(jobs["off"]) == given(jobs["titan"]) == [{}] * GROUPS
    assert "CPU staging is on" not in (folder / "off" / "group0_rank0.log").read_text(errors="replace")


@pytest.mark.parametrize(
    ("name", "window", "on_host", "plan"),
    [
        ("host", None, True, ON_HOST),
        ("one_at_a_time", None, False, ROUNDS.format(21)),
        ("window", 0.5, False, ROUNDS.format(1)),
    ],
)
def test_flag(
    jobs: dict[str, Job], folder: Path, name: str, window: float | None, on_host: bool, plan: str
) -> None:
    check_trained(jobs[name], steps=4, synchronizations=2)
    check_same_results(jobs[name], jobs["off"])
    switches = {
        "offload_averaged_parameters_to_cpu": True,
        "offload_window_mb": window,
        "offload_allreduce_to_cpu": on_host,
    }
    assert given(jobs[name]) == [switches] * GROUPS
    check_logged(folder / name, plan, ranks=1)


@pytest.mark.slow
def test_two_ranks_and_a_synchronization_each_step(tmp_path: Path) -> None:
    jobs = run_jobs(tmp_path, {"off": ["staging"], "host": ["staging", FLAG]}, ranks=2, sync_steps=1, steps=3)
    for job in jobs.values():
        check_trained(job, steps=3, synchronizations=3)
    check_same_results(jobs["host"], jobs["off"])
    check_logged(tmp_path / "host", ON_HOST, ranks=2)
    # Two shards of one model, not two copies.
    assert jobs["host"][0][0].norms != jobs["host"][0][1].norms
