"""Two groups whose models differ, which neither can see. As a program: where Gloo aborts the process.

python mismatched_groups.py "shapes" staged
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Optional

import torch
from averaging_models import Parameters
from replica_threads import Replica, run_replicas
from torch import nn

from torchft.local_sgd import LocalSGD
from torchft.process_group import ProcessGroupGloo

# One parameter of each group, the smaller one first.
SIZES = {
    "shapes": (torch.zeros(4), torch.zeros(8)),
    "sizes of dtypes": (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4)),
}


def averages(
    values: Callable[[int], nn.Module], staging: bool, pg_seconds: Optional[float] = None, **options: Any
) -> list[tuple[bool, list[torch.Tensor]]]:
    """Synchronizes two groups once: whether each committed, and its parameters then."""

    def process_group() -> ProcessGroupGloo:
        return ProcessGroupGloo(timedelta(seconds=pg_seconds or 30))

    def body(replica: Replica) -> tuple[bool, list[torch.Tensor]]:
        model = values(replica.index)
        replica.model = model
        step = replica.manager.current_step()
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        LocalSGD(replica.manager, model, optimizer, 1, staging, **options).sync()
        return replica.manager.current_step() == step + 1, list(model.parameters())

    return run_replicas(2, body, process_group)


if __name__ == "__main__":
    tensors = SIZES[sys.argv[1]]
    for committed, _ in averages(lambda index: Parameters([tensors[index]]), sys.argv[2] == "staged", 5):
        print("committed", committed)
