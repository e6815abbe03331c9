"""Two replica groups of two FSDP2 ranks that suffer faults in their synchronizations, seen from the parent.

The ranks run ``fault_worker.py``. They go from round to round together: in each one a rank trains a little,
synchronizes by the staged path and reports its shards, bit for bit, before (after the quorum, healing
included) and after. A round may have faults, which the parent hands out. The same processes live through one
fault after another; a group that died is started again, as a launcher does.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Optional

import torch
from places import SUPPORT
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from ways import Way

from torchft._launch.replicas import Exit, Message, ReplicaGroups

GROUPS = RANKS = 2
SHAPES = ((7, 3), (4,), (5, 2, 3), (2, 5), (1, 6), (64,), (3, 3), (8, 2), (6,))
FIRST, MIDDLE = 0, len(SHAPES) // 2

# The Manager's must be longer: a vote waits for the rank whose collective times out.
COLLECTIVE_TIMEOUT = timedelta(seconds=4)
MANAGER_TIMEOUT = timedelta(seconds=9)
# For a group that starts again.
QUORUM_TIMEOUT = timedelta(seconds=120)
# seconds of silence
PATIENCE = 100.0
TRIES = 3

# Environment of the ranks.
CONTROL_PORT, HOSTS, WAY = "FAULT_CONTROL_PORT", "FAULT_HOST", "FAULT_WAY"

# How the groups stage: one parameter at a time in one, several in the other.
WINDOWS: tuple[Way, ...] = (None, 0)

POINTS = (
    "asks_for_quorum",
    "healing",
    "after_quorum",
    "before_allreduce",
    "in_collective",
    "in_flight",
    "before_vote",
    "after_vote",
    "in_write_back",
)
ACTIONS = ("die", "stop", "hold", "raise", "sleep", "drift")

Key = tuple[int, int]
Bits = list[bytes]


@dataclass(frozen=True)
class Fault:
    """What some ranks of a group do at one point of a round; they announce that they got there.

    Attributes:
        group: the replica group.
        point: one of ``POINTS``.
        action: ``die`` by SIGKILL, ``stop`` by SIGSTOP, ``hold`` until the parent says go or kills, ``raise``
            an exception, ``sleep``, or ``drift``: change the parameters.
        ranks: ranks of the group.
        index: at which parameter, where the point has one; None: at each.
        seconds: how long to sleep.
    """

    group: int
    point: str
    action: str
    ranks: tuple[int, ...] = tuple(range(RANKS))
    index: Optional[int] = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        assert self.point in POINTS, self.point
        assert self.action in ACTIONS, self.action


@dataclass
class Round:
    """What was heard of one round; keys are (group, rank).

    Attributes:
        number: counts the rounds from 0.
        faults: what was planned.
        reached: (group, rank, point) of each fault that happened.
        before: shards after quorum and healing.
        after: shards when ``sync()`` had ended.
        step: the Manager's, with ``before``.
        step_after: the Manager's, with ``after``.
        healed: who loaded a peer's state.
        checkpoint: the address at which the Manager serves its state to peers.
        failed: the exception with which ``sync()`` ended.
        exits: ranks that ended.
    """

    number: int
    faults: tuple[Fault, ...]
    reached: set[tuple[int, int, str]] = field(default_factory=set)
    before: dict[Key, Bits] = field(default_factory=dict)
    after: dict[Key, Bits] = field(default_factory=dict)
    step: dict[Key, int] = field(default_factory=dict)
    step_after: dict[Key, int] = field(default_factory=dict)
    healed: set[Key] = field(default_factory=set)
    checkpoint: dict[Key, str] = field(default_factory=dict)
    failed: dict[Key, str] = field(default_factory=dict)
    exits: dict[Key, Exit] = field(default_factory=dict)

    def fired(self) -> bool:
        """Whether every rank of every fault has come to its point."""
        return all(
            (fault.group, rank, fault.point) in self.reached for fault in self.faults for rank in fault.ranks
        )

    def decision(self, group: int) -> str:
        """Requires that both ranks of a group keep the invariant; returns ``kept`` or ``took``."""
        decisions = [self.decision_of(group, rank) for rank in range(RANKS)]
        assert decisions[0] == decisions[1], f"the ranks of group {group} decided {decisions}"
        return decisions[0]

    def decision_of(self, group: int, rank: int) -> str:
        """Requires that a rank has either all that it had or all of the average, as it says itself."""
        key = (group, rank)
        if key not in self.after:
            end = self.exits.get(key)
            raise AssertionError(
                "\n".join([f"{key} did not end round {self.number}", *(end.output if end else ())])
            )
        committed = self.step_after[key] - self.step[key]
        assert committed in (0, 1)
        if not committed:
            assert self.after[key] == self.before[key], f"{key} rejected and has other bits than before"
            return "kept"
        averages = average(*(self.before[other, rank] for other in range(GROUPS)))
        if not self.healed:
            # Otherwise all that follows would hold for a group that never takes anything over.
            assert all(a != b for a, b in zip(averages, self.before[key], strict=True) if a), (
                "nothing to tell apart"
            )
        assert self.after[key] == averages, f"{key} committed and has not the average"
        return "took"


def average(first: Bits, second: Bits) -> Bits:
    """The average of two groups' float32 shards, bit for bit: a sum of two has only one rounding."""
    result = []
    for a, b in zip(first, second, strict=True):
        values = [
            torch.frombuffer(bytearray(x), dtype=torch.float32) if x else torch.empty(0) for x in (a, b)
        ]
        result.append(((values[0] + values[1]) / 2).numpy().tobytes())
    return result


