"""Which parameters FSDP holds unsharded at this moment, as FSDP itself says.

An average that is written into an unsharded parameter vanishes when its module is resharded; one that is
written into a shard beside an unsharded copy is not in that copy, from which FSDP1 goes on.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Optional

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened as is_flattened
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

_FSDP1_ADVICE = (
    "synchronize right after an optimizer step, before the next forward pass; a forward and backward pass "
    "shards it again, a forward pass alone, as for a validation, does not. Keep what only runs forward, such "
    "as a frozen teacher, out of the module that LocalSGD gets"
)
_FSDP2_ADVICE = (
    "call reshard() on its FSDP module before the synchronization, or let the last microbatch reshard again "
    "with set_reshard_after_backward(True)"
)


def find_unsharded(model: Any, parameters: Sequence[torch.Tensor]) -> Optional[tuple[int, str]]:
    """Looks for a parameter that FSDP holds unsharded.

    Args:
        model: what is synchronized, or an adapter of it.
        parameters: what its ``parameters()`` returns now.

    Returns:
        The index of the first one and what to do about it; None where all are as they are trained.
    """
    numbers = {id(parameter): index for index, parameter in enumerate(parameters)}
    fsdp1 = _unsharded_fsdp1(_fsdp1_modules(model, parameters))
    for unsharded, advice in ((_unsharded_fsdp2(), _FSDP2_ADVICE), (fsdp1, _FSDP1_ADVICE)):
        found = sorted(numbers[id(each)] for each in unsharded if id(each) in numbers)
        if found:
            return found[0], advice
    return None


def _unsharded_fsdp2() -> Iterator[torch.Tensor]:
    # All of this process: the model may be a part of what fully_shard() was called on.
    for module, reference in list(_module_state_mapping.items()):
        state = reference()
        if not isinstance(module, FSDPModule) or not isinstance(state, FSDPState):
            continue
        for group in _parameter_groups(state):
            if group.is_sharded:
                continue
            for held in group.fsdp_params:
                # With reshard_after_forward=N a third one, sharded over fewer ranks.
                for name in ("_unsharded_param", "_sharded_post_forward_param"):
                    parameter = getattr(held, name, None)
                    if parameter is not None:
                        yield parameter


def _parameter_groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    # PyTorch up to 2.13 has one at most.
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _fsdp1_modules(model: Any, parameters: Sequence[torch.Tensor]) -> list[FullyShardedDataParallel]:
    if isinstance(model, FullyShardedDataParallel):
        return FullyShardedDataParallel.fsdp_modules(model)
    # FSDP1 marks what it holds, and registers plain tensors while that is unsharded.
    if not any(is_flattened(each) or not isinstance(each, nn.Parameter) for each in parameters):
        return []
    # The wrapper may be around the model, or hidden inside an adapter, and nothing else leads to it.
    return [found for found in gc.get_objects() if issubclass(type(found), FullyShardedDataParallel)]


def _unsharded_fsdp1(modules: Iterable[FullyShardedDataParallel]) -> Iterator[torch.Tensor]:
    for module in modules:
        handle = module._handle
        if handle is None or not handle.uses_sharded_strategy or not _holds_unsharded(handle):
            continue
        yield handle.flat_param
        # With use_orig_params=True the model shows these, which are other objects while they are unsharded.
        for name, owner, _ in handle.flat_param._param_infos:
            parameter = getattr(owner, name, None)
            if parameter is not None:
                yield parameter


def _holds_unsharded(handle: Any) -> bool:
    # Set while the module shows unsharded views of a flat parameter that counts as sharded again.
    if getattr(handle, "_unsharded_flat_param_for_skipped_views", None) is not None:
        return True
    # FSDP1 makes these in the first forward pass and frees them by making their storage empty; the second one
    # is that of mixed precision.
    names = ("_full_param_padded", "_full_prec_full_param_padded")
    full = [getattr(handle.flat_param, name, None) for name in names]
    return any(tensor is not None and tensor.untyped_storage().nbytes() > 0 for tensor in full)
