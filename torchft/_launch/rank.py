"""What a rank makes of the options that all commands share."""

from __future__ import annotations

import os
from datetime import timedelta

import torch

from torchft._launch import cli
from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

__all__ = ["pick_device", "process_group"]


def pick_device(name: str) -> torch.device:
    """Chooses this rank's device, and makes it the current one.

    Args:
        name: the value of ``--device``: ``auto`` or a device type.

    Raises:
        UserError: see ``cli.resolve_device``.
    """
    device = cli.resolve_device(name)
    if device.type == "cpu":
        return device
    # The launcher shows each group the devices that are meant for it.
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def process_group(name: str, timeout: timedelta) -> ProcessGroup:
    """Makes the process group that the Manager reconfigures as groups come and go.

    Args:
        name: the value of ``--process-group``: ``gloo`` or ``nccl``.
        timeout: how long a collective may take.
    """
    return {"gloo": ProcessGroupGloo, "nccl": ProcessGroupNCCL}[name](timeout=timeout)
