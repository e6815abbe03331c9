"""Mistakes in calling the bench, refused before anything starts."""

from __future__ import annotations

import pytest
import torch

from torchft._launch.cli import UserError, run
from torchft.local_sgd_bench import __main__ as local_sgd_bench
from torchft.local_sgd_bench.cases import build


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "rcf"], "--model 'rcf' is unknown; pass rfc, many or MODULE:CALLABLE"),
        (["--model", "no_such_module:f"], "importing 'no_such_module:f' failed, ModuleNotFoundError"),
        (["--window-mb", "0", "--window-mb", "0.0"], "pass every --window-mb once"),
        (["--replicas", "1"], "--replicas 1 leaves nothing to average; pass 2 or more"),
        (["--device", "tpu"], "--device 'tpu' is not available here"),
        (["--process-group", "nccl", "--device", "cpu"], "needs CUDA, and the device is cpu; pass gloo"),
        (["--json", "/no/such/folder/r.json"], "there is no folder"),
        (["--plot", "r.pdf"], "pass a name that ends in .png"),
        (["--from-json", "no_such_file.json"], "can't be read: No such file or directory"),
        (["--from-json", "a.json", "--json", "b.json"], "pass one of them"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        local_sgd_bench.main(arguments)
    assert message in str(refused.value)


@pytest.mark.parametrize("value", ["-1", "nan", "much"])
def test_a_window_must_be_a_size(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("bench", local_sgd_bench.main, [f"--window-mb={value}"])
    assert ended.value.code == 2
    assert f"got '{value}', pass a number of at least 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("only_a_model", "returned Linear; return (model, step_fn)"),
        ("no_parameters", "has no parameters, so there is nothing to average"),
    ],
)
def test_a_callable_that_returns_something_else_is_refused(model: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        build(f"bench_models:{model}", torch.device("cpu"), 0)
    assert message in str(refused.value)
