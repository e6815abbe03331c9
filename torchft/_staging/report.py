"""The one line that the log has about a plan."""

from __future__ import annotations

from torchft._staging.plan import StagingPlan
from torchft._staging.units import format_bytes


def describe_plan(plan: StagingPlan, process_group: str) -> str:
    """Returns what a synchronization takes, for the log.

    Args:
        plan: of the synchronization.
        process_group: backend name of the Manager's process group; empty where it is not known.
    """
    by_device = "; ".join(
        f"{device}: S = {format_bytes(total)}, M = {format_bytes(largest)}, "
        + ("no window" if device not in plan.windows else f"window {format_bytes(plan.windows[device])}")
        for device, (total, largest) in plan.devices.items()
    )
    how = "reduced on the host" if plan.allreduce_to_cpu else f"in {len(plan.rounds)} rounds"
    hint = ""
    on_accelerator = any(device.type != "cpu" for device in plan.devices)
    if on_accelerator and not plan.allreduce_to_cpu and process_group == "torchft-gloo":
        hint = (
            "; Gloo reduces on the host anyway: offload_allreduce_to_cpu=True takes no window, half the "
            "traffic over the host link and less time"
        )
    return (
        f"CPU staging is on: {len(plan.layouts)} parameters {how}; {by_device or 'nothing to average'}; "
        f"host memory {format_bytes(plan.host_bytes)}{hint}"
    )
