"""A group that fails while it takes a peer's state over must not spread what it has of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from properties import HOST, WAYS, WINDOW
from replica_threads import Replica, run_replicas
from torch import nn

from torchft._staging.buffers import StagingBuffers
from torchft.local_sgd import LocalSGD
from torchft.process_group import ProcessGroupGloo

HEALTHY, STALE = 20.0, 100.0


class Model(nn.Module):
    """Two parameters; loading a state may fail between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((4,), HEALTHY))
        self.second = nn.Parameter(torch.full((4,), HEALTHY))
        self.fail_with: type[BaseException] | None = None

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.first.copy_(state_dict["first"])
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error("injected")
        self.second.copy_(state_dict["second"])


class OutOfMemoryOnce(LocalSGD):
    out_of_memory = False

    def _take_memory(self) -> StagingBuffers:
        if self.out_of_memory:
            self.out_of_memory = False
            raise MemoryError("injected")
        return super()._take_memory()


def heal_and_fail(
    arm: Callable[[Model, OutOfMemoryOnce], None], use_async_quorum: bool, options: dict[str, Any]
) -> list[list[float]]:
    """Group 1 starts again with stale parameters and fails once while it heals; what both hold after that."""

    def body(replica: Replica) -> list[float]:
        model = Model()

        def local_sgd(of: Replica) -> OutOfMemoryOnce:
            of.model = model
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return OutOfMemoryOnce(of.manager, model, optimizer, 1, True, **options)

        mine, successor = local_sgd(replica), None
        mine.sync()
        replica.barrier.wait()
        try:
            if replica.index == 1:
                replica.close()
                successor = replica.successor(ProcessGroupGloo(timedelta(seconds=3)))
                mine = local_sgd(successor)
                with torch.no_grad():
                    model.first.fill_(STALE)
                    model.second.fill_(STALE)
                arm(model, mine)
            refused = False
            for _ in range(3):
                refused = False
                try:
                    mine.sync()
                except BaseException as error:
                    refused = "start it again" in str(error)
                    if not refused and "injected" not in str(error) and not isinstance(error, TimeoutError):
                        raise
                replica.barrier.wait()
            if refused:
                return [HEALTHY, HEALTHY]
            return [model.first[0].item(), model.second[0].item()]
        finally:
            if successor is not None:
                successor.close()

    return run_replicas(
        2,
        body,
        lambda: ProcessGroupGloo(timedelta(seconds=3)),
        manager_args={"use_async_quorum": use_async_quorum, "quorum_timeout": timedelta(seconds=8)},
    )


@pytest.mark.parametrize(
    ("error", "options"),
    [
        pytest.param(RuntimeError, WINDOW, marks=pytest.mark.slow),
        (KeyboardInterrupt, WINDOW),
        (RuntimeError, HOST),
        pytest.param(KeyboardInterrupt, HOST, marks=pytest.mark.slow),
    ],
)
def test_half_loaded_state_is_not_spread(error: type[BaseException], options: dict[str, Any]) -> None:
    def arm(model: Model, _: OutOfMemoryOnce) -> None:
        model.fail_with = error

    assert heal_and_fail(arm, use_async_quorum=False, options=options) == [[HEALTHY, HEALTHY]] * 2


@pytest.mark.parametrize("options", WAYS)
def test_no_memory_while_an_asynchronous_quorum_heals(options: dict[str, Any]) -> None:
    def arm(_: Model, local_sgd: OutOfMemoryOnce) -> None:
        local_sgd.out_of_memory = True

    assert heal_and_fail(arm, use_async_quorum=True, options=options) == [[HEALTHY, HEALTHY]] * 2
