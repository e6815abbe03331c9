"""Fault plans: what goes wrong in one synchronization, drawn from a seed, and the check of what is left.

``run_plan`` carries one plan out in replica groups that are threads of this process, with a real Lighthouse,
real Managers and real Gloo on the simulated accelerator. ``python tests/fault_plans.py SEED...`` does so
for several, and prints a line of JSON for each.

All parameters are whole numbers before they are averaged, so that their sums are exact in any order and the
average can be foretold bit for bit.
"""

from __future__ import annotations

import concurrent.futures
import gc
import json
import logging
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, Optional

import simulated_accelerator as sim
import torch
from replica_threads import Replica, run_replicas
from torch import nn
from torch.distributed import _Work  # pyright: ignore[reportPrivateImportUsage]
from ways import ON_HOST, Way, arguments_of

from torchft._staging.buffers import StagingBuffers
from torchft.local_sgd import LocalSGD

# Faults of the process group
IN_COLLECTIVE = (
    "raises",
    "scribbles",
    "fails_in_wait",
    "fails_alone",
    "fails_alone_in_wait",
    "never",
    "late",
    "too_late",
)
# Faults of this process and of its group
ELSEWHERE = (
    "no_memory",
    "host_copy",
    "interrupt",
    "interrupt_write_back",
    "vote_raises",
    "vote_false",
    "leaves",
    "joins",
)
KINDS = (*IN_COLLECTIVE, *ELSEWHERE)
# After these the object refuses to go on, and the group starts again.
LOSES_GROUP = ("interrupt", "interrupt_write_back", "vote_raises", "leaves")

# MiB
WINDOWS = (None, 0, 0.0005, 1)

SHAPES = ((3, 4), (5,), (), (2, 3, 4, 5), (64,), (7, 2))
# Not dense in memory, so that a host all-reduce has a window, too.
STRIDED = (5,)
# While a fault is about; the process group's and the Manager's. Elsewhere the machine may be slow.
SHORT = timedelta(seconds=2)
LONG = timedelta(seconds=30)
TRIES = 3
# A peer's rejection may come before the fault; then the next synchronization has it.
FAULT_ROUNDS = 5
# For a group that was late for a quorum.
LATE_ROUNDS = 3
# For what other threads let go of. seconds
PATIENCE = 20.0


class BrokenInvariant(AssertionError):
    """What a plan was to find out."""


class GroupLeft(BaseException):
    """Ends a group's synchronization as the end of its process would."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise BrokenInvariant(message)


@dataclass(frozen=True)
class Plan:
    """One fault.

    Attributes:
        seed: what everything else is drawn from.
        kind: one of ``KINDS``.
        groups: number of replica groups.
        faulty: the group in which it happens.
        position: the parameter, or all-reduce, at which it happens.
        ways: how each group stages; they need not agree.
        use_async_quorum: the Managers' setting.
    """

    seed: int
    kind: str
    groups: int
    faulty: int
    position: int
    ways: tuple[Way, ...]
    use_async_quorum: bool

    @classmethod
    def from_seed(cls, seed: int) -> Plan:
        rng = random.Random(seed)
        groups = rng.choice((2, 3))
        last = len(SHAPES) - 1
        faulty = rng.randrange(groups)
        ways: list[Way] = [rng.choice((ON_HOST, rng.choice(WINDOWS))) for _ in range(groups)]
        # Consecutive seeds have all kinds, in one way of the group that fails and then in the other.
        repetition, kind = divmod(seed, len(KINDS))
        ways[faulty] = ON_HOST if repetition % 2 else rng.choice(WINDOWS)
        return cls(
            seed=seed,
            kind=KINDS[kind],
            groups=groups,
            faulty=faulty,
            position=rng.choice((0, rng.randint(1, last - 1), last)),
            ways=tuple(ways),
            use_async_quorum=rng.random() < 0.25,
        )


class Model(nn.Module):
    """Parameters on one simulated device; its checkpoints are host tensors, as those of a GPU are."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.parameters_on_device = nn.ParameterList()
        for shape in SHAPES:
            value = torch.zeros(shape, device=sim.device(index))
            if len(shape) == 4:
                value = value.to(memory_format=torch.channels_last)
            elif len(shape) == 2:
                value = torch.zeros(shape[::-1], device=value.device).t()
            elif shape == STRIDED:
                value = torch.zeros((*shape, 2), device=value.device)[..., 1]
            self.parameters_on_device.append(nn.Parameter(value))
        self.loaded: Optional[list[torch.Tensor]] = None

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().cpu() for parameter in self.parameters()]

    def nbytes(self) -> int:
        """Returns the bytes on the device."""
        return sum(
            (2 if tuple(parameter.shape) == STRIDED else 1) * parameter.nbytes
            for parameter in self.parameters()
        )

    @torch.no_grad()
    def write(self, values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters(), values, strict=True):
            parameter.copy_(value.to(parameter.device))

    def train_alone(self, *seed: int) -> None:
        """Takes other whole numbers for parameters."""
        generator = torch.Generator().manual_seed(hash(seed) % 2**31)
        self.write([torch.randint(-500, 500, shape, generator=generator).float() for shape in SHAPES])

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"values": self.values()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.write(state_dict["values"])
        self.loaded = self.values()


