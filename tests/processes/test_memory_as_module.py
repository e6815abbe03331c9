"""The command python -m torchft.local_sgd_memory as a process."""

from __future__ import annotations

import subprocess
import sys

from places import BENCHMARKS


def test_as_a_module() -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torchft.local_sgd_memory"),
            *("model_shapes:deepseek_v3_671b", "--host-memory", "1GiB"),
        ],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout.startswith("671,026,419,200 parameters in 1,025 tensors\n")
