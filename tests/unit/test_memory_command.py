"""The command python -m torchft.local_sgd_memory: output, files, exit codes, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchft._launch import cli
from torchft._staging.units import GIB
from torchft.local_sgd_memory import __main__ as memory_command

MODELS = "test_memory_command:Models"
# What a model of 8 GiB needs to fit anywhere.
ROOM = ["--host-memory", "1TiB"]


class Models:
    """What the command is pointed at, as test_memory_command:Models.NAME."""

    @staticmethod
    def eight_gib() -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.empty(GIB // 2)) for _ in range(4)])

    @staticmethod
    def on_cpu() -> nn.Module:
        return nn.Linear(2, 2, device="cpu")

    @staticmethod
    def no_module() -> int:
        return 3

    @staticmethod
    def needs_values() -> nn.Module:
        return nn.Linear(int(torch.ones(1).item()), 1)

    @staticmethod
    def exits() -> nn.Module:
        raise SystemExit("run me with torchrun")

    @staticmethod
    def no_parameters() -> nn.Module:
        return nn.ReLU()


def command(arguments: list[str]) -> int:
    return cli.run(memory_command.PROG, memory_command.main, arguments)


def run(model: str, *arguments: str) -> int:
    return command([f"{MODELS}.{model}", *arguments])


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eight_gib", "--shards", "4", "--ranks-per-host", "4", "--host-memory", "8GiB") == 0
    out = capsys.readouterr().out
    assert "2,147,483,648 parameters in 4 tensors, on the fullest of 4 ranks" in out
    assert "fits: 8.00 GiB given" in out
    assert "Peak of the run" not in out


def test_exit_code_1_when_the_host_memory_does_not_suffice(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eight_gib", "--ranks-per-host", "4", "--host-memory", "31GiB") == 1
    assert "DOES NOT FIT, 1.00 GiB too little: 31.00 GiB given" in capsys.readouterr().out


@pytest.mark.parametrize(("available", "code"), [(8 * GIB, 0), (8 * GIB - 1, 1), (None, 0)])
def test_available_memory_of_this_host(
    available: int | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("torchft.local_sgd_memory.available_host_memory", lambda: available)
    assert run("eight_gib") == code


def test_everything_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    options = "--window-mb 4096 --dtype bfloat16 --ranks-per-host 2 --entry-memory 20GiB --step-peak 22GiB"
    assert run("eight_gib", *options.split(), "--json", str(path), *ROOM) == 0
    out = capsys.readouterr().out
    assert "the window takes as much as all copies: staging can't lower the peak" in out
    result: dict[str, Any] = json.loads(path.read_text())
    assert result["model"] == f"{MODELS}.eight_gib"
    memory = result["staging_memory"]
    assert memory["total_bytes"] == 4 * GIB
    assert memory["largest_bytes"] == GIB
    assert memory["device_bytes_staged"] == 4 * GIB
    assert memory["by_dtype"] == {"bfloat16": 4 * GIB}
    assert memory["fits"] is True
    assert "bytes_by_tensor" not in memory
    assert result["peak"]["run_peak_original"] == 24 * GIB
    assert result["peak"]["lowered_bytes"] == 0


def test_json_without_the_optional_parts(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert run("eight_gib", "--json", str(path), *ROOM) == 0
    assert json.loads(path.read_text())["peak"] is None


@pytest.mark.parametrize("peak", [[], ["--entry-memory", "20GiB", "--step-peak", "30GiB"]])
def test_plot_shows_both_paths(peak: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    lines: dict[str, list[float]] = {}
    draw = Axes.plot

    def spy(self: Axes, x: Any, y: list[float], **options: Any) -> Any:
        lines[options["label"]] = y
        return draw(self, x, y, **options)

    monkeypatch.setattr(Axes, "plot", spy)
    path = tmp_path / "memory.png"
    assert run("eight_gib", "--plot", str(path), *peak, *ROOM) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    entry = 20.0 if peak else 0.0
    original, staged = lines["without staging: + 8.00 GiB"], lines["with staging: + 2.00 GiB"]
    # GiB: one copy after another, all of them until the end of write-back, none.
    assert [value - entry for value in original] == [0, 0, 2, 4, 6, 8, 8, 8, 8, 8, 0]
    assert [value - entry for value in staged] == [0, *[2] * 9, 0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["json"], "'json' does not name a model; pass MODULE:CALLABLE"),
        ([f"{MODELS}.no_module"], "returned a int; pass one that returns a torch.nn.Module"),
        ([f"{MODELS}.needs_values"], "on the meta device failed, "),
        ([f"{MODELS}.exits"], "on the meta device failed, SystemExit: run me with torchrun"),
        (["json:loads"], "TypeError: loads() missing 1 required positional argument"),
        ([f"{MODELS}.no_parameters"], "ReLU has no parameters"),
        ([f"{MODELS}.eight_gib", "--shards", "0"], "--shards: got '0', pass a whole number"),
        ([f"{MODELS}.eight_gib", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        ([f"{MODELS}.eight_gib", "--host-memory", "lots"], "got 'lots', pass a size such as 64GiB"),
        ([f"{MODELS}.eight_gib", "--window-mb", "-1"], "--window-mb: got '-1'"),
        ([f"{MODELS}.eight_gib", "--entry-memory", "9GiB"], "--entry-memory needs --step-peak as well"),
        (
            [f"{MODELS}.eight_gib", "--entry-memory", "7GiB", "--step-peak", "9GiB"],
            "entry_memory (7.00 GiB) is less than the parameters alone",
        ),
        ([f"{MODELS}.eight_gib", "--plot", "x.svg"], "'x.svg' is no PNG; pass a name that ends in .png"),
        ([f"{MODELS}.eight_gib", "--json", "no/such/folder/x.json"], "there is no folder"),
        ([f"{MODELS}.on_cpu", "--plot", "x.png"], "has parameters on the CPU; leave it out"),
    ],
)
def test_mistakes(
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = command(arguments)
    except SystemExit as error:  # argparse
        code = error.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert says in captured.err
    assert list(tmp_path.iterdir()) == []
