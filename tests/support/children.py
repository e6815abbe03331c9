"""Processes that tests start and watch, and ports for them."""

from __future__ import annotations

import socket

import psutil

# As torchft._launch.replicas.send() does, without the seconds that importing PyTorch takes.
_SEND = """
import json, os, signal, subprocess, sys, time
def send(**fields):
    os.write(int(os.environ["_TORCHFT_REPLICAS_FD"]), (json.dumps(fields) + "\\n").encode())
"""


def scripted(code: str) -> list[str]:
    """A program for ReplicaGroups that may call ``send`` and has the usual modules imported."""
    return ["-c", _SEND + code]


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        return probe.getsockname()[1]


def gone(processes: list[psutil.Process], seconds: float = 20.0) -> bool:
    """Whether none of the processes is left after so many seconds at the most."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
