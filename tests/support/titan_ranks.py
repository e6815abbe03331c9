"""Runs ranks of TorchTitan jobs, each in a process of its own that is forked from this one.

Importing TorchTitan takes longer than the jobs of the tests do, so it is done here, once. On the command line
stands a JSON file: a list with an object per rank, which has its ``arguments``, more of its ``environment``,
and the ``log`` file for its output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

# Before anything else of TorchTitan: it settles the device.
import titan_launcher

# So that no rank has to.
import titan_configs  # noqa: F401  # isort: skip


def _run(arguments: list[str], environment: dict[str, str], log: str) -> None:
    sys.argv[1:] = arguments
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    titan_launcher.run()


def _main() -> None:
    ranks: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    for rank in ranks:
        if os.fork() == 0:
            _run(**rank)
            return
    for _ in ranks:
        if os.wait()[1] != 0:
            # The others wait for the one that failed.
            os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _main()
