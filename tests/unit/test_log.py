"""What LocalSGD tells: log lines, spans in a trace, and a warning where the host has too little memory."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from averaging_models import equal_parameters
from local_manager import LocalManager, staged
from replica_threads import Replica, run_replicas
from torch import nn

from torchft._staging import host_memory
from torchft.local_sgd import LocalSGD
from torchft.local_sgd_memory import staging_memory


@pytest.mark.parametrize("commit", [True, False])
def test_log_lines(commit: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torchft.local_sgd")
    local = staged(equal_parameters(1, count=4, size=1 << 18), LocalManager(commit), offload_window_mb=2)
    local.sync()
    local.sync()
    first, *rest = [record.getMessage() for record in caplog.records]
    assert first == (
        "CPU staging is on: 4 parameters in 2 rounds; cpu: S = 4.00 MiB, M = 1.00 MiB, window 2.00 MiB; "
        "host memory 6.00 MiB"
    )
    outcome, end = ("committed", "ms to write back") if commit else ("rejected", "too few groups took part")
    assert len(rest) == 2
    for line in rest:
        assert line.startswith(f"staged synchronization {outcome}: ")
        assert "ms to reduce and stage" in line
        assert line.endswith(end)


def test_spans_show_in_a_trace() -> None:
    local = staged(equal_parameters(1, count=2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        local.sync()
    names = {event.name for event in trace.events() or []}
    assert {"torchft::local_sgd::reduce_and_stage", "torchft::local_sgd::write_back"} <= names


def test_staging_off_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torchft.local_sgd")
    model = nn.Linear(2, 2)
    manager: Any = LocalManager()
    LocalSGD(manager, model, torch.optim.SGD(model.parameters()), 1).sync()
    assert not caplog.records


@pytest.mark.parametrize(("missing", "warnings"), [(0, 0), (1, 1)])
def test_one_warning_when_the_host_memory_does_not_suffice(
    missing: int, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = 4
    # Parameters on the CPU: their window is host memory as well, as the report says.
    needed = ranks * staging_memory(equal_parameters(0)).host_bytes
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
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
    assert all(f"for the {ranks} ranks of this host" in message for message in messages)
