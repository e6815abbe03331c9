"""What a staged synchronization has to order by itself, since the Manager's ``wait()`` does not.

The Manager divides the sum of an all-reduce in a callback, on the stream that was current when the all-reduce
began, and orders the division before what follows ``wait()`` on CUDA and XPU only, and for the current device
only. The release copies nothing until the vote, which takes longer than the division; staging copies to the
host at once, and would stage sums that nobody has divided yet, or half divided ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

# Where wait() orders the division. To synchronize there as well would wait for whatever else is in flight.
_ORDERED_BY_WAIT = ("cpu", "cuda", "xpu")

_NOTHING = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes an accelerator's device the current one, as an all-reduce and its ``wait()`` need it.

    Args:
        device: where the tensor is; nothing is to be done for the CPU.
    """
    if device.type == "cpu":
        return _NOTHING
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        return _NOTHING
    return torch.accelerator.device_index(device.index)


def finish_divisions(devices: Iterable[torch.device]) -> None:
    """Returns when tensors whose all-reduces have been waited for hold averages, and not sums.

    Args:
        devices: where the tensors are.
    """
    for device in devices:
        if device.type not in _ORDERED_BY_WAIT:
            torch.accelerator.synchronize(device)
