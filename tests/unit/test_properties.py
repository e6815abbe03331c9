"""The most important properties of CPU staging, and proof that their checks notice a broken one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import create_autospec

import properties
import pytest
import torch
from averaging_models import Parameters, random_tensor
from places import ROOT

from torchft import _upstream_local_sgd
from torchft._staging.buffers import StagingBuffers
from torchft._staging.plan import ShardLayout, StagingPlan, local_shard
from torchft.local_sgd import LocalSGD
from torchft.manager import Manager

OURS = ROOT / "torchft"


@pytest.mark.parametrize("options", properties.WAYS)
@pytest.mark.parametrize("check", properties.PROPERTIES)
def test_property(check: Callable[..., None], options: dict[str, Any]) -> None:
    check(LocalSGD, **options)


def test_release_takes_all_parameters_at_once() -> None:
    """The comparison that staging is for: S without it."""
    for peaks in properties.extra_device_memory(LocalSGD, False, synchronizations=5):
        assert peaks == {24 * 4000}


@pytest.mark.parametrize(
    ("window_mb", "bytes_in_window"), [(0, 4000), (0.01, 2 * 4032 - 32), (1, 24 * 4032 - 32)]
)
def test_window_bounds_device_memory(window_mb: float, bytes_in_window: int) -> None:
    for peaks in properties.extra_device_memory(
        LocalSGD, True, synchronizations=5, offload_window_mb=window_mb
    ):
        assert peaks == {bytes_in_window}


class NoStage(LocalSGD):
    """Keeps the averages on the device."""

    @torch.no_grad()
    def _average(self) -> list[torch.Tensor]:
        assert self._buffers is not None
        averages = []
        for index, parameter in enumerate(self._model.parameters()):
            slot = self._buffers.slot(index)
            slot.copy_(local_shard(parameter))
            self._manager.allreduce(slot).wait()
            averages.append(slot.clone())
        return averages


class DelInsteadOfWindow(LocalSGD):
    """Makes a copy per parameter, and takes ``del`` for a release."""

    def _take_memory(self) -> StagingBuffers:
        buffers = super()._take_memory()
        buffers._windows.clear()
        return buffers

    @torch.no_grad()
    def _average(self) -> list[torch.Tensor]:
        averages = []
        for parameter in self._model.parameters():
            averaged = local_shard(parameter).clone()
            self._manager.allreduce(averaged).wait()
            averages.append(averaged.cpu())
            del averaged
        return averages

    @torch.no_grad()
    def _write_back(self, averages: list[torch.Tensor]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        for average, parameter in zip(averages, self._model.parameters(), strict=True):
            parameter.copy_(average)


class TemporaryInWriteBack(LocalSGD):
    """Brings averages to the device in memory of their own."""

    @torch.no_grad()
    def _write_back(self, averages: list[torch.Tensor]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        for average, parameter in zip(averages, self._model.parameters(), strict=True):
            parameter.copy_(average.to(parameter.device))


class NoWayThroughAWindow(LocalSGD):
    """Copies straight to the host and back, whatever the layout is."""

    def _take_memory(self) -> StagingBuffers:
        buffers = super()._take_memory()
        buffers.plan.offsets.clear()
        return buffers


class StridesOnTheHost(LocalSGD):
    """Keeps its averages contiguous on the host, whatever the layout is."""

    def _take_memory(self) -> StagingBuffers:
        buffers = super()._take_memory()
        buffers.host = [tensor.contiguous() for tensor in buffers.host]
        return buffers


class WriteBackBeforeVote(LocalSGD):
    """Does not wait for the vote."""

    def _average(self) -> list[torch.Tensor]:
        averages = super()._average()
        self._write_back(averages)
        return averages


class ContiguousCopies(LocalSGD):
    """Copies every parameter into contiguous memory, whatever its strides are."""

    def _take_memory(self) -> StagingBuffers:
        buffers = super()._take_memory()
        layouts = [
            ShardLayout(
                layout.shape,
                torch.empty(layout.shape, device="meta").stride(),
                layout.dtype,
                layout.device,
                layout.nbytes,
            )
            for layout in buffers.plan.layouts
        ]
        return StagingBuffers(StagingPlan.of(layouts, self._window_bytes))


class NoVoteAfterException(LocalSGD):
    """Lets an exception pass without a vote."""

    def _reject(self, error: Exception) -> None:
        pass


@pytest.mark.parametrize(
    ("broken", "options", "check"),
    [
        (NoStage, properties.WINDOW, properties.check_device_memory),
        (DelInsteadOfWindow, properties.WINDOW, properties.check_device_memory),
        (TemporaryInWriteBack, properties.HOST, properties.check_device_memory),
        (NoWayThroughAWindow, properties.HOST, properties.check_copies),
        (StridesOnTheHost, properties.WINDOW, properties.check_copies),
        (StridesOnTheHost, properties.HOST, properties.check_copies),
        (WriteBackBeforeVote, properties.WINDOW, properties.check_rejection_keeps_parameters),
        (WriteBackBeforeVote, properties.HOST, properties.check_rejection_keeps_parameters),
        (ContiguousCopies, properties.WINDOW, properties.check_mixes_with_release),
        (StridesOnTheHost, properties.HOST, properties.check_mixes_with_release),
        (NoVoteAfterException, properties.WINDOW, properties.check_votes_after_exception),
        (NoVoteAfterException, properties.HOST, properties.check_votes_after_exception),
    ],
)
def test_check_notices_broken_variant(
    broken: type[LocalSGD], options: dict[str, Any], check: Callable[..., None]
) -> None:
    with pytest.raises(AssertionError):
        check(broken, **options)


def test_default_path_is_the_code_of_the_release() -> None:
    """Whatever runs in an unstaged synchronization is the release's code, but for what hands on to it."""
    model = Parameters([random_tensor(1, 3), random_tensor(2, 2)])
    manager = create_autospec(Manager)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ran: dict[str, set[str]] = {}

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            ran.setdefault(frame.f_code.co_filename, set()).add(frame.f_code.co_name)

    sys.setprofile(see)
    try:
        with LocalSGD(manager, model, optimizer, 1):
            optimizer.step()
    finally:
        sys.setprofile(None)
    handing_on = [
        "__enter__",
        "__exit__",
        "_step_pre_hook",
        "_step_post_hook",
        "sync",
        "_perform_sync",
        "_average",
    ]
    release = inspect.getfile(_upstream_local_sgd)
    assert ran[release] == {"__init__", *handing_on, "extract_local_tensor"}
    ours = {
        (Path(file).name, name)
        for file, names in ran.items()
        if Path(file).is_relative_to(OURS)
        for name in names
    }
    assert ours == {
        *(("local_sgd.py", name) for name in ("__init__", *handing_on[1:])),
        *(("checks.py", name) for name in ("check_switch", "window_bytes", "check_allreduce_to_cpu")),
        ("local_sgd.py", "_counts"),
        ("outcome.py", "of"),
        ("outcome.py", "__init__"),
    }
