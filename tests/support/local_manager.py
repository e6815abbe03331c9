"""LocalSGD without a lighthouse: a Manager that is alone and needs no collective."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import nn

from torchft.local_sgd import LocalSGD
from torchft.work import _DummyWork


class LocalManager:
    """Stands for a Manager of a quorum of one where no collective is needed."""

    def __init__(
        self,
        commit: bool = True,
        use_async_quorum: bool = False,
        init_sync: bool = False,
        process_group: object = None,
    ) -> None:
        self._use_async_quorum = use_async_quorum
        self._init_sync = init_sync
        # As the real Manager has it; it is asked for its name only.
        self._pg = process_group
        self.commit = commit
        self.quorums = 0

    def start_quorum(self) -> None:
        self.quorums += 1

    def wait_quorum(self) -> None:
        pass

    def allreduce(self, tensor: torch.Tensor) -> Any:
        return _DummyWork(tensor)

    def should_commit(self) -> bool:
        return self.commit

    def errored(self) -> Optional[Exception]:
        return None

    def report_error(self, error: Exception) -> None:
        self.commit = False


def staged(
    model: nn.Module, manager: Any = None, sync_every: Any = 1, optimizer: Any = None, **options: Any
) -> LocalSGD:
    """Returns a LocalSGD with CPU staging, if the options do not say otherwise."""
    if optimizer is None:
        # A model without parameters has no optimizer of its own.
        optimizer = torch.optim.SGD([*model.parameters()] or [torch.zeros(1)], lr=0.1)
    options = {"offload_averaged_parameters_to_cpu": True, **options}
    stand_in: Any = manager or LocalManager()
    return LocalSGD(stand_in, model, optimizer, sync_every, **options)
