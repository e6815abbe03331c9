"""Which steps count, and which optimizers are warned of."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from averaging_models import equal_parameters
from local_manager import LocalManager, staged
from properties import make
from replica_threads import Replica, run_replicas
from torch import nn

from torchft.local_sgd import LocalSGD


class Calling(torch.optim.SGD):
    """Does more after the step of its base class."""

    factor = 0.5

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(self.factor)
        return loss


class CallingTwice(Calling):
    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step(closure)


class Locking(LocalManager):
    """Counts who may read, and sees the weights that are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.sent: list[float] = []

    def disallow_state_dict_read(self) -> None:
        self.calls.append("lock")

    def allow_state_dict_read(self) -> None:
        self.calls.append("unlock")

    def allreduce(self, tensor: torch.Tensor) -> Any:
        self.sent.append(float(tensor[0]))
        return super().allreduce(tensor)


def model_of(value: float) -> nn.Module:
    model = nn.Module()
    model.register_parameter("p", nn.Parameter(torch.full((2,), value)))
    return model


@pytest.mark.parametrize(("cls", "factor"), [(Calling, 0.5), (CallingTwice, 0.25), (torch.optim.SGD, 1.0)])
def test_step_inside_a_step_does_not_count(cls: type[torch.optim.SGD], factor: float) -> None:
    # PyTorch hooks the step of every class that was ever instantiated.
    for known in (torch.optim.SGD, Calling, CallingTwice):
        known([torch.zeros(1)], lr=0.1)
    model, manager = model_of(8.0), Locking()
    optimizer = cls(model.parameters(), lr=0.0)
    with LocalSGD(manager, model, optimizer, 2, True):  # pyright: ignore[reportArgumentType]
        for _ in range(4):
            model.p.grad = torch.zeros(2)
            optimizer.step()
    assert manager.quorums == 2
    # Synchronized after whole steps only.
    assert manager.sent == [8 * factor**2, 8 * factor**4]
    assert manager.calls.count("lock") == 4


def test_a_step_that_raised_does_not_hide_the_next_ones() -> None:
    model, manager = model_of(1.0), Locking()
    optimizer = Calling(model.parameters(), lr=0.0)

    def closure() -> float:
        raise MemoryError("injected")

    with LocalSGD(manager, model, optimizer, 1, True):  # pyright: ignore[reportArgumentType]
        for _ in range(2):
            with pytest.raises(MemoryError):
                optimizer.step(closure)
        optimizer.step()
    assert manager.quorums == 1


def test_optimizer_inside_another_one_counts() -> None:
    """A wrapper that steps the optimizer that LocalSGD was given is no part of a step of it."""

    class Outer(torch.optim.SGD):
        inner: torch.optim.Optimizer

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    model, manager = model_of(1.0), Locking()
    outer = Outer(model.parameters(), lr=0.0)
    outer.inner = torch.optim.SGD(model.parameters(), lr=0.0)
    with LocalSGD(manager, model, outer.inner, 1, True):  # pyright: ignore[reportArgumentType]
        outer.step()
    assert manager.quorums == 1


def test_compiled_step_synchronizes() -> None:
    """A compiler that traced the hooks would trace the Manager as well, and nothing could be committed."""

    def body(replica: Replica) -> int:
        model = model_of(float(replica.index))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica.model = model
        step = torch.compile(optimizer.step, backend="eager")
        with LocalSGD(replica.manager, model, optimizer, 1, True):
            for _ in range(3):
                model.p.grad = torch.zeros(2)
                step()
        return replica.manager.current_step()

    # One group: the compiler is not made for several threads at once.
    assert run_replicas(1, body, warm_up=False) == [3]


@pytest.mark.parametrize("how", ["with block", "sync"])
def test_lock_is_released_after_a_step_that_raised(how: str) -> None:
    """Held by a group that is not stepping any more, no peer could heal from it."""

    def body(replica: Replica) -> None:
        model = equal_parameters(replica.index, 2)
        local = make(LocalSGD, replica, model, True)
        optimizer: Any = local._local_optimizer

        def closure() -> float:
            raise MemoryError("injected")

        with local:
            with pytest.raises(MemoryError):
                optimizer.step(closure)
            assert not replica.manager._is_state_dict_read_allowed
            if how == "sync":
                local.sync()
                assert replica.manager._is_state_dict_read_allowed
        assert replica.manager._is_state_dict_read_allowed

    run_replicas(1, body)


def warnings_of(model: nn.Module, optimizer: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    manager: Any = LocalManager()
    LocalSGD(manager, model, optimizer, 1, True)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_optimizer_without_all_trainable_parameters(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not warnings_of(model, torch.optim.SGD(model.parameters(), lr=0.1), caplog)
    (warning,) = warnings_of(model, torch.optim.SGD(model[0].parameters(), lr=0.1), caplog)
    assert "2 of the model's trainable parameters ('1.weight', '1.bias')" in warning
    (warning,) = warnings_of(model, torch.optim.SGD([torch.zeros(1)], lr=0.1), caplog)
    assert "4 of the model's trainable parameters ('0.weight', '0.bias', '1.weight', ...)" in warning
    model[1].requires_grad_(False)
    assert not warnings_of(model, torch.optim.SGD(model[0].parameters(), lr=0.1), caplog)


def test_model_that_has_only_parameters(caplog: pytest.LogCaptureFixture) -> None:
    """An adapter that overrides parameters(): names are nothing that averaging needs."""

    class Adapter:
        def __init__(self) -> None:
            self.inner = nn.Linear(2, 2)

        def parameters(self) -> list[torch.Tensor]:
            return [self.inner.weight]

    model: Any = Adapter()
    staged(model).sync()
    (warning,) = warnings_of(model, torch.optim.SGD([torch.zeros(1)], lr=0.1), caplog)
    assert "(number 0)" in warning
