"""
Child processes that cannot outlive the process that started them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Union

__all__ = ["signal_all", "spawn", "stop"]

# Runs in the child before anything else. The child holds the read end of a pipe whose write end only the
# parent has: end of file means that the parent is gone, even by SIGKILL. Unlike PR_SET_PDEATHSIG this has
# no window before it is armed, and it does not fire when merely the parent's *thread* ends.
_BOOTSTRAP = """\
import os, runpy, signal, sys, threading
def watch():
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
kind, program = sys.argv[1:3]
del sys.argv[:2]
if kind == "-m":
    runpy.run_module(program, run_name="__main__", alter_sys=True)
else:
    exec(program)
"""


def spawn(
    program: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: Union[int, IO[bytes]],
    stderr: Union[int, IO[bytes]],
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts a Python program that dies with this process.

    It is the leader of a process group of its own: Ctrl-C in the terminal reaches the parent only, which
    then stops its children in order. Its standard input belongs to the death watch.

    Args:
        program: what would follow ``python``: ``["-m", module, ...]`` or ``["-c", code, ...]``.
        env: the child's whole environment.
        stdout: as for ``subprocess.Popen``.
        stderr: as for ``subprocess.Popen``.
        pass_fds: file descriptors to hand over.
    """
    return subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, *program],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=dict(env),
        pass_fds=tuple(pass_fds),
        start_new_session=True,
    )


def signal_all(processes: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    """Sends a signal to those of the processes that still run, and to the processes that they started."""
    for process in processes:
        if process.poll() is None:
            # it may have ended since the poll
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def stop(processes: Sequence[subprocess.Popen[bytes]], grace: float = 3.0) -> None:
    """Ends processes and collects them: SIGTERM first, SIGKILL for those that are left.

    Args:
        processes: as ``spawn`` returned them; those that have ended already are fine.
        grace: seconds between the two signals.
    """
    signal_all(processes, signal.SIGTERM)
    deadline = time.monotonic() + grace
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        # Also on a second Ctrl-C: nothing may be left behind.
        signal_all(processes, signal.SIGKILL)
        for process in processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
