"""One of two ranks of test_fsdp1.py: tells what staging says of FSDP1 modules at each point of training."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from local_manager import LocalManager
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from torchft._launch.replicas import send
from torchft.local_sgd import LocalSGD

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


def refusal(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    manager: Any = LocalManager()
    try:
        LocalSGD(manager, model, optimizer, 1, True).sync()
    except ValueError as error:
        return str(error)
    return ""


def run(strategy: ShardingStrategy, use_orig_params: bool, mixed: bool) -> None:
    options: dict[str, Any] = {
        "use_orig_params": use_orig_params,
        "sharding_strategy": strategy,
        "device_id": torch.device("cpu"),
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16) if mixed else None,
    }
    inner = FullyShardedDataParallel(nn.Linear(4, 4), **options)
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), inner), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = {"at the start": refusal(model, optimizer)}
    with torch.no_grad():
        model(torch.ones(2, 4))
    seen["after a validation"] = refusal(model, optimizer)
    loss = model(torch.ones(2, 4)).sum()
    seen["before the backward"] = refusal(model, optimizer)
    loss.backward()
    optimizer.step()
    seen["after a step"] = refusal(model, optimizer)
    send(
        case=[strategy.name, use_orig_params, mixed],
        **{name.replace(" ", "_"): text for name, text in seen.items()},
    )


dist.init_process_group("gloo")
for strategy, use_orig_params, mixed in itertools.product(STRATEGIES, (True, False), (False, True)):
    run(strategy, use_orig_params, mixed)
dist.barrier()
dist.destroy_process_group()
