"""The memory of one staged synchronization, all of it taken at once."""

from __future__ import annotations

import torch

from torchft._staging.plan import StagingPlan, local_shard


class StagingBuffers:
    """The window and the host memory of one synchronization.

    The window exists because references to a reduced tensor outlive ``wait()``: the Manager's callback
    and timer threads drop theirs a little later, and after a time-out a collective may still be writing.
    One allocation that stays for the whole synchronization makes lingering references cost nothing and
    keeps memory from being freed under a collective.

    Args:
        plan: what to take.

    Attributes:
        plan: as given.
        host: for each parameter an uninitialized host tensor with its layout, for its average.

    Raises:
        RuntimeError: (``torch.OutOfMemoryError`` on an accelerator) when the memory cannot be had.
    """

    def __init__(self, plan: StagingPlan) -> None:
        self.plan = plan
        self._windows = {
            device: torch.empty(nbytes, dtype=torch.uint8, device=device)
            for device, nbytes in plan.windows.items()
        }
        self.host = [
            torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="cpu")
            for layout in plan.layouts
        ]

    def slot(self, index: int) -> torch.Tensor:
        """Returns the part of the window that belongs to parameter ``index``, as a view with its layout."""
        layout, offset = self.plan.layouts[index], self.plan.offsets[index]
        memory = self._windows[layout.device][offset : offset + layout.nbytes]
        return memory.view(layout.dtype).as_strided(layout.shape, layout.stride)

    def copy_to_host(self, index: int, parameter: torch.Tensor) -> torch.Tensor:
        """Copies the local shard of parameter ``index`` straight to its host tensor, which it returns."""
        shard = local_shard(parameter)
        if index in self.plan.offsets:
            shard = self.slot(index).copy_(shard)
        return self.host[index].copy_(shard)

    def bring_back(self, index: int, average: torch.Tensor) -> torch.Tensor:
        """Returns ``average`` where the parameter can take it over without memory for a temporary.

        That is inside the window for whatever has a place there: after the vote nothing may be allocated on
        the device, since running out of memory between two parameters would leave a torn model.

        Args:
            index: of the parameter.
            average: its staged average.
        """
        if index not in self.plan.offsets or self.plan.layouts[index].device.type == "cpu":
            return average
        return self.slot(index).copy_(average)

    def release_window(self) -> None:
        """Drops the window, whoever still holds this object."""
        self._windows.clear()

    def release(self) -> None:
        """Drops the window and the host tensors, whoever still holds this object."""
        self._windows.clear()
        self.host.clear()
