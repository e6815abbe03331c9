"""Where things are in this checkout."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
BENCHMARKS = ROOT / "benchmarks"
