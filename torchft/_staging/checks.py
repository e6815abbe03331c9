"""What CPU staging refuses: each mistake as a ValueError that says what to pass instead."""

from __future__ import annotations

import math
import numbers
from typing import Optional

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from torchft._staging.buffers import local_shard
from torchft.manager import Manager

MIB = 1024 * 1024


def window_bytes(offload_window_mb: Optional[float], offload: bool) -> Optional[int]:
    """Returns the window in bytes, None for one parameter at a time.

    Raises:
        ValueError: the window is not a number of MiB, 0 or more, or staging is off.
    """
    if offload_window_mb is None:
        return None
    if (
        isinstance(offload_window_mb, bool)
        or not isinstance(offload_window_mb, (int, float))
        or not math.isfinite(offload_window_mb)
        or offload_window_mb < 0
    ):
        raise ValueError(
            f"offload_window_mb must be None or a number of MiB, 0 or more, got {offload_window_mb!r}"
        )
    if not offload:
        raise ValueError(
            f"offload_window_mb={offload_window_mb!r} needs offload_averaged_parameters_to_cpu=True"
        )
    return int(offload_window_mb * MIB)


def check_sync_every(sync_every: int) -> None:
    """Raises ValueError unless ``sync_every`` is a whole number of optimizer steps, 1 or more."""
    if isinstance(sync_every, bool) or not isinstance(sync_every, numbers.Integral) or sync_every < 1:
        raise ValueError(
            f"sync_every must be a whole number of optimizer steps, 1 or more, got {sync_every!r}"
        )


def check_step_hooks(optimizer: optim.Optimizer) -> None:
    """Raises ValueError for an optimizer, or a wrapper of one, that can't call LocalSGD at its steps."""
    try:
        # Having the methods says little: wrappers inherit them without the state that they work on.
        optimizer.register_step_pre_hook(lambda *_: None).remove()
        optimizer.register_step_post_hook(lambda *_: None).remove()
    except AttributeError as error:
        raise ValueError(
            f"optimizer of type {type(optimizer).__name__} has no step hooks ({error}), so no step would "
            "synchronize: pass a torch.optim.Optimizer, of a wrapper the one inside"
        ) from error


def check_quorum_mode(manager: Manager) -> None:
    """Raises ValueError for the quorum settings under which LocalSGD destroys weights."""
    # "is True": a test double has neither attribute, or a double in its place.
    if getattr(manager, "_use_async_quorum", None) is True and getattr(manager, "_init_sync", None) is True:
        raise ValueError(
            "the Manager has use_async_quorum=True and init_sync=True: the first LocalSGD synchronization "
            "would divide all weights by the number of replica groups. Pass use_async_quorum=False or "
            "init_sync=False to the Manager; recommended are both, with identical initial weights in all "
            "groups"
        )


def check_parameters(model: nn.Module) -> None:
    """Raises ValueError for a parameter that can't be averaged or whose average can't be written back."""
    for name, parameter in model.named_parameters():
        # May still be materialized before the first synchronization.
        if not is_lazy(parameter):
            _check_parameter(name, parameter)


def mesh_dimensions(model: nn.Module) -> dict[str, int]:
    """Returns the number of mesh dimensions of every parameter that is a DTensor, by name."""
    return {
        name: parameter.device_mesh.ndim
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
    }


def check_ready(model: nn.Module, dimensions: dict[str, int]) -> None:
    """Checks the parameters at the moment of a synchronization.

    Args:
        model: the module that is synchronized.
        dimensions: the mesh dimensions that each DTensor has while it is sharded. While a module is
            unsharded FSDP2 swaps another parameter in, a plain tensor, or with tensor parallelism a DTensor
            on a smaller mesh; an average written into that one vanishes when the module is resharded.

    Raises:
        ValueError: a parameter is uninitialized, unsharded, or one that :func:`check_parameters` refuses.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} is not initialized: run one forward pass before the first "
                "synchronization"
            )
        ndim = parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0
        if ndim < dimensions.get(name, 0):
            raise ValueError(
                f"parameter {name!r} was a DTensor when LocalSGD was made and is unsharded now, so its "
                "average would be lost: call reshard() on its FSDP module before the synchronization, or "
                "let the last microbatch reshard again with set_reshard_after_backward(True)"
            )
        _check_parameter(name, parameter)


def _check_parameter(name: str, parameter: torch.Tensor) -> None:
    shard = local_shard(parameter)
    if shard.device.type == "meta":
        raise ValueError(
            f"parameter {name!r} is on the meta device and has no values: materialize the model first, with "
            "to_empty() and its initialization"
        )
    check_averageable(name, shard, shard.dtype)


def check_averageable(name: str, shard: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError for a local shard that can't be averaged, wherever it lies.

    Args:
        name: the parameter's, for the message.
        shard: what this rank holds; on the meta device, too.
        dtype: the element type that it has in training.
    """
    if shard.layout != torch.strided:
        raise ValueError(
            f"parameter {name!r} has layout {shard.layout}: LocalSGD averages dense parameters only"
        )
    # Averaging divides, and PyTorch has no division for the 8-bit floats.
    if not dtype.is_floating_point or torch.finfo(dtype).bits < 16:
        raise ValueError(
            f"parameter {name!r} has dtype {dtype}, which has no average: LocalSGD takes 16, 32 and "
            "64-bit floating-point parameters; register anything else as a buffer"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(shard.shape, shard.stride(), strict=True)):
        raise ValueError(
            f"parameter {name!r} of shape {tuple(shard.shape)} and strides {shard.stride()} is expanded: "
            "several elements share one memory location and can't be written; make it contiguous()"
        )
