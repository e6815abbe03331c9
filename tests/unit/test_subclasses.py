"""Subclasses of LocalSGD that average, synchronize or vote in their own way, with and without staging."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import simulated_accelerator as sim
import torch
from averaging_models import bits, equal_parameters
from local_manager import LocalManager, staged
from properties import synchronize_until_commit
from replica_threads import Replica, run_replicas
from torch import nn

from torchft.local_sgd import LocalSGD
from torchft.work import _DummyWork

WAYS: dict[str, dict[str, Any]] = {
    "release": {},
    "staged": {"offload_averaged_parameters_to_cpu": True},
    "window": {"offload_averaged_parameters_to_cpu": True, "offload_window_mb": 0.01},
    "host": {"offload_averaged_parameters_to_cpu": True, "offload_allreduce_to_cpu": True},
}
# Of 6 parameters of 4000 bytes, with the window's places on multiples of 64 bytes.
EXTRA = {"staged": 4000, "window": 2 * 4032 - 32, "host": 0}


class Counting(LocalSGD):
    averages = 0

    def _average(self) -> list[torch.Tensor]:
        self.averages += 1
        return super()._average()


class Doubling(LocalSGD):
    def _average(self) -> list[torch.Tensor]:
        return [2 * average.detach() for average in super()._average()]


class Voting(LocalSGD):
    """Has a _perform_sync() of its own, as the release's is."""

    def _perform_sync(self) -> None:
        averages = self._average()
        if self._manager.should_commit():
            with torch.no_grad():
                for parameter, average in zip(self._model.parameters(), averages, strict=True):
                    parameter.copy_(average)


class Passing(LocalSGD):
    """Has a _perform_sync() of its own that averages nothing."""

    def _perform_sync(self) -> None:
        self._manager.should_commit()


class Direct(LocalSGD):
    """Has a sync() of its own, as the release's is."""

    def sync(self) -> None:
        self._manager.start_quorum()
        self._perform_sync()
        self._local_step = 0


def new(cls: type[LocalSGD], way: str, model: nn.Module, manager: Any) -> LocalSGD:
    return cls(manager, model, torch.optim.SGD(model.parameters(), lr=0.1), 1, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("cls", "factor"), [(Counting, 1), (Doubling, 2), (Voting, 1), (Direct, 1)])
def test_subclass_gets_the_average(cls: type[LocalSGD], factor: int, way: str) -> None:
    def body(replica: Replica) -> list[torch.Tensor]:
        model = equal_parameters(replica.index, 3)
        replica.model = model
        local = new(cls, way, model, replica.manager)
        synchronize_until_commit(replica, local)
        synchronize_until_commit(replica, local)
        if isinstance(local, Counting):
            assert local.averages >= 2
        return [parameter.detach() for parameter in model.parameters()]

    groups = run_replicas(2, body)
    first = [equal_parameters(index, 3).parameters() for index in range(2)]
    for a, b, *averages in zip(*first, *groups, strict=True):
        for average in averages:
            assert torch.equal(average, factor * factor * (a + b) / 2)


@pytest.mark.parametrize("way", EXTRA)
@pytest.mark.parametrize("cls", [LocalSGD, Doubling, Voting, Direct])
def test_memory_bound_of_subclasses(cls: type[LocalSGD], way: str) -> None:
    model = equal_parameters(1, 6, sim.device(5))
    memory = sim.memory(5)
    at_vote: list[int] = []

    class Watching(LocalManager):
        def should_commit(self) -> bool:
            at_vote.append(memory.peak - entry)
            memory.reset_peak()
            at_vote.append(memory.alive)
            return True

    local = new(cls, way, model, Watching())
    gc.collect()
    memory.reset_peak()
    entry = memory.alive
    local.sync()
    assert at_vote[0] == EXTRA[way]
    # Voting has no window any more when it votes.
    assert memory.peak == at_vote[1], "something was allocated on the device after the vote"
    assert memory.alive == entry


