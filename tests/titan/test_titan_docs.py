"""The page about TorchTitan: its job runs, its code works, its numbers are right."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("TorchTitan needs Python 3.11", allow_module_level=True)
else:
    pytest.register_assert_rewrite("titan_jobs")

import torch
from docs_blocks import block, check_shown, prose
from titan_configs import write_tokenizer
from titan_jobs import ENVIRONMENT, GROUPS, check_trained, finish, records
from torchtitan.config import ConfigManager

from torchft._launch import child_process
from torchft._launch.lighthouse import LighthouseProcess
from torchft._staging.units import MIB
from torchft.local_sgd_memory.__main__ import main
from torchft.titan.config import allreduces_on_host
from torchft.titan.trainer import FaultTolerantTrainer


def torchrun(text: str, **variables: str) -> list[str]:
    """The arguments of the block's torchrun, with its variables put in."""
    (command,) = (line for line in text.replace("\\\n", " ").splitlines() if line.startswith("torchrun "))
    return shlex.split(Template(command).substitute(variables))[1:]


def test_documented_flags_exist() -> None:
    arguments = torchrun(block("titan.rst", "torchrun"), GROUP="0")
    config = ConfigManager().parse_args(arguments[arguments.index("torchtitan.train") + 1 :])
    assert isinstance(config, FaultTolerantTrainer.Config)
    assert config.fault_tolerance.local_sgd_offload_to_cpu
    assert config.fault_tolerance.semi_sync_method == "local_sgd"
    assert allreduces_on_host(config.fault_tolerance)
    assert block("titan.rst", "torchft_lighthouse") == f"torchft_lighthouse --min_replicas {GROUPS}\n"


def test_documented_job(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    processes: list[subprocess.Popen[bytes]] = []
    # What a machine without GPUs and without TorchTitan's assets needs instead, and half the steps.
    instead = {
        "torchtitan.train": "titan_launcher",
        "torchft.titan": "titan_configs",
        "llama3_torchft_debugmodel": "staging",
        "assets/tokenizer": str(tmp_path),
        "c4_test": "tiny",
        "20": "10",
        "outputs": str(tmp_path / "outputs"),
    }
    with ExitStack() as stack:
        lighthouse = stack.enter_context(LighthouseProcess(min_replicas=GROUPS))
        # torchrun ends its ranks when it is asked to; one that is killed leaves them to themselves.
        stack.callback(lambda: child_process.stop(processes, grace=40))
        for group in range(GROUPS):
            log = stack.enter_context(open(tmp_path / f"group{group}.log", "wb"))
            arguments = torchrun(block("titan.rst", "torchrun"), GROUP=str(group))
            process = child_process.spawn(
                [
                    *["-m", "torch.distributed.run"],
                    *[instead.get(argument, argument) for argument in arguments],
                    *["--fault_tolerance.process_group_timeout_ms", "60000"],
                    *["--profiler.no-enable_profiling", "--debug.seed", "0"],
                ],
                env={
                    **ENVIRONMENT,
                    "TORCHFT_LIGHTHOUSE": lighthouse.address,
                    "TITAN_RECORD": str(tmp_path / f"group{group}"),
                },
                stdout=log,
                stderr=log,
            )
            processes.append(process)
        finish(processes, tmp_path)

    job = records(tmp_path, ranks=2)
    check_trained(job, steps=10, synchronizations=2)
    log = (tmp_path / "group0.log").read_text(errors="replace")
    check_shown(block("titan.rst", "CPU staging is on"), log)


def test_own_configuration() -> None:
    scope: dict[str, Any] = {}
    exec(block("titan.rst", "with_local_sgd_offload"), scope)
    config = scope["llama3_8b"]()
    exec(block("titan.rst", "local_sgd_offload_to_cpu = True"), {"config": config})
    assert config.fault_tolerance.local_sgd_offload_to_cpu is True
    assert config.loss.global_vocab_size == 128256


@pytest.fixture
def my_model() -> ModuleType:
    module = ModuleType("my_model")
    exec(block("titan.rst", "def llama3_8b():\n    return model_registry"), vars(module))
    return module


def test_documented_size_of_llama3_8b(my_model: ModuleType) -> None:
    with torch.device("meta"):
        sizes = [parameter.nbytes / MIB / 1024 for parameter in my_model.llama3_8b().parameters()]
    page = prose("titan.rst")
    assert f"S is {sum(sizes):.2f} GiB and M {max(sizes):.2f} GiB unsharded" in page


def test_documented_memory_report(
    my_model: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "my_model", my_model)
    program, _, arguments = block("titan.rst", "local_sgd_memory").partition("local_sgd_memory ")
    assert program == "python -m torchft."
    reports = []
    for more in ([], ["--allreduce-to-cpu"]):
        assert main([*shlex.split(arguments), *more]) == 0
        reports.append(capsys.readouterr().out)
    report, on_host = reports
    page = prose("titan.rst")
    said = re.search(r"unsharded, and (\S+ GiB) and (\S+ MiB) with ``--shards 8``", page)
    assert said is not None
    assert re.search(rf"without staging +{said[1]}\n +with staging +{said[2]} ", report), report
    assert "``gloo`` takes by default: 0 bytes of the device, and S of the host" in page
    assert re.search(rf"with staging +0 B .*per rank +{said[1]}\n", on_host, re.DOTALL), on_host
