"""MODULE:CALLABLE: what it may name, and what is said of what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from torchft._launch.cli import UserError
from torchft._launch.target import find, users_code


class Models:
    """What is pointed at, as test_target:Models.NAME."""

    not_callable = 3
    built = nn.Linear(2, 2)

    @staticmethod
    def build() -> nn.Module:
        return nn.Linear(2, 2)


def test_functions_classes_and_what_they_hold_are_found() -> None:
    assert find("torch.nn:ReLU") is nn.ReLU
    assert find(f"{__name__}:Models.build") is Models.build


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("json", "'json' does not name a model; pass MODULE:CALLABLE"),
        (":x", "does not name a model"),
        ("x:", "does not name a model"),
        ("no such:x", "importing 'no such:x' failed, ValueError: invalid format"),
        ("no_such_module_here:x", "failed, ModuleNotFoundError: No module named 'no_such_module_here'; pass"),
        (
            "json:nothing",
            "AttributeError: module 'json' has no attribute 'nothing'; pass a function",
        ),
        ("broken:build", "importing 'broken:build' failed, OSError: no weights here; pass"),
        ("script:build", "importing 'script:build' failed, SystemExit: run me with torchrun; pass"),
        (f"{__name__}:Models.not_callable", "is a int; pass a function or class"),
        (f"{__name__}:Models.built", "is a Linear; pass a function or class"),
    ],
)
def test_mistakes(spec: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken.py").write_text("raise OSError('no weights here')")
    (tmp_path / "script.py").write_text("raise SystemExit('run me with torchrun')")
    with pytest.raises(UserError) as refused:
        find(spec)
    assert says in str(refused.value)


def test_ctrl_c_is_no_mistake_of_the_model() -> None:
    with pytest.raises(KeyboardInterrupt), users_code("building", "pass another one"):
        raise KeyboardInterrupt
