"""LocalSGD with CPU staging: the averages of the release, and its interface."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from typing import Any
from unittest.mock import create_autospec

import pytest
import simulated_accelerator as sim
import torch
import torch.distributed as dist
from averaging_models import Parameters, bits, equal_parameters, odd_parameters, random_tensor
from local_manager import LocalManager, staged
from properties import HOST, WAYS, make, synchronize_until_commit
from replica_threads import Replica, run_replicas
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore
from ways import ON_HOST, Way, arguments_of

from torchft import _upstream_local_sgd, local_sgd
from torchft.local_sgd import LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo
from torchft.work import _DummyWork

both_ways = pytest.mark.parametrize("options", WAYS)

RELEASE = "release"


def averaged_bits(ways: list[Way], simulated: bool = False) -> list[list[bytes]]:
    """Synchronizes one group per way four times; returns the bits of all parameters, by group."""

    def body(replica: Replica) -> list[bytes]:
        device = sim.device(replica.index) if simulated else "cpu"
        model = odd_parameters(replica.index + 1, device)
        way = ways[replica.index]
        options = {} if way == RELEASE else arguments_of(way)
        local = make(LocalSGD, replica, model, way != RELEASE, **options)
        for step in range(3):
            synchronize_until_commit(replica, local)
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    seed = 1000 * replica.index + 50 * step + number
                    parameter += random_tensor(seed, *parameter.shape, dtype=parameter.dtype).to(device)
        synchronize_until_commit(replica, local)
        return bits(model)

    return run_replicas(len(ways), body, sim.SimulatedProcessGroupGloo if simulated else ProcessGroupGloo)


@pytest.fixture(scope="module")
def release_bits() -> dict[int, list[bytes]]:
    return {groups: averaged_bits([RELEASE] * groups)[0] for groups in (2, 3)}


@pytest.mark.parametrize("simulated", [False, True], ids=["cpu", "simulated"])
@pytest.mark.parametrize(
    "ways",
    [
        [None, None],
        [None, RELEASE],
        [RELEASE, 0],
        [0.001, 100],
        [ON_HOST, ON_HOST],
        [ON_HOST, RELEASE],
        [0.001, ON_HOST],
        [None, RELEASE, 0],
        [RELEASE, None, ON_HOST],
        [ON_HOST, ON_HOST, 0],
    ],
    ids=str,
)
def test_bit_identical_to_release_and_mixed(
    ways: list[Way], simulated: bool, release_bits: dict[int, list[bytes]]
) -> None:
    for group in averaged_bits(ways, simulated):
        assert group == release_bits[len(ways)]


def test_signature_extends_the_release() -> None:
    ours = list(inspect.signature(LocalSGD.__init__).parameters.values())
    release = list(inspect.signature(_upstream_local_sgd.LocalSGD.__init__).parameters.values())
    assert [p.name for p in ours[: len(release)]] == [p.name for p in release]
    assert [(p.name, p.default) for p in ours[len(release) :]] == [
        ("offload_averaged_parameters_to_cpu", False),
        ("offload_window_mb", None),
        ("offload_allreduce_to_cpu", False),
    ]


def test_calls_of_today_stay_valid() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    LocalSGD(create_autospec(Manager), model, optimizer, 2)
    LocalSGD(manager=create_autospec(Manager), model=model, optimizer=optimizer, sync_every=2)
    LocalSGD(create_autospec(Manager), model, optimizer, 2, True)


def test_every_name_of_the_release_is_reachable() -> None:
    for name in vars(_upstream_local_sgd):
        assert hasattr(local_sgd, name), name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = local_sgd.no_such_name  # pyright: ignore[reportAttributeAccessIssue]


def test_optimizer_hooks_drive_the_staged_path() -> None:
    model = equal_parameters(1, count=2)
    manager = LocalManager()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSGD(_with_hooks(manager), model, optimizer, 2, True):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert manager.quorums == 0
        optimizer.step()
        assert manager.quorums == 1


def _with_hooks(manager: LocalManager) -> Any:
    manager.disallow_state_dict_read = lambda: None  # type: ignore[attr-defined]
    manager.allow_state_dict_read = lambda: None  # type: ignore[attr-defined]
    return manager


@both_ways
@pytest.mark.parametrize("commit", [True, False])
def test_parameters_keep_storage_and_averages_have_no_history(commit: bool, options: dict[str, Any]) -> None:
    model = odd_parameters(1)
    seen: list[torch.Tensor] = []

    class Recording(LocalManager):
        def allreduce(self, tensor: torch.Tensor) -> Any:
            seen.append(tensor)
            tensor.mul_(2)
            return _DummyWork(tensor)

    before = [p.detach().clone() for p in model.parameters()]
    storages = [p.data_ptr() for p in model.parameters()]
    staged(model, Recording(commit), **options).sync()
    assert len(seen) == len(before)
    assert all(t.grad_fn is None and not t.requires_grad for t in seen)
    assert [p.data_ptr() for p in model.parameters()] == storages
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old * 2 if commit else old)
        assert parameter.grad_fn is None


@both_ways
def test_model_without_parameters_votes(options: dict[str, Any]) -> None:
    manager = LocalManager()
    staged(nn.Module(), manager, **options).sync()
    assert manager.quorums == 1


@pytest.mark.parametrize(
    # M of each device; with a host all-reduce the one that is not dense in memory.
    ("options", "peaks"),
    [({"offload_window_mb": 0}, {3: 800, 4: 1200}), (HOST, {3: 0, 4: 1200})],
)
def test_parameters_on_several_devices(options: dict[str, Any], peaks: dict[int, int]) -> None:
    tensors = [
        random_tensor(1, 100).to(sim.device(3)),
        random_tensor(2, 50),
        random_tensor(3, 300, 2).to(sim.device(4))[:, 1],
        random_tensor(4, 200).to(sim.device(3)),
    ]
    model = Parameters(tensors)
    entry = {index: sim.memory(index).alive for index in (3, 4)}
    for index in entry:
        sim.memory(index).reset_peak()
    before = bits(model)
    staged(model, **options).sync()
    assert {index: sim.memory(index).peak - alive for index, alive in entry.items()} == peaks
    assert bits(model) == before


@both_ways
def test_healing_in_the_vote_may_replace_parameters(options: dict[str, Any]) -> None:
    """load_state_dict(assign=True) puts new Parameter objects into the model; those get the average."""
    model = equal_parameters(1, count=3)
    healed = {name: tensor + 1 for name, tensor in model.state_dict().items()}

    class Healing(LocalManager):
        def should_commit(self) -> bool:
            model.load_state_dict(healed, assign=True)
            return True

    averages = bits(model)
    local = staged(model, Healing(), **options)
    old = list(model.parameters())
    local.sync()
    assert all(a is not b for a, b in zip(model.parameters(), old, strict=True))
    assert bits(model) == averages


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """The simulated device of one rank."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield DeviceMesh(sim.NAME, [0])
    dist.destroy_process_group()


