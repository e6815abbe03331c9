"""
Watches a run: prints its progress, kills and restarts groups, and judges the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from torchft._launch.replicas import Exit, Message, ReplicaGroups

__all__ = ["GroupLost", "Results", "Supervisor"]

# Of silence, after which a group whose peers have finished waits for them in vain. It may be starting, or its
# report may still be on its way. seconds
_PATIENCE = 30.0


class GroupLost(Exception):
    """A group died and cannot come back; the message says which and why."""


@dataclass
class Results:
    """What a run did.

    Attributes:
        history: one entry per synchronization: step, losses (by group; None where it was missing or healed),
            committed, milliseconds (of the group that waited least), healed (groups).
        validation_before: validation loss at the start, in nats per byte.
        validation_after: validation loss after the last commit.
        total_bytes: S, of the rank with the most.
        largest_bytes: M, of the rank with the largest.
        kills: groups killed.
        heals: times that a group took its state over from a peer.
        commits_at_start: commits that a checkpoint brought.
        digests: SHA-256 of each rank's parameters, by rank, one per group that finished.
    """

    history: list[dict[str, Any]] = field(default_factory=list)
    validation_before: float = math.nan
    validation_after: float = math.nan
    total_bytes: int = 0
    largest_bytes: int = 0
    kills: int = 0
    heals: int = 0
    commits_at_start: int = 0
    digests: dict[int, list[str]] = field(default_factory=dict)

    @property
    def commits(self) -> int:
        """Synchronizations that were committed."""
        return sum(entry["committed"] for entry in self.history)

    @property
    def rejections(self) -> int:
        """Synchronizations that were rejected."""
        return len(self.history) - self.commits

    @property
    def identical(self) -> bool:
        """Whether all groups ended with the same bits, rank by rank."""
        return bool(self.digests) and all(len(set(digests)) == 1 for digests in self.digests.values())


@dataclass
class _Group:
    alive: int = 0
    start: int = 0
    dying: bool = False
    # what the kill schedule compares: the last step heard of in this start
    step: Optional[int] = None
    finished: bool = False
    # Since its last start: a commit makes a restarted group a full member again.
    committed: bool = False
    rejected: bool = False

    @property
    def rejoining(self) -> bool:
        """Whether it was started again and is not yet a full member."""
        return self.start > 0 and not self.committed


# Quorum and step: what tells a synchronization from the one before it. Reports of one group come in order,
# those of two groups do not, and after a rejection the step is the same.
_Key = tuple[int, int]


@dataclass
class _Synchronization:
    """What was heard of one synchronization.

    Attributes:
        reports: by group.
        gone: groups that died before they reported.
    """

    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether all reports have come that will come."""
        participants = max(report["participants"] for report in self.reports.values())
        return len(self.reports.keys() | self.gone) >= participants


