"""The main job's options and environment: mistakes are one line each, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from docs_blocks import block

from torchft._launch import cli
from torchft.examples.local_sgd import __main__ as launcher
from torchft.examples.local_sgd import train
from torchft.examples.local_sgd.model import ByteTransformer
from torchft.examples.local_sgd.options import add_training_options, as_arguments, check_training_options


def test_the_documented_sizes_are_those_of_the_default_model() -> None:
    parser = cli.Parser("prog", "")
    add_training_options(parser)
    options = parser.parse_args([])
    with torch.device("meta"):
        model = ByteTransformer(options.dim, options.layers, options.heads, options.sequence_length)
    sizes = [parameter.nbytes / 2**20 for parameter in model.parameters()]
    line = f"per rank          S {sum(sizes):.2f} MiB of parameters, M {max(sizes):.2f} MiB the largest one"
    assert line in block("main_job.rst", "bit-identical in all 2 groups").splitlines()


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code = cli.run("prog", launcher.main, arguments)
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert code == 2, captured
    assert captured.err.count("\n") == 1
    assert "training starts" not in captured.out
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replicas", "0"], "got '0'"),
        (["--ranks", "-1"], "got '-1'"),
        (["--steps", "0"], "got '0'"),
        (["--learning-rate", "nan"], "got 'nan'"),
        (["--window-mb", "inf"], "got 'inf'"),
        (["--min-replicas", "3"], "--min-replicas 3 is more than --replicas 2"),
        (["--dim", "30"], "--dim 30 is no multiple of --heads 4"),
        (["--device", "warp"], "'warp' is not available here"),
        (["--device", "cpu", "--process-group", "nccl"], "pass gloo"),
        (["--lighthouse", "http://localhost:1"], "no lighthouse answers at 'http://localhost:1'"),
        (["--lighthouse", "nonsense"], "pass http://HOST:PORT"),
        (["--kill-replica-at-step", "480"], "not before the last step"),
        (["--kill-replica-at-step", "5", "--replicas", "1"], "needs a peer"),
        (["--no-offload-averaged-parameters-to-cpu", "--window-mb", "1"], "does nothing without CPU staging"),
        (["--allreduce-to-cpu", "--process-group", "nccl"], "works with gloo only"),
        (["--allreduce-to-cpu", "--window-mb", "2"], "has no window, and --window-mb is 2"),
        (["--allreduce-to-cpu", "--no-offload-averaged-parameters-to-cpu"], "is a kind of CPU staging"),
        (["--data", "/no/such/file"], "does not exist"),
        (["--data", "/dev/zero"], "neither a file nor a folder"),
        (["--json", "/no/such/folder/file"], "there is no folder"),
        (["--checkpoint", "/dev/null"], "can't be a folder"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(arguments, capsys)


def test_the_environment_names_the_lighthouse_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:2")
    assert "no lighthouse answers at 'http://localhost:2'" in refused([], capsys)


def test_nccl_ranks_that_would_share_a_gpu_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The check is all that is reached, so that machines without a GPU can run it.
    monkeypatch.setattr(cli, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "pass --process-group gloo" in refused(["--process-group", "nccl"], capsys)


def test_data_without_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image").write_bytes(b"\x89PNG\0\0\0\0" * 9999)
    (tmp_path / "short.txt").write_text("short")
    assert "is empty" in refused(["--data", str(tmp_path / "empty.txt")], capsys)
    assert "no text" in refused(["--data", str(tmp_path / "image")], capsys)
    assert "the data has 5 bytes" in refused(["--data", str(tmp_path)], capsys)


def test_training_options_reach_the_ranks() -> None:
    parser = cli.Parser("prog", "")
    add_training_options(parser)
    for arguments in (
        [],
        ["--no-offload-averaged-parameters-to-cpu", "--steps", "7", "--data", "a b", "--min-replicas", "1"],
        ["--window-mb", "0", "--learning-rate", "1e-4", "--checkpoint", "saved"],
        ["--no-allreduce-to-cpu"],
    ):
        options = parser.parse_args(arguments)
        assert parser.parse_args(as_arguments(options)) == options


@pytest.mark.parametrize(
    ("arguments", "on"),
    [
        ([], True),
        (["--allreduce-to-cpu"], True),
        (["--no-allreduce-to-cpu"], False),
        (["--window-mb", "0"], False),
        (["--process-group", "nccl"], False),
        (["--no-offload-averaged-parameters-to-cpu"], False),
        (["--no-offload-averaged-parameters-to-cpu", "--no-allreduce-to-cpu"], False),
    ],
)
def test_the_all_reduce_is_on_the_host_where_that_costs_nothing(arguments: list[str], on: bool) -> None:
    parser = cli.Parser("prog", "")
    add_training_options(parser)
    options = parser.parse_args(arguments)
    check_training_options(options)
    assert options.allreduce_to_cpu is on


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "RANK is not set; start this with torchrun"),
        ({"RANK": "0"}, "REPLICA_GROUP_ID is not set"),
        ({"RANK": "0", "REPLICA_GROUP_ID": "0"}, "TORCHFT_LIGHTHOUSE is not set"),
        (
            {"RANK": "0", "REPLICA_GROUP_ID": "2", "TORCHFT_LIGHTHOUSE": "http://x:1"},
            "REPLICA_GROUP_ID is '2'",
        ),
        (
            {"RANK": "0", "REPLICA_GROUP_ID": "x", "TORCHFT_LIGHTHOUSE": "http://x:1"},
            "REPLICA_GROUP_ID is 'x'",
        ),
    ],
)
def test_train_says_what_its_environment_lacks(
    env: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "REPLICA_GROUP_ID", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)
    if "RANK" in env:
        env = {"WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", **env}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cli.run("prog", train.main, []) == 2
    assert words in capsys.readouterr().err
