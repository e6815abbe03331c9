"""What LocalSGD tells: log lines, spans in a trace, and a warning where the host has too little memory."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import simulated_accelerator as sim
import torch
from averaging_models import Parameters, equal_parameters
from local_manager import LocalManager, staged
from properties import HOST, WAYS, make
from replica_threads import Replica, run_replicas
from torch import nn

from torchft._staging import host_memory
from torchft.local_sgd import LocalSGD
from torchft.local_sgd_memory import staging_memory
from torchft.process_group import ProcessGroupBabyGloo, ProcessGroupDummy, ProcessGroupGloo


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


def test_log_line_of_a_host_allreduce(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torchft.local_sgd")
    model = Parameters(
        [
            torch.zeros(1 << 18, device=sim.device()),
            torch.zeros(1 << 17),
            torch.zeros(1 << 17, 2, device=sim.device(1))[:, 1],
        ]
    )
    staged(model, offload_allreduce_to_cpu=True).sync()
    first, second = [record.getMessage() for record in caplog.records]
    assert first == (
        "CPU staging is on: 3 parameters reduced on the host; "
        "simulated:0: S = 1.00 MiB, M = 1.00 MiB, no window; cpu: S = 512.00 KiB, M = 512.00 KiB, no window; "
        "simulated:1: S = 512.00 KiB, M = 512.00 KiB, window 512.00 KiB; host memory 2.00 MiB"
    )
    assert second.startswith("staged synchronization committed: ")


@pytest.mark.parametrize(
    ("devices", "process_group", "options", "hint"),
    [
        ([sim.device()], ProcessGroupGloo, {}, True),
        ([sim.device()], ProcessGroupGloo, {"offload_window_mb": 0}, True),
        (["cpu", sim.device()], ProcessGroupGloo, {}, True),
        ([sim.device()], ProcessGroupGloo, HOST, False),
        (["cpu"], ProcessGroupGloo, {}, False),
        ([], ProcessGroupGloo, {}, False),
        # Never commits with LocalSGD, on the host neither.
        ([sim.device()], ProcessGroupBabyGloo, {}, False),
        ([sim.device()], lambda: ProcessGroupDummy(0, 1), {}, False),
        ([sim.device()], lambda: None, {}, False),
    ],
)
def test_hint_that_gloo_can_do_without_a_window(
    devices: list[Any],
    process_group: Any,
    options: dict[str, Any],
    hint: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="torchft.local_sgd")
    model = Parameters(torch.zeros(2, device=device) for device in devices)
    local = staged(model, LocalManager(process_group=process_group()), **options)
    local.sync()
    local.sync()
    first, *rest = [record.getMessage() for record in caplog.records]
    assert first.startswith("CPU staging is on")
    end = (
        "; Gloo reduces on the host anyway: offload_allreduce_to_cpu=True takes no window, half the "
        "traffic over the host link and less time"
    )
    assert first.endswith(end) == hint
    assert not any("Gloo" in line for line in ([] if hint else [first]) + rest)


@pytest.mark.parametrize("options", WAYS)
def test_spans_show_in_a_trace(options: dict[str, Any]) -> None:
    local = staged(equal_parameters(1, count=2), **options)
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


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize(("missing", "warnings"), [(0, 0), (1, 1)])
def test_one_warning_when_the_host_memory_does_not_suffice(
    missing: int,
    warnings: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = 4
    # Parameters on the CPU: their window, if there is one, is host memory as well, as the report says.
    needed = ranks * staging_memory(equal_parameters(0), allreduce_to_cpu=options == HOST).host_bytes
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(host_memory, "available_host_memory", lambda: needed - missing)

    def body(replica: Replica) -> None:
        model = equal_parameters(0)
        local_sgd = make(LocalSGD, replica, model, True, **options)
        for _ in range(3):
            local_sgd.sync()

    with caplog.at_level(logging.WARNING, "torchft.local_sgd"):
        run_replicas(1, body)
    messages = [record.getMessage() for record in caplog.records if record.name == "torchft.local_sgd"]
    assert len(messages) == warnings
    assert all(f"for the {ranks} ranks of this host" in message for message in messages)
