"""Runs the real LocalSGD at the size of real models, and compares the memory it takes with the report.

    python benchmarks/memory_proof.py

prints the table of the page "LocalSGD memory". Tensors are fake: they have shape, type and device and no
data, so a synchronization of 671 billion parameters takes seconds and next to no memory. PyTorch's MemTracker
watches which of them are alive. It knows nothing of the report, and the report knows nothing of it.

Only the Manager is a stand-in, since tensors without data can't be sent. LocalSGD, its buffers and the shards
(DTensors as FSDP2 lays them out, on a fake process group) are the real ones. The rank looked at is the first,
whose shards are the largest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional

import model_shapes
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from torchft._launch import cli
from torchft._staging.buffers import local_shard
from torchft._staging.units import format_bytes
from torchft.local_sgd import LocalSGD
from torchft.local_sgd_memory import StagingMemory, staging_memory

PROG = "python benchmarks/memory_proof.py"
DEVICE = "simulated"
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama 3 8B": model_shapes.llama3_8b,
    "Llama 3 70B": model_shapes.llama3_70b,
    "Llama 3.1 405B": model_shapes.llama3_405b,
    "DeepSeek-V3 671B": model_shapes.deepseek_v3_671b,
}


@dataclass(frozen=True)
class Way:
    """A way of staging: ``offload_window_mb``, in MiB, and ``offload_allreduce_to_cpu``."""

    window_mb: Optional[float] = None
    allreduce_to_cpu: bool = False

    def __str__(self) -> str:
        if self.allreduce_to_cpu:
            return "none"
        return "M" if self.window_mb is None else f"{self.window_mb:g} MiB"


MODEL_WINDOW, HOST_ALLREDUCE = Way(), Way(allreduce_to_cpu=True)
# Of these models only the smallest is ever trained unsharded.
CASES: list[tuple[str, int]] = [
    ("Llama 3 8B", 1),
    *((name, ranks) for name in MODELS for ranks in (8, 64, 512)),
]
# A row of the table each; elsewhere the first one alone.
WAYS: dict[tuple[str, int], list[Way]] = {
    ("Llama 3 8B", 8): [MODEL_WINDOW, Way(window_mb=1024), HOST_ALLREDUCE],
    ("Llama 3.1 405B", 512): [MODEL_WINDOW, HOST_ALLREDUCE],
}


class Done:
    """A collective that has ended."""

    def wait(self) -> bool:
        return True


class Manager:
    """Answers as a Manager whose collectives have all ended, and holds on to no tensor."""

    def __init__(self, commits: bool) -> None:
        self._commits = commits

    def start_quorum(self) -> None:
        pass

    def allreduce(self, tensor: torch.Tensor) -> Done:
        return Done()

    def should_commit(self) -> bool:
        return self._commits

    def errored(self) -> None:
        return None


@dataclass(frozen=True)
class Tracked:
    """What MemTracker saw of one synchronization, beyond what was alive before it. All in bytes.

    Attributes:
        device_peak: most on the device at once.
        host_peak: most on the host at once.
        device_left: what is left on the device afterwards.
        host_left: what is left on the host afterwards.
    """

    device_peak: int
    host_peak: int
    device_left: int
    host_left: int


@dataclass(frozen=True)
class Result:
    """One model on so many ranks, staged in one way: what was tracked, and what was expected of it.

    Attributes:
        model: its name.
        ranks: over how many ranks it is sharded; 1: not at all.
        way: in which it is staged.
        parameters: number of parameters of the whole model.
        original: a synchronization without staging.
        staged: one with staging, committed.
        rejected: one with staging, rejected.
        reported_device: what the report says of the device without and with staging, in bytes.
        reported_host: what the report says of the host, in bytes.
    """

    model: str
    ranks: int
    way: Way
    parameters: int
    original: Tracked
    staged: Tracked
    rejected: Tracked
    reported_device: tuple[int, int]
    reported_host: int

    @property
    def holds(self) -> bool:
        """Whether everything that was tracked is what the report says."""
        original, staged = self.reported_device
        return (
            self.original == Tracked(original, 0, 0, 0)
            and self.staged == Tracked(staged, self.reported_host, 0, 0)
            and self.rejected == self.staged
        )


def sharded(parameter: torch.Tensor, mesh: Optional[DeviceMesh]) -> nn.Parameter:
    """Returns a parameter as rank 0 holds it under FSDP2, without a mesh all of it; of fake tensors."""
    if mesh is None:
        return nn.Parameter(torch.empty(parameter.shape, device=DEVICE))
    with unset_fake_temporarily():  # only for speed
        shape = parameter.chunk(mesh.size())[0].shape
    local = torch.empty(shape, device=DEVICE)
    return nn.Parameter(
        DTensor.from_local(local, mesh, [Shard(0)], shape=parameter.shape, stride=parameter.stride())
    )


def place(model: nn.Module, ranks: int) -> None:
    """Replaces the parameters of a model on the meta device by fake ones on the simulated device.

    To be called inside a FakeTensorMode, which is the one that the parameters belong to.
    """
    with unset_fake_temporarily():  # a mesh is made with real tensors
        mesh = DeviceMesh(DEVICE, list(range(ranks))) if ranks > 1 else None
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, sharded(parameter, mesh))


def synchronize(model: nn.Module, commits: bool = True, **options: Any) -> Tracked:
    """Runs one synchronization of the real LocalSGD under MemTracker.

    Args:
        model: of fake parameters.
        commits: how the vote ends.
        options: further arguments of LocalSGD.
    """
    local_sgd = LocalSGD(
        Manager(commits),  # pyright: ignore[reportArgumentType]
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        sync_every=1,
        **options,
    )
    tracker = MemTracker()
    tracker.track_external(*(local_shard(parameter) for parameter in model.parameters()))

    def alive(when: str) -> tuple[int, int]:
        totals = {DEVICE: 0, "cpu": 0}
        for device, snapshot in tracker.get_tracker_snapshot(when).items():
            if device.type in totals:
                totals[device.type] += snapshot["Total"]
        return totals[DEVICE], totals["cpu"]

    before = alive("current")
    with tracker:
        local_sgd.sync()
    peak, after = alive("peak"), alive("current")
    return Tracked(peak[0] - before[0], peak[1] - before[1], after[0] - before[0], after[1] - before[1])


def prove(name: str, ranks: int) -> list[Result]:
    """Runs the synchronizations of one model, in all its ways.

    Args:
        name: one of ``MODELS``.
        ranks: over how many ranks to shard it.

    Raises:
        AssertionError: the report differs between the model to be sharded and the sharded one.
    """
    ways = WAYS.get((name, ranks), [MODEL_WINDOW])
    with torch.device("meta"):
        model = MODELS[name]()
    planned = [reported(model, way, shards=ranks) for way in ways]
    results = []
    with FakeTensorMode():
        place(model, ranks)
        # Not counted: the first time that an operator of DTensor meets a shape, it makes fake tensors of the
        # global size, which real training does not have.
        synchronize(model)
        original = synchronize(model)
        for way, plan in zip(ways, planned, strict=True):
            report = reported(model, way)
            assert figures(report) == figures(plan), (figures(report), figures(plan))
            staging = {
                "offload_averaged_parameters_to_cpu": True,
                "offload_window_mb": way.window_mb,
                "offload_allreduce_to_cpu": way.allreduce_to_cpu,
            }
            results.append(
                Result(
                    model=name,
                    ranks=ranks,
                    way=way,
                    parameters=report.parameters,
                    original=original,
                    staged=synchronize(model, **staging),
                    rejected=synchronize(model, commits=False, **staging),
                    reported_device=(report.device_bytes_original, report.device_bytes_staged),
                    reported_host=report.host_bytes,
                )
            )
    return results


def reported(model: nn.Module, way: Way, shards: int = 1) -> StagingMemory:
    return staging_memory(
        model, shards=shards, offload_window_mb=way.window_mb, allreduce_to_cpu=way.allreduce_to_cpu
    )


def figures(report: StagingMemory) -> tuple[int, ...]:
    """Returns what does not depend on the name of the device."""
    return (
        report.parameters,
        report.total_bytes,
        report.largest_bytes,
        report.device_bytes_original,
        report.device_bytes_staged,
        report.host_bytes,
        report.link_bytes_committed,
        *report.bytes_by_tensor,
    )


HEADER = (
    f"{'model':<17} {'ranks':>5} {'window':>8}  {'device, original':>16} {'device, staged':>14} "
    f"{'host, staged':>12}  as reported"
)


def row(result: Result) -> str:
    """Returns the line of the table: tracked figures, and whether they are those of the report."""
    original = format_bytes(result.original.device_peak)
    return (
        f"{result.model:<17} {result.ranks:>5} {result.way!s:>8}  {original:>16} "
        f"{format_bytes(result.staged.device_peak):>14} {format_bytes(result.staged.host_peak):>12}  "
        f"{'yes' if result.holds else 'NO'}"
    )


def main(argv: Sequence[str]) -> int:
    """Runs the cases, prints the table.

    Args:
        argv: the arguments.

    Returns:
        0, or 1 when a tracked figure is not the reported one.
    """
    parser = cli.Parser(PROG, "Tracks the memory of the real LocalSGD at the size of real models.")
    parser.add_argument(
        "--case",
        action="append",
        type=int,
        choices=range(len(CASES)),
        metavar="N",
        help=f"model and ranks of the table, 0 to {len(CASES) - 1}; may be repeated (default: all)",
    )
    parser.add_common("--json")
    arguments = parser.parse_args(argv)
    cli.check_output_file("--json", arguments.json)

    _setup_privateuseone_for_python_backend(DEVICE)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(ranks for _, ranks in CASES))
    print(HEADER, flush=True)
    results = []
    for number in arguments.case or range(len(CASES)):
        proved = prove(*CASES[number])
        print(*map(row, proved), sep="\n", flush=True)
        results += proved
    dist.destroy_process_group()
    if arguments.json is not None:
        cli.write_json(arguments.json, [{**asdict(r), "holds": r.holds, "row": row(r)} for r in results])
    return 0 if all(result.holds for result in results) else 1


if __name__ == "__main__":
    sys.exit(cli.run(PROG, main))
