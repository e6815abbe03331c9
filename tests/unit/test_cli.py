"""The options and exit codes that all commands share."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path

import pytest

from torchft._launch import cli

PROG = "python -m torchft.something"


def parser() -> cli.Parser:
    made = cli.Parser(PROG, "Does something.")
    for option in ("--replicas", "--ranks", "--sync-every", "--window-mb", "--device", "--process-group"):
        made.add_common(option)
    for option in ("--seed", "--lighthouse", "--json", "--plot"):
        made.add_common(option)
    return made


def test_defaults_are_those_of_the_table_and_a_command_may_have_its_own() -> None:
    options = parser().parse_args([])
    assert (options.replicas, options.ranks, options.window_mb) == (2, 1, None)
    assert (options.device, options.process_group, options.lighthouse) == ("auto", "gloo", None)
    own = cli.Parser(PROG, "Does something.")
    own.add_common("--sync-every", default=99)
    assert own.parse_args([]).sync_every == 99


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replicas", "0"], "--replicas: got '0', pass a whole number of at least 1"),
        (["--replicas", "2.5"], "got '2.5'"),
        (["--sync-every", "many"], "got 'many'"),
        (["--seed", "-1"], "at least 0"),
        (["--window-mb", "nan"], "got 'nan', pass a number of at least 0"),
        (["--window-mb", "inf"], "got 'inf'"),
        (["--window-mb", "-0.5"], "got '-0.5'"),
        (["--process-group", "mpi"], "gloo"),
        (["--no-such-option"], "--no-such-option"),
        (["--replica", "3"], "--replica 3"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(arguments)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"{PROG}: ")
    assert words in error


def test_zero_is_a_window() -> None:
    assert parser().parse_args(["--window-mb", "0"]).window_mb == 0.0


def test_a_user_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: object) -> int:
        raise cli.UserError("--data 'x'\n  does not exist")

    assert cli.run(PROG, main, []) == 2
    assert capsys.readouterr().err == f"{PROG}: --data 'x' does not exist\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_unwinds_and_becomes_an_exit_code(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned = []

    def main(argv: object) -> int:
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        finally:
            cleaned.append(True)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    assert cli.run(PROG, main, []) == code
    assert cleaned == [True]
    assert capsys.readouterr().err.count("\n") == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_outcomes_pass_through() -> None:
    assert cli.run(PROG, lambda argv: len(argv), ["one"]) == 1

    def main(argv: object) -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        cli.run(PROG, main, [])


def test_devices() -> None:
    assert cli.resolve_device("cpu").type == "cpu"
    assert cli.resolve_device("auto").index is None
    with pytest.raises(cli.UserError, match=r"'warp' is not available here; pass one of auto, cpu"):
        cli.resolve_device("warp")


def test_the_option_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    assert cli.resolve_lighthouse(None) is None
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://a:1")
    assert cli.resolve_lighthouse(None) == "http://a:1"
    assert cli.resolve_lighthouse("http://b:2") == "http://b:2"


def test_output_files_are_checked_before_the_work(tmp_path: Path) -> None:
    cli.check_output_file("--json", None)
    cli.check_output_file("--json", str(tmp_path / "new.json"))
    for path, words in (
        ("", "is empty"),
        (str(tmp_path), "is a folder"),
        (str(tmp_path / "no" / "file.json"), "there is no folder"),
    ):
        with pytest.raises(cli.UserError, match=words):
            cli.check_output_file("--json", path)


def test_plots_are_checked_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "plot.PNG")
    cli.check_plot_file("--plot", None)
    cli.check_plot_file("--plot", path)
    with pytest.raises(cli.UserError, match="there is no folder"):
        cli.check_plot_file("--plot", str(tmp_path / "no" / "plot.png"))
    with pytest.raises(cli.UserError, match=r"'plot.svg' is no PNG; pass a name that ends in .png"):
        cli.check_plot_file("--plot", "plot.svg")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(cli.UserError, match=r'--plot needs matplotlib: pip install "torchft\[tools\]"'):
        cli.check_plot_file("--plot", path)


def test_json_is_whole_and_has_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    cli.write_json(str(path), {"loss": math.nan, "times": (1.5, math.inf), "n": 3})
    assert json.loads(path.read_text()) == {"loss": None, "times": [1.5, None], "n": 3}
    with pytest.raises(TypeError):
        cli.write_json(str(path), {"loss": object()})
    # the failed write has not touched what was there
    assert json.loads(path.read_text())["n"] == 3


def test_json_has_a_line_per_field_and_item(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    cli.write_json(str(path), {"a": {"b": [1, 2], "c": {}}, "d": [{"e": [3]}, []], "f": []})
    assert path.read_text().splitlines() == [
        "{",
        '  "a": {',
        '    "b": [1, 2],',
        '    "c": {}',
        "  },",
        '  "d": [',
        '    {"e": [3]},',
        "    []",
        "  ],",
        '  "f": []',
        "}",
    ]
