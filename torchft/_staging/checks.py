"""What CPU staging refuses, and when: each mistake as a ValueError that says what to pass instead."""

from __future__ import annotations

import logging
import math
import numbers
import sys
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import nn, optim
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import Backend
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchft._staging.fsdp import find_unsharded
from torchft._staging.plan import StagingPlan, local_shard
from torchft._staging.units import MIB

logger: logging.Logger = logging.getLogger("torchft.local_sgd")

_NAMES_SHOWN = 3


# Before anything is made


def check_switch(name: str, value: object) -> None:
    """Raises ValueError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def window_bytes(offload_window_mb: Optional[float], offload: bool) -> Optional[int]:
    """Returns the window in bytes, None for one parameter at a time.

    Raises:
        ValueError: the window is not a number of MiB, 0 or more, or staging is off.
    """
    if offload_window_mb is None:
        return None
    # As Python's own number: those of NumPy may overflow, and wrap around to a negative window.
    mebibytes = math.nan
    if isinstance(offload_window_mb, numbers.Integral) and not isinstance(offload_window_mb, bool):
        mebibytes = int(offload_window_mb)
    elif isinstance(offload_window_mb, numbers.Real) and not isinstance(offload_window_mb, bool):
        try:
            mebibytes = float(offload_window_mb)
        except OverflowError:
            mebibytes = sys.maxsize if offload_window_mb > 0 else -1
    # nan compares false with everything
    if not 0 <= mebibytes < math.inf:
        raise ValueError(
            f"offload_window_mb must be None or a number of MiB, 0 or more, got {offload_window_mb!r}"
        )
    if not offload:
        raise ValueError(
            f"offload_window_mb={offload_window_mb!r} needs offload_averaged_parameters_to_cpu=True"
        )
    # No memory is larger, and a float that is too large has no whole number.
    return sys.maxsize if mebibytes >= sys.maxsize // MIB else int(mebibytes * MIB)


def check_allreduce_to_cpu(offload_allreduce_to_cpu: bool, offload: bool, window_mb: Optional[float]) -> None:
    """Raises ValueError for a host all-reduce without staging or with a window, which it does not have."""
    check_switch("offload_allreduce_to_cpu", offload_allreduce_to_cpu)
    if not offload_allreduce_to_cpu:
        return
    if not offload:
        raise ValueError("offload_allreduce_to_cpu=True needs offload_averaged_parameters_to_cpu=True")
    if window_mb is not None:
        raise ValueError(
            f"offload_allreduce_to_cpu=True has no window, and offload_window_mb is {window_mb!r}: pass one "
            "of them"
        )


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


def check_quorum_mode(manager: Any) -> None:
    """Raises ValueError for the quorum settings under which LocalSGD destroys weights."""
    # "is True": a test double has neither attribute, or a double in its place.
    if getattr(manager, "_use_async_quorum", None) is True and getattr(manager, "_init_sync", None) is True:
        raise ValueError(
            "the Manager has use_async_quorum=True and init_sync=True: the first LocalSGD synchronization "
            "would divide all weights by the number of replica groups. Pass use_async_quorum=False or "
            "init_sync=False to the Manager; recommended are both, with identical initial weights in all "
            "groups"
        )


# What the Manager's process group can reduce


def process_group_name(manager: Any) -> str:
    """Returns the backend's name as the Manager's process group tells it; empty where it does not."""
    tell = getattr(getattr(manager, "_pg", None), "getBackendName", None)
    try:
        name = tell() if callable(tell) else None
    except RuntimeError:
        # The base classes of TorchFT and of PyTorch raise, and not every process group overrides them.
        return ""
    return name if isinstance(name, str) else ""


def check_process_group(manager: Any, model: Any, allreduce_to_cpu: bool) -> None:
    """Raises ValueError for a process group that is known not to reduce what it is going to be given.

    Args:
        manager: its process group counts; whatever does not say what it is passes.
        model: whose parameters are reduced.
        allreduce_to_cpu: whether host copies are reduced, wherever the parameters are.
    """
    name = process_group_name(manager)
    if _takes_cpu_tensors(name) is not False:
        return
    if allreduce_to_cpu:
        raise ValueError(
            "offload_allreduce_to_cpu=True needs a process group that reduces CPU tensors, and the Manager's "
            f"is {name!r}: pass the Manager a ProcessGroupGloo, or offload_window_mb=0 to LocalSGD instead"
        )
    for index, parameter in enumerate(model.parameters()):
        if local_shard(parameter).device.type == "cpu":
            raise ValueError(
                f"parameter {_name(model, index, parameter)} is on the CPU, and the Manager's process group, "
                f"{name!r}, can't reduce CPU tensors: move the model to the accelerator, or pass the Manager "
                "a ProcessGroupGloo"
            )


def _takes_cpu_tensors(name: str) -> Optional[bool]:
    """Whether a backend has a CPU side, as PyTorch knows its backends; None for one that it does not know."""
    backend = name.lower().rpartition("-")[2]
    devices = Backend.backend_capability.get(backend)
    return None if devices is None else "cpu" in devices


def check_backend(failure: Optional[BaseException], allreduce_to_cpu: bool) -> None:
    """Raises ValueError if a synchronization was rejected since nothing can reduce what it was given.

    PyTorch's process groups say so only when they are called, and it will be so every time.

    Args:
        failure: of the rejected synchronization.
        allreduce_to_cpu: whether it reduced host copies.
    """
    if failure is None or "No backend type associated with device type" not in str(failure):
        return
    advice = (
        "leave offload_allreduce_to_cpu out, or pass the Manager a process group that reduces CPU tensors"
        if allreduce_to_cpu
        else "move the model to a device that it can reduce, or pass the Manager another process group"
    )
    raise ValueError(
        f"the Manager's process group can't reduce what it is given, so no synchronization can succeed "
        f"({failure}): {advice}"
    ) from failure


# Parameters, when LocalSGD is made


def check_parameters(model: Any) -> None:
    """Raises ValueError for a parameter that can't be averaged or whose average can't be written back."""
    for index, parameter in enumerate(model.parameters()):
        # May still be materialized before the first synchronization.
        if not is_lazy(parameter):
            _check_parameter(model, index, parameter)


def warn_of_other_optimizers(model: Any, optimizer: Any) -> None:
    """Warns of trainable parameters that ``optimizer`` does not step: synchronizations follow its steps."""
    if not isinstance(optimizer, optim.Optimizer):
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    others = [
        (index, parameter)
        for index, parameter in enumerate(model.parameters())
        if parameter.requires_grad and id(parameter) not in stepped
    ]
    if not others:
        return
    names = ", ".join(_name(model, index, parameter) for index, parameter in others[:_NAMES_SHOWN])
    logger.warning(
        "%d of the model's trainable parameters (%s%s) are not in the optimizer that LocalSGD was given. Its "
        "steps alone are counted, so synchronizations may come in the middle of a step, at other times than "
        "meant, or never. Pass the optimizer that steps the whole model, or call sync() yourself",
        len(others),
        names,
        ", ..." if len(others) > _NAMES_SHOWN else "",
    )


# Parameters, at the moment of a synchronization


def check_ready(model: Any) -> None:
    """Checks the parameters before anything of a synchronization is sent.

    Raises:
        ValueError: a parameter is uninitialized, unsharded, or one that :func:`check_parameters` refuses.
    """
    parameters = list(model.parameters())
    for index, parameter in enumerate(parameters):
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {_name(model, index, parameter)} is not initialized: run one forward pass before "
                "the first synchronization"
            )
        _check_parameter(model, index, parameter)
    unsharded = find_unsharded(model, parameters)
    if unsharded is not None:
        index, advice = unsharded
        raise ValueError(
            f"parameter {_name(model, index, parameters[index])} is unsharded at this moment, so its average "
            f"would be lost: {advice}"
        )


def check_averageable(name: str, shard: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError for a local shard that can't be averaged, wherever it lies.

    Args:
        name: the parameter's, for the message.
        shard: what this rank holds; on the meta device, too.
        dtype: the element type that it has in training.
    """
    problem = _problem(shard, dtype)
    if problem is not None:
        raise ValueError(f"parameter {name!r} {problem}")


