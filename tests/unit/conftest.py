"""Tests here need no second process, which makes them the quick ones; threads are fine."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _no_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: Any, *_: Any, **__: Any) -> None:
        raise AssertionError(f"{command} is a second process: a test of it belongs into tests/processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
