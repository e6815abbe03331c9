"""
Watches a run: prints its progress, kills and restarts groups, and judges the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from torchft._launch.replicas import Exit, Message, ReplicaGroups
from torchft.examples.local_sgd.rejections import NothingCommitted

__all__ = ["GroupLost", "Results", "Supervisor"]

# Of silence, after which a group whose peers have finished waits for them in vain. It may be starting, or its
# report may still be on its way. seconds
_PATIENCE = 30.0


class GroupLost(Exception):
    """A group died and cannot come back, or gave up; the message says which and why."""


@dataclass
class Results:
    """What a run did.

    Attributes:
        history: one entry per commit, and one per group that rejected: step, attempt (rejections before it),
            losses (by group; None where it was missing or healed), committed, milliseconds (of the group that
            waited least), healed (groups), reason (of a rejection).
        validation_before: validation loss at the start, in nats per byte.
        validation_after: validation loss after the last commit.
        total_bytes: S, of the rank with the most.
        largest_bytes: M, of the rank with the largest.
        kills: groups killed.
        heals: times that a group took its state over from a peer.
        digests: SHA-256 of each rank's parameters, by rank, one per group that finished.
    """

    history: list[dict[str, Any]] = field(default_factory=list)
    validation_before: float = math.nan
    validation_after: float = math.nan
    total_bytes: int = 0
    largest_bytes: int = 0
    kills: int = 0
    heals: int = 0
    digests: dict[int, list[str]] = field(default_factory=dict)

    @property
    def commits(self) -> int:
        """Synchronizations that were committed."""
        return sum(entry["committed"] for entry in self.history)

    @property
    def rejections(self) -> int:
        """Synchronizations that were rejected, by one group or several."""
        return len({(entry["step"], entry["attempt"]) for entry in self.history if not entry["committed"]})

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
    # of its last rejection, once a rank has told it
    reason: Optional[str] = None

    @property
    def rejoining(self) -> bool:
        """Whether it was started again and is not yet a full member."""
        return self.start > 0 and not self.committed

    @property
    def needs_peer(self) -> bool:
        """Whether it has to heal, or to repeat a synchronization."""
        return self.dying or self.rejected or self.rejoining


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
        # Reports of commits that others have yet to report, by commit and group, and the last one recorded.
        self._pending: dict[int, dict[int, dict[str, Any]]] = {}
        self._recorded = 0
        self.results = Results()

    def run(self) -> Results:
        """Starts all groups and returns when they have finished.

        Returns:
            What happened.

        Raises:
            ReplicaFailed: a rank failed with an error of its own.
            UserError: a rank found a mistake of the user.
            GroupLost: a group died and cannot come back, or gave up.
        """
        for group in range(len(self._groups)):
            self._start(group)
        while True:
            stuck = self._stuck()
            try:
                event = next(self._processes.events(None if stuck is None else _PATIENCE), None)
            except TimeoutError:
                raise _lost(stuck) from None
            if event is None:
                break
            if isinstance(event, Exit):
                self._on_exit(event)
            elif event.start == self._groups[event.group].start:
                self._on_message(event)
        self._record_commits(self._commits)
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
        group = self._groups[message.group]
        if kind == "synchronized":
            # The rank that could not take part knows why; the others of its group only that one could not.
            group.reason = None if fields["committed"] else fields["reason"] or group.reason
        if kind == "gave_up":
            raise GroupLost(f"group {message.group} gave up: {NothingCommitted(group.reason)}")
        if message.rank != 0:
            return
        if kind == "begin" and math.isnan(self.results.validation_before):
            self.results.validation_before = fields["validation_loss"]
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
                self._kill(number)
                break

    def _kill(self, number: int) -> None:
        self._processes.kill(number)
        self._groups[number].dying = True
        self.results.kills += 1

    def _on_synchronized(self, number: int, report: dict[str, Any]) -> None:
        group = self._groups[number]
        committed, commits = report["committed"], report["commits"]
        group.committed = group.committed or committed
        group.rejected = not committed
        group.finished = commits >= self._commits
        self.results.heals += report["healed"]
        if not committed:
            self._record({number: report})
        # One that was stopped for a while may report a commit after its peers have gone on without it.
        elif commits > self._recorded:
            reports = self._pending.setdefault(commits, {})
            reports[number] = report
            if len(reports) >= report["participants"]:
                self._record_commits(commits)

    def _record_commits(self, last: int) -> None:
        """Records the commits up to ``last``. Groups report in order: what misses now was lost with one."""
        for commits in sorted(commits for commits in self._pending if commits <= last):
            self._record(self._pending.pop(commits))
        self._recorded = last

    def _record(self, reports: dict[int, dict[str, Any]]) -> None:
        """Prints and keeps a commit, by all groups that reported it, or a rejection, by one."""
        healed = sorted(group for group, report in reports.items() if report["healed"])
        # What a group trained before it healed was replaced by its peer's state: no loss to show.
        losses = [
            reports[group]["loss"] if group in reports and group not in healed else None
            for group in range(len(self._groups))
        ]
        number, report = next(iter(reports.items()))
        entry = {
            **{name: report[name] for name in ("step", "attempt", "committed")},
            "reason": None if report["committed"] else self._groups[number].reason,
            "losses": losses,
            "milliseconds": min(report["milliseconds"] for report in reports.values()),
            "healed": healed,
        }
        self.results.history.append(entry)
        shown = "  ".join("    -" if loss is None else f"{loss:5.3f}" for loss in losses)
        note = "".join(f", group {group} healed from a peer" for group in healed)
        if not entry["committed"]:
            note += f", group {number}" + (f": {entry['reason']}" if entry["reason"] else "")
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
            self._kill(end.group)
        if not group.dying:
            end.check()
        elif group.alive == 0:
            stuck = self._stuck()
            if stuck is not None:
                raise _lost(stuck)
            if all(other.dying or other.rejoining for other in self._groups):
                # Those that are back already had nobody to heal from.
                self._record_commits(self._commits)
                self._recorded = 0
                _print(
                    "no group is left to heal from: all go on from their checkpoints, or from the beginning"
                )
            _print(f"starting group {end.group} again")
            self._start(end.group)

    def _stuck(self) -> Optional[int]:
        """Returns a group that needs a peer, if all groups that do not have finished."""
        left = [number for number, group in enumerate(self._groups) if group.dying or not group.finished]
        if not left or len(left) == len(self._groups):
            return None
        return left[0] if all(self._groups[number].needs_peer for number in left) else None

    @property
    def kills_left(self) -> list[int]:
        """Steps of planned kills that did not happen."""
        return [step for step, _ in self._kills]


def _lost(number: Optional[int]) -> GroupLost:
    return GroupLost(
        f"group {number} cannot rejoin: the others have finished, and nobody is left to heal from"
    )


def _print(line: str) -> None:
    print(line, flush=True)
