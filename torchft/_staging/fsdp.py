"""Which parameters FSDP holds unsharded at this moment, as FSDP itself says.

An average that is written into an unsharded parameter vanishes when its module is resharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

_FSDP1_ADVICE = (
    "synchronize right after an optimizer step, or enter and leave "
    "FullyShardedDataParallel.summon_full_params(model, writeback=False) before"
)
_FSDP2_ADVICE = (
    "call reshard() on its FSDP module before the synchronization, or let the last microbatch reshard again "
    "with set_reshard_after_backward(True)"
)


def find_unsharded(model: Any, parameters: Sequence[torch.Tensor]) -> Optional[tuple[int, str]]:
    """Looks for a parameter that FSDP holds unsharded.

    Args:
        model: the module that is synchronized; anything but an ``nn.Module`` has no FSDP1 inside.
        parameters: what its ``parameters()`` returns now.

    Returns:
        The index of the first one and what to do about it; None where all are as they are trained.
    """
    numbers = {id(parameter): index for index, parameter in enumerate(parameters)}
    for unsharded, advice in ((_unsharded_fsdp2(), _FSDP2_ADVICE), (_unsharded_fsdp1(model), _FSDP1_ADVICE)):
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


def _unsharded_fsdp1(model: Any) -> Iterator[torch.Tensor]:
    if not isinstance(model, nn.Module):
        return
    for module in model.modules():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        handle = module._handle
        # With NO_SHARD the parameters are never anything but whole.
        if handle is None or not handle.uses_sharded_strategy or handle.is_sharded(handle.flat_param):
            continue
        yield handle.flat_param
        # With use_orig_params=True these are what the model shows.
        yield from getattr(handle.flat_param, "_params", None) or ()
