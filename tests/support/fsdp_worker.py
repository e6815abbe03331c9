"""One rank of test_fsdp.py: staged synchronizations of real FSDP2 shards across two replica groups.

Runs every case with the first ranks of its group that the case needs, each with a Manager of its own, and
tells the parent what it saw. A case's lighthouse URL comes from the command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from averaging_models import Parameters, random_tensor
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchft._launch.replicas import send
from torchft.local_sgd import LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

GROUP = int(os.environ["REPLICA_GROUP_ID"])
RANK = int(os.environ["RANK"])


def uneven(seed: int) -> nn.Module:
    """Dimension 0 does not divide by the ranks; with three ranks one parameter leaves a rank empty."""
    return Parameters([random_tensor(seed, 7, 3), random_tensor(seed + 1, 2, 5), random_tensor(seed + 2, 4)])


class Mlp(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        for number, parameter in enumerate(self.parameters()):
            parameter.data = random_tensor(seed + number, *parameter.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if mesh.ndim == 2:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["fsdp"]
    fully_shard(model, mesh=mesh)
    return model


@contextmanager
def manager(lighthouse: str, mesh: DeviceMesh, ranks: int, store_port: int) -> Iterator[Manager]:
    made = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=2,
        use_async_quorum=False,
        init_sync=False,
        timeout=timedelta(seconds=60),
        quorum_timeout=timedelta(seconds=60),
        replica_id=f"group_{GROUP}",
        store_addr="localhost",
        store_port=store_port,
        rank=RANK,
        world_size=ranks,
        lighthouse_addr=lighthouse,
        hostname="localhost",
    )
    try:
        yield made
    finally:
        made.shutdown(wait=False)


def facts(parameter: DTensor) -> tuple[Any, ...]:
    """What a synchronization must not change."""
    return (
        parameter.device_mesh,
        parameter.placements,
        parameter.shape,
        parameter.stride(),
        parameter.to_local().data_ptr(),
        parameter.requires_grad,
    )


def check(build: Callable[[int], nn.Module], made: Manager, mesh: DeviceMesh, window: Any) -> dict[str, Any]:
    """Synchronizes once by the staged path and compares with the average of the unsharded tensors."""
    model = shard(build(100 * GROUP), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalSGD(made, model, optimizer, 1, True, offload_window_mb=window)
    parameters = list(model.parameters())
    assert all(isinstance(p, DTensor) for p in parameters)
    before = [facts(p) for p in parameters]  # type: ignore[arg-type]
    step = made.current_step()
    for _ in range(3):
        local.sync()
        if made.current_step() > step:
            break
    assert made.current_step() == step + 1, "no commit in three synchronizations"
    assert [facts(p) for p in model.parameters()] == before, "a DTensor was changed or replaced"  # type: ignore[arg-type]
    for parameter, a, b in zip(parameters, build(0).parameters(), build(100).parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), (a + b) / 2), "not the average of the groups"
    return {
        "local_shapes": [list(p.to_local().shape) for p in parameters if isinstance(p, DTensor)],
        "placements": [str(p.placements) for p in parameters if isinstance(p, DTensor)],
    }


def check_unsharded_is_refused(made: Manager, mesh: DeviceMesh) -> str:
    model = shard(Mlp(1), mesh)
    local = LocalSGD(made, model, torch.optim.SGD(model.parameters(), lr=0.1), 1, True)
    assert isinstance(model, FSDPModule)
    model.unshard()
    step = made.current_step()
    try:
        local.sync()
    except ValueError as error:
        assert made.current_step() == step
        return str(error)
    finally:
        model.reshard()
    return ""


def main() -> None:
    dist.init_process_group("gloo")
    meshes = [
        (2, DeviceMesh("cpu", list(range(2)))),
        (3, DeviceMesh("cpu", list(range(3)))),
        (4, DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("fsdp", "tp"))),
    ]
    for (ranks, mesh), lighthouse in zip(meshes, sys.argv[1:], strict=True):
        store = None
        port = torch.zeros(1, dtype=torch.int64)
        if RANK == 0:
            store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            port.fill_(store.port)
        dist.broadcast(port, src=0)
        if ranks > RANK:
            with manager(lighthouse, mesh, ranks, int(port)) as made:
                build = Mlp if mesh.ndim == 2 else uneven
                for window in (None, 0):
                    seen = check(build, made, mesh, window)
                refusal = check_unsharded_is_refused(made, mesh) if ranks != 3 else None
                send(ranks=ranks, refusal=refusal, **seen)
                # The Manager of rank 0 serves the others' votes.
                dist.barrier(group=mesh.get_group() if mesh.ndim == 1 else None)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
