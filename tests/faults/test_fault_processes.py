"""Real processes that are killed, stopped, slow or failing inside a staged synchronization."""

from __future__ import annotations

import io
import signal
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import pytest
from fault_groups import (
    COLLECTIVE_TIMEOUT,
    FIRST,
    MANAGER_TIMEOUT,
    MIDDLE,
    RANKS,
    SHAPES,
    WINDOWS,
    Bits,
    Fault,
    FaultGroups,
    Round,
    average,
    decode,
    encode,
)
from ways import ON_HOST, Way

from torchft.checkpointing import _serialization

BOTH = tuple(range(RANKS))


class Lasting:
    """The groups of this module: they live on from test to test unless one has left them broken.

    Or unless the next test is of groups that stage in other ways.
    """

    def __init__(self) -> None:
        self.groups: FaultGroups | None = None
        self._ways: tuple[Way, ...] = ()

    def get(self, *ways: Way) -> FaultGroups:
        if self.groups is not None and not (self.groups.settled and self._ways == ways):
            self.close()
        if self.groups is None:
            self._ways = ways
            self.groups = FaultGroups(ways=ways).__enter__()
            self.groups.commit_together()
        return self.groups

    def close(self) -> None:
        if self.groups is not None:
            self.groups.__exit__()
            self.groups = None


@pytest.fixture(scope="module")
def lasting() -> Iterator[Lasting]:
    lasting = Lasting()
    yield lasting
    lasting.close()


@pytest.fixture
def groups(lasting: Lasting) -> FaultGroups:
    return lasting.get(*WINDOWS)


@pytest.fixture
def groups_on_host(lasting: Lasting) -> FaultGroups:
    return lasting.get(ON_HOST, ON_HOST)


@pytest.fixture
def mixed_groups(lasting: Lasting) -> FaultGroups:
    return lasting.get(ON_HOST, None)


# Point, parameter, and what the other group decides; None: it may have had its averages or not.
BEFORE_FIRST = ("before_allreduce", FIRST, "kept")
IN_THE_MIDDLE = ("in_flight", MIDDLE, "kept")
BEFORE_VOTE = ("before_vote", 0, None)
AFTER_VOTE = ("after_vote", 0, None)
IN_WRITE_BACK = ("in_write_back", MIDDLE, None)

# The last two points have a test of their own below, which is not slow.
KILLS = [
    pytest.param(group, ranks, *where, id=f"{where[0]}-{group}-{'+'.join(map(str, ranks))}", marks=marks)
    for group, ranks, where, marks in [
        (0, (0,), BEFORE_FIRST, ()),
        (1, BOTH, IN_THE_MIDDLE, ()),
        (1, (1,), BEFORE_VOTE, ()),
        (1, BOTH, BEFORE_FIRST, pytest.mark.slow),
        (0, (1,), IN_THE_MIDDLE, pytest.mark.slow),
        (0, BOTH, BEFORE_VOTE, pytest.mark.slow),
        (1, (0,), AFTER_VOTE, pytest.mark.slow),
        (0, BOTH, AFTER_VOTE, pytest.mark.slow),
        (1, (0,), IN_WRITE_BACK, pytest.mark.slow),
        (0, BOTH, IN_WRITE_BACK, pytest.mark.slow),
    ]
]


def kill_at(
    groups: FaultGroups, group: int, ranks: tuple[int, ...], point: str, index: int, *others: Fault
) -> Round:
    """Has ranks of a group killed at a point of a round, beside other faults."""
    seen = groups.provoke(Fault(group, point, "hold" if ranks == BOTH else "die", ranks, index), *others)
    if ranks == BOTH:
        groups.kill(group)
    groups.wait(lambda: {(group, rank) for rank in ranks} <= set(seen.exits))
    assert [seen.exits[group, rank].returncode for rank in ranks] == [-signal.SIGKILL] * len(ranks)
    return seen


def check_kill(
    groups: FaultGroups, group: int, ranks: tuple[int, ...], point: str, index: int, expected: str | None
) -> None:
    """Requires that the other group decides as expected, and that the killed one comes back and heals."""
    seen = kill_at(groups, group, ranks, point, index)
    groups.finish(seen, 1 - group)
    decision = seen.decision(1 - group)
    print(f"killed {ranks} of group {group} at {point}: the other group {decision}")
    assert expected in (None, decision)
    if ranks != BOTH and point in ("after_vote", "in_write_back"):
        remaining = (group, 1 - ranks[0])
        groups.wait(lambda: remaining in seen.after)
        # The Manager's server dies with rank 0, perhaps before rank 1 has its answer.
        assert seen.decision_of(*remaining) == "took" or (ranks == (0,) and remaining in seen.failed)
    groups.kill(group)
    groups.recover(group)


