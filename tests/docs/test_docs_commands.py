"""The commands of README.md and the pages; what is appended to them makes them take seconds."""

from __future__ import annotations

import argparse
import runpy
import shlex
import shutil
import sys
import warnings
from pathlib import Path

import pytest
from children import free_port
from docs_blocks import block, commands, shell
from places import BENCHMARKS, ROOT

from torchft.local_sgd_bench import __main__ as local_sgd_bench
from torchft.local_sgd_bench.results import Results
from torchft.local_sgd_bench.worker import case_names


def output(script: str, cwd: Path, **variables: str) -> str:
    """stdout of a script that ends well."""
    done = shell(script, cwd, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def here(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """stdout of ``python -m MODULE ...`` in this process, which has PyTorch loaded already."""
    python, m, module, *arguments = shlex.split(command)
    assert (Path(python).name, m) == ("python", "-m")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with warnings.catch_warnings():
        # Of a module that is loaded already. To unload it would leave two of it for the tests that follow.
        warnings.filterwarnings("ignore", "'torchft", RuntimeWarning)
        with pytest.raises(SystemExit) as end:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert not end.value.code
    return capsys.readouterr().out


def stand_in(folder: Path) -> tuple[Path, Path]:
    """A python that only writes down where its output goes and what it is to run, and the file with that."""
    python, calls = folder / "python", folder / "calls"
    python.write_text(f'#!/bin/bash\necho "$(readlink /proc/$$/fd/1) python $*" >> {calls}\n')
    python.chmod(0o755)
    return python, calls


def test_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command, _ = commands(block("README.md", "MODULE:CALLABLE"))
    command = command.replace("MODULE:CALLABLE", "model_shapes:llama3_8b")
    report = here(f"{command} --host-memory 1TiB", capsys, monkeypatch)
    # The first row of the README's table.
    assert "without staging        29.92 GiB" in report
    assert "with staging            1.96 GiB" in report


def test_bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, own = commands(block("README.md", "MODULE:CALLABLE"))
    (command,) = commands(block("bench.rst", "python -m torchft.local_sgd_bench --window-mb 0"))
    plain, model = own.split(" --model ")
    assert (plain, model) == (command.split(" --window")[0], "MODULE:CALLABLE")
    (tmp_path / "my_model.py").write_text(block("bench.rst", "def classifier"))
    small = "--model my_model:classifier --pairs 2 --warm-up 1"
    tables = output(f"{command} {small} --json results.json", tmp_path)
    assert tables.count("identical at every step") == 3

    monkeypatch.chdir(tmp_path)
    again = here(f"{plain} --from-json results.json --plot results.png", capsys, monkeypatch)
    assert again == tables
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_bench_of_a_gpu_needs_one(tmp_path: Path) -> None:
    # In a folder of its own: it makes the folder for its results first.
    (tmp_path / "benchmarks").symlink_to(BENCHMARKS)
    done = shell(block("bench.rst", "gpu.sh"), tmp_path, CUDA_VISIBLE_DEVICES="-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "python sees no CUDA device; nothing was measured\n"
    assert list((tmp_path / "results").iterdir()) == []


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, argparse.Namespace]:
    """What the script, which would take ten minutes, measures: the options of the bench by file."""
    (tmp_path / "benchmarks").mkdir()
    shutil.copy(BENCHMARKS / "cpu.sh", tmp_path / "benchmarks")
    python, calls = stand_in(tmp_path)
    output(block("CONTRIBUTING.md", "bash benchmarks/cpu.sh"), tmp_path, PYTHON=str(python))
    found = {}
    monkeypatch.chdir(tmp_path)
    for call in calls.read_text().splitlines():
        _, _, m, module, *arguments = call.split()
        assert (m, module) == ("-m", "torchft.local_sgd_bench")
        options = local_sgd_bench._parse(arguments)
        found[options.json] = options
    return found


def test_measurements(measured: dict[str, argparse.Namespace]) -> None:
    assert measured.keys() == {path.name for path in BENCHMARKS.glob("cpu-*.json")}
    for name, options in measured.items():
        committed = Results.read(str(BENCHMARKS / name)).options
        for option in ("model", "window_mb"):
            assert committed[option] == getattr(options, option), (name, option)


def test_measurements_have_all_cases(measured: dict[str, argparse.Namespace]) -> None:
    for name, options in measured.items():
        assert Results.read(str(BENCHMARKS / name)).cases == case_names(options)


def test_tables_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What make runs, one after the other in this process."""
    python, calls = stand_in(tmp_path)
    make = block("CONTRIBUTING.md", "make -C docs figures").rstrip()
    output(f"{make} PYTHON={python} TABLES={tmp_path} PICTURES={tmp_path}", ROOT)
    monkeypatch.chdir(ROOT / "docs")
    tables = {path.name: path for path in BENCHMARKS.glob("*.txt")}
    for call in calls.read_text().splitlines():
        target, command = call.split(maxsplit=1)
        shown = here(command, capsys, monkeypatch)
        if target != "/dev/null":
            assert shown == tables.pop(Path(target).name).read_text(), target
    assert not tables
    pictures = {path.name for path in (ROOT / "docs" / "source").glob("*.png")}
    assert {path.name for path in tmp_path.glob("*.png")} == pictures


def test_lighthouse_of_a_titan_job() -> None:
    port = free_port()
    command = block("titan.rst", "torchft_lighthouse").rstrip()
    script = f"{command} --bind '[::]:{port}' & lighthouse=$!\n"
    script += f"until (: < /dev/tcp/localhost/{port}) 2> /dev/null; do kill -0 $lighthouse; sleep 0.2; done\n"
    output(script + "kill $lighthouse", ROOT)


def test_fault_plans_are_found() -> None:
    every, more, one = commands(block("CONTRIBUTING.md", "FAULT_SEED="))
    assert more == f"FAULT_PLANS=120 {every} -k test_plans"
    assert one == f"FAULT_SEED=17 {every} -k test_plans"
    assert "::test_plans\n" in output(one, ROOT, PYTEST_ADDOPTS="--collect-only -q")


@pytest.mark.slow
def test_fault_plan_of_a_seed() -> None:
    (one,) = commands(block("CONTRIBUTING.md", "FAULT_SEED="))[2:]
    assert "\n1 of 1 fault plans\n" in output(one, ROOT)