@pytest.mark.parametrize("way", ["staged", "window", "host"])
def test_average_alone_returns_host_tensors_in_order(way: str) -> None:
    model = equal_parameters(1, 3, sim.device(5))
    local = new(LocalSGD, way, model, LocalManager())
    averages = local._average()
    assert all(average.device.type == "cpu" and not average.requires_grad for average in averages)
    for average, parameter in zip(averages, model.parameters(), strict=True):
        assert torch.equal(average, parameter.detach().cpu())
    local.sync()


@pytest.mark.parametrize("way", ["staged", "host"])
@pytest.mark.parametrize("cls", [Passing, Voting, Direct])
@pytest.mark.parametrize("commit", [True, False])
def test_healthy_subclass_is_not_refused(cls: type[LocalSGD], way: str, commit: bool) -> None:
    manager = LocalManager(commit)
    local = new(cls, way, equal_parameters(1, 2), manager)
    for _ in range(3):
        local.sync()
    assert manager.quorums == 3


class Failing(LocalManager):
    """Raises in the second all-reduce, once."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.errors = [error]
        self.calls = 0
        self.votes = 0

    def allreduce(self, tensor: torch.Tensor) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise self.errors.pop()
        return _DummyWork(tensor)

    def should_commit(self) -> bool:
        self.votes += 1
        return self.commit


@pytest.mark.parametrize("way", ["staged", "host"])
@pytest.mark.parametrize("cls", [Voting, Direct, Counting])
def test_failed_average_of_a_subclass_is_voted_down(cls: type[LocalSGD], way: str) -> None:
    model = equal_parameters(1, 3)
    before = bits(model)
    manager = Failing(MemoryError("injected"))
    local = new(cls, way, model, manager)
    with pytest.raises(MemoryError, match="injected"):
        local.sync()
    assert (manager.votes, manager.commit) == (1, False)
    assert bits(model) == before
    manager.commit = True
    local.sync()
    assert manager.votes == 2


def test_exception_of_a_subclass_after_the_average_is_voted_down() -> None:
    class Raising(LocalSGD):
        def _average(self) -> list[torch.Tensor]:
            super()._average()
            raise ArithmeticError("injected")

    manager = LocalManager()
    local = new(Raising, "staged", equal_parameters(1, 2), manager)
    with pytest.raises(ArithmeticError):
        local.sync()
    assert not manager.commit


@pytest.mark.parametrize("way", ["staged", "host"])
@pytest.mark.parametrize("cls", [Voting, Direct, LocalSGD])
def test_interrupted_subclass_is_refused(cls: type[LocalSGD], way: str) -> None:
    manager = Failing(KeyboardInterrupt())
    local = new(cls, way, equal_parameters(1, 3), manager)
    with pytest.raises(KeyboardInterrupt):
        local.sync()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="left before its commit vote"):
            local.sync()
    assert (manager.calls, manager.votes) == (2, 0)


def test_parameters_are_checked_under_a_sync_of_ones_own() -> None:
    model = nn.LazyLinear(3)
    manager = LocalManager()
    local = Direct(manager, model, torch.optim.SGD(model.parameters(), lr=0.1), 1, True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="run one forward pass"):
        local.sync()
    assert not manager.commit, "the peers wait for a vote"


def test_stand_in_for_perform_sync_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    local = staged(equal_parameters(1, 2))
    calls: list[None] = []
    monkeypatch.setattr(local, "_perform_sync", lambda: calls.append(None))
    for _ in range(3):
        local.sync()
    assert len(calls) == 3


@pytest.mark.parametrize("errored", [None, "no method"])
def test_manager_without_errored_is_no_reason_to_refuse(errored: Any) -> None:
    manager: Any = LocalManager(commit=False)
    manager.errored = errored
    local = staged(equal_parameters(1, 2), manager)
    for _ in range(3):
        local.sync()
    assert manager.quorums == 3