class _FaultyWork(_Work):
    """A collective that fails in ``wait``, as those of Gloo do: after ``seconds``.

    Attributes:
        really: carries it out nevertheless, before the failure; None: nothing of it happens.
    """

    def __init__(
        self, failure: Exception, seconds: float = 0, really: Optional[Callable[[], object]] = None
    ) -> None:
        super().__init__()
        self._failure = failure
        self._seconds = seconds
        self.really = really

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        time.sleep(self._seconds)
        if self.really is not None:
            self.really()
        raise self._failure


class FaultyProcessGroup(sim.SimulatedProcessGroupGloo):
    """Gloo, one of whose all-reduces goes wrong.

    Attributes:
        calls: all-reduces since the synchronization began.
        patience: time-out of each all-reduce.
        before: called with the number of each all-reduce before it.
        fault: called in place of the all-reduce, with a function that does the real one; None: no fault.
        position: the all-reduce that ``fault`` replaces.
    """

    def __init__(self) -> None:
        super().__init__(timeout=LONG)
        self.calls = 0
        self.patience = LONG
        self.position = -1
        self.fault: Optional[Callable[[torch.Tensor, Callable[[], Any]], Any]] = None
        self._broken = False

    def configure(self, *args: Any, **kwargs: Any) -> None:
        self._broken = False
        super().configure(*args, **kwargs)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        call, self.calls = self.calls, self.calls + 1
        opts.timeout = self.patience
        if self._broken:
            # A collective left out would pair the later ones with other parameters of the peers.
            raise RuntimeError("injected: an earlier collective broke the connection")
        if self.fault is not None and call == self.position:
            work = self.fault(tensors[0], lambda: super(FaultyProcessGroup, self).allreduce(tensors, opts))
            self._broken = isinstance(work, _FaultyWork) and work.really is None
            return work
        return super().allreduce(tensors, opts)


@dataclass
class Record:
    """What one group saw of one synchronization.

    Attributes:
        inputs: what it brought, after quorum and (synchronous) healing.
        reference: what a rejected synchronization must leave: the inputs, or the state healed to.
        after: what it left.
        healed: whether it took a peer's state over.
        voted: whether it reached the vote.
        key: quorum and step of the vote: those with the same key were in one synchronization.
        participating: whether its inputs count.
        committed: what the vote said.
        error: what the synchronization raised.
        lost: whether the group has to start again.
    """

    inputs: list[torch.Tensor] = field(default_factory=list)
    reference: list[torch.Tensor] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)
    healed: bool = False
    voted: bool = False
    key: tuple[int, int] = (-1, -1)
    participating: bool = True
    participants: int = 0
    committed: bool = False
    error: str = ""
    lost: bool = False