def _check_parameter(model: Any, index: int, parameter: torch.Tensor) -> None:
    shard = local_shard(parameter)
    problem = _problem(shard, shard.dtype)
    if problem is None and shard.device.type == "meta":
        problem = (
            "is on the meta device and has no values: materialize the model first, with to_empty() and its "
            "initialization"
        )
    if problem is not None:
        raise ValueError(f"parameter {_name(model, index, parameter)} {problem}")


def _problem(shard: torch.Tensor, dtype: torch.dtype) -> Optional[str]:
    """Returns why a local shard has no average, None if it has one."""
    if shard.layout != torch.strided:
        return f"has layout {shard.layout}: LocalSGD averages dense parameters only"
    # Averaging divides, and PyTorch has no division for the 8-bit floats.
    if not dtype.is_floating_point or torch.finfo(dtype).bits < 16:
        return (
            f"has dtype {dtype}, which has no average: LocalSGD takes 16, 32 and 64-bit floating-point "
            "parameters; register anything else as a buffer"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(shard.shape, shard.stride(), strict=True)):
        return (
            f"of shape {tuple(shard.shape)} and strides {shard.stride()} is expanded: several elements share "
            "one memory location and can't be written; make it contiguous()"
        )
    if _is_made_of_others(shard) and not _is_one_tensor(shard):
        return (
            f"is a {type(shard).__name__}, which is not shown to hold one {dtype} tensor of shape "
            f"{tuple(shard.shape)} and no other: its average can't be written back. Convert the model after "
            "training, or register the tensor as a buffer"
        )
    return None


