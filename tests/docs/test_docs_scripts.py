"""The Python blocks for the user's own script do what they say."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from children import free_port
from docs_blocks import block, check_shown, commands
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
    plan, committed = block("failures.rst", "CPU staging is on").splitlines()

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


def test_a_whole_script(tmp_path: Path) -> None:
    """As in three terminals; one group is killed and started again."""
    (tmp_path / "script.py").write_text(block("main_job.rst", "replica_id="))
    lighthouse, *groups = commands(block("main_job.rst", "torchrun --master-port 29500 script.py"))
    ports = {"29510": free_port(), "29500": free_port(), "29501": free_port()}
    logs = [tmp_path / f"group{number}" for number in range(2)]

    def start(command: str, log: Path) -> subprocess.Popen[bytes]:
        for documented, free in ports.items():
            command = command.replace(documented, str(free))
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        with log.open("ab") as file:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=tmp_path,
                env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        processes.append(process)
        return process

    def commits(log: Path) -> int:
        return log.read_text().count("staged synchronization committed")

    processes: list[subprocess.Popen[bytes]] = []
    try:
        start(f"{lighthouse} --bind '[::]:{ports['29510']}'", tmp_path / "lighthouse")
        first, second = (start(command, log) for command, log in zip(groups, logs, strict=True))
        deadline = time.monotonic() + 100
        while commits(logs[1]) < 3:
            assert second.poll() is None, logs[1].read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (worker,) = (child for child in psutil.Process(second.pid).children(True) if "-u" in child.cmdline())
        worker.kill()
        assert second.wait(60) != 0
        second = start(groups[1], logs[1])
        for process in (first, second):
            assert process.wait(100) == 0, "\n".join(log.read_text() for log in logs)
    finally:
        # The ranks of torchrun have sessions of their own.
        trees = [psutil.Process(process.pid) for process in processes if process.poll() is None]
        for process in [child for tree in trees for child in [*tree.children(True), tree]]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in processes:
            process.wait()
    sums = [re.findall(r"loss [\d.]+, sum (-?[\d.]+)", log.read_text()) for log in logs]
    assert sums[0] == sums[1]
    assert len(sums[0]) == 1
    assert commits(logs[0]) == 20
    # The second start healed: it did not begin at the first commit again.
    assert commits(logs[1]) < 25


def test_memory_report(capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("memory.rst", "print(staging_memory(model))"), {"model": nn.Linear(512, 512, bias=False)})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "262,144 parameters in 1 tensors"
    assert lines[1].split() == ["S,", "all", "of", "a", "rank", "1.00", "MiB", "float32"]
