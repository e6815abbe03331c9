"""The memory of one staged synchronization: where each average lies on device and host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import torch
from torch.distributed.tensor import DTensor

# Collectives and copy kernels read whole vectors only from aligned addresses; every dtype's own
# alignment divides this as well. bytes
_SLOT_ALIGNMENT = 64


def local_shard(parameter: torch.Tensor) -> torch.Tensor:
    """Returns what this rank holds of ``parameter``, without a copy."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@dataclass(frozen=True)
class ShardLayout:
    """How a local shard lies in memory once ``Tensor.clone()`` has copied it.

    Collectives reduce raw memory, so a staged replica group may stand beside an unstaged one only if its
    elements have the order that the release's ``clone()`` gives them: the strides of the
    shard itself where these are dense (transposed and channels_last ones too), dense strides in the same
    order of dimensions otherwise.

    Attributes:
        shape: sizes of the local shard, in elements.
        stride: strides of the copy, in elements.
        dtype: element type.
        device: where the local shard lives.
        nbytes: bytes of the copy (elements times element size).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int

    @classmethod
    def of(cls, parameter: torch.Tensor) -> ShardLayout:
        """Returns the layout of the local shard of ``parameter``; allocates nothing."""
        shard = local_shard(parameter)
        stride = shard.stride()
        # clone() keeps the strides of a contiguous one; to ask nevertheless costs most of what planning does.
        if not shard.is_contiguous():
            like_shard = torch.empty_strided(shard.shape, stride, dtype=shard.dtype, device="meta")
            stride = torch.empty_like(like_shard).stride()
        return cls(
            shape=tuple(shard.shape),
            stride=stride,
            dtype=shard.dtype,
            device=shard.device,
            nbytes=shard.numel() * shard.element_size(),
        )


@dataclass(frozen=True)
class Placement:
    """Where one local shard lies in the window of its device.

    Attributes:
        index: position of the parameter in ``model.parameters()``.
        offset: first byte inside the window.
    """

    index: int
    offset: int


def plan_rounds(layouts: Sequence[ShardLayout], window_bytes: Optional[int]) -> list[list[Placement]]:
    """Cuts the sequence of parameters into rounds that are in the window, and in flight, together.

    Parameters stay whole and in order: the sequence of collectives must be the release's own, whatever
    the window, or groups with different windows would pair different parameters.

    Args:
        layouts: one per parameter, in the order of ``model.parameters()``.
        window_bytes: bytes that a round may take on each device; a larger parameter is a round of its
            own. None: every parameter is a round of its own.

    Returns:
        The rounds, each with one placement per parameter.
    """
    largest: dict[torch.device, int] = {}
    for layout in layouts:
        largest[layout.device] = max(largest.get(layout.device, 0), layout.nbytes)

    rounds: list[list[Placement]] = []
    used: dict[torch.device, int] = {}
    for index, layout in enumerate(layouts):
        offset = -(-used.get(layout.device, 0) // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        if (
            not rounds
            or window_bytes is None
            or offset + layout.nbytes > max(window_bytes, largest[layout.device])
        ):
            rounds.append([])
            used, offset = {}, 0
        rounds[-1].append(Placement(index, offset))
        used[layout.device] = offset + layout.nbytes
    return rounds


def window_sizes(
    layouts: Sequence[ShardLayout], rounds: Sequence[Sequence[Placement]]
) -> dict[torch.device, int]:
    """Returns the bytes of the window on each device, as much as the fullest round needs."""
    sizes: dict[torch.device, int] = {}
    for placement in (placement for placements in rounds for placement in placements):
        layout = layouts[placement.index]
        end = placement.offset + layout.nbytes
        sizes[layout.device] = max(sizes.get(layout.device, 0), end)
    return sizes


def host_bytes(layouts: Sequence[ShardLayout], rounds: Sequence[Sequence[Placement]]) -> int:
    """Returns the bytes that staging takes on the host: all averages, and the window of a CPU device."""
    windows = window_sizes(layouts, rounds)
    return sum(layout.nbytes for layout in layouts) + sum(
        nbytes for device, nbytes in windows.items() if device.type == "cpu"
    )


class StagingBuffers:
    """All memory of one staged synchronization, taken at once when it is constructed.

    The window exists because references to a reduced tensor outlive ``wait()``: the Manager's callback
    and timer threads drop theirs a little later, and after a time-out a collective may still be writing.
    One allocation that stays for the whole synchronization makes lingering references cost nothing and
    keeps memory from being freed under a collective.

    Args:
        layouts: one per parameter, in the order of ``model.parameters()``.
        window_bytes: see :func:`plan_rounds`.

    Attributes:
        layouts: as given.
        rounds: the placements of all parameters, see :func:`plan_rounds`.
        host: for each parameter an uninitialized host tensor with its layout.

    Raises:
        RuntimeError: (``torch.OutOfMemoryError`` on an accelerator) when the memory cannot be had.
    """

    def __init__(self, layouts: Sequence[ShardLayout], window_bytes: Optional[int]) -> None:
        self.layouts = layouts
        self.rounds = plan_rounds(layouts, window_bytes)
        self._placements = [placement for placements in self.rounds for placement in placements]
        self._windows = {
            device: torch.empty(nbytes, dtype=torch.uint8, device=device)
            for device, nbytes in window_sizes(layouts, self.rounds).items()
        }
        self.host = [
            torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="cpu")
            for layout in layouts
        ]

    def slot(self, index: int) -> torch.Tensor:
        """Returns the part of the window that belongs to parameter ``index``, as a view with its layout."""
        layout, offset = self.layouts[index], self._placements[index].offset
        memory = self._windows[layout.device][offset : offset + layout.nbytes]
        return memory.view(layout.dtype).as_strided(layout.shape, layout.stride)

    def averaged(self, index: int) -> torch.Tensor:
        """Returns the staged average of parameter ``index``, on the parameter's own device.

        A device tensor is made inside the window: after the vote nothing may be allocated on the device,
        since running out of memory between two parameters would leave a torn model.
        """
        host = self.host[index]
        if self.layouts[index].device.type == "cpu":
            return host
        return self.slot(index).copy_(host)

    def release(self) -> None:
        """Drops the window and the host tensors, whoever still holds this object."""
        self._windows.clear()
        self.host.clear()
