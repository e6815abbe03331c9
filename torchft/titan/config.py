"""The three fields that TorchTitan's fault tolerance section gains, and what they can't be combined with."""

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
    several parameters in flight; needs "local_sgd_offload_to_cpu". With 0
    as many as fit into the size of the largest parameter; with more as
    many as fit into that, which takes more memory and is faster. By default
    none is given: one parameter at a time, or an all-reduce on the host.
    """

    local_sgd_offload_allreduce_to_cpu: Optional[bool] = None
    """
    Reduce the copies on the host themselves, so that a synchronization
    takes no accelerator memory at all; needs "local_sgd_offload_to_cpu" and
    "process_group" "gloo", which reduces on the host anyway. By default on
    with "gloo" unless a window is given, off with any other process group.
    On accelerators all replica groups must use the same.
    """


def allreduces_on_host(section: FaultTolerance) -> bool:
    """Whether CPU staging reduces the copies on the host, which is the default where it can.

    Args:
        section: one that :func:`check_fault_tolerance` accepts, with the flag on.
    """
    if section.local_sgd_offload_allreduce_to_cpu is not None:
        return section.local_sgd_offload_allreduce_to_cpu
    return section.process_group == "gloo" and section.local_sgd_offload_window_mb is None


def check_fault_tolerance(section: FaultTolerance, pipeline_parallel_degree: int) -> None:
    """Raises ValueError for a flag that would have no effect or a wrong one.

    Args:
        section: the fault tolerance section of a job, command line included.
        pipeline_parallel_degree: the number of pipeline ranks of the job, 1 for none.
    """
    flag = "fault_tolerance.local_sgd_offload_to_cpu"
    window_flag = "fault_tolerance.local_sgd_offload_window_mb"
    host_flag = "fault_tolerance.local_sgd_offload_allreduce_to_cpu"
    window, on_host = section.local_sgd_offload_window_mb, section.local_sgd_offload_allreduce_to_cpu
    if not section.local_sgd_offload_to_cpu:
        for name, value in {window_flag: window, host_flag: on_host}.items():
            if value is not None:
                raise ValueError(
                    f"{name} is {value}, which needs CPU staging: pass --{flag} as well, or leave it out"
                )
        return

    try:
        window_bytes(window, True)
    except ValueError as error:
        raise ValueError(f"{window_flag}: {error}") from None
    if on_host and window is not None:
        raise ValueError(f"{host_flag} has no window, and {window_flag} is {window}: pass one of them")
    if on_host and section.process_group != "gloo":
        raise ValueError(
            f"{host_flag} needs a process group that reduces CPU tensors, and fault_tolerance.process_group "
            f"is {section.process_group!r}: pass --fault_tolerance.process_group gloo, or leave it out"
        )
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
