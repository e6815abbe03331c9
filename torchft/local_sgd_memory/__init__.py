"""
LocalSGD memory
===============

What CPU staging of LocalSGD saves and costs on a given model, before it is switched on.

In a training script, after sharding, one line tells it for this rank::

    print(staging_memory(model))

For a model that does not exist yet there is a command::

    python -m torchft.local_sgd_memory MODULE:CALLABLE

The report is made of the same functions that lay out a staged synchronization, so the two can't disagree.
"""

from __future__ import annotations

import dataclasses
from typing import Optional

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchft._staging.checks import check_allreduce_to_cpu, check_averageable, window_bytes
from torchft._staging.host_memory import available_host_memory, local_world_size
from torchft._staging.plan import ShardLayout, StagingPlan, local_shard
from torchft.local_sgd_memory.report import DeviceShare, PeakMemory, StagingMemory

__all__ = ["DeviceShare", "PeakMemory", "StagingMemory", "staging_memory"]


@torch.no_grad()
def staging_memory(
    model: nn.Module,
    *,
    shards: int = 1,
    dtype: Optional[torch.dtype] = None,
    offload_window_mb: Optional[float] = None,
    allreduce_to_cpu: bool = False,
    ranks_per_host: Optional[int] = None,
    host_memory: Optional[int] = None,
) -> StagingMemory:
    """Reports what CPU staging saves and costs for the parameters that this rank holds.

    Allocates nothing and changes nothing.

    Args:
        model: the module that LocalSGD gets, as it stands: plain, sharded with FSDP2 or otherwise made of
            DTensors, on any device, the meta device too.
        shards: for a sharding that does not exist yet: FSDP2 over so many ranks, which cuts dimension 0 of
            each parameter as ``torch.chunk`` does. The rank with the most counts.
        dtype: for a conversion that has not happened yet: element type of the floating-point parameters.
        offload_window_mb: as LocalSGD gets it, in MiB.
        allreduce_to_cpu: LocalSGD's ``offload_allreduce_to_cpu``: reduce the host copies themselves.
        ranks_per_host: ranks of one host; default: LOCAL_WORLD_SIZE, else 1.
        host_memory: bytes of host memory that those ranks may take; default: what is available on this
            host, within the limits of its cgroups.

    Raises:
        ValueError: for an argument that can't be used, and for parameters that LocalSGD can't average.
    """
    window = window_bytes(offload_window_mb, offload=True)
    check_allreduce_to_cpu(allreduce_to_cpu, True, offload_window_mb)
    for name, value in (("shards", shards), ("ranks_per_host", ranks_per_host)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if host_memory is not None and host_memory < 0:
        raise ValueError(f"host_memory must be a number of bytes, 0 or more, got {host_memory!r}")
    named = dict(model.named_parameters())
    if not named:
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to average")

    layouts = [_layout(name, parameter, shards, dtype) for name, parameter in named.items()]
    plan = StagingPlan.of(layouts, window, allreduce_to_cpu)
    by_device = tuple(
        DeviceShare(str(device), total, largest, plan.windows.get(device, 0))
        for device, (total, largest) in plan.devices.items()
    )
    by_dtype: dict[str, int] = {}
    for layout in layouts:
        dtype_name = str(layout.dtype).replace("torch.", "")
        by_dtype[dtype_name] = by_dtype.get(dtype_name, 0) + layout.nbytes
    largest_name, largest = max(zip(named, layouts, strict=True), key=lambda item: item[1].nbytes)
    total = sum(layout.nbytes for layout in layouts)
    original = sum(share.total_bytes for share in by_device if not share.is_host)
    staged = sum(share.window_bytes for share in by_device if not share.is_host)
    return StagingMemory(
        parameters=sum(parameter.numel() for parameter in named.values()),
        tensors=len(layouts),
        shards=shards,
        total_bytes=total,
        largest_bytes=largest.nbytes,
        largest_name=largest_name,
        rounds=len(plan.rounds),
        allreduce_to_cpu=allreduce_to_cpu,
        by_dtype=by_dtype,
        by_device=by_device,
        device_bytes_original=original,
        device_bytes_staged=staged,
        saved_bytes=original - staged,
        host_bytes=plan.host_bytes,
        link_bytes_committed=2 * original,
        link_bytes_rejected=original,
        ranks_per_host=local_world_size() if ranks_per_host is None else ranks_per_host,
        host_memory=available_host_memory() if host_memory is None else host_memory,
        host_memory_given=host_memory is not None,
        bytes_by_tensor=tuple(layout.nbytes for layout in layouts),
    )


def _layout(name: str, parameter: torch.Tensor, shards: int, dtype: Optional[torch.dtype]) -> ShardLayout:
    """Returns how the local shard of a parameter will lie in memory, on the rank that holds the most."""
    if is_lazy(parameter):
        raise ValueError(f"parameter {name!r} is not initialized: run one forward pass first")
    shard = local_shard(parameter)
    if shards > 1:
        if shard is not parameter:
            raise ValueError(
                f"shards={shards} is for a model that is not sharded yet, and parameter {name!r} is a "
                "DTensor; leave it out"
            )
        if parameter.dim() == 0:
            raise ValueError(
                f"parameter {name!r} is a scalar, which FSDP2 can't shard: make it 1-dimensional"
            )
        # Chunk 0 is never smaller than another one, so the first rank holds the most of every parameter.
        shard = parameter.narrow(0, 0, -(-parameter.shape[0] // shards))
    if dtype is None or not shard.dtype.is_floating_point:
        dtype = shard.dtype
    check_averageable(name, shard, dtype)
    return dataclasses.replace(ShardLayout.of(shard), dtype=dtype, nbytes=shard.numel() * dtype.itemsize)
