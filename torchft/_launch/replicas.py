"""
Replica groups as processes on this machine, under one lighthouse.

Every rank is a Python program with the environment that ``torchrun`` would give it (``RANK``,
``WORLD_SIZE``, ``MASTER_ADDR``, ...) plus ``REPLICA_GROUP_ID``, ``NUM_REPLICA_GROUPS`` and
``TORCHFT_LIGHTHOUSE``. What else is in this process's environment reaches all ranks, except what only one
process can have, such as ``TORCHFT_MANAGER_PORT``. A rank may tell its parent things with :func:`send`::

    with ReplicaGroups(["-m", "my_package.worker"], replicas=2) as groups:
        groups.start_all()
        for event in groups.events(timeout=60):
            if isinstance(event, Message):
                print(event.group, event.rank, event.fields)
            else:
                event.check()

However this process ends, SIGKILL included, none of its children stays behind.
"""

from __future__ import annotations

import collections
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torchft._launch import child_process
from torchft._launch.cli import UserError
from torchft._launch.lighthouse import LighthouseProcess, check_host, check_lighthouse

__all__ = ["Exit", "Message", "ReplicaFailed", "ReplicaGroups", "attached", "send"]

_MESSAGES_FD_ENV = "_TORCHFT_REPLICAS_FD"
# Enough for a traceback with chained exceptions, little enough to print.
_LINES_KEPT = 80
# What only one process can have: a port or a socket to listen on, a rank.
_OF_ONE_PROCESS = {"TORCHFT_MANAGER_PORT", "TORCH_WORKER_SERVER_SOCKET", "TORCHCOMM_RANK", "TORCHCOMM_SIZE"}
# PyTorch appends the rank within a group to these file names; the Manager sees to TORCH_FR_DUMP_TEMP_FILE.
_FILES_OF_RANKS = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"}


@dataclass(frozen=True)
class _Event:
    """What is heard of a rank.

    Attributes:
        group: its replica group.
        rank: its rank within the group.
        start: 0 for the group's first start, 1 after the first restart, ...
    """

    group: int
    rank: int
    start: int


@dataclass(frozen=True)
class Message(_Event):
    """What a rank sent.

    Attributes:
        fields: what it passed to ``send``.
    """

    fields: dict[str, Any]


@dataclass(frozen=True)
class Exit(_Event):
    """The end of a rank; the last that is heard of it.

    Attributes:
        returncode: as of ``subprocess``: the exit code, or minus the signal's number.
        output: its last lines on stdout and stderr.
        killed: whether ``kill`` or ``stop`` ended it.
    """

    returncode: int
    output: tuple[str, ...]
    killed: bool

    def check(self) -> None:
        """Raises unless the rank ended well or was killed on purpose.

        Raises:
            UserError: the rank ended with exit code 2 and one line about the user's mistake: that line.
            ReplicaFailed: it failed otherwise.
        """
        if self.returncode == 0 or self.killed:
            return
        if self.returncode == 2 and self.output:
            # As cli.run() prints it, after the name of the rank's program.
            raise UserError(self.output[-1].partition(": ")[2])
        raise ReplicaFailed(self)


class ReplicaFailed(Exception):
    """A rank failed; the message has its group, rank, how it ended, and its last lines."""

    def __init__(self, end: Exit) -> None:
        self.exit = end
        code = end.returncode
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        lines = list(end.output)
        # What was logged before the error helps nobody, and may be long.
        first = next((index for index, line in enumerate(lines) if line.startswith("Traceback")), 0)
        head = f"group {end.group} rank {end.rank} failed ({how})"
        super().__init__("\n".join([head, *lines[first:]]))


@dataclass
class _Rank:
    group: int
    rank: int
    start: int
    process: subprocess.Popen[bytes]
    killed: bool = False
    output: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=_LINES_KEPT))