@pytest.mark.parametrize(("group", "ranks", "point", "index", "expected"), KILLS)
def test_killed(
    groups: FaultGroups, group: int, ranks: tuple[int, ...], point: str, index: int, expected: str | None
) -> None:
    check_kill(groups, group, ranks, point, index, expected)


@pytest.mark.slow
@pytest.mark.parametrize("rank", BOTH)
def test_vote_raises_on_the_ranks_beside_a_killed_one(groups: FaultGroups, rank: int) -> None:
    seen = kill_at(groups, 0, (rank,), "before_vote", 0)
    remaining = (0, 1 - rank)
    begin = time.monotonic()
    groups.wait(lambda: remaining in seen.exits)
    print(f"{remaining} after {time.monotonic() - begin:.1f} s: {seen.failed[remaining]}")
    assert seen.after[remaining] == seen.before[remaining]
    groups.kill(0)
    groups.recover(0)


def test_group_that_comes_back_while_its_peer_writes_back_heals_after_that(groups: FaultGroups) -> None:
    seen = kill_at(groups, 0, BOTH, "after_vote", 0, Fault(1, "in_write_back", "hold", index=MIDDLE))
    healing = groups.restart(0, Fault(0, "asks_for_quorum", "sleep"))
    groups.wait(healing.fired)
    groups.listen(1)
    assert not healing.before, "a quorum with a group that is half written"
    groups.go(seen, 1, "in_write_back")
    groups.finish(seen, 1)
    assert seen.decision(1) == "took"
    groups.finish(healing)
    groups.check_healed(healing, 0)
    groups.commit_together()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_write_back_waits_for_readers_and_keeps_new_ones_out(groups: FaultGroups) -> None:
    groups.finish(kill_at(groups, 0, (1,), "in_write_back", MIDDLE))
    groups.kill(0)
    seen = groups.restart(
        0,
        # As a third group would: otherwise the average is what the donor has anyway.
        Fault(0, "after_quorum", "drift"),
        Fault(1, "before_vote", "hold"),
        Fault(1, "in_write_back", "hold", index=MIDDLE),
    )
    groups.wait(lambda: {(1, rank, "before_vote") for rank in BOTH} <= seen.reached)
    assert (0, 0) in seen.healed
    for rank in BOTH:
        before = seen.before[1, rank]
        averages = average(seen.before[0, rank], before)
        assert all(a != b for a, b in zip(averages, before, strict=True) if a), (
            "a mixture could not be told apart"
        )

    readers = [checkpoint_of(seen, rank, seen.step[1, rank], timeout=60) for rank in BOTH]
    begun = [reader.read(1 << 20) for reader in readers]
    groups.go(seen, 1, "before_vote")
    groups.listen(1)
    assert (1, 0, "in_write_back") not in seen.reached, "writes while a peer reads"
    for rank, (reader, begin) in enumerate(zip(readers, begun, strict=True)):
        assert shards_in(begin + reader.read()) == seen.before[1, rank]

    groups.wait(seen.fired)
    for rank in BOTH:
        for step in (seen.step[1, rank], seen.step[1, rank] + 1):
            with pytest.raises(TimeoutError):
                checkpoint_of(seen, rank, step, timeout=0.5)
    groups.go(seen, 1, "in_write_back")
    groups.finish(seen)
    assert [seen.decision(group) for group in range(2)] == ["took"] * 2
    groups.commit_together()


def checkpoint_of(seen: Round, rank: int, step: int, timeout: float) -> HTTPResponse:
    """Asks a rank of group 1 for its state, as a healing peer does."""
    url = f"{seen.checkpoint[1, rank]}{step}/full"
    # Never by way of a proxy.
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=timeout)


def shards_in(state: bytes) -> Bits:
    loaded: Any = _serialization._streaming_load(io.BytesIO(state), weights_only=False)
    return decode(encode(value.to_local() for value in loaded["user"]["default"]["model"].values()))


