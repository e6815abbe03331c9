"""TorchTitan jobs of two replica groups on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from places import SUPPORT
from titan_configs import write_tokenizer
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torchft._launch import child_process
from torchft._launch.lighthouse import LighthouseProcess

GROUPS = 2
# Seconds for jobs that run at once; they take about twenty. A Manager that waits in vain gives up after 60.
LIMIT = 150
FLAG = "--fault_tolerance.local_sgd_offload_to_cpu"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"}


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


def run_jobs(
    folder: Path, jobs: dict[str, list[str]], *, ranks: int, sync_steps: int, steps: int
) -> dict[str, Job]:
    """Trains all groups of all jobs to the end, at once; fails with the end of the logs when a rank fails.

    Args:
        folder: gets a folder for each job, with the logs.
        jobs: by name: a configuration of titan_configs.py, and more of TorchTitan's command line.
        ranks: ranks per replica group.
        sync_steps: optimizer steps between synchronizations.
        steps: optimizer steps.
    """
    stores = []
    plan: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for job, (config, *flags) in jobs.items():
            home = folder / job
            home.mkdir()
            write_tokenizer(home)
            lighthouse = stack.enter_context(LighthouseProcess(min_replicas=GROUPS))
            for group in range(GROUPS):
                # As under torchrun: this process holds the store of a group, on a port that is free for sure.
                store = TCPStore(
                    "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT)
                )
                stores.append(store)
                plan += [
                    {
                        "arguments": [
                            *["--module", "titan_configs", "--config", config],
                            *["--hf_assets_path", str(home), "--dump_folder", f"{home}/dump{group}"],
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
                        "environment": {
                            "TORCHFT_LIGHTHOUSE": lighthouse.address,
                            "TITAN_RECORD": str(home / f"group{group}"),
                            "RANK": str(rank),
                            "LOCAL_RANK": str(rank),
                            "WORLD_SIZE": str(ranks),
                            "MASTER_ADDR": "localhost",
                            "MASTER_PORT": str(store.port),
                            "TORCHELASTIC_USE_AGENT_STORE": "True",
                            "TORCHELASTIC_RESTART_COUNT": "0",
                        },
                        "log": str(home / f"group{group}_rank{rank}.log"),
                    }
                    for rank in range(ranks)
                ]
        (folder / "ranks.json").write_text(json.dumps(plan))
        log = stack.enter_context(open(folder / "start.log", "wb"))
        process = child_process.spawn(
            ["-m", "titan_ranks", str(folder / "ranks.json")], env=ENVIRONMENT, stdout=log, stderr=log
        )
        stack.callback(lambda: child_process.stop([process]))
        finish([process], folder)
    return {job: records(folder / job, ranks) for job in jobs}


def finish(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Waits for all processes; fails with the end of all logs in ``folder`` as soon as one of them fails."""
    deadline = time.monotonic() + LIMIT
    # Not one after the other: one that fails leaves the others waiting for it.
    while any(process.poll() is None for process in processes):
        assert time.monotonic() < deadline, f"hangs:\n{_logs(folder)}"
        assert all(process.returncode in (None, 0) for process in processes), _logs(folder)
        time.sleep(0.1)
    assert all(process.returncode == 0 for process in processes), _logs(folder)


def records(folder: Path, ranks: int) -> Job:
    """What the ranks of all groups recorded in ``folder``."""
    return [
        [RankRecord.read(folder / f"group{group}_rank{rank}.json") for rank in range(ranks)]
        for group in range(GROUPS)
    ]


def _logs(folder: Path) -> str:
    logs = sorted(folder.rglob("*.log"))
    return "\n".join(f"{log}:\n{log.read_text(errors='replace')[-4000:]}" for log in logs)


def check_trained(job: Job, steps: int, synchronizations: int) -> None:
    """All steps were taken, all synchronizations committed, and the groups agree after each of them."""
    for group in job:
        for rank in group:
            assert len(rank.constructed) == 1
            assert rank.constructed[0]["async_quorum"] is False
            assert len(rank.losses) == steps
            assert rank.committed == list(range(1, synchronizations + 1))
    for first, second in zip(*job, strict=True):
        assert first.norms == second.norms
    # Each group trains on data of its own.
    assert job[0][0].losses != job[1][0].losses
