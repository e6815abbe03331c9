"""One rank of test_fsdp.py: staged synchronizations of real FSDP2 shards across two replica groups.

Runs every case with the first ranks of its group that the case needs, each with a Manager of its own, and
tells the parent what it saw. A case's lighthouse URL comes from the command line.
"""

from __future__ import annotations

import gc
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
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from ways import ON_HOST, Way, arguments_of

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
def manager(lighthouse: str, ranks: int, store_port: int) -> Iterator[Manager]:
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


def staged(model: nn.Module, made: Manager, way: Way) -> LocalSGD:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return LocalSGD(made, model, optimizer, 1, True, **arguments_of(way))


def commit(model: nn.Module, local: LocalSGD, made: Manager) -> list[DTensor]:
    """Synchronizes once and returns the parameters, which are the same DTensors as before."""
    parameters: list[DTensor] = [each for each in model.parameters() if isinstance(each, DTensor)]
    before = [facts(parameter) for parameter in parameters]
    step = made.current_step()
    for _ in range(3):
        local.sync()
        if made.current_step() > step:
            break
    assert made.current_step() == step + 1, "no commit in three synchronizations"
    after = [facts(parameter) for parameter in model.parameters()]  # type: ignore[arg-type]
    assert after == before, "a DTensor was changed or replaced"
    return parameters  # pyright: ignore[reportReturnType]


def check(build: Callable[[int], nn.Module], made: Manager, mesh: DeviceMesh, way: Way) -> dict[str, Any]:
    """Synchronizes once by the staged path and compares with the average of the unsharded tensors."""
    model = shard(build(100 * GROUP), mesh)
    parameters = commit(model, staged(model, made, way), made)
    for parameter, a, b in zip(parameters, build(0).parameters(), build(100).parameters(), strict=True):
        assert torch.equal(parameter.full_tensor(), (a + b) / 2), "not the average of the groups"
    return {
        "local_shapes": [list(parameter.to_local().shape) for parameter in parameters],
        "placements": [str(parameter.placements) for parameter in parameters],
    }


def check_offloaded(made: Manager, mesh: DeviceMesh, way: Way) -> dict[str, Any]:
    """Synchronizes once what FSDP2 keeps on the host, of a mesh of simulated devices."""
    import simulated_accelerator as sim

    rank = mesh.get_local_rank()
    model: nn.Module = Parameters(
        parameter.detach().to(sim.device()) for parameter in uneven(100 * GROUP).parameters()
    )
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    local = staged(model, made, way)
    memory = sim.memory()
    gc.collect()
    memory.reset_peak()
    entry = memory.alive
    parameters = commit(model, local, made)
    # Nothing can be gathered on simulated devices.
    for parameter, a, b in zip(parameters, uneven(0).parameters(), uneven(100).parameters(), strict=True):
        chunks = ((a + b) / 2).chunk(mesh.size())
        average = chunks[rank] if rank < len(chunks) else a[:0]
        assert torch.equal(parameter.to_local(), average), "not the average of the groups"
    return {
        "local_shapes": [list(parameter.to_local().shape) for parameter in parameters],
        "mesh": mesh.device_type,
        "devices": [str(parameter.to_local().device) for parameter in parameters],
        "extra_device_bytes": memory.peak - entry,
    }


def check_unsharded_is_refused(made: Manager, mesh: DeviceMesh) -> str:
    model = shard(Mlp(1), mesh)
    local = staged(model, made, None)
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


# How the two groups stage, one after the other.
WAYS: list[tuple[Way, Way]] = [(None, None), (0, 0), (ON_HOST, ON_HOST), (ON_HOST, None)]


def run(name: str, lighthouse: str, ranks: int, body: Callable[[Manager], dict[str, Any]]) -> None:
    """Has the first ranks of this replica group do something with a Manager; all ranks call this."""
    store = None
    port = torch.zeros(1, dtype=torch.int64)
    if RANK == 0:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port.fill_(store.port)
    dist.broadcast(port, src=0)
    group = dist.new_group(list(range(ranks)))
    if ranks > RANK:
        with manager(lighthouse, ranks, int(port)) as made:
            send(case=name, **body(made))
            # The Manager of rank 0 serves the others' votes.
            dist.barrier(group)  # pyright: ignore[reportArgumentType]
    dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    of_two, of_three = (DeviceMesh("cpu", list(range(ranks))) for ranks in (2, 3))
    two_by_two = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("fsdp", "tp"))
    lighthouses = iter(sys.argv[1:])

    def body(made: Manager, mesh: DeviceMesh, build: Callable[[int], nn.Module]) -> dict[str, Any]:
        seen = [check(build, made, mesh, ways[GROUP]) for ways in WAYS]
        refusal = "" if mesh is of_three else check_unsharded_is_refused(made, mesh)
        return {"seen": seen, "refusal": refusal}

    def offloaded(made: Manager, mesh: DeviceMesh) -> dict[str, Any]:
        return {"seen": [check_offloaded(made, mesh, ways[GROUP]) for ways in WAYS]}

    run("2 ranks", next(lighthouses), 2, lambda made: body(made, of_two, uneven))
    run("3 ranks", next(lighthouses), 3, lambda made: body(made, of_three, uneven))
    run("2 x 2 ranks", next(lighthouses), 4, lambda made: body(made, two_by_two, Mlp))
    # From here on it is an accelerator for all that this process does.
    import simulated_accelerator as sim

    simulated = DeviceMesh(sim.NAME, list(range(3)))
    run("offloaded", next(lighthouses), 3, lambda made: offloaded(made, simulated))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