class ReplicaGroups:
    """Starts, watches, kills and restarts replica groups.

    Use it as a context manager: leaving it stops every process. Not for use from several threads.

    Args:
        program: what every rank runs, as after ``python``: ``["-m", module, ...]`` or ``["-c", code, ...]``.
        replicas: number of replica groups.
        ranks: ranks per group.
        min_replicas: groups without which there is no quorum (of a lighthouse of one's own); default: all.
        lighthouse: URL of a running lighthouse; None starts one.
        env: what to add to this process's environment for every rank.
        on_output: called with group, rank and each line that a rank prints, from reader threads.

    Raises:
        ValueError: the lighthouse does not answer, or Managers can't work on this machine.
    """

    def __init__(
        self,
        program: Sequence[str],
        *,
        replicas: int,
        ranks: int = 1,
        min_replicas: Optional[int] = None,
        lighthouse: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        on_output: Optional[Callable[[int, int, str], None]] = None,
    ) -> None:
        check_host()
        self._program = list(program)
        self._replicas = replicas
        self._world_size = ranks
        self._env = dict(env or {})
        self._on_output = on_output
        self._own_lighthouse: Optional[LighthouseProcess] = None
        self._stores: dict[int, TCPStore] = {}
        self._starts: dict[int, int] = {}
        self._ranks: list[_Rank] = []
        self._alive = 0
        self._events: queue.Queue[Union[Message, Exit]] = queue.Queue()
        if lighthouse is None:
            own = LighthouseProcess(replicas if min_replicas is None else min_replicas)
            self._own_lighthouse = own
            self.lighthouse: str = own.address
        else:
            check_lighthouse(lighthouse)
            self.lighthouse = lighthouse

    def start_all(self) -> None:
        """Starts every group."""
        for group in range(self._replicas):
            self.start(group)

    def start(self, group: int) -> int:
        """Starts a group, for the first time or after it has ended.

        Args:
            group: 0 to ``replicas - 1``.

        Returns:
            0 for the first start, 1 for the first restart, ...; events carry it.
        """
        start = self._starts.get(group, -1) + 1
        self._starts[group] = start
        # A new store: in the old one the ranks would find the address of the Manager that died.
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._stores[group] = store
        for rank in range(self._world_size):
            self._start_rank(group, rank, start, self._environment(group, rank, store.port))
        return start

    def kill(self, group: int) -> None:
        """Kills all ranks of a group with SIGKILL; their ``Exit`` events follow.

        Args:
            group: 0 to ``replicas - 1``.
        """
        ranks = [rank for rank in self._ranks if rank.group == group and rank.process.poll() is None]
        for rank in ranks:
            rank.killed = True
        child_process.signal_all([rank.process for rank in ranks], signal.SIGKILL)

    def events(self, timeout: Optional[float] = None) -> Iterator[Union[Message, Exit]]:
        """Yields what happens, in order per rank, until no rank is left.

        Args:
            timeout: seconds of silence after which to give up; None waits for ever.

        Raises:
            TimeoutError: nothing happened for ``timeout`` seconds.
        """
        while self._alive:
            try:
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(f"nothing was heard of the replica groups for {timeout} seconds") from None
            if isinstance(event, Exit):
                self._alive -= 1
            yield event

    def stop(self) -> None:
        """Stops everything, the own lighthouse last. May be called twice."""
        try:
            for rank in self._ranks:
                rank.killed = rank.killed or rank.process.poll() is None
            child_process.stop([rank.process for rank in self._ranks])
        finally:
            if self._own_lighthouse is not None:
                self._own_lighthouse.stop()
        self._stores.clear()

    def __enter__(self) -> ReplicaGroups:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _environment(self, group: int, rank: int, port: int) -> dict[str, str]:
        cpus = len(os.sched_getaffinity(0))
        ranks = str(self._world_size)
        env = {
            # Every process would use all cores, and be many times slower for it.
            "OMP_NUM_THREADS": str(max(1, cpus // (self._replicas * self._world_size))),
            # votes and set-ups are logged otherwise, and would push a traceback out of the kept lines
            "RUST_LOG": "warn",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": "1",
            **_inherited(group),
            # as from a torchrun per group, on one node
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), ranks),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            # the store exists already, rank 0 is not to open another one
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "REPLICA_GROUP_ID": str(group),
            "NUM_REPLICA_GROUPS": str(self._replicas),
            "TORCHFT_LIGHTHOUSE": self.lighthouse,
        }
        # Healing fetches a peer's state by HTTP, under this machine's name: never by way of a proxy.
        for name in ("no_proxy", "NO_PROXY"):
            known = [env[name]] if env.get(name) else []
            env[name] = ",".join([*known, "localhost", os.uname().nodename])
        env.update(self._devices(group))
        env.update(self._env)
        return env

    def _devices(self, group: int) -> dict[str, str]:
        """Deals the CUDA devices out, so that ranks share one only where there are too few."""
        count = torch.cuda.device_count()
        if count == 0:
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",")[:count] if visible else [str(index) for index in range(count)]
        first = group * self._world_size
        mine = [names[(first + rank) % count] for rank in range(min(self._world_size, count))]
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}

    def _start_rank(self, group: int, rank: int, start: int, env: dict[str, str]) -> None:
        read_end, write_end = os.pipe()
        try:
            process = child_process.spawn(
                self._program,
                env={**env, _MESSAGES_FD_ENV: str(write_end)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[write_end],
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        started = _Rank(group, rank, start, process)
        self._ranks.append(started)
        self._alive += 1
        threading.Thread(target=self._watch, args=(started, read_end), daemon=True).start()

    def _watch(self, rank: _Rank, messages_fd: int) -> None:
        readers = [
            threading.Thread(target=self._read_messages, args=(rank, messages_fd), daemon=True),
            threading.Thread(target=self._read_output, args=(rank,), daemon=True),
        ]
        for reader in readers:
            reader.start()
        returncode = rank.process.wait()
        assert rank.process.stdin is not None
        # Nobody is left to watch for this process's death; a job that restarts groups for weeks would run
        # out of files.
        rank.process.stdin.close()
        for reader in readers:
            # a process that the rank started may hold the pipes open
            reader.join(timeout=5)
        self._events.put(Exit(rank.group, rank.rank, rank.start, returncode, tuple(rank.output), rank.killed))

    def _read_messages(self, rank: _Rank, messages_fd: int) -> None:
        with os.fdopen(messages_fd, encoding="utf-8", errors="replace") as messages:
            for line in messages:
                try:
                    fields = json.loads(line)
                except ValueError:
                    continue  # cut short by a kill
                self._events.put(Message(rank.group, rank.rank, rank.start, fields))

    def _read_output(self, rank: _Rank) -> None:
        assert rank.process.stdout is not None
        with rank.process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip()
                rank.output.append(line)
                if self._on_output is not None:
                    self._on_output(rank.group, rank.rank, line)


def _inherited(group: int) -> dict[str, str]:
    """Returns what of this process's environment the ranks of a group may have as well."""
    env = {
        name: value
        for name, value in os.environ.items()
        # torchrun's are for its own workers: error file, watchdog, store
        if name not in _OF_ONE_PROCESS and not name.startswith("TORCHELASTIC_")
    }
    for name in _FILES_OF_RANKS & env.keys():
        env[name] += f"group_{group}_"
    return env


def attached() -> bool:
    """Whether this process is a rank of ``ReplicaGroups``, so that ``send`` reaches somebody."""
    return _MESSAGES_FD_ENV in os.environ


def send(**fields: Any) -> None:
    """Tells the parent something, from a rank of ``ReplicaGroups``.

    Args:
        fields: names and values of types that JSON knows.
    """
    line = json.dumps(fields) + "\n"
    fd = int(os.environ[_MESSAGES_FD_ENV])
    data = line.encode()
    while data:
        data = data[os.write(fd, data) :]
