"""CPU staging of FSDP2 shards, in real processes: two replica groups of up to four ranks on Gloo."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import pytest
from places import SUPPORT

from torchft._launch.lighthouse import LighthouseProcess
from torchft._launch.replicas import Exit, Message, ReplicaGroups

# Ranks of the cases of fsdp_worker.py, each of which has a Manager and a lighthouse of its own.
CASES = {"2 ranks": 2, "3 ranks": 3, "2 x 2 ranks": 4, "offloaded": 3}
Seen = dict[tuple[str, int, int], dict[str, Any]]


@pytest.fixture(scope="module")
def seen() -> Seen:
    """What each rank saw, by case, group and rank."""
    seen: Seen = {}
    with ExitStack() as stack:
        lighthouses = [LighthouseProcess(2) for _ in CASES]
        for lighthouse in lighthouses:
            stack.callback(lighthouse.stop)
        groups = stack.enter_context(
            ReplicaGroups(
                ["-m", "fsdp_worker", *(lighthouse.address for lighthouse in lighthouses)],
                replicas=2,
                ranks=4,
                lighthouse=lighthouses[0].address,
                env={"PYTHONPATH": str(SUPPORT)},
            )
        )
        groups.start_all()
        for event in groups.events(timeout=200):
            if isinstance(event, Message):
                seen[event.fields["case"], event.group, event.rank] = event.fields
            elif isinstance(event, Exit):
                event.check()
    return seen


def test_every_rank_of_every_case_gets_the_average(seen: Seen) -> None:
    assert set(seen) == {
        (case, group, rank) for case, ranks in CASES.items() for group in (0, 1) for rank in range(ranks)
    }
    # In every way of staging.
    assert {len(fields["seen"]) for fields in seen.values()} == {4}


def test_shards_are_uneven_and_empty(seen: Seen) -> None:
    """The case is worth nothing if the shards happen to be equal."""
    for case in ("3 ranks", "offloaded"):
        for first, last in zip(seen[case, 0, 0]["seen"], seen[case, 0, 2]["seen"], strict=True):
            assert first["local_shapes"][0] != last["local_shapes"][0]
            assert last["local_shapes"][1] == [0, 5]


def test_two_dimensional_mesh_shards_one_dimension_twice(seen: Seen) -> None:
    for once in seen["2 x 2 ranks", 0, 0]["seen"]:
        assert any("_StridedShard" in placements for placements in once["placements"])


def test_offloaded_shards_stay_on_the_host_and_take_no_device_memory(seen: Seen) -> None:
    for group, rank in itertools.product((0, 1), range(3)):
        for once in seen["offloaded", group, rank]["seen"]:
            assert once["mesh"] == "simulated"
            assert set(once["devices"]) == {"cpu"}
            assert once["extra_device_bytes"] == 0


def test_unsharded_parameters_are_refused(seen: Seen) -> None:
    # With tensor parallelism the unsharded parameter is a DTensor as well, on a smaller mesh.
    for case in ("2 ranks", "2 x 2 ranks"):
        for group, rank in [(0, 0), (0, 1), (1, 0), (1, CASES[case] - 1)]:
            refusal = seen[case, group, rank]["refusal"]
            assert refusal.startswith("parameter 'up.weight' is unsharded at this moment")
            assert "reshard()" in refusal
