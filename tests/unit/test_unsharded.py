"""Parameters that FSDP2 holds unsharded are refused, as FSDP2 itself says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_manager import LocalManager, staged
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    return model


def unsharded(model: nn.Module) -> nn.Module:
    assert isinstance(model, FSDPModule)
    model.unshard()
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def check_refused(model: nn.Module, local: Any, manager: LocalManager, reshard: Callable[[], None]) -> None:
    with pytest.raises(ValueError, match=r"is unsharded at this moment.*reshard\(\)"):
        local.sync()
    assert manager.quorums == 0
    reshard()
    local.sync()
    assert manager.quorums == 1


def test_made_before_fully_shard(mesh: DeviceMesh) -> None:
    model, manager = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), LocalManager()
    local = staged(model, manager)
    fully_shard(model, mesh=mesh)
    unsharded(model)
    check_refused(model, local, manager, model.reshard)  # pyright: ignore[reportArgumentType]


def test_made_while_unsharded(mesh: DeviceMesh) -> None:
    model, manager = unsharded(sharded(mesh)), LocalManager()
    check_refused(model, staged(model, manager), manager, model.reshard)  # pyright: ignore[reportArgumentType]


def test_renamed_since(mesh: DeviceMesh) -> None:
    model, manager = sharded(mesh), LocalManager()
    local = staged(model, manager)
    unsharded(model)
    model.add_module("other", model[0])  # pyright: ignore[reportIndexIssue]
    del model[0]  # pyright: ignore[reportIndexIssue]
    check_refused(model, local, manager, model.reshard)  # pyright: ignore[reportArgumentType]


def test_part_of_what_is_sharded(mesh: DeviceMesh) -> None:
    """The module that knows of the sharding is outside the model that is synchronized."""
    whole, manager = sharded(mesh), LocalManager()
    local = staged(whole[0], manager)  # pyright: ignore[reportIndexIssue]
    check_refused(unsharded(whole), local, manager, whole.reshard)  # pyright: ignore[reportArgumentType]


def test_only_some_modules(mesh: DeviceMesh) -> None:
    model, manager = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), LocalManager()
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    local = staged(model, manager)
    unsharded(model[1])
    with pytest.raises(ValueError, match=r"parameter '1.weight' is unsharded"):
        local.sync()


def test_other_models_do_not_matter(mesh: DeviceMesh) -> None:
    """A teacher may stay unsharded."""
    teacher, manager = unsharded(sharded(mesh)), LocalManager()
    staged(sharded(mesh), manager).sync()
    assert manager.quorums == 1
    assert teacher is not None


def test_replaced_for_good_is_not_refused(mesh: DeviceMesh) -> None:
    """DTensors that have given way to plain parameters, for an export say, have no shard to go back to."""
    model, manager = sharded(mesh), LocalManager()
    local = staged(model, manager)
    for module in model.children():
        for name, parameter in list(module.named_parameters()):
            assert isinstance(parameter, DTensor)
            setattr(module, name, nn.Parameter(parameter.full_tensor().detach().clone()))
    local.sync()
    assert manager.quorums == 1
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
