"""TorchTitan trains two replica groups under LocalSGD on the CPU, with the flag and without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("TorchTitan needs Python 3.11", allow_module_level=True)

from titan_configs import write_tokenizer
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torchft import _child_process
from torchft._lighthouse import LighthouseProcess

GROUPS = 2
# Seconds for one job; it takes about ten. A Manager that waits in vain gives up after 60.
LIMIT = 150
FLAG = "--fault_tolerance.local_sgd_offload_to_cpu"

pytestmark = pytest.mark.timeout(2 * LIMIT + 60)


@dataclass
class RankRecord:
    """What one rank of one group recorded; see titan_launcher.py."""

    constructed: list[dict[str, Any]]
    losses: list[float]
    norms: list[float]
    committed: list[int]

    @classmethod
    def read(cls, path: Path) -> RankRecord:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        synchronized = [line for line in lines if line["event"] == "synchronized"]
        return cls(
            constructed=[line for line in lines if line["event"] == "constructed"],
            losses=[line["loss"] for line in lines if line["event"] == "step"],
            norms=[line["norm"] for line in synchronized],
            committed=[line["manager_step"] for line in synchronized],
        )


# Indexed by replica group, then by rank.
Job = list[list[RankRecord]]


def run_job(folder: Path, config: str, ranks: int, sync_steps: int, steps: int, *flags: str) -> Job:
    """Trains all groups to the end; fails with the end of a rank's log when a rank fails.

    Args:
        folder: for everything that the job writes.
        config: a configuration of titan_configs.py.
        ranks: ranks per replica group.
        sync_steps: optimizer steps between synchronizations.
        steps: optimizer steps.
        flags: more of TorchTitan's command line.
    """
    write_tokenizer(folder)
    processes: dict[Path, subprocess.Popen[bytes]] = {}
    stores = []
    with ExitStack() as stack:
        lighthouse = stack.enter_context(LighthouseProcess(min_replicas=GROUPS))
        stack.callback(lambda: _child_process.stop(list(processes.values())))
        for group in range(GROUPS):
            # As under torchrun: this process holds the store of a group, on a port that is free for sure.
            store = TCPStore(
                "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT)
            )
            stores.append(store)
            for rank in range(ranks):
                name = folder / f"group{group}_rank{rank}"
                log = stack.enter_context(open(f"{name}.log", "wb"))
                processes[name] = _child_process.spawn(
                    [
                        *["-m", "titan_launcher", "--module", "titan_configs", "--config", config],
                        *["--hf_assets_path", str(folder), "--dump_folder", f"{folder}/dump{group}"],
                        *["--training.steps", str(steps), "--debug.seed", "0", "--checkpoint.enable"],
                        "--profiler.no-enable_profiling",
                        *["--fault_tolerance.replica_id", str(group)],
                        *["--fault_tolerance.group_size", str(GROUPS)],
                        *["--fault_tolerance.min_replica_size", str(GROUPS)],
                        *["--fault_tolerance.process_group", "gloo"],
                        *["--fault_tolerance.process_group_timeout_ms", "60000"],
                        *["--fault_tolerance.semi_sync_method", "local_sgd"],
                        *["--fault_tolerance.sync_steps", str(sync_steps)],
                        *flags,
                    ],
                    env={
                        **os.environ,
                        "PYTHONPATH": os.path.dirname(__file__),
                        "OMP_NUM_THREADS": "1",
                        "TORCHFT_LIGHTHOUSE": lighthouse.address,
                        "TITAN_RECORD": f"{name}.json",
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(ranks),
                        "MASTER_ADDR": "localhost",
                        "MASTER_PORT": str(store.port),
                        "TORCHELASTIC_USE_AGENT_STORE": "True",
                        "TORCHELASTIC_RESTART_COUNT": "0",
                    },
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        deadline = time.monotonic() + LIMIT
        while any(process.poll() is None for process in processes.values()):
            # Not one after the other: a rank that fails leaves the others waiting for it.
            for name, process in processes.items():
                assert process.poll() in (None, 0), f"{name} failed:\n{_log(name)}"
            assert time.monotonic() < deadline, "\n".join(
                f"{name} hangs:\n{_log(name)}" for name in processes
            )
            time.sleep(0.1)
        for name, process in processes.items():
            assert process.returncode == 0, f"{name} failed:\n{_log(name)}"
    return [
        [RankRecord.read(folder / f"group{group}_rank{rank}.json") for rank in range(ranks)]
        for group in range(GROUPS)
    ]


def _log(name: Path) -> str:
    return Path(f"{name}.log").read_text(errors="replace")[-4000:]


@pytest.fixture(scope="module")
def one_rank_off(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Groups of one rank, two synchronizations; two tests compare with it."""
    return run_job(tmp_path_factory.mktemp("off"), "staging", 1, 2, 4)


def check_trained(job: Job, steps: int, synchronizations: int) -> None:
    """All steps were taken, all synchronizations committed, and the groups agree after each of them."""
    for group in job:
        for rank in group:
            assert len(rank.constructed) == 1
            assert rank.constructed[0]["async_quorum"] is False
            assert len(rank.losses) == steps
            assert rank.committed == list(range(1, synchronizations + 1))
    for first, second in zip(*job):
        assert first.norms == second.norms
    # Each group trains on data of its own.
    assert job[0][0].losses != job[1][0].losses


def check_same_results(job: Job, other: Job) -> None:
    for group, other_group in zip(job, other):
        for rank, other_rank in zip(group, other_group):
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