def _is_made_of_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a subclass that hands its operators on to other tensors."""
    # Fake tensors and devices written in Python are that, too, and stand for a single tensor.
    dispatch = getattr(type(tensor), "__torch_dispatch__", None)
    return (
        dispatch is not torch._C._disabled_torch_dispatch_impl
        and not isinstance(tensor, FakeTensor)
        and tensor.device.type != torch._C._get_privateuse1_backend_name()
    ) or is_traceable_wrapper_subclass(tensor)


def _is_one_tensor(wrapper: torch.Tensor) -> bool:
    """Whether a wrapper subclass holds one plain tensor of its own shape, dtype and memory order, no more."""
    # Of several tensors a copy is carried out one by one, and the last one wins. Where nothing says what is
    # inside, it may be so.
    flatten: Any = (
        getattr(wrapper, "__tensor_flatten__", None) if is_traceable_wrapper_subclass(wrapper) else None
    )
    names = [] if flatten is None else flatten()[0]
    held: Any = getattr(wrapper, names[0], None) if len(names) == 1 else None
    if not isinstance(held, torch.Tensor) or _description(held) != _description(wrapper):
        return False
    return not _is_made_of_others(held) or _is_one_tensor(held)


def _description(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout


# Parameters, after the vote


def check_averages(plan: StagingPlan, averages: Sequence[torch.Tensor]) -> None:
    """Raises ValueError, before the vote, for averages that are not one per parameter of its shape."""
    if len(averages) != len(plan.layouts):
        raise ValueError(
            f"_average() returned {len(averages)} averages of {len(plan.layouts)} parameters: return one for "
            "each of model.parameters(), in its order"
        )
    for index, (layout, average) in enumerate(zip(plan.layouts, averages, strict=True)):
        if tuple(average.shape) != layout.shape:
            raise ValueError(
                f"_average() returned a tensor of shape {tuple(average.shape)} for parameter number {index}, "
                f"whose shape on this rank is {layout.shape}"
            )


def find_change(plan: StagingPlan, parameters: Sequence[torch.Tensor]) -> Optional[str]:
    """Says whether the parameters are others than those that were averaged.

    Args:
        plan: of the synchronization.
        parameters: what the model has now.

    Returns:
        What differs, or None.
    """
    if len(parameters) != len(plan.layouts):
        return (
            f"the model had {len(plan.layouts)} parameters when the synchronization began and has "
            f"{len(parameters)} now"
        )
    for index, (layout, parameter) in enumerate(zip(plan.layouts, parameters, strict=True)):
        shard = local_shard(parameter)
        if (tuple(shard.shape), shard.dtype) != (layout.shape, layout.dtype):
            return (
                f"parameter number {index} was {layout.dtype} of shape {layout.shape} when the "
                f"synchronization began and is {shard.dtype} of shape {tuple(shard.shape)} now"
            )
        if shard.device.type == "meta":
            return f"parameter number {index} is on the meta device now and has no values"
    return None


def _name(model: Any, index: int, parameter: torch.Tensor) -> str:
    """Returns a parameter's name for a message; adapters that override parameters() may have no names."""
    if isinstance(model, nn.Module):
        for name, candidate in model.named_parameters():
            if candidate is parameter:
                return repr(name)
    return f"number {index}"
