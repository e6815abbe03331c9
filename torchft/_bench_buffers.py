"""Host buffers that LocalSGD does not offer, to learn what an option for them would be worth.

The bench swaps them in behind the window of M bytes. They are no public option: whoever keeps host memory
between synchronizations gives up that it is free for other things in the meantime.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Callable, Optional

import torch

from torchft._local_sgd_buffers import ShardLayout

# Returns the host tensors of a synchronization, and the bytes that they take.
HostBuffers = Callable[[Sequence[ShardLayout]], tuple[list[torch.Tensor], int]]

# Every dtype's alignment divides it. bytes
_ALIGNMENT = 64


def pageable(layouts: Sequence[ShardLayout]) -> tuple[list[torch.Tensor], int]:
    """Allocates as LocalSGD does."""
    tensors = [
        torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="cpu")
        for layout in layouts
    ]
    return tensors, sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def pinned(layouts: Sequence[ShardLayout]) -> tuple[list[torch.Tensor], int]:
    """Allocates page-locked memory with CUDA; the bytes are those after the allocator's rounding."""

    def active() -> int:
        return torch.cuda.host_memory_stats().get("active_bytes.current", 0)

    before = active()
    tensors = [
        torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="cpu", pin_memory=True)
        for layout in layouts
    ]
    return tensors, active() - before


def huge_pages(layouts: Sequence[ShardLayout]) -> tuple[list[torch.Tensor], int]:
    """Maps one piece of memory and asks for transparent huge pages in it."""
    offsets, size = [], 0
    for layout in layouts:
        offsets.append(size)
        size += -(-layout.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensors keep the mapping alive.
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    tensors = [
        whole[offset : offset + layout.nbytes].view(layout.dtype).as_strided(layout.shape, layout.stride)
        for layout, offset in zip(layouts, offsets)
    ]
    return tensors, size


def kept(buffers: HostBuffers) -> HostBuffers:
    """Wraps ``buffers`` so that the first synchronization's memory serves all later ones."""
    held: Optional[tuple[list[torch.Tensor], int]] = None

    def reuse(layouts: Sequence[ShardLayout]) -> tuple[list[torch.Tensor], int]:
        nonlocal held
        if held is None:
            held = buffers(layouts)
        # A list of its own: the synchronization clears it.
        return list(held[0]), held[1]

    return reuse


# Made anew for every case: those that keep memory must not share it.
VARIANTS: dict[str, Callable[[], HostBuffers]] = {
    "kept": lambda: kept(pageable),
    "pinned": lambda: pinned,
    "kept-pinned": lambda: kept(pinned),
    "huge-pages": lambda: huge_pages,
}
