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

from titan_jobs import FLAG, GROUPS, LIMIT, Job, check_trained, run_job

pytestmark = pytest.mark.timeout(2 * LIMIT + 60)


@pytest.fixture(scope="module")
def one_rank_off(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Groups of one rank, two synchronizations; two tests compare with it."""
    return run_job(tmp_path_factory.mktemp("off"), "staging", 1, 2, 4)


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


def test_flag_off_is_titans_own_trainer(one_rank_off: Job, tmp_path: Path) -> None:
    theirs = run_job(tmp_path, "titan", 1, 2, 4)
    check_trained(one_rank_off, steps=4, synchronizations=2)
    check_same_results(one_rank_off, theirs)
    assert given(one_rank_off) == given(theirs) == [{}] * GROUPS


def test_one_rank(one_rank_off: Job, tmp_path: Path) -> None:
    on = run_job(tmp_path, "staging", 1, 2, 4, FLAG, "--fault_tolerance.local_sgd_offload_window_mb", "0.5")
    check_trained(on, steps=4, synchronizations=2)
    check_same_results(on, one_rank_off)
    assert given(on) == [{"offload_averaged_parameters_to_cpu": True, "offload_window_mb": 0.5}] * GROUPS


@pytest.mark.slow
def test_two_ranks_and_a_synchronization_each_step(tmp_path: Path) -> None:
    jobs = {}
    for name, flags in {"off": [], "on": [FLAG]}.items():
        (tmp_path / name).mkdir()
        jobs[name] = run_job(tmp_path / name, "staging", 2, 1, 3, *flags)
        check_trained(jobs[name], steps=3, synchronizations=3)
    check_same_results(jobs["on"], jobs["off"])
    assert given(jobs["off"]) == [{}] * 2 * GROUPS
    assert given(jobs["on"]) == (
        [{"offload_averaged_parameters_to_cpu": True, "offload_window_mb": None}] * 2 * GROUPS
    )
    # Two shards of one model, not two copies.
    assert jobs["on"][0][0].norms != jobs["on"][0][1].norms