class Supervisor:
    """Runs replica groups to their end.

    Args:
        groups: the groups, not started yet.
        replicas: how many.
        ranks: ranks per group.
        steps: optimizer steps of the run, for the progress lines.
        commits: commits that a group needs.
        kills: at which steps to kill a group; the last group first, then the one before it, in turn.
    """

    def __init__(
        self,
        groups: ReplicaGroups,
        *,
        replicas: int,
        ranks: int,
        steps: int,
        commits: int,
        kills: Sequence[int],
    ) -> None:
        self._processes = groups
        self._ranks = ranks
        self._steps = steps
        self._commits = commits
        self._groups = [_Group() for _ in range(replicas)]
        self._kills = [(step, replicas - 1 - index % replicas) for index, step in enumerate(sorted(kills))]
        self._pending: dict[_Key, _Synchronization] = {}
        self.results = Results()

    def run(self) -> Results:
        """Starts all groups and returns when they have finished.

        Returns:
            What happened.

        Raises:
            ReplicaFailed: a rank failed with an error of its own.
            UserError: a rank found a mistake of the user.
            GroupLost: a group died and cannot come back.
        """
        for group in range(len(self._groups)):
            self._start(group)
        while True:
            stuck = self._stuck()
            try:
                event = next(self._processes.events(_PATIENCE if stuck else None), None)
            except TimeoutError:
                raise _lost(stuck) from None
            if event is None:
                break
            if isinstance(event, Exit):
                self._on_exit(event)
            elif event.start == self._groups[event.group].start:
                self._on_message(event)
        for key in sorted(self._pending):
            self._record(key)
        return self.results

    def _start(self, group: int) -> None:
        start = self._processes.start(group)
        self._groups[group] = _Group(alive=self._ranks, start=start)

    def _on_message(self, message: Message) -> None:
        kind, fields = message.fields["kind"], message.fields
        if kind == "begin":
            self.results.total_bytes = max(self.results.total_bytes, fields["total_bytes"])
            self.results.largest_bytes = max(self.results.largest_bytes, fields["largest_bytes"])
        if kind == "finished":
            self.results.digests.setdefault(message.rank, []).append(fields["digest"])
        if message.rank != 0:
            return
        if kind == "begin" and math.isnan(self.results.validation_before):
            self.results.validation_before = fields["validation_loss"]
            self.results.commits_at_start = fields["commits"]
            at = f" at step {fields['step']}" if fields["step"] else ""
            _print(f"training starts{at}, validation loss {fields['validation_loss']:.3f}")
            _print("per synchronization: step, loss of each group, outcome of the vote, time it took")
        elif kind == "step":
            self._on_step(message.group, fields["step"])
        elif kind == "synchronized":
            self._on_synchronized(message.group, fields)
        elif kind == "finished":
            self.results.validation_after = fields["validation_loss"]

    def _on_step(self, number: int, step: int) -> None:
        group = self._groups[number]
        # From where this start began, so that a kill that is over does not fire at the restarted group.
        before = step - 1 if group.step is None else group.step
        group.step = step
        for kill in self._kills:
            if kill[1] == number and before < kill[0] <= step and not group.dying:
                self._kills.remove(kill)
                _print(f"step {step:6d}  killing group {number} (SIGKILL)")
                self._processes.kill(number)
                self._lose(number)
                break

    def _lose(self, number: int) -> None:
        """A group is dying: from now on nothing waits for its reports."""
        self._groups[number].dying = True
        self.results.kills += 1
        self._settle()

    def _on_synchronized(self, number: int, fields: dict[str, Any]) -> None:
        group = self._groups[number]
        if group.dying:
            return
        group.committed = group.committed or fields["committed"]
        group.rejected = not fields["committed"]
        group.finished = fields["commits"] >= self._commits
        self.results.heals += fields["healed"]
        key = (fields["quorum"], fields["step"])
        self._pending.setdefault(key, _Synchronization()).reports[number] = fields
        # With reports on their way, a group may seem to be left behind that has committed as well.
        if self._settle():
            self._check_lost()

    def _settle(self) -> bool:
        """Records the synchronizations that are over; returns whether there were any."""
        dying = {number for number, group in enumerate(self._groups) if group.dying}
        for synchronization in self._pending.values():
            synchronization.gone |= dying - synchronization.reports.keys()
        complete = [key for key, synchronization in self._pending.items() if synchronization.complete]
        if not complete:
            return False
        # What misses in an earlier one was lost with a group that is back already.
        for key in sorted(key for key in self._pending if key <= max(complete)):
            self._record(key)
        return True

    def _record(self, key: _Key) -> None:
        """Prints and keeps a synchronization of which nothing more will be heard."""
        reports = self._pending.pop(key).reports
        groups = range(len(self._groups))
        healed = [group for group in groups if group in reports and reports[group]["healed"]]
        # What a group trained before it healed was replaced by its peer's state: no loss to show.
        losses = [
            reports[group]["loss"] if group in reports and group not in healed else None for group in groups
        ]
        entry = {
            "step": max(report["step"] for report in reports.values()),
            "losses": losses,
            "committed": any(report["committed"] for report in reports.values()),
            "milliseconds": min(report["milliseconds"] for report in reports.values()),
            "healed": healed,
        }
        self.results.history.append(entry)
        shown = "  ".join("    -" if loss is None else f"{loss:5.3f}" for loss in losses)
        note = "".join(f", group {group} healed from a peer" for group in healed)
        _print(
            f"step {entry['step']:6d}/{self._steps}  loss {shown}  "
            f"{'committed' if entry['committed'] else 'rejected'} {entry['milliseconds']:7.1f} ms{note}"
        )

    def _on_exit(self, end: Exit) -> None:
        group = self._groups[end.group]
        group.alive -= 1
        if not group.dying and end.returncode < 0 and not end.killed:
            # Killed from outside, as by an operator or for memory: a fault like one that we planned.
            if group.rejoining:
                raise GroupLost(f"group {end.group} died again before it committed anything")
            _print(f"group {end.group} rank {end.rank} was killed by signal {-end.returncode}")
            self._processes.kill(end.group)
            self._lose(end.group)
        if not group.dying:
            end.check()
        elif group.alive == 0:
            self._check_lost()
            if all(other.dying or other.rejoining for other in self._groups):
                # Those that are back already had nobody to heal from.
                _print(
                    "no group is left to heal from: all go on from their checkpoints, or from the beginning"
                )
            _print(f"starting group {end.group} again")
            self._start(end.group)

    def _check_lost(self) -> None:
        """Raises when a group that has to heal, or to repeat a synchronization, has no peer left for it."""
        stuck = self._stuck()
        if stuck:
            raise _lost(stuck)

    def _stuck(self) -> list[int]:
        """Returns the groups that need a peer, if all others have finished."""
        unfinished = [number for number, group in enumerate(self._groups) if not group.finished]
        stuck = [
            number
            for number in unfinished
            for group in [self._groups[number]]
            if group.dying or group.rejected or group.rejoining
        ]
        return stuck if stuck == unfinished and len(stuck) < len(self._groups) else []

    @property
    def kills_left(self) -> list[int]:
        """Steps of planned kills that did not happen."""
        return [step for step, _ in self._kills]


def _lost(stuck: Sequence[int]) -> GroupLost:
    return GroupLost(
        f"group {stuck[0]} cannot rejoin: the others have finished, and nobody is left to heal from"
    )


def _print(line: str) -> None:
    print(line, flush=True)
