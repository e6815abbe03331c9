"""Fault plans: what goes wrong in one synchronization, drawn from a seed, and the check of what is left.

``run_plan`` carries one plan out in replica groups that are threads of this process, with a real Lighthouse,
real Managers and real Gloo on the simulated accelerator. ``python tests/fault_plans.py SEED...`` does so
for several, and prints a line of JSON for each.

All parameters are whole numbers before they are averaged, so that their sums are exact in any order and the
average can be foretold bit for bit.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
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

from torchft._local_sgd_buffers import StagingBuffers
from torchft.local_sgd import LocalSGD

# Faults of the process group
IN_COLLECTIVE = ("raises", "scribbles", "fails_in_wait", "fails_alone", "never", "late", "too_late")
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

SHAPES = ((3, 4), (5,), (), (2, 3, 4, 5), (64,), (7, 2))
# While a fault is about; the process group's and the Manager's. Elsewhere the machine may be slow.
SHORT = timedelta(seconds=2)
LONG = timedelta(seconds=30)
TRIES = 3
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
        window_mb: ``offload_window_mb`` of each group; they need not agree.
        use_async_quorum: the Managers' setting.
    """

    seed: int
    kind: str
    groups: int
    faulty: int
    position: int
    window_mb: tuple[Optional[float], ...]
    use_async_quorum: bool

    @classmethod
    def from_seed(cls, seed: int) -> Plan:
        rng = random.Random(seed)
        groups = rng.choice((2, 3))
        last = len(SHAPES) - 1
        return cls(
            seed=seed,
            # Consecutive seeds have all kinds.
            kind=KINDS[seed % len(KINDS)],
            groups=groups,
            faulty=rng.randrange(groups),
            position=rng.choice((0, rng.randint(1, last - 1), last)),
            window_mb=tuple(rng.choice((None, 0, 0.0005, 1)) for _ in range(groups)),
            use_async_quorum=rng.random() < 0.25,
        )


class Model(nn.Module):
    """Parameters on one simulated device; its checkpoints are host tensors, as those of a GPU are."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.parameters_on_device = nn.ParameterList()
        for shape in SHAPES:
            value = torch.zeros(shape)
            if len(shape) == 4:
                value = value.to(memory_format=torch.channels_last)
            elif len(shape) == 2:
                value = torch.zeros(shape[::-1]).t()
            self.parameters_on_device.append(nn.Parameter(value.to(sim.device(index))))
        self.loaded: Optional[list[torch.Tensor]] = None

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().cpu() for parameter in self.parameters()]

    def nbytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())

    @torch.no_grad()
    def write(self, values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters(), values):
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
    """A collective that fails in ``wait``, as those of Gloo do: after ``seconds``."""

    def __init__(self, failure: Exception, seconds: float = 0) -> None:
        super().__init__()
        self._failure = failure
        self._seconds = seconds

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        time.sleep(self._seconds)
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
            self._broken = isinstance(work, _FaultyWork)
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
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def check_records(records: dict[int, Record], use_async_quorum: bool) -> None:
    """Checks the invariant on one synchronization of all groups that took part."""
    for group, record in records.items():
        if record.lost:
            continue
        if not record.committed:
            require(_same(record.after, record.reference), f"group {group} did not commit, and changed")
            continue
        peers = [r for r in records.values() if r.voted and r.key == record.key]
        sources = [r for r in peers if r.participating]
        require(
            len(sources) == record.participants,
            f"group {group} divided by {record.participants}, but {len(sources)} groups took part",
        )
        sums = [torch.stack(values).sum(0) for values in zip(*(r.inputs for r in sources))]
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

    def _write_back(self, buffers: StagingBuffers) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        group = self.group
        if group.armed == "interrupt_write_back":
            real = buffers.averaged

            def averaged(index: int) -> torch.Tensor:
                if index == group.plan.position and group.fires("interrupt_write_back"):
                    raise KeyboardInterrupt
                return real(index)

            buffers.averaged = averaged  # type: ignore[method-assign]
        try:
            super()._write_back(buffers)
        finally:
            vars(buffers).pop("averaged", None)


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
        options = {"offload_window_mb": self.plan.window_mb[self.index]} if self.path_is_staged else {}
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


class _Round:
    """What the groups tell each other about one round."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.records: list[dict[int, Record]] = []
        self.fired = False
        self.joins = threading.Event()

    def put(self, number: int, group: int, record: Record) -> None:
        while len(self.records) <= number:
            self.records.append({})
        self.records[number][group] = record


