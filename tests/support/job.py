"""The main job as a process, at a size that trains in seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

MODULE = "torchft.examples.local_sgd"


# A step takes about two milliseconds.
SMALL = ["--dim", "32", "--layers", "1", "--sequence-length", "32", "--batch-size", "4", "--sync-every", "4"]
BOTH = r"loss +\d\.\d+ +\d\.\d+ +committed"


class Run:
    """The launcher as a process; nothing of it may be left when it ends."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", MODULE, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            # as in a terminal of its own, so that Ctrl-C goes to this job alone
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def rank(self, group: int) -> psutil.Process:
        """The process of a group with one rank."""
        ranks = [p for p in self.children() if p.environ().get("REPLICA_GROUP_ID") == str(group)]
        assert len(ranks) == 1
        return ranks[0]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait_for(self, pattern: str, after: int = 0, seconds: float = 90.0) -> int:
        """Waits for a line from ``after`` on that matches, and returns the number of the next one."""
        deadline = time.monotonic() + seconds
        number = after
        while True:
            if number < len(self.lines):
                number += 1
                if re.search(pattern, self.lines[number - 1]):
                    return number
            else:
                assert self.process.poll() is None or self._reader.is_alive(), self.output
                assert time.monotonic() < deadline, f"no {pattern!r} in\n{self.output}"
                time.sleep(0.01)

    def end(self, timeout: float = 120.0) -> int:
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.end()
        assert self.process.stdout is not None
        self.process.stdout.close()


def run(*arguments: str, code: int = 0) -> str:
    with Run(*arguments) as job:
        assert job.end() == code, job.output
        return job.output


def options_of(command: str) -> list[str]:
    """Those of a documented command, which runs the launcher."""
    python, m, module, *rest = command.split()
    assert (python, m, module) == ("python", "-m", MODULE)
    return rest


def results(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
