"""The most important properties of CPU staging, and proof that their checks notice a broken one."""

from __future__ import annotations

from collections.abc import Callable

import properties
import pytest
import torch

from torchft import _upstream_local_sgd
from torchft._staging.buffers import ShardLayout, StagingBuffers, local_shard
from torchft.local_sgd import LocalSGD


@pytest.mark.parametrize("check", properties.PROPERTIES)
def test_property(check: Callable[..., None]) -> None:
    check(LocalSGD)


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

    def _reduce_and_stage(self, buffers: StagingBuffers) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        for index, parameter in enumerate(self._model.parameters()):
            slot = buffers.slot(index)
            slot.copy_(local_shard(parameter).detach())
            self._manager.allreduce(slot).wait()
            buffers.host[index] = slot.clone()


class DelInsteadOfWindow(LocalSGD):
    """Makes a copy per parameter, and takes ``del`` for a release."""

    def _take_memory(self) -> StagingBuffers:
        buffers = super()._take_memory()
        buffers._windows.clear()
        return buffers

    @torch.no_grad()
    def _reduce_and_stage(self, buffers: StagingBuffers) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        for index, parameter in enumerate(self._model.parameters()):
            averaged = local_shard(parameter).clone()
            self._manager.allreduce(averaged).wait()
            buffers.host[index].copy_(averaged)
            del averaged

    @torch.no_grad()
    def _write_back(self, buffers: StagingBuffers) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        for host, parameter in zip(buffers.host, self._model.parameters(), strict=True):
            parameter.copy_(host)


class WriteBackBeforeVote(LocalSGD):
    """Does not wait for the vote."""

    def _reduce_and_stage(self, buffers: StagingBuffers) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        super()._reduce_and_stage(buffers)
        self._write_back(buffers)


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
            for layout in buffers.layouts
        ]
        return StagingBuffers(layouts, self._window_bytes)


class NoVoteAfterException(LocalSGD):
    """Lets an exception pass without a vote."""

    def _reject(self, error: Exception) -> None:
        pass


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (NoStage, properties.check_device_memory),
        (DelInsteadOfWindow, properties.check_device_memory),
        (WriteBackBeforeVote, properties.check_rejection_keeps_parameters),
        (ContiguousCopies, properties.check_mixes_with_release),
        (NoVoteAfterException, properties.check_votes_after_exception),
    ],
)
def test_check_notices_broken_variant(broken: type[LocalSGD], check: Callable[..., None]) -> None:
    with pytest.raises(AssertionError):
        check(broken)


def test_default_path_is_the_code_of_the_release() -> None:
    assert LocalSGD._average is _upstream_local_sgd.LocalSGD._average
    delegating = LocalSGD._perform_sync.__code__
    assert set(delegating.co_names) == {
        "_offload_averaged_parameters_to_cpu",
        "_perform_staged_sync",
        "super",
        "_perform_sync",
    }
