"""Fifty synchronizations of two real replica groups, with the bytes in use before, during and after each.

Some of them fail in the middle, in all groups. The groups have different windows, in one quorum.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import torch
from averaging_models import Parameters, random_tensor
from replica_threads import Replica, run_replicas
from torch import nn

from torchft._staging.units import MIB
from torchft.local_sgd import LocalSGD
from torchft.local_sgd_memory import StagingMemory, staging_memory
from torchft.process_group import ProcessGroupGloo

SYNCHRONIZATIONS = 50
# MiB; one per group
WINDOWS = (None, 3)
SIZES = (MIB // 4, MIB // 2, MIB // 8, 100)


def fails(number: int) -> bool:
    """Whether a synchronization is made to fail."""
    return number % 5 == 3


@dataclass(frozen=True)
class Synchronization:
    """One synchronization of one group. Bytes, beyond what was in use before it.

    Attributes:
        committed: how the vote ended.
        device_peak: most on the device at once.
        device_left: left on the device afterwards.
        host_at_vote: in use on the host when the vote begins, by all groups together.
        host_left: left on the host afterwards, by all groups together.
    """

    committed: bool
    device_peak: int
    device_left: int
    host_at_vote: int
    host_left: int


@dataclass(frozen=True)
class DeviceMeter:
    """How a group reads the bytes of its device: in use, the peak, and a new peak from now on."""

    alive: Callable[[], int]
    peak: Callable[[], int]
    reset_peak: Callable[[], None]


def failing(group: type[ProcessGroupGloo]) -> Callable[[], ProcessGroupGloo]:
    """Makes process groups whose collectives raise while ``collectives_left`` is used up."""

    class FailingProcessGroup(group):  # type: ignore[misc, valid-type]
        collectives_left: Optional[int] = None

        def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
            if self.collectives_left is not None:
                if self.collectives_left == 0:
                    raise RuntimeError("a collective that was to fail")
                self.collectives_left -= 1
            return super().allreduce(tensors, opts)

    return FailingProcessGroup


class _MallocInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def host_bytes() -> int:
    """Returns what this process has in use from malloc, memory of CPU tensors included."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallocInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def settled(bytes_in_use: Callable[[], int], entry: int) -> int:
    """Returns what is more in use than at entry, once it is nothing or a second is over.

    Threads of the Manager drop their references to a reduced tensor a little after ``wait()``.
    """
    deadline = time.monotonic() + 1
    while bytes_in_use() > entry and time.monotonic() < deadline:
        time.sleep(0.001)
    return bytes_in_use() - entry


def synchronize(
    replica: Replica, device: torch.device, meter: DeviceMeter
) -> tuple[StagingMemory, list[Synchronization]]:
    """Runs all synchronizations of one group."""
    model: nn.Module = Parameters(
        random_tensor(100 * replica.index + number, size).to(device) for number, size in enumerate(SIZES)
    )
    replica.model = model
    local_sgd = LocalSGD(
        replica.manager,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        sync_every=1,
        offload_averaged_parameters_to_cpu=True,
        offload_window_mb=WINDOWS[replica.index],
    )
    should_commit = replica.manager.should_commit
    votes: list[tuple[int, bool]] = []

    def vote() -> bool:
        in_use = host_bytes()
        votes.append((in_use, should_commit()))
        return votes[-1][1]

    replica.manager.should_commit = vote  # type: ignore[method-assign]

    results = []
    for number in range(SYNCHRONIZATIONS):
        replica.barrier.wait()
        replica.process_group.collectives_left = 2 if fails(number) else None  # type: ignore[attr-defined]
        host, alive = host_bytes(), meter.alive()
        meter.reset_peak()
        replica.barrier.wait()
        local_sgd.sync()
        peak = meter.peak() - alive
        replica.barrier.wait()
        left = settled(meter.alive, alive)
        # Simulated devices are host memory themselves, and the host's bytes are those of all groups.
        replica.barrier.wait()
        results.append(
            Synchronization(
                committed=votes[-1][1],
                device_peak=peak,
                device_left=left,
                host_at_vote=votes[-1][0] - host,
                host_left=host_bytes() - host,
            )
        )
    report = staging_memory(model, offload_window_mb=WINDOWS[replica.index])
    return report, results


def on_simulated_device() -> list[tuple[StagingMemory, list[Synchronization]]]:
    """Runs the groups on simulated devices, one each."""
    import simulated_accelerator

    def body(replica: Replica) -> tuple[StagingMemory, list[Synchronization]]:
        memory = simulated_accelerator.memory(replica.index)
        meter = DeviceMeter(lambda: memory.alive, lambda: memory.peak, memory.reset_peak)
        return synchronize(replica, simulated_accelerator.device(replica.index), meter)

    return run_replicas(len(WINDOWS), body, failing(simulated_accelerator.SimulatedProcessGroupGloo))


def on_cuda() -> list[tuple[StagingMemory, list[Synchronization]]]:
    """Runs the groups on one CUDA device; its bytes are those of both groups."""

    def body(replica: Replica) -> tuple[StagingMemory, list[Synchronization]]:
        device = torch.device("cuda", 0)

        def peak() -> int:
            torch.cuda.synchronize(device)
            return torch.cuda.max_memory_allocated(device)

        meter = DeviceMeter(
            lambda: torch.cuda.memory_allocated(device),
            peak,
            lambda: torch.cuda.reset_peak_memory_stats(device),
        )
        return synchronize(replica, device, meter)

    return run_replicas(len(WINDOWS), body, failing(ProcessGroupGloo))
