"""Averages are divided before they are staged, wherever the parameters are and whatever wait() orders."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import simulated_accelerator as sim
import torch
from averaging_models import Parameters
from local_manager import LocalManager, staged
from properties import WAYS, make, synchronize_until_commit
from replica_threads import Replica, run_replicas

from torchft._staging import ordering
from torchft.local_sgd import LocalSGD
from torchft.work import _DummyWork


def first(group: int, number: int) -> torch.Tensor:
    return torch.full((100,), 10.0 * number + 4.0 * group)


def averages(devices: list[int], **options: Any) -> list[list[torch.Tensor]]:
    """Synchronizes two groups once; returns the parameters of each.

    Args:
        devices: index, within the group, of the device of each parameter.
        options: further arguments of LocalSGD.
    """

    def body(replica: Replica) -> list[torch.Tensor]:
        model = Parameters(
            first(replica.index, number).to(sim.device(2 * replica.index + device))
            for number, device in enumerate(devices)
        )
        synchronize_until_commit(replica, make(LocalSGD, replica, model, True, **options))
        return [parameter.detach().cpu() for parameter in model.parameters()]

    return run_replicas(2, body, sim.SimulatedProcessGroupGloo)


def check(seen: list[list[torch.Tensor]]) -> None:
    for group in seen:
        for number, value in enumerate(group):
            assert torch.equal(value, (first(0, number) + first(1, number)) / 2)


@pytest.mark.parametrize("like_cuda", [False, True])
@pytest.mark.parametrize("options", [*WAYS, {"offload_window_mb": 0.001}, {"offload_window_mb": 1}])
@pytest.mark.parametrize("devices", [[0] * 5, [0, 1, 1, 0, 1]], ids=["one device", "two devices"])
def test_averages_are_divided(
    devices: list[int], options: dict[str, Any], like_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sim.like_cuda(monkeypatch) if like_cuda else nullcontext():
        check(averages(devices, **options))


@pytest.mark.parametrize("options", [{}, {"offload_window_mb": 1}])
def test_without_synchronizing_sums_are_staged(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard is real in the simulation: the other tests of it would notice."""
    monkeypatch.setattr(ordering, "_ORDERED_BY_WAIT", ("cpu", sim.NAME))
    with pytest.raises(AssertionError):
        check(averages([0, 0, 0], **options))


def test_without_the_guard_sums_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
    with sim.like_cuda(monkeypatch), pytest.raises(AssertionError):
        check(averages([1, 1, 1]))


def test_device_is_the_current_one_in_its_allreduce_and_in_the_wait() -> None:
    """What the Manager orders, it orders on the streams of the current device."""
    seen: list[tuple[str, int, int]] = []

    class Watching(LocalManager):
        def allreduce(self, tensor: torch.Tensor) -> Any:
            def see(what: str) -> None:
                seen.append((what, tensor.device.index, torch.accelerator.current_device_index()))

            class Work(_DummyWork):
                def wait(self, timeout: Any = None) -> bool:
                    see("wait")
                    return super().wait()

            see("all-reduce")
            return Work(tensor)

    model = Parameters(first(0, number).to(sim.device(1 + number)) for number in range(2))
    staged(model, Watching(), offload_window_mb=1).sync()
    assert seen == [("all-reduce", 1, 1), ("all-reduce", 2, 2), ("wait", 1, 1), ("wait", 2, 2)]


def test_devices_that_wait_orders_are_not_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would wait for everything else in flight, too."""
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", asked.append)
    ordered = [torch.device(name) for name in ("cpu", "cuda:1", "xpu:0")]
    ordering.finish_divisions(ordered)
    assert not asked
    ordering.finish_divisions([*ordered, sim.device(1)])
    assert asked == [sim.device(1)]


def test_guard_leaves_the_current_device() -> None:
    seen: list[Any] = []
    with ordering.on_device(sim.device(3)):
        seen.append(torch.accelerator.current_device_index())
    assert [*seen, torch.accelerator.current_device_index()] == [3, 0]
    with ordering.on_device(torch.device("cpu")):
        assert torch.accelerator.current_device_index() == 0
