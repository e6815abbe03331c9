"""Fifty synchronizations of real Managers take what the report says and leave no byte behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import memory_replicas
import pytest
import torch
from memory_replicas import SYNCHRONIZATIONS, fails
from places import SUPPORT

from torchft._staging.units import MIB

# What Python objects, log lines and the Managers' threads may take from malloc during one synchronization.
# The staged copies of one group are 3.5 MiB.
HOST_NOISE = MIB


def test_device_and_host_memory_return_after_every_synchronization() -> None:
    groups = memory_replicas.on_simulated_device()
    staged = sum(report.total_bytes for report, _ in groups)
    for report, synchronizations in groups:
        assert len(synchronizations) == SYNCHRONIZATIONS
        for number, seen in enumerate(synchronizations):
            where = f"synchronization {number}: {seen}"
            assert seen.device_peak == report.device_bytes_staged, where
            assert seen.device_left == 0, where
            assert seen.host_at_vote > report.host_bytes - HOST_NOISE, where
            assert seen.host_left < HOST_NOISE, where
            assert not (fails(number) and seen.committed), where
        # Now and then the first collectives after a failure are rejected in the process group's set-up.
        assert sum(seen.committed for seen in synchronizations) >= SYNCHRONIZATIONS // 2
    # Large enough that a single copy that stays behind would show.
    assert staged > 4 * HOST_NOISE


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_and_host_memory_return_after_every_synchronization() -> None:
    # A process of its own: where a simulated accelerator is registered, PyTorch takes that for the only one.
    code = "import test_memory_replicas; test_memory_replicas.check_cuda()"
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, check=True, timeout=240
    )


def check_cuda() -> None:
    """Checks both groups on one CUDA device, within the rounding of its allocator."""
    rounding = 2 * MIB
    groups = memory_replicas.on_cuda()
    windows = sum(report.device_bytes_staged for report, _ in groups)
    for report, synchronizations in groups:
        for number, seen in enumerate(synchronizations):
            where = f"synchronization {number}: {seen}"
            assert seen.device_peak <= windows + rounding, where
            assert abs(seen.device_left) <= rounding, where
            assert seen.host_at_vote > report.host_bytes - HOST_NOISE, where
            assert seen.host_left < HOST_NOISE, where
        assert sum(seen.committed for seen in synchronizations) >= SYNCHRONIZATIONS // 2
