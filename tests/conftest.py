"""Makes sure that the code under test is this checkout's, and turns slow tests on and off."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from places import ROOT

# The Lighthouse and Managers log every request otherwise; read when torchft is imported.
os.environ.setdefault("RUST_LOG", "warn")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # In the background of a script Ctrl-C is ignored, and would be by all processes that tests start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    problem = _other_code_under_test()
    if problem is not None:
        raise pytest.UsageError(f"{problem}: run `pip install -e '.[dev]'` in {ROOT}")


def _other_code_under_test() -> str | None:
    try:
        from torchft import local_sgd
    except ImportError as error:
        return f"torchft.local_sgd can't be imported ({error})"
    # An editable install runs the checkout's file; its code objects carry that file's name.
    source = local_sgd.LocalSGD.sync.__code__.co_filename
    if Path(source).resolve() != ROOT / "torchft" / "local_sgd.py":
        return f"torchft.local_sgd comes from {source}, not from this checkout"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    # Deselected rather than skipped: a skip means that this machine lacks something.
    kept = [item for item in items if item.get_closest_marker("slow") is None]
    dropped = [item for item in items if item.get_closest_marker("slow") is not None]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
