"""The TorchTitan flag: the configuration, what it refuses, and what it leaves as TorchTitan has it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from places import ROOT

if sys.version_info < (3, 11):
    pytest.skip("TorchTitan needs Python 3.11", allow_module_level=True)

from torchtitan.config import ConfigManager
from torchtitan.experiments.torchft.config import FaultTolerance as TitanFaultTolerance
from torchtitan.experiments.torchft.llama3 import config_registry as titan_registry
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer as TitanTrainer

from torchft.titan import config_registry
from torchft.titan.config import FaultTolerance, allreduces_on_host, check_fault_tolerance
from torchft.titan.trainer import FaultTolerantTrainer, with_local_sgd_offload

DEBUG_MODEL = ["--module", "torchft.titan", "--config", "llama3_torchft_debugmodel"]
LOCAL_SGD = ["--fault_tolerance.semi_sync_method", "local_sgd"]
FLAG = "--fault_tolerance.local_sgd_offload_to_cpu"
WINDOW = "--fault_tolerance.local_sgd_offload_window_mb"
ON_HOST = "--fault_tolerance.local_sgd_offload_allreduce_to_cpu"
PROCESS_GROUP = "--fault_tolerance.process_group"


def parse(*arguments: str) -> Any:
    return ConfigManager().parse_args([*DEBUG_MODEL, *arguments])


def test_titan_has_no_such_field_itself() -> None:
    theirs = {each.name for each in fields(TitanFaultTolerance)}
    ours = {each.name for each in fields(FaultTolerance) if each.name.startswith("local_sgd_offload_")}
    assert len(ours) == 3
    assert not theirs & ours, (
        f"this TorchTitan has {sorted(theirs & ours)} in its own FaultTolerance: torchft.titan can step "
        "aside. Compare its behavior with docs/source/titan.rst, then remove torchft/titan, its tests and "
        "the extra"
    )


def test_flag_is_off_by_default() -> None:
    section = parse().fault_tolerance
    assert section.local_sgd_offload_to_cpu is False
    assert section.local_sgd_offload_window_mb is None
    assert section.local_sgd_offload_allreduce_to_cpu is None


def test_command_line_sets_the_flag() -> None:
    config = parse(*LOCAL_SGD, FLAG, WINDOW, "8.5")
    assert isinstance(config, FaultTolerantTrainer.Config)
    assert config.fault_tolerance.local_sgd_offload_to_cpu is True
    assert config.fault_tolerance.local_sgd_offload_window_mb == 8.5
    assert config._owner is FaultTolerantTrainer


@pytest.mark.parametrize(
    ("arguments", "on_host"),
    [
        (["gloo"], True),
        (["gloo", ON_HOST, "None"], True),
        (["gloo", ON_HOST, "True"], True),
        (["gloo", ON_HOST, "False"], False),
        (["gloo", ON_HOST, "False", WINDOW, "8"], False),
        (["gloo", WINDOW, "0"], False),
        (["nccl"], False),
        (["nccl", ON_HOST, "False"], False),
        (["nccl", WINDOW, "0"], False),
        (["mccl"], False),
    ],
)
def test_allreduce_on_the_host_by_default_where_it_can_be(arguments: list[str], on_host: bool) -> None:
    section = parse(*LOCAL_SGD, FLAG, PROCESS_GROUP, *arguments).fault_tolerance
    check_fault_tolerance(section, 1)
    assert allreduces_on_host(section) is on_host


@pytest.mark.parametrize("spelling", [[ON_HOST], [ON_HOST.replace(".local", ".no-local")], [ON_HOST, "true"]])
def test_allreduce_on_the_host_takes_a_word(spelling: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(*LOCAL_SGD, FLAG, *spelling)
    assert end.value.code == 2
    assert "local-sgd-offload-allreduce-to-cpu" in capsys.readouterr().err


def test_help_shows_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())
    assert "--fault-tolerance.local-sgd-offload-to-cpu" in text
    assert "Keep averaged parameters on the host until the replica groups have voted" in text
    assert "--fault-tolerance.local-sgd-offload-window-mb" in text
    assert "Accelerator memory, in MiB per device" in text
    assert "--fault-tolerance.local-sgd-offload-allreduce-to-cpu {None,True,False}" in text
    assert "Reduce the copies on the host themselves" in text


def test_registry_has_each_configuration_of_titan_with_its_values() -> None:
    names = dir(config_registry)
    assert "llama3_torchft_debugmodel" in names
    for name in names:
        theirs = getattr(titan_registry, name)()
        ours = getattr(config_registry, name)()
        assert isinstance(ours, FaultTolerantTrainer.Config)
        for each in fields(TitanFaultTolerance):
            assert getattr(ours.fault_tolerance, each.name) == getattr(theirs.fault_tolerance, each.name)
        for each in fields(theirs):
            # Two calls build two models whose initializers, being partial functions, never compare equal.
            if each.name not in ("fault_tolerance", "model_spec"):
                assert getattr(ours, each.name) == getattr(theirs, each.name), each.name
        assert ours.model_spec is not None
        assert theirs.model_spec is not None
        assert ours.model_spec.flavor == theirs.model_spec.flavor


def test_unknown_configuration_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'nope' not found.*\['llama3_torchft_debugmodel'\]"):
        ConfigManager().parse_args(["--module", "torchft.titan", "--config", "nope"])


def test_import_error_of_the_registry_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A TorchTitan without its TorchFT experiment, as another release may be.
    monkeypatch.setitem(sys.modules, "torchtitan.experiments.torchft.llama3", None)
    monkeypatch.delitem(sys.modules, "torchft.titan.config_registry")
    with pytest.raises(
        RuntimeError, match=r"^torchft\.titan can't be imported: .*torchft\.llama3.*torchft\[titan\]"
    ):
        parse()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fault_tolerance.semi_sync_method", "diloco", FLAG], "semi_sync_method is 'diloco'"),
        (["--fault_tolerance.semi_sync_method", "None", FLAG], "semi_sync_method is None"),
        ([*LOCAL_SGD, "--fault_tolerance.no-enable", FLAG], "pass --fault_tolerance.enable as well"),
        ([*LOCAL_SGD, "--parallelism.pipeline_parallel_degree", "2", FLAG], "pipeline_parallel_degree is 2"),
        ([*LOCAL_SGD, WINDOW, "8"], "window_mb is 8.0, which needs CPU staging"),
        ([*LOCAL_SGD, ON_HOST, "True"], "allreduce_to_cpu is True, which needs CPU staging"),
        ([*LOCAL_SGD, ON_HOST, "False"], "allreduce_to_cpu is False, which needs CPU staging"),
        ([*LOCAL_SGD, FLAG, ON_HOST, "True", WINDOW, "8"], "no window, .*window_mb is 8.0: pass one of them"),
        (
            [*LOCAL_SGD, FLAG, ON_HOST, "True", PROCESS_GROUP, "nccl"],
            "process_group is 'nccl': pass --.* gloo, or leave it out",
        ),
        ([*LOCAL_SGD, FLAG, WINDOW, "-1"], "window_mb.*0 or more, got -1"),
        ([*LOCAL_SGD, FLAG, WINDOW, "nan"], "window_mb.*0 or more, got nan"),
    ],
)
def test_refused(arguments: list[str], message: str) -> None:
    config = parse("--training.disable_cuda_graphs", *arguments)
    with pytest.raises(ValueError, match=message) as refusal:
        # No process group and no device is needed to see it.
        config.build()
    assert "fault_tolerance.local_sgd_offload" in str(refusal.value)


class Reached(Exception):
    """The job got past the check of its configuration."""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--fault_tolerance.semi_sync_method", "None"],
        ["--fault_tolerance.no-enable"],
        ["--parallelism.pipeline_parallel_degree", "2"],
        [*LOCAL_SGD],
        [*LOCAL_SGD, FLAG],
        [*LOCAL_SGD, FLAG, PROCESS_GROUP, "nccl"],
        ["--fault_tolerance.semi_sync_method", "Local_SGD", FLAG, WINDOW, "0"],
    ],
)
def test_not_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(self: Any) -> None:
        raise Reached

    # The first thing after the check that needs a device.
    monkeypatch.setattr("torchtitan.tools.utils.get_local_device", lambda: "cpu")
    monkeypatch.setattr("torchtitan.tools.utils.device_module.set_device", lambda device: None)
    monkeypatch.setattr(TitanTrainer, "init_distributed", reached)
    with pytest.raises(Reached):
        parse("--training.disable_cuda_graphs", *arguments).build()


def test_configuration_may_set_the_flag_and_leave_the_rest_to_the_command_line() -> None:
    FaultTolerance(local_sgd_offload_to_cpu=True)
    replace(FaultTolerance(local_sgd_offload_to_cpu=True), semi_sync_method="diloco")


def test_helper_keeps_every_value_and_the_original() -> None:
    theirs = titan_registry.llama3_torchft_debugmodel()
    theirs.training.steps = 7
    ours = with_local_sgd_offload(theirs)
    assert type(theirs.fault_tolerance) is TitanFaultTolerance
    assert type(ours.fault_tolerance) is FaultTolerance
    for each in fields(theirs):
        if each.name != "fault_tolerance":
            assert getattr(ours, each.name) is getattr(theirs, each.name)
    assert with_local_sgd_offload(ours) is ours


def other_trainer() -> Any:
    class OwnTrainer(TitanTrainer):
        @dataclass(kw_only=True, slots=True)
        class Config(TitanTrainer.Config):
            more: int = 1

    return OwnTrainer.Config()


def other_section() -> Any:
    @dataclass(kw_only=True, slots=True)
    class OwnSection(TitanFaultTolerance):
        more: int = 1

    return TitanTrainer.Config(fault_tolerance=OwnSection())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_trainer, r"OwnTrainer.Config: derive a trainer of your own from torchft\.titan"),
        (other_section, r"OwnSection, whose additional fields would be lost"),
    ],
)
def test_helper_refuses_what_it_would_truncate(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        with_local_sgd_offload(make())


def test_rest_of_the_package_does_not_import_titan() -> None:
    package = ROOT / "torchft"
    importers = {
        path.relative_to(package).parts[0]
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "titan" in ast.unparse(node)
    }
    assert importers == {"titan"}
