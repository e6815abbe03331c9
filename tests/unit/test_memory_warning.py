"""LocalSGD warns once, before it takes the memory, when the host has too little for all of its ranks."""

from __future__ import annotations

import logging

import pytest
import torch
from averaging_models import equal_parameters
from replica_threads import Replica, run_replicas

from torchft._staging import host_memory
from torchft.local_sgd import LocalSGD
from torchft.local_sgd_memory import staging_memory

RANKS = 4


@pytest.mark.parametrize(("missing", "warnings"), [(0, 0), (1, 1)])
def test_one_warning_when_the_host_memory_does_not_suffice(
    missing: int, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Parameters on the CPU: their window is host memory as well, as the report says.
    needed = RANKS * staging_memory(equal_parameters(0)).host_bytes
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(RANKS))
    monkeypatch.setattr(host_memory, "available_host_memory", lambda: needed - missing)

    def body(replica: Replica) -> None:
        model = equal_parameters(0)
        local_sgd = LocalSGD(replica.manager, model, torch.optim.SGD(model.parameters(), lr=0.1), 1, True)
        for _ in range(3):
            local_sgd.sync()

    with caplog.at_level(logging.WARNING, "torchft.local_sgd"):
        run_replicas(1, body)
    messages = [record.getMessage() for record in caplog.records if record.name == "torchft.local_sgd"]
    assert len(messages) == warnings
    assert all(f"for the {RANKS} ranks of this host" in message for message in messages)