def dtensor(mesh: DeviceMesh, shard: torch.Tensor) -> DTensor:
    # As FSDP2 makes them: from_local would move a shard on the host to the device of the mesh.
    meta = TensorMeta(shard.shape, shard.stride(), shard.dtype)
    return DTensor(shard, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=True)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("device", "options", "extra"),
    [
        # FSDP2's CPU offload keeps the shards of an accelerator's mesh on the host.
        ("cpu", {}, 0),
        ("cpu", HOST, 0),
        (sim.device(), {}, 4000),
        (sim.device(), HOST, 2000),
    ],
)
def test_extra_device_memory_of_shards(
    device: torch.device | str, options: dict[str, Any], extra: int, mesh: DeviceMesh
) -> None:
    """A DTensor is not rebuilt on the device for write-back; one that is not dense in memory has a window."""
    tensors = [random_tensor(0, 1000), random_tensor(1, 20, 50).t(), random_tensor(2, 500, 2)[:, 1]]

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        held = tensor if tensor._base is None else tensor._base
        return held.clone().to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    model = Parameters(dtensor(mesh, on_device(tensor)) for tensor in tensors)
    shards = [shard for p in model.parameters() if isinstance(p, DTensor) for shard in [p.to_local()]]
    assert [(shard.device, shard.stride()) for shard in shards] == [
        (torch.device(device), tensor.stride()) for tensor in tensors
    ]

    class Doubling(LocalManager):
        def allreduce(self, tensor: torch.Tensor) -> Any:
            return _DummyWork(tensor.mul_(2))

    local = staged(model, Doubling(), **options)
    gc.collect()
    memory = sim.memory(0)
    memory.reset_peak()
    entry = memory.alive
    with sim.recorded_copies() as copies:
        local.sync()
    assert memory.peak - entry == extra
    assert all(copy.straight for copy in copies)
    for shard, tensor in zip(shards, tensors, strict=True):
        assert torch.equal(shard.cpu(), 2 * tensor)


def test_staging_off_asks_no_more_of_the_model_than_the_release() -> None:
    class OnlyParameters:
        def parameters(self) -> list[torch.Tensor]:
            return []

    model: Any = OnlyParameters()
    manager: Any = LocalManager()
    LocalSGD(manager, model, torch.optim.SGD([torch.zeros(1)]), 1).sync()