def encode(shards: Iterable[torch.Tensor]) -> list[str]:
    """Shards as text for a message, in logical order of elements."""
    return [base64.b64encode(shard.detach().contiguous().numpy().tobytes()).decode() for shard in shards]


def decode(shards: Iterable[str]) -> Bits:
    return [base64.b64decode(shard) for shard in shards]


class FaultGroups:
    """The two groups. Use it as a context manager.

    Args:
        hosts: the names under which the groups reach each other.
        control_host: the name under which they reach this process.
        entering: entered while a group is started.
        lighthouse: URL of a running lighthouse; None starts one.
        env: further environment of the ranks.
        ways: how each group stages.

    Attributes:
        settled: all ranks live and hold the same parameters, so that the next test may go on with them.
    """

    def __init__(
        self,
        hosts: Sequence[str] = ("localhost",) * GROUPS,
        control_host: str = "localhost",
        entering: Callable[[int], AbstractContextManager[object]] = nullcontext,
        lighthouse: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        ways: Sequence[Way] = WINDOWS,
    ) -> None:
        self.settled = False
        self._control = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._groups = ReplicaGroups(
            ["-m", "fault_worker"],
            replicas=GROUPS,
            ranks=RANKS,
            lighthouse=lighthouse,
            env={
                "PYTHONPATH": str(SUPPORT),
                CONTROL_PORT: str(self._control.port),
                f"{HOSTS}_CONTROL": control_host,
                **{f"{HOSTS}_{group}": host for group, host in enumerate(hosts)},
                **{f"{WAY}_{group}": json.dumps(way) for group, way in enumerate(ways)},
                **(env or {}),
            },
        )
        self._entering = entering
        self._running: set[Key] = set()
        self._pids: dict[Key, int] = {}
        self._rounds: list[Round] = []

    def __enter__(self) -> FaultGroups:
        for group in range(GROUPS):
            self._start(group)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._groups.stop()

    def _start(self, group: int) -> None:
        self._control.set(f"first/{group}", str(len(self._rounds)))
        with self._entering(group):
            self._groups.start(group)
        self._running |= {(group, rank) for rank in range(RANKS)}

    def begin(self, *faults: Fault) -> Round:
        """Begins a round and returns what will be heard of it."""
        self.settled = False
        seen = Round(len(self._rounds), faults)
        self._rounds.append(seen)
        self._control.set(f"plan/{seen.number}", json.dumps([asdict(fault) for fault in faults]))
        return seen

    def provoke(self, *faults: Fault) -> Round:
        """Begins rounds until all faults have happened: the machine may spoil one before."""
        for _ in range(TRIES):
            seen = self.begin(*faults)
            self.wait(lambda seen=seen: seen.fired() or self.ended(seen))
            if seen.fired():
                return seen
        raise AssertionError(f"{faults} did not happen in {TRIES} rounds")

    def listen(self, seconds: float) -> None:
        """Listens for so long, for what should not come."""
        end = time.monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            self.wait(lambda: time.monotonic() >= end, seconds)

    def wait(self, until: Callable[[], bool], patience: float = PATIENCE) -> None:
        """Listens until something holds; TimeoutError after seconds of silence."""
        while not until():
            event = next(self._groups.events(timeout=patience), None)
            assert event is not None, "no rank is left"
            key = (event.group, event.rank)
            if isinstance(event, Exit):
                self._running.discard(key)
                self._rounds[-1].exits[key] = event
            elif isinstance(event, Message):
                self._hear(key, event.fields)

    def _hear(self, key: Key, fields: dict[str, Any]) -> None:
        if "pid" in fields:
            self._pids[key] = fields["pid"]
            return
        seen = self._rounds[fields["round"]]
        if "reached" in fields:
            seen.reached.add((*key, fields["reached"]))
        elif "before" in fields:
            seen.before[key] = decode(fields["before"])
            seen.step[key] = fields["step"]
            seen.checkpoint[key] = fields["checkpoint"]
            if fields["healed"]:
                seen.healed.add(key)
        else:
            seen.after[key] = decode(fields["after"])
            seen.step_after[key] = fields["step"]
            if fields["failed"]:
                seen.failed[key] = fields["failed"]

    def ended(self, seen: Round, *groups: int) -> bool:
        """Whether every rank of the groups, by default of all, has ended the round or itself."""
        keys = {(group, rank) for group in groups or range(GROUPS) for rank in range(RANKS)}
        return all(key in seen.after or key not in self._running for key in keys)

    def finish(self, seen: Round, *groups: int) -> None:
        """Waits until the groups, by default all, have ended the round."""
        self.wait(lambda: self.ended(seen, *groups))

    def go(self, seen: Round, group: int, point: str) -> None:
        """Lets the ranks of a group go on that hold at a point."""
        for rank in range(RANKS):
            self._control.set(f"go/{seen.number}/{group}/{rank}/{point}", "")

    def signal(self, fault: Fault, number: int) -> None:
        """Sends a signal to the ranks of a fault."""
        for rank in fault.ranks:
            os.kill(self._pids[fault.group, rank], number)

    def kill(self, group: int) -> None:
        """Kills what is left of a group and waits for its end, as a launcher does when one rank has ended."""
        self._groups.kill(group)
        self.wait(lambda: not any(key[0] == group for key in self._running))

    def restart(self, group: int, *faults: Fault) -> Round:
        """Starts a group that ended and begins the round in which it heals."""
        self._start(group)
        return self.begin(*faults)

    def recover(self, group: int) -> None:
        """Starts a group that ended; requires that it heals and that both then commit, to the same bits."""
        seen = self.restart(group)
        self.finish(seen)
        self.check_healed(seen, group)
        self.commit_together()

    def check_healed(self, seen: Round, group: int) -> None:
        """Requires that a group took its peer's state over, whole, and that both kept the invariant after."""
        assert seen.healed == {(group, rank) for rank in range(RANKS)}
        for rank in range(RANKS):
            assert seen.before[group, rank] == seen.before[1 - group, rank], "healed to something else"
        for each in range(GROUPS):
            seen.decision(each)

    def commit_together(self) -> None:
        """Requires a synchronization without faults that both groups commit, within three."""
        for _ in range(TRIES):
            seen = self.begin()
            self.finish(seen)
            # A group that rejected alone in the last round is a step behind, and heals in this one.
            decisions = [seen.decision(group) for group in range(GROUPS)]
            if decisions == ["took"] * GROUPS and not seen.healed:
                for rank in range(RANKS):
                    assert seen.after[0, rank] == seen.after[1, rank], "the groups differ"
                self.settled = True
                return
        raise AssertionError(f"no commit of both groups in {TRIES} rounds")