def _play(group: Group, board: _Round, staged: bool) -> None:
    """The part of one group: rounds until the fault has fired, then rounds until all commit together."""
    plan, barrier = group.plan, group.replica.barrier
    joiner = plan.kind == "joins" and group.index == plan.faulty
    # The fault of "joins" happens to the joiner; one of the others says when.
    witness = (plan.faulty + 1) % plan.groups if plan.kind == "joins" else plan.faulty
    group.on_fault = board.joins.set
    clean, number = 0, 0
    joining = joiner
    joiner_thread = concurrent.futures.ThreadPoolExecutor(1)
    first: Optional[concurrent.futures.Future[Record]] = None
    while True:
        meet = number * 2
        group.arm(plan.kind if group.index == witness and not board.fired else "")
        if not board.fired:
            group.process_group.patience = SHORT
            group.manager._timeout = SHORT
        barrier.wait()
        record = None
        if joining:
            joining = False
            group.replica.close()
            require(board.joins.wait(60), "nobody came to the point at which the group was to join")
            group.start_again()
            group.arm("")
            # It asks for a quorum while the others are inside their synchronization, and waits for their
            # next one.
            first = joiner_thread.submit(group.synchronize)
            time.sleep(1)
        elif first is not None:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                record = first.result(timeout=15)
                first = None
        else:
            group.model.train_alone(plan.seed, number, group.index)
            record = group.synchronize()
        if record is not None:
            board.put(meet, group.index, record)
        if group.fired:
            board.fired = True
        barrier.wait()
        records = board.records[meet]
        if staged:
            check_records(records, plan.use_async_quorum)
            if record is not None and record.lost and plan.kind != "leaves":
                group.check_refuses()
        if record is not None and record.lost:
            group.start_again()
        if staged and first is None:
            group.check_memory()
        everyone = len(records) == plan.groups and all(r.committed and not r.lost for r in records.values())
        together = everyone and len({r.key for r in records.values()}) == 1
        was_clean = board.fired and clean > 0
        number += 1
        if was_clean and together:
            if staged:
                average = records[0].after
                require(all(_same(r.after, average) for r in records.values()), "the groups differ")
            return
        if board.fired:
            require(not staged or clean < TRIES, f"no common commit in {TRIES} clean synchronizations")
            clean += 1
        else:
            require(number < 5, "the fault did not fire")
        if clean > TRIES + 2:
            return


def run_plan(
    plan: Plan, staged: bool = True, local_sgd: type[LocalSGD] = LocalSGD
) -> list[dict[int, Record]]:
    """Carries ``plan`` out and checks everything that it promises.

    Args:
        plan: the fault.
        staged: with CPU staging; without it nothing is checked.
        local_sgd: the class under test.

    Returns:
        The records of all rounds, by group.

    Raises:
        BrokenInvariant: a promise is broken, or the fault did not fire.
    """
    gc.collect()
    watched = type("Watched", (_WatchedLocalSGD, local_sgd), {})
    board = _Round(plan)

    def body(replica: Replica) -> None:
        group = Group(replica, plan, staged, watched)
        try:
            _play(group, board, staged)
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
    return board.records


def without_staging(plan: Plan) -> Plan:
    """Returns ``plan`` as it can happen on the release path, which has no host copies and no write-back."""
    instead = {"no_memory": "vote_false", "host_copy": "vote_false", "interrupt_write_back": "interrupt"}
    return replace(plan, kind=instead.get(plan.kind, plan.kind))


def check_threads(plan: Plan) -> None:
    """Carries ``plan`` out on both paths: the staged one may leave no more threads than the release."""
    before = threading.active_count()
    run_plan(without_staging(plan), staged=False)
    release = threading.active_count() - before
    before = threading.active_count()
    run_plan(plan)
    _wait_until(lambda: threading.active_count() - before <= release)
    left = threading.active_count() - before
    require(left <= release, f"{left} threads stay, {release} after the same plan without staging")


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
