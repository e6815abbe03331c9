"""Runs ranks of TorchTitan jobs, each in a process of its own that is forked from this one.

Importing TorchTitan takes longer than the jobs of the tests do, so it is done here, once. On the command line
stands a JSON file: a list with what each rank gets, as :func:`_run` takes it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import wait
from pathlib import Path

# Before anything else of TorchTitan: it settles the device.
import titan_launcher

# So that no rank has to.
import titan_configs  # noqa: F401  # isort: skip


def _run(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Is one rank.

    Args:
        arguments: TorchTitan's command line.
        environment: what the rank's environment has besides this process's.
        log: the file for its output.
    """
    sys.argv[1:] = arguments
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    titan_launcher.run()


def _main() -> None:
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_run, kwargs=rank) for rank in json.loads(Path(sys.argv[1]).read_text())]
    for rank in ranks:
        rank.start()
    while None in (codes := [rank.exitcode for rank in ranks]) and not any(codes):
        wait([rank.sentinel for rank, code in zip(ranks, codes, strict=True) if code is None])
    if any(codes):
        # The others wait for the one that failed.
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _main()
