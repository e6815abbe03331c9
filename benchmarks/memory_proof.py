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
# Of these models only the smallest is ever trained unsharded.
CASES: list[tuple[str, int, Optional[float]]] = [
    ("Llama 3 8B", 1, None),
    *((name, ranks, None) for name in MODELS for ranks in (8, 64, 512)),
    ("Llama 3 8B", 8, 1024),
]


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
    """One model on so many ranks: what was tracked, and what was expected of it.

    Attributes:
        model: its name.
        ranks: over how many ranks it is sharded; 1: not at all.
        parameters: number of parameters of the whole model.
        original: a synchronization without staging.
        staged: one with staging, committed.
        rejected: one with staging, rejected.
        window_mb: ``offload_window_mb`` of the two, MiB.
        reported_device: what the report says of the device without and with staging, in bytes.
        reported_host: what the report says of the host, in bytes.
    """

    model: str
    ranks: int
    parameters: int
    original: Tracked
    staged: Tracked
    rejected: Tracked
    window_mb: Optional[float]
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


def prove(name: str, ranks: int, window_mb: Optional[float] = None) -> Result:
    """Runs the synchronizations of one model.

    Args:
        name: one of ``MODELS``.
        ranks: over how many ranks to shard it.
        window_mb: ``offload_window_mb``, MiB.

    Raises:
        AssertionError: the report differs between the model to be sharded and the sharded one.
    """
    with torch.device("meta"):
        model = MODELS[name]()
    planned = staging_memory(model, shards=ranks, offload_window_mb=window_mb)
    staging = {"offload_averaged_parameters_to_cpu": True, "offload_window_mb": window_mb}
    with FakeTensorMode():
        place(model, ranks)
        report = staging_memory(model, offload_window_mb=window_mb)
        assert figures(report) == figures(planned), (figures(report), figures(planned))
        # Not counted: the first time that an operator of DTensor meets a shape, it makes fake tensors of the
        # global size, which real training does not have.
        synchronize(model)
        return Result(
            model=name,
            ranks=ranks,
            parameters=report.parameters,
            original=synchronize(model),
            staged=synchronize(model, **staging),
            rejected=synchronize(model, commits=False, **staging),
            window_mb=window_mb,
            reported_device=(report.device_bytes_original, report.device_bytes_staged),
            reported_host=report.host_bytes,
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
    window = "M" if result.window_mb is None else f"{result.window_mb:g} MiB"
    return (
        f"{result.model:<17} {result.ranks:>5} {window:>8}  {format_bytes(result.original.device_peak):>16} "
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
        help=f"row of the table, 0 to {len(CASES) - 1}; may be repeated (default: all)",
    )
    parser.add_common("--json")
    arguments = parser.parse_args(argv)
    cli.check_output_file("--json", arguments.json)

    _setup_privateuseone_for_python_backend(DEVICE)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(ranks for _, ranks, _ in CASES))
    print(HEADER, flush=True)
    results = []
    for number in arguments.case or range(len(CASES)):
        result = prove(*CASES[number])
        print(row(result), flush=True)
        results.append(result)
    dist.destroy_process_group()
    if arguments.json is not None:
        cli.write_json(arguments.json, [{**asdict(r), "holds": r.holds, "row": row(r)} for r in results])
    return 0 if all(result.holds for result in results) else 1


if __name__ == "__main__":
    sys.exit(cli.run(PROG, main))
