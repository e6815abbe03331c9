"""The two fields that TorchTitan's fault tolerance section gains, and what they can't be combined with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from torchtitan.experiments.torchft.config import FaultTolerance as TitanFaultTolerance

from torchft._staging.checks import window_bytes


# TorchTitan's Configurable.Config demands both arguments.
@dataclass(kw_only=True, slots=True)
class FaultTolerance(TitanFaultTolerance):
    """TorchTitan's fault tolerance section, with CPU staging for LocalSGD."""

    local_sgd_offload_to_cpu: bool = False
    """
    Keep averaged parameters on the host until the replica groups have
    voted, instead of a second copy of all parameters on the accelerator:
    less accelerator memory at a synchronization, for host memory and a
    longer synchronization. Only with "semi_sync_method" "local_sgd", and
    without pipeline parallelism.
    """

    local_sgd_offload_window_mb: Optional[float] = None
    """
    Accelerator memory, in MiB per device, in which staging may keep
    several parameters in flight; needs "local_sgd_offload_to_cpu". By
    default one parameter at a time; with 0 as many as fit into the size of
    the largest parameter; with more as many as fit into that, which takes
    more memory and is faster.
    """


def check_fault_tolerance(section: FaultTolerance, pipeline_parallel_degree: int) -> None:
    """Raises ValueError for a flag that would have no effect or a wrong one.

    Args:
        section: the fault tolerance section of a job, command line included.
        pipeline_parallel_degree: the number of pipeline ranks of the job, 1 for none.
    """
    window = section.local_sgd_offload_window_mb
    if not section.local_sgd_offload_to_cpu:
        if window is not None:
            raise ValueError(
                f"fault_tolerance.local_sgd_offload_window_mb is {window}, which needs CPU staging: pass "
                "--fault_tolerance.local_sgd_offload_to_cpu as well, or leave the window out"
            )
        return

    try:
        window_bytes(window, True)
    except ValueError as error:
        raise ValueError(f"fault_tolerance.local_sgd_offload_window_mb: {error}") from None
    flag = "fault_tolerance.local_sgd_offload_to_cpu"
    if not section.enable:
        raise ValueError(f"{flag} needs fault tolerance: pass --fault_tolerance.enable as well")
    method = section.semi_sync_method
    # TorchTitan takes the method in any case.
    if method is None or method.lower() != "local_sgd":
        raise ValueError(
            f"{flag} works with LocalSGD only, and fault_tolerance.semi_sync_method is {method!r}: pass "
            "--fault_tolerance.semi_sync_method local_sgd, or leave the flag out"
        )
    if pipeline_parallel_degree > 1:
        raise ValueError(
            f"{flag} can't be combined with pipeline stages, and parallelism.pipeline_parallel_degree is "
            f"{pipeline_parallel_degree}: LocalSGD would average one model part of each rank and never the "
            "others. Pass --parallelism.pipeline_parallel_degree 1"
        )
