"""The Python blocks for the user's own script do what they say."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from docs_blocks import block, check_shown
from replica_threads import Replica, run_replicas
from torch import nn

from torchft.local_sgd import LocalSGD


def start(group: int) -> dict[str, Any]:
    """What a script has before LocalSGD: the same weights in all groups, and batches of its own in each."""
    model = nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(group)

    def batches() -> Iterator[int]:
        # What the block leaves out: forward and backward.
        for number in range(100):
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=generator)).square().mean().backward()
            yield number

    return {"model": model, "optimizer": optimizer, "batches": batches()}


def alone(group: int) -> torch.Tensor:
    """The weight of a group that trains without LocalSGD."""
    script = start(group)
    for _ in script["batches"]:
        script["optimizer"].step()
    return script["model"].weight.detach()


def test_readme(caplog: pytest.LogCaptureFixture) -> None:
    text = block("README.md", "for batch in batches:")
    assert "sync_every=100," in text

    def body(replica: Replica) -> tuple[int, torch.Tensor]:
        script = start(replica.index)
        before = replica.manager.current_step()
        exec(text, {"manager": replica.manager, **script})
        return replica.manager.current_step() - before, script["model"].weight.detach()

    with caplog.at_level(logging.INFO, "torchft.local_sgd"):
        (commits, weight), (_, other) = run_replicas(2, body)
    assert commits == 1
    assert torch.equal(weight, other)
    assert (alone(0) - alone(1)).abs().max() > 1e-3
    torch.testing.assert_close(weight, (alone(0) + alone(1)) / 2)
    assert caplog.text.count("staged synchronization committed") == 2


def test_local_sgd_page(caplog: pytest.LogCaptureFixture) -> None:
    text = block("local_sgd.rst", "from torchft.local_sgd import LocalSGD")
    plan, committed = block("local_sgd.rst", "CPU staging is on").splitlines()

    def body(replica: Replica) -> bool:
        # The log is of four parameters of 1 MiB, with a window of two of them.
        model = nn.ParameterList([nn.Parameter(torch.full((2**18,), float(replica.index))) for _ in range(4)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        names = {"manager": replica.manager, "model": model, "optimizer": optimizer, "sync_every": 1}
        # The dots are the training.
        exec(text.replace("    ...", "    optimizer.step()"), dict(names))
        averaged = all(bool((parameter == 0.5).all()) for parameter in model)
        LocalSGD(**names, offload_averaged_parameters_to_cpu=True, offload_window_mb=2).sync()
        return averaged

    with caplog.at_level(logging.INFO, "torchft.local_sgd"):
        assert run_replicas(2, body) == [True, True]
    # On a CPU the window is in host memory, too.
    assert plan.replace("cuda:0", "cpu").replace("memory 4.00", "memory 6.00") in caplog.messages
    check_shown(committed, "\n".join(caplog.messages))


def test_memory_report(capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("memory.rst", "print(staging_memory(model))"), {"model": nn.Linear(512, 512, bias=False)})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "262,144 parameters in 1 tensors"
    assert lines[1].split() == ["S,", "all", "of", "a", "rank", "1.00", "MiB", "float32"]
