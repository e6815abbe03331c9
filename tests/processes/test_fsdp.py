"""CPU staging of FSDP2 shards, in real processes: two replica groups of up to four ranks on Gloo."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from places import SUPPORT

from torchft._launch.lighthouse import LighthouseProcess
from torchft._launch.replicas import Exit, Message, ReplicaGroups


@pytest.fixture(scope="module")
def seen() -> dict[tuple[int, int, int], dict[str, Any]]:
    """What each rank saw, by group, ranks of the case and rank."""
    seen = {}
    with ExitStack() as stack:
        lighthouses = [LighthouseProcess(2) for _ in range(3)]
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
                seen[event.group, event.fields["ranks"], event.rank] = event.fields
            elif isinstance(event, Exit):
                event.check()
    return seen


def test_every_rank_of_every_case_gets_the_average(seen: dict[tuple[int, int, int], dict[str, Any]]) -> None:
    assert set(seen) == {
        (group, ranks, rank) for group in (0, 1) for ranks in (2, 3, 4) for rank in range(ranks)
    }


def test_shards_are_uneven_and_empty(seen: dict[tuple[int, int, int], dict[str, Any]]) -> None:
    """The case is worth nothing if the shards happen to be equal."""
    first, last = seen[0, 3, 0]["local_shapes"], seen[0, 3, 2]["local_shapes"]
    assert first[0] != last[0]
    assert last[1] == [0, 5]


def test_two_dimensional_mesh_shards_one_dimension_twice(
    seen: dict[tuple[int, int, int], dict[str, Any]],
) -> None:
    assert any("_StridedShard" in placements for placements in seen[0, 4, 0]["placements"])


def test_unsharded_parameters_are_refused(seen: dict[tuple[int, int, int], dict[str, Any]]) -> None:
    # With tensor parallelism the unsharded parameter is a DTensor as well, on a smaller mesh.
    for ranks in (2, 4):
        for group, rank in [(0, 0), (0, 1), (1, 0), (1, ranks - 1)]:
            refusal = seen[group, ranks, rank]["refusal"]
            assert refusal.startswith("parameter 'up.weight' is unsharded at this moment")
            assert "reshard()" in refusal
