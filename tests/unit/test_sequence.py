"""In what order a staged synchronization takes memory, hands all-reduces over, waits and votes."""

from __future__ import annotations

from typing import Any

import pytest
import simulated_accelerator as sim
import torch
from averaging_models import odd_parameters
from local_manager import LocalManager, staged
from properties import HOST, WAYS
from torch.utils._python_dispatch import TorchDispatchMode

from torchft.work import _DummyWork

DEVICES = ["cpu", sim.device()]
PARAMETERS = 13


class Allocations(TorchDispatchMode):
    """Records every operator that returns a tensor with memory of its own, on the host and on devices."""

    def __init__(self, record: list[str]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if isinstance(out, torch.Tensor) and all(value.alias_info is None for value in returns):
            self._record.append("allocates")
        return out


class Recording(LocalManager):
    """Records what a synchronization does.

    Attributes:
        record: in order: "allocates", the numbers of all-reduces, "waits" and "votes".
        reduced: what was handed over.
    """

    def __init__(self, commit: bool = True) -> None:
        super().__init__(commit)
        self.record: list[Any] = []
        self.reduced: list[torch.Tensor] = []

    def allreduce(self, tensor: torch.Tensor) -> Any:
        manager = self
        self.record.append(len(self.reduced))
        self.reduced.append(tensor)

        class Work(_DummyWork):
            def wait(self, timeout: Any = None) -> bool:
                manager.record.append("waits")
                return super().wait()

        return Work(tensor)

    def should_commit(self) -> bool:
        self.record.append("votes")
        return super().should_commit()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [*WAYS, {"offload_window_mb": 0}, {"offload_window_mb": 1}])
def test_all_memory_is_taken_before_the_first_allreduce(
    options: dict[str, Any], device: torch.device | str
) -> None:
    manager = Recording()
    local = staged(odd_parameters(1, device), manager, **options)
    with Allocations(manager.record):
        local.sync()
    record = manager.record
    # The host tensors at least.
    assert record[:PARAMETERS] == ["allocates"] * PARAMETERS
    assert "allocates" not in record[record.index(0) :]


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("options", [*WAYS, {"offload_window_mb": 1}])
def test_nothing_is_taken_on_the_device_after_the_vote(options: dict[str, Any], commit: bool) -> None:
    memory = sim.memory(5)
    at_vote = 0

    class Voting(LocalManager):
        def should_commit(self) -> bool:
            nonlocal at_vote
            memory.reset_peak()
            at_vote = memory.alive
            return super().should_commit()

    model = odd_parameters(1, sim.device(5))
    local = staged(model, Voting(commit), **options)
    entry = memory.alive
    local.sync()
    assert memory.peak == at_vote > entry
    assert memory.alive == entry


@pytest.mark.parametrize("device", DEVICES)
def test_host_allreduce_hands_everything_over_before_it_waits(device: torch.device | str) -> None:
    manager = Recording()
    local = staged(odd_parameters(1, device), manager, **HOST)
    local.sync()
    assert manager.record == [*range(PARAMETERS), *["waits"] * PARAMETERS, "votes"]


@pytest.mark.parametrize("device", DEVICES)
def test_host_allreduce_reduces_what_the_release_reduces(device: torch.device | str) -> None:
    """One host tensor per parameter, in order, with the memory of its clone and without history."""
    manager = Recording()
    model = odd_parameters(1, device)
    staged(model, manager, **HOST).sync()
    assert len(manager.reduced) == len(list(model.parameters())) == PARAMETERS
    memory = set()
    for tensor, parameter in zip(manager.reduced, model.parameters(), strict=True):
        clone = parameter.detach().clone()
        assert tensor.device.type == "cpu"
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (clone.shape, clone.stride(), clone.dtype)
        # Exactly its own bytes, whole.
        assert (tensor.storage_offset(), tensor.untyped_storage().nbytes()) == (0, clone.nbytes)
        assert torch.equal(tensor, clone.cpu())
        assert tensor.grad_fn is None
        assert not tensor.requires_grad
        memory |= {tensor.data_ptr()} - {0}
    # Two parameters are empty.
    assert len(memory) == PARAMETERS - 2
    assert not memory & {parameter.data_ptr() for parameter in model.parameters()}
