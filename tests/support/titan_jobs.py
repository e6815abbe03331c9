"""Jobs of two replica groups, each rank a process that runs titan_launcher.py."""

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
# Seconds for one job; it takes about ten. A Manager that waits in vain gives up after 60.
LIMIT = 150
FLAG = "--fault_tolerance.local_sgd_offload_to_cpu"


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
        stack.callback(lambda: child_process.stop(list(processes.values())))
        for group in range(GROUPS):
            # As under torchrun: this process holds the store of a group, on a port that is free for sure.
            store = TCPStore(
                "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT)
            )
            stores.append(store)
            for rank in range(ranks):
                name = folder / f"group{group}_rank{rank}"
                log = stack.enter_context(open(f"{name}.log", "wb"))
                processes[name] = child_process.spawn(
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
                        "PYTHONPATH": str(SUPPORT),
                        "OMP_NUM_THREADS": "1",
                        "TORCHFT_LIGHTHOUSE": lighthouse.address,
                        "TITAN_RECORD": str(folder / f"group{group}"),
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
        finish(processes)
    return records(folder, ranks)


def finish(processes: dict[Path, subprocess.Popen[bytes]]) -> None:
    """Waits for all processes; fails with the end of the log as soon as one of them fails.

    Args:
        processes: each with its log file, without the suffix.
    """
    deadline = time.monotonic() + LIMIT
    while any(process.poll() is None for process in processes.values()):
        # Not one after the other: a rank that fails leaves the others waiting for it.
        for name, process in processes.items():
            assert process.poll() in (None, 0), f"{name} failed:\n{_log(name)}"
        assert time.monotonic() < deadline, "\n".join(f"{name} hangs:\n{_log(name)}" for name in processes)
        time.sleep(0.1)
    for name, process in processes.items():
        assert process.returncode == 0, f"{name} failed:\n{_log(name)}"


def records(folder: Path, ranks: int) -> Job:
    """What the ranks of all groups recorded in ``folder``."""
    return [
        [RankRecord.read(folder / f"group{group}_rank{rank}.json") for rank in range(ranks)]
        for group in range(GROUPS)
    ]


def _log(name: Path) -> str:
    return Path(f"{name}.log").read_text(errors="replace")[-4000:]


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