def _same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_records(records: Sequence[tuple[int, Record]], use_async_quorum: bool) -> None:
    """Checks the invariant on all synchronizations of a plan, given with the number of the group."""
    for group, record in records:
        if record.lost:
            continue
        if not record.committed:
            require(_same(record.after, record.reference), f"group {group} did not commit, and changed")
            continue
        peers = [r for _, r in records if r.voted and r.key == record.key]
        sources = [r for r in peers if r.participating]
        require(
            len(sources) == record.participants,
            f"group {group} divided by {record.participants}, but {len(sources)} groups took part",
        )
        sums = [torch.stack(values).sum(0) for values in zip(*(r.inputs for r in sources), strict=True)]
        average = [value / len(sources) for value in sums]
        require(_same(record.after, average), f"group {group} committed something else than the average")
        if record.healed and not use_async_quorum:
            require(
                any(_same(record.inputs, r.inputs) for r in peers if not r.healed),
                f"group {group} healed into something that no peer had",
            )


class _WatchedLocalSGD(LocalSGD):
    """Records inputs and buffers; fails where the plan says."""

    group: Any

    def _perform_sync(self) -> None:
        group = self.group
        group.record.inputs = group.model.values()
        if group.record.healed or group.model.loaded is None:
            group.record.reference = group.record.inputs
        super()._perform_sync()

    def _take_memory(self) -> StagingBuffers:
        group = self.group
        if group.fires("no_memory"):
            raise MemoryError("injected: no memory for the buffers")
        buffers = super()._take_memory()
        group.staged += [weakref.ref(tensor) for tensor in buffers.host]
        if group.armed == "host_copy":
            buffers.host = _FailingList(buffers.host, group)
        return buffers

    def _write_back(self, averages: list[torch.Tensor]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        group, buffers = self.group, self._buffers
        assert buffers is not None
        if group.armed == "interrupt_write_back":
            real = buffers.bring_back

            def bring_back(index: int, average: torch.Tensor) -> torch.Tensor:
                if index == group.plan.position and group.fires("interrupt_write_back"):
                    raise KeyboardInterrupt
                return real(index, average)

            buffers.bring_back = bring_back  # type: ignore[method-assign]
        try:
            super()._write_back(averages)
        finally:
            vars(buffers).pop("bring_back", None)


class _FailingList(list):  # type: ignore[type-arg]
    def __init__(self, items: list[torch.Tensor], group: Group) -> None:
        super().__init__(items)
        self._group = group

    def __getitem__(self, index: Any) -> Any:
        if index == self._group.plan.position and self._group.fires("host_copy"):
            raise MemoryError("injected: no memory for a host copy")
        return super().__getitem__(index)


class Group:
    """One replica group that carries out its part of a plan."""

    def __init__(self, replica: Replica, plan: Plan, staged: bool, local_sgd: type[LocalSGD]) -> None:
        self.plan = plan
        self.index = replica.index
        self.path_is_staged = staged
        self.staged: list[weakref.ref[torch.Tensor]] = []
        self.record = Record()
        self.armed = ""
        self.fired = False
        self.on_fault: Callable[[], None] = lambda: None
        self._class = local_sgd
        # What a failed plan of this process has left.
        self._others = sim.memory(self.index).alive
        self._timers: list[threading.Timer] = []
        self._begin(replica)

    def _begin(self, replica: Replica) -> None:
        self.replica = replica
        self.manager: Any = replica.manager
        self.process_group: Any = replica.process_group
        self.model = Model(self.index)
        replica.model = self.model
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        options = arguments_of(self.plan.ways[self.index]) if self.path_is_staged else {}
        self.local_sgd = self._class(self.manager, self.model, optimizer, 1, self.path_is_staged, **options)
        self.local_sgd.group = self  # type: ignore[attr-defined]
        self._allreduce, self._vote = self.manager.allreduce, self.manager.should_commit
        self.manager.allreduce, self.manager.should_commit = self.allreduce, self.vote
        self._reduced = 0

    def start_again(self) -> None:
        """Leaves everything of this group behind, as the end of its process does, and begins anew."""
        self.replica.close()
        del self.local_sgd, self.model
        self.replica.model = nn.Module()
        gc.collect()
        self._begin(self.replica.successor(FaultyProcessGroup()))
        self.model.train_alone(self.plan.seed, -1, self.index)

    def arm(self, kind: str) -> None:
        self.armed = kind
        patience = SHORT if kind else LONG
        self.process_group.patience = patience
        self.manager._timeout = patience
        mine = kind in IN_COLLECTIVE
        self.process_group.position = self.plan.position
        self.process_group.fault = self._collective_fault if mine else None

    def fires(self, kind: str) -> bool:
        """Whether the fault is ``kind`` and has not happened yet; it has, from now on."""
        if self.armed != kind or self.fired:
            return False
        self.fired = True
        self.on_fault()
        return True

    def _collective_fault(self, tensor: torch.Tensor, real: Callable[[], Any]) -> Any:
        if not self.fires(self.armed):
            return real()
        kind = self.armed
        failure = RuntimeError(f"injected: {kind}")
        if kind == "late":
            time.sleep(0.3)
            return real()
        if kind in ("never", "too_late"):
            if kind == "too_late":
                # Given up, it still writes: into whatever its memory is used for by then.
                timer = threading.Timer(SHORT.total_seconds() + 0.2, tensor.fill_, (666.0,))
                timer.daemon = True
                timer.start()
                self._timers.append(timer)
            return _FaultyWork(failure, SHORT.total_seconds())
        if kind == "fails_alone_in_wait":
            work = real()

            def finish_and_scribble() -> None:
                # The peers go on, and so does this group until it waits.
                work.wait()
                tensor.fill_(666.0)

            return _FaultyWork(failure, really=finish_and_scribble)
        if kind == "fails_alone":
            # The peers have their average and may commit it.
            real().wait()
        if kind != "raises":
            tensor.fill_(666.0)
        if kind == "fails_in_wait":
            return _FaultyWork(failure)
        raise failure

    def allreduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        position, self._reduced = self._reduced, self._reduced + 1
        if position == self.plan.position:
            if self.fires("interrupt"):
                raise KeyboardInterrupt
            if self.fires("leaves"):
                self.replica.close()
                raise GroupLeft
            self.fires("joins")
        return self._allreduce(tensor, *args, **kwargs)

    def vote(self) -> bool:
        record = self.record
        record.participants = self.manager.num_participants()
        record.participating = self.manager.is_participating()
        record.key = (self.manager._quorum_id, self.manager.current_step())
        record.voted = True
        if self.fires("vote_raises"):
            raise RuntimeError("injected: the vote raises")
        if self.fires("vote_false"):
            self.manager.report_error(RuntimeError("injected: this group votes no"))
        record.committed = self._vote()
        return record.committed

    def synchronize(self) -> Record:
        """One synchronization, and what is to be seen of it afterwards."""
        self.record = record = Record()
        self.process_group.calls = self._reduced = 0
        self.model.loaded = None
        record.reference = self.model.values()
        try:
            self.local_sgd.sync()
        except BaseException as error:
            # Not the exception itself: its traceback would keep what is to be gone.
            record.error = repr(error)
            injected = isinstance(error, (KeyboardInterrupt, GroupLeft)) or "injected" in str(error)
            if not injected:
                raise
            record.lost = self.plan.kind in LOSES_GROUP
        record.after = self.model.values()
        if self.model.loaded is not None:
            record.healed = True
            record.reference = self.model.loaded
        return record

    def check_refuses(self) -> None:
        """After an unknown outcome the object must not synchronize again."""
        calls = self.process_group.calls
        self.manager._quorum_timeout = SHORT
        try:
            self.local_sgd.sync()
        except Exception as error:
            require("start it again" in str(error), f"not a refusal: {error!r}")
        else:
            raise BrokenInvariant("an object with an unknown outcome synchronized again")
        require(self.process_group.calls == calls, "the refused synchronization reduced something")

    def check_memory(self) -> None:
        """Device and host bytes are those of before; threads may let go a little later."""
        while self._timers:
            self._timers.pop().join()
        expected = self._others + self.model.nbytes()
        _wait_until(lambda: sim.memory(self.index).alive == expected)
        alive = sim.memory(self.index).alive
        require(alive == expected, f"group {self.index}: {alive - expected} bytes stay on the device")
        _wait_until(lambda: all(reference() is None for reference in self.staged))
        left = sum(reference() is not None for reference in self.staged)
        require(left == 0, f"group {self.index}: {left} host tensors stay")
        self.staged.clear()


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


class _Board:
    """What the groups of a plan tell each other.

    Attributes:
        records: of all synchronizations so far, with the number of the group.
        clean: those that began after the fault.
        fired: whether the fault has happened.
        joins: set when a group is to join.
    """

    def __init__(self) -> None:
        self.records: list[tuple[int, Record]] = []
        self.clean: list[tuple[int, Record]] = []
        self.fired = False
        self.joins = threading.Event()

    def common(self, groups: int) -> Optional[list[Record]]:
        """Returns the records of a clean synchronization that all groups have committed, if there is one."""
        for key in {record.key for _, record in self.clean}:
            records = {group: r for group, r in self.clean if r.key == key and r.committed and not r.lost}
            if len(records) == groups:
                return list(records.values())
        return None


class _Player:
    """Carries out the part of one group: rounds until the fault has fired, then until all commit together."""

    def __init__(self, group: Group, board: _Board, staged: bool) -> None:
        self.group = group
        self.board = board
        self.staged = staged
        self.plan = group.plan
        joins = self.plan.kind == "joins"
        self._joining = joins and group.index == self.plan.faulty
        # The fault of "joins" happens to the joiner; one of the others says when.
        witness = (self.plan.faulty + 1) % self.plan.groups if joins else self.plan.faulty
        self._is_witness = group.index == witness
        group.on_fault = board.joins.set
        # Where some groups are a quorum, a group whose request comes late is left out and waits for the next
        # quorum, in a thread of its own: the others must not wait for it.
        self._thread = concurrent.futures.ThreadPoolExecutor(1) if joins else None
        self._pending: Optional[concurrent.futures.Future[Record]] = None
        self._pending_is_clean = False

    def play(self) -> None:
        try:
            self._rounds()
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _rounds(self) -> None:
        plan, board, barrier = self.plan, self.board, self.group.replica.barrier
        clean = 0
        for number in range(FAULT_ROUNDS + TRIES + LATE_ROUNDS):
            fired_before = board.fired
            self._arm(fired_before)
            barrier.wait()
            record = self._synchronize(number, fired_before)
            board.fired = board.fired or self.group.fired
            barrier.wait()
            if record is not None:
                self._look_after(record)
            common = board.common(plan.groups)
            if common is not None:
                if self.staged:
                    check_records(board.records, plan.use_async_quorum)
                    average = common[0].after
                    require(all(_same(r.after, average) for r in common), "the groups differ")
                return
            require(board.fired or number < FAULT_ROUNDS, "the fault did not fire")
            clean += fired_before
            if clean == TRIES + (LATE_ROUNDS if plan.kind == "joins" else 0):
                break
        if self.staged:
            check_records(board.records, plan.use_async_quorum)
            raise BrokenInvariant(f"no common commit in {TRIES} clean synchronizations")

    def _arm(self, fired: bool) -> None:
        group = self.group
        group.arm(self.plan.kind if self._is_witness and not fired else "")
        if not fired:
            # The peers of a failing group need not wait for long, either.
            group.process_group.patience = SHORT
            group.manager._timeout = SHORT

    def _synchronize(self, number: int, clean: bool) -> Optional[Record]:
        """Returns the record of a synchronization that has ended in this round, if there is one."""
        group, board = self.group, self.board
        if self._pending is None:
            if self._joining:
                self._joining = False
                group.replica.close()
                require(board.joins.wait(60), "nobody came to the point at which the group was to join")
                group.start_again()
                group.arm("")
            else:
                group.model.train_alone(self.plan.seed, number, group.index)
            self._pending_is_clean = clean
        if self._thread is None:
            record = group.synchronize()
        else:
            if self._pending is None:
                self._pending = self._thread.submit(group.synchronize)
            concurrent.futures.wait([self._pending], timeout=SHORT.total_seconds() * 2)
            if not self._pending.done():
                return None
            record, self._pending = self._pending.result(), None
        board.records.append((group.index, record))
        if self._pending_is_clean:
            board.clean.append((group.index, record))
        return record

    def _look_after(self, record: Record) -> None:
        if self.staged and record.lost and self.plan.kind != "leaves":
            self.group.check_refuses()
        if record.lost:
            self.group.start_again()
        if self.staged:
            self.group.check_memory()


def run_plan(plan: Plan, staged: bool = True, local_sgd: type[LocalSGD] = LocalSGD) -> None:
    """Carries ``plan`` out and checks everything that it promises.

    Args:
        plan: the fault.
        staged: with CPU staging; without it nothing is checked.
        local_sgd: the class under test.

    Raises:
        BrokenInvariant: a promise is broken, or the fault did not fire.
    """
    gc.collect()
    watched = type("Watched", (_WatchedLocalSGD, local_sgd), {})
    board = _Board()

    def body(replica: Replica) -> None:
        group = Group(replica, plan, staged, watched)
        try:
            _Player(group, board, staged).play()
        finally:
            group.replica.close()

    run_replicas(
        plan.groups,
        body,
        FaultyProcessGroup,
        timeout=LONG,
        manager_args={"use_async_quorum": plan.use_async_quorum},
        min_replicas=plan.groups - 1 if plan.kind == "joins" else plan.groups,
    )
    require(board.fired, "the fault did not fire")


def without_staging(plan: Plan) -> Plan:
    """Returns ``plan`` as it can happen on the release path, which has no host copies and no write-back."""
    instead = {"no_memory": "vote_false", "host_copy": "vote_false", "interrupt_write_back": "interrupt"}
    return replace(plan, kind=instead.get(plan.kind, plan.kind))


def check_threads(plan: Plan) -> None:
    """Carries ``plan`` out on both paths: the staged one may leave no more threads than the release."""
    # By identity: what earlier plans left may end at any time.
    before = set(threading.enumerate())
    run_plan(without_staging(plan), staged=False)
    release = len(set(threading.enumerate()) - before)
    before = set(threading.enumerate())
    run_plan(plan)
    _wait_until(lambda: len(set(threading.enumerate()) - before) <= release)
    left = [thread.name for thread in set(threading.enumerate()) - before]
    require(
        len(left) <= release, f"threads {left} stay, {release} of them after the same plan without staging"
    )


def main(seeds: Sequence[int]) -> None:
    """Carries out the plans of ``seeds``, on both paths, and prints a line of JSON for each."""
    logging.disable(logging.CRITICAL)
    for seed in seeds:
        plan = Plan.from_seed(seed)
        error = ""
        try:
            check_threads(plan)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        print(json.dumps({**asdict(plan), "error": error}), flush=True)


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]])
