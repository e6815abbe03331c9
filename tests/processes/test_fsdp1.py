"""FSDP1 goes on from an unsharded copy that an average is not in: while there is one, staging refuses."""

from __future__ import annotations

from typing import Any

from places import SUPPORT

from torchft._launch.replicas import Exit, Message, ReplicaGroups


def test_unsharded_fsdp1_is_refused_and_sharded_is_not() -> None:
    seen: list[dict[str, Any]] = []
    with ReplicaGroups(
        ["-m", "fsdp1_worker"], replicas=1, ranks=2, env={"PYTHONPATH": str(SUPPORT)}
    ) as groups:
        groups.start_all()
        for event in groups.events(timeout=100):
            if isinstance(event, Message):
                seen.append(event.fields)
            elif isinstance(event, Exit):
                event.check()
    assert len(seen) == 2 * 12
    for fields in seen:
        strategy, _, _ = case = fields["case"]
        assert fields["at_the_start"] == fields["after_a_step"] == "", case
        for where in ("after_a_validation", "before_the_backward"):
            # Whole parameters are what NO_SHARD trains.
            refused = strategy != "NO_SHARD"
            assert ("is unsharded at this moment" in fields[where]) == refused, (case, where, fields[where])
