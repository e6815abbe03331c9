"""What lies where in one staged synchronization: computed beforehand, without allocating anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
        dense: whether the shard itself has these strides, so that it and a copy of it have the same bytes.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    dense: bool = True

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
            dense=stride == shard.stride(),
        )


@dataclass(frozen=True)
class StagingPlan:
    """The memory of a staged synchronization, and the order in which it is used.

    Attributes:
        layouts: one per parameter, in the order of ``model.parameters()``.
        rounds: the parameters that are in the window, and in flight, together; all are waited for before the
            next ones come in. With a host all-reduce a single round: nothing is waited for in between.
        offsets: by parameter, its first byte in the window of its device. A parameter without one never is
            in a window.
        windows: bytes of the window, by device.
        allreduce_to_cpu: whether the host copies themselves are reduced (host all-reduce).
    """

    layouts: tuple[ShardLayout, ...]
    rounds: tuple[tuple[int, ...], ...]
    offsets: dict[int, int]
    windows: dict[torch.device, int]
    allreduce_to_cpu: bool

    @classmethod
    def of(
        cls, layouts: Iterable[ShardLayout], window_bytes: Optional[int], allreduce_to_cpu: bool = False
    ) -> StagingPlan:
        """Plans a synchronization.

        Args:
            layouts: one per parameter, in the order of ``model.parameters()``.
            window_bytes: bytes that a round may take on each device; a larger parameter is a round of its
                own. None: every parameter is a round of its own.
            allreduce_to_cpu: plan for a host all-reduce, which has no window.
        """
        layouts = tuple(layouts)
        if allreduce_to_cpu:
            rounds, offsets = _one_round(layouts)
        else:
            rounds, offsets = _rounds(layouts, window_bytes)
        windows: dict[torch.device, int] = {}
        for index, offset in offsets.items():
            layout = layouts[index]
            windows[layout.device] = max(windows.get(layout.device, 0), offset + layout.nbytes)
        return cls(layouts, tuple(map(tuple, rounds)), offsets, windows, allreduce_to_cpu)

    @cached_property
    def devices(self) -> dict[torch.device, tuple[int, int]]:
        """S and M, in bytes, by device."""
        sizes: dict[torch.device, tuple[int, int]] = {}
        for layout in self.layouts:
            total, largest = sizes.get(layout.device, (0, 0))
            sizes[layout.device] = total + layout.nbytes, max(largest, layout.nbytes)
        return sizes

    @property
    def host_bytes(self) -> int:
        """Bytes that staging takes on the host: all averages, and the window of a CPU device."""
        window = sum(nbytes for device, nbytes in self.windows.items() if device.type == "cpu")
        return sum(layout.nbytes for layout in self.layouts) + window


def _rounds(
    layouts: Sequence[ShardLayout], window_bytes: Optional[int]
) -> tuple[list[list[int]], dict[int, int]]:
    # Parameters stay whole and in order: the sequence of collectives must be the release's own, whatever
    # the window, or groups with different windows would pair different parameters.
    largest: dict[torch.device, int] = {}
    for layout in layouts:
        largest[layout.device] = max(largest.get(layout.device, 0), layout.nbytes)

    rounds: list[list[int]] = []
    offsets: dict[int, int] = {}
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
        rounds[-1].append(index)
        offsets[index] = offset
        used[layout.device] = offset + layout.nbytes
    return rounds, offsets


def _one_round(layouts: Sequence[ShardLayout]) -> tuple[list[list[int]], dict[int, int]]:
    # PyTorch copies a shard that is not dense between devices by way of a contiguous temporary on the
    # accelerator, in both directions: these, one at a time, go through a window that is there beforehand.
    strided = [
        index for index, layout in enumerate(layouts) if not layout.dense and layout.device.type != "cpu"
    ]
    return [list(range(len(layouts)))] if layouts else [], dict.fromkeys(strided, 0)
