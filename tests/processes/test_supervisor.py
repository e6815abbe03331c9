"""The main job's supervisor, over ranks that follow a script."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from children import scripted

from torchft._launch.replicas import ReplicaGroups
from torchft.examples.local_sgd import supervisor as supervisor_module
from torchft.examples.local_sgd.supervisor import GroupLost, Supervisor


@pytest.mark.parametrize(
    ("code", "words"),
    [
        # group 0 finishes; group 1 reaches step 1, is killed, and finds nobody after its restart
        (
            "last = dict(kind='synchronized', step=1, attempt=0, commits=1, loss=1.0, committed=True,"
            " reason=None, healed=False, participants=1, milliseconds=1.0)\n"
            "if os.environ['REPLICA_GROUP_ID'] == '0': send(**last)\n"
            "else: time.sleep(0.5); send(kind='step', step=1); time.sleep(60)",
            "group 1 cannot rejoin: the others have finished",
        ),
        # group 1 dies, and dies again before it has done anything
        (
            "import signal\n"
            "if os.environ['REPLICA_GROUP_ID'] == '0': time.sleep(60)\n"
            "os.kill(os.getpid(), signal.SIGKILL)",
            "group 1 died again before it committed anything",
        ),
    ],
)
def test_a_group_that_cannot_rejoin_is_reported(code: str, words: str) -> None:
    with ReplicaGroups(scripted(code), replicas=2) as groups:
        supervisor = Supervisor(groups, replicas=2, ranks=1, steps=2, commits=1, kills=[1])
        with pytest.raises(GroupLost, match=words):
            supervisor.run()


SYNC = """
def sync(committed, step, attempt=0, healed=False, participants=2):
    send(kind='synchronized', step=step, attempt=attempt, commits=step - (not committed), loss=1.0,
         committed=committed, reason=None, healed=healed, participants=participants, milliseconds=1.0)
"""
FINISH = "\nsend(kind='finished', digest='x', validation_loss=1.0)\n"


def test_a_group_whose_peers_left_it_waiting_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Group 1 died unnoticed by group 0, which finished before group 1 was back: it waits for nobody."""
    monkeypatch.setattr(supervisor_module, "_PATIENCE", 1.0)
    code = SYNC + (
        "if os.environ['REPLICA_GROUP_ID'] == '0': time.sleep(1); sync(True, 1)\n"
        "elif os.path.exists(os.environ['KILLED']): time.sleep(60)\n"
        "else: open(os.environ['KILLED'], 'w').close(); os.kill(os.getpid(), 9)\n"
    )
    with ReplicaGroups(scripted(code), replicas=2, env={"KILLED": str(tmp_path / "killed")}) as groups:
        supervisor = Supervisor(groups, replicas=2, ranks=1, steps=1, commits=1, kills=[])
        with pytest.raises(GroupLost, match="group 1 cannot rejoin"):
            supervisor.run()


def test_a_last_synchronization_that_is_repeated_loses_nobody() -> None:
    """All reject it, then all commit it; what the second group reports comes later."""
    code = SYNC + "sync(False, 1); time.sleep(1 + int(os.environ['REPLICA_GROUP_ID'])); sync(True, 1, 1)"
    code += FINISH
    with ReplicaGroups(scripted(code), replicas=2) as groups:
        results = Supervisor(groups, replicas=2, ranks=1, steps=1, commits=1, kills=[]).run()
    assert (results.commits, results.rejections) == (1, 1)


DIE = "open(os.environ['KILLED'], 'w').close(); os.kill(os.getpid(), 9)\n"


@pytest.mark.parametrize(
    ("survivor", "other"),
    [
        # The death is heard of after the peer's rejection, and the group is back before its peer commits.
        (
            "sync(False, 1)\nwhile not back(): time.sleep(0.01)\ntime.sleep(2); sync(True, 1, 1)",
            "if back(): sync(True, 1, healed=True); time.sleep(2)\nelse: time.sleep(1); " + DIE,
        ),
        # The rejection is heard of when the group is back and has committed.
        (
            "while not back(): time.sleep(0.01)\ntime.sleep(2); sync(False, 1); sync(True, 1, 1)",
            "if back(): sync(True, 1, healed=True); time.sleep(3)\nelse: " + DIE,
        ),
    ],
)
def test_a_rejection_is_no_part_of_the_next_synchronization(
    survivor: str, other: str, tmp_path: Path
) -> None:
    expected = [(1, False), (1, True), (2, True)]
    assert outcomes(f"{survivor}; sync(True, 2)", f"{other}\nsync(True, 2)", tmp_path) == expected


@pytest.mark.parametrize(
    ("survivor", "other", "commits"),
    [
        # Group 1 reports a commit, dies and is back before its peer's report of that commit arrives.
        (
            "while not back(): time.sleep(0.01)\ntime.sleep(2); sync(True, 1); sync(True, 2)",
            "if back(): time.sleep(4); sync(True, 2, healed=True)\nelse: sync(True, 1); time.sleep(0.5); "
            + DIE,
            2,
        ),
        # It dies before it reports a commit.
        (
            "sync(True, 1)\nwhile not back(): time.sleep(0.01)\ntime.sleep(2); sync(True, 2)",
            "if back(): time.sleep(2); sync(True, 2, healed=True)\nelse: time.sleep(1); " + DIE,
            2,
        ),
        # It is stopped before it reports a commit, and its peer goes on without it.
        (
            "sync(True, 1); sync(True, 2, participants=1); time.sleep(2); sync(True, 3)",
            "time.sleep(1); sync(True, 1); time.sleep(1); sync(True, 3, healed=True)",
            3,
        ),
    ],
)
def test_a_commit_whose_report_is_late_counts_once(
    survivor: str, other: str, commits: int, tmp_path: Path
) -> None:
    assert outcomes(survivor, other, tmp_path) == [(commit + 1, True) for commit in range(commits)]


def outcomes(first: str, second: str, folder: Path) -> list[tuple[int, bool]]:
    """Steps and votes that the supervisor heard of, from a group that lives and one that may die once."""
    code = SYNC + "def back(): return os.path.exists(os.environ['KILLED'])\n"
    code += "if os.environ['REPLICA_GROUP_ID'] == '0':\n" + textwrap.indent(first, "    ")
    code += "\nelse:\n" + textwrap.indent(second, "    ") + FINISH
    with ReplicaGroups(scripted(code), replicas=2, env={"KILLED": str(folder / "killed")}) as groups:
        results = Supervisor(groups, replicas=2, ranks=1, steps=3, commits=3, kills=[]).run()
    return [(entry["step"], entry["committed"]) for entry in results.history]


def test_groups_that_differ_are_found_out() -> None:
    code = (
        "group = int(os.environ['REPLICA_GROUP_ID'])\n"
        "send(kind='begin', step=0, total_bytes=8, largest_bytes=4, validation_loss=5.0)\n"
        "send(kind='finished', digest=str(group), validation_loss=2.0)\n"
    )
    with ReplicaGroups(scripted(code), replicas=2) as groups:
        results = Supervisor(groups, replicas=2, ranks=1, steps=1, commits=1, kills=[]).run()
    assert results.digests == {0: ["0", "1"]} or results.digests == {0: ["1", "0"]}
    assert not results.identical