@pytest.mark.slow
def test_killed_while_it_heals(groups: FaultGroups) -> None:
    groups.kill(0)
    seen = groups.restart(0, Fault(0, "healing", "die", (1,)))
    groups.wait(seen.fired)
    groups.finish(seen, 1)
    assert seen.decision(1) == "kept"
    groups.kill(0)
    groups.recover(0)


@pytest.mark.parametrize("how", ["continued", pytest.param("killed", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("group", "ranks"),
    [(1, (1,)), pytest.param(0, (0,), marks=pytest.mark.slow), pytest.param(0, BOTH, marks=pytest.mark.slow)],
)
def test_stopped_for_longer_than_the_time_out(
    groups: FaultGroups, group: int, ranks: tuple[int, ...], how: str
) -> None:
    check_stop(groups, group, ranks, how)


def check_stop(groups: FaultGroups, group: int, ranks: tuple[int, ...], how: str) -> None:
    """Requires that groups reject where ranks are stopped in a collective, and continued or killed later."""
    fault = Fault(group, "in_flight", "stop", ranks, MIDDLE)
    seen = groups.provoke(fault)
    groups.finish(seen, 1 - group)
    assert seen.decision(1 - group) == "kept"
    if how == "killed":
        groups.kill(group)
        groups.recover(group)
        return
    groups.signal(fault, signal.SIGCONT)
    groups.finish(seen)
    assert seen.decision(group) == "kept"
    assert not seen.exits
    groups.commit_together()


@pytest.mark.slow
def test_group_stopped_before_its_vote_commits_late(groups: FaultGroups) -> None:
    fault = Fault(0, "before_vote", "stop")
    seen = groups.provoke(fault)
    groups.finish(seen, 1)
    time.sleep(COLLECTIVE_TIMEOUT.total_seconds() + 1)
    groups.signal(fault, signal.SIGCONT)
    groups.finish(seen)
    assert [seen.decision(group) for group in range(2)] == ["took"] * 2
    groups.commit_together()


@pytest.mark.slow
@pytest.mark.parametrize("rank", BOTH)
def test_rank_stopped_before_its_vote_costs_its_group(groups: FaultGroups, rank: int) -> None:
    """For longer than the Manager waits: the vote of the other rank raises."""
    fault = Fault(0, "before_vote", "stop", (rank,))
    seen = groups.provoke(fault)
    other = (0, 1 - rank)
    groups.wait(lambda: other in seen.exits)
    assert seen.after[other] == seen.before[other]
    assert other in seen.failed
    groups.finish(seen, 1)
    assert seen.decision(1) == "took"
    groups.signal(fault, signal.SIGCONT)
    groups.wait(lambda: (0, rank) in seen.after)
    late = seen.decision_of(0, rank)
    print(f"rank {rank}, which votes late, {late} and {seen.failed.get((0, rank), 'goes on')}")
    groups.kill(0)
    groups.recover(0)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_rank_that_fails_in_its_collective_makes_its_group_reject(groups: FaultGroups, rank: int) -> None:
    check_failing_rank(groups, rank)


def check_failing_rank(groups: FaultGroups, rank: int) -> None:
    """Requires that both groups reject where one rank fails in a collective, and go on."""
    seen = groups.provoke(Fault(rank, "in_collective", "raise", (rank,), MIDDLE))
    groups.finish(seen)
    assert [seen.decision(group) for group in range(2)] == ["kept"] * 2
    assert not seen.exits
    groups.commit_together()


@pytest.mark.slow
def test_rank_that_raises_before_its_vote_makes_its_group_reject(groups: FaultGroups) -> None:
    """As without memory: it votes no, and its process ends."""
    seen = groups.provoke(Fault(0, "before_allreduce", "raise", (1,), MIDDLE))
    groups.finish(seen)
    assert [seen.decision(group) for group in range(2)] == ["kept"] * 2
    assert list(seen.failed) == [(0, 1)]
    groups.kill(0)
    groups.recover(0)


def test_slow_host_commits(groups: FaultGroups) -> None:
    """Each all-reduce is in time, all of them together take several time-outs of the other group."""
    # An empty shard is reduced in no time, so that the other group waits twice as long for the next one.
    pause = COLLECTIVE_TIMEOUT.total_seconds() / 3
    begin = time.monotonic()
    seen = groups.provoke(Fault(1, "before_allreduce", "sleep", seconds=pause))
    groups.finish(seen)
    assert time.monotonic() - begin > pause * len(SHAPES) > 2 * COLLECTIVE_TIMEOUT.total_seconds()
    assert [seen.decision(group) for group in range(2)] == ["took"] * 2
    groups.commit_together()


def test_one_slow_all_reduce_is_rejected(groups: FaultGroups) -> None:
    pause = COLLECTIVE_TIMEOUT.total_seconds() + 2
    seen = groups.provoke(Fault(1, "before_allreduce", "sleep", index=MIDDLE, seconds=pause))
    groups.finish(seen)
    assert [seen.decision(group) for group in range(2)] == ["kept"] * 2
    assert not seen.exits
    groups.commit_together()


@pytest.mark.slow
@pytest.mark.parametrize(("slow", "decision"), [(1, "took"), (0, "kept")])
def test_group_with_all_reduces_in_flight_waits_for_two_at_once(
    groups: FaultGroups, slow: int, decision: str
) -> None:
    """Gloo runs two at a time. Group 1, whose window holds the first two, waits for both from the start."""
    check_two_slow_allreduces(groups, slow, decision)


def check_two_slow_allreduces(groups: FaultGroups, slow: int, decision: str) -> None:
    """Requires a decision of both groups where one is slow at the first two all-reduces."""
    pause = 0.6 * COLLECTIVE_TIMEOUT.total_seconds()
    faults = [Fault(slow, "before_allreduce", "sleep", index=index, seconds=pause) for index in (0, 1)]
    seen = groups.provoke(*faults)
    groups.finish(seen)
    assert [seen.decision(group) for group in range(2)] == [decision] * 2
    groups.commit_together()


@pytest.mark.slow
def test_slow_rank_makes_the_votes_of_all_groups_raise(groups: FaultGroups) -> None:
    """It lags by more than the Manager's time-out: one rank of each group waits too long for a vote."""
    pause = COLLECTIVE_TIMEOUT.total_seconds() / 3
    assert pause * len(SHAPES) > MANAGER_TIMEOUT.total_seconds() + 2
    seen = groups.provoke(Fault(1, "before_allreduce", "sleep", (1,), seconds=pause))
    groups.wait(lambda: {(0, 0), (1, 0)} <= set(seen.exits))
    for key in [(0, 0), (1, 0)]:
        assert key in seen.failed
        assert seen.after[key] == seen.before[key]


# With a host all-reduce: at last, since the groups of other ways end here.


@pytest.mark.parametrize(
    ("group", "ranks", "where"),
    [
        pytest.param(1, BOTH, IN_THE_MIDDLE, id="in_flight-1-0+1"),
        pytest.param(0, (1,), IN_THE_MIDDLE, id="in_flight-0-1", marks=pytest.mark.slow),
        pytest.param(0, (0,), BEFORE_FIRST, id="before_allreduce-0-0", marks=pytest.mark.slow),
        pytest.param(1, (1,), BEFORE_VOTE, id="before_vote-1-1", marks=pytest.mark.slow),
        pytest.param(0, BOTH, AFTER_VOTE, id="after_vote-0-0+1", marks=pytest.mark.slow),
        pytest.param(1, (0,), IN_WRITE_BACK, id="in_write_back-1-0", marks=pytest.mark.slow),
    ],
)
def test_killed_beside_a_host_allreduce(
    groups_on_host: FaultGroups, group: int, ranks: tuple[int, ...], where: tuple[str, int, str | None]
) -> None:
    check_kill(groups_on_host, group, ranks, *where)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_rank_that_fails_in_a_host_allreduce_makes_its_group_reject(
    groups_on_host: FaultGroups, rank: int
) -> None:
    check_failing_rank(groups_on_host, rank)


@pytest.mark.slow
def test_group_stopped_in_a_host_allreduce_for_longer_than_the_time_out(groups_on_host: FaultGroups) -> None:
    check_stop(groups_on_host, 0, BOTH, "continued")


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1])
def test_groups_on_host_wait_for_two_at_once(groups_on_host: FaultGroups, slow: int) -> None:
    """As without staging: all all-reduces of a group are in flight, of which Gloo runs two at a time."""
    check_two_slow_allreduces(groups_on_host, slow, "kept")


@pytest.mark.slow
@pytest.mark.parametrize("group", [0, 1])
def test_killed_in_groups_of_both_ways(mixed_groups: FaultGroups, group: int) -> None:
    check_kill(mixed_groups, group, BOTH, *IN_THE_MIDDLE)
