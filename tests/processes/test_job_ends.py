"""How the main job ends before its time: signals, failures, a loss that is no number."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from children import gone
from job import MODULE, SMALL, Run, results, run
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torchft._launch.lighthouse import LighthouseProcess


@pytest.mark.parametrize(
    ("number", "code", "moment"),
    [
        (signal.SIGINT, 130, "replica groups x"),
        (signal.SIGTERM, 143, "committed"),
        pytest.param(signal.SIGINT, 130, "training starts", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, "committed", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, "replica groups x", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, "killing group", marks=pytest.mark.slow),
    ],
)
def test_signals_stop_everything_within_seconds(
    text: str, number: signal.Signals, code: int, moment: str
) -> None:
    with Run(*SMALL, "--steps", "100000", "--data", text, "--kill-replica-at-step", "400") as job:
        job.wait_for(moment)
        children = job.children()
        begin = time.monotonic()
        # as a terminal does: to the whole foreground process group
        os.killpg(job.process.pid, number)
        assert job.end(timeout=20) == code, job.output
        assert time.monotonic() - begin < 15
        assert gone(children)
        assert "Traceback" not in job.output, job.output


def test_a_failing_rank_is_shown_once_and_leaves_nothing(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with Run(
        *(*SMALL, "--steps", "100000", "--data", text, "--ranks", "2", "--checkpoint", str(folder)),
        *("--checkpoint-every", "1"),
    ) as job:
        job.wait_for("committed")
        children = job.children()
        # a file system that fails in the middle of training
        moved = tmp_path / "moved"
        while True:
            try:
                os.rename(folder, moved)
                folder.write_text("no folder")
                break
            except FileExistsError:
                time.sleep(0.01)
            except IsADirectoryError:
                moved = tmp_path / f"{moved.name}_"
        assert job.end() == 1, job.output
        assert gone(children)
    heads = [line for line in job.lines if re.fullmatch(r"group \d rank \d failed \(exit code 1\)", line)]
    assert len(heads) == 1
    assert job.output.count("Traceback (most recent call last)") >= 1
    assert "committed anything" not in job.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_waits_for_a_peer_dies_at_once(text: str, number: signal.Signals) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with LighthouseProcess(min_replicas=2) as lighthouse:
        rank = subprocess.Popen(
            [sys.executable, "-u", "-m", f"{MODULE}.train", *SMALL, "--steps", "4", "--data", text],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={
                **os.environ,
                **{"RANK": "0", "WORLD_SIZE": "1", "REPLICA_GROUP_ID": "0", "OMP_NUM_THREADS": "1"},
                **{"MASTER_ADDR": "localhost", "TORCHFT_LIGHTHOUSE": lighthouse.address},
                "MASTER_PORT": str(store.port),
            },
        )
        try:
            assert rank.stdout is not None
            assert "starts at step 0" in rank.stdout.readline()
            # four steps take milliseconds: by then it waits in the quorum
            time.sleep(1.0)
            assert rank.poll() is None
            rank.send_signal(number)
            assert rank.wait(5) == -number
        finally:
            rank.kill()
            rank.communicate()


@pytest.mark.slow
def test_a_loss_that_is_no_number_fails_the_run(text: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    output = run(
        *(*SMALL, "--steps", "8", "--data", text, "--learning-rate", "1e30", "--json", str(file)), code=1
    )
    assert "training diverged" in output
    assert results(file)["validation_loss"]["after"] is None
    assert math.isfinite(results(file)["validation_loss"]["before"])
