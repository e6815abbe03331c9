"""Synchronizations that are rejected again and again: who says why, and who gives up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from job import SMALL, results, run

from torchft._launch.lighthouse import LighthouseProcess
from torchft._launch.replicas import Exit, Message, ReplicaGroups
from torchft.examples.local_sgd.supervisor import GroupLost, Supervisor

IN_A_ROW = "4 synchronizations in a row were rejected: "


def test_a_run_that_can_commit_nothing_ends_with_the_reason(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    file = tmp_path / "results.json"
    lines = run(*SMALL, "--data", text, "--steps", "8", "--json", str(file), code=1).splitlines()
    assert re.match(f"group [01] gave up: {IN_A_ROW}", lines[-1])
    # and each on the way says why
    rejected = [line for line in lines if re.search(r"rejected .* ms, group [01]: ", line)]
    assert len(rejected) in range(4, 9)
    assert all(line.endswith("Unable to find address for: nope0") for line in [*rejected, lines[-1]])
    result = results(file)
    assert (result["commits"], result["rejections"], result["problems"]) == (0, 4, [lines[-1]])


def test_a_rank_of_torchrun_gives_up_as_well(text: str) -> None:
    with LighthouseProcess(min_replicas=1) as lighthouse:
        rank = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "-m", "torchft.examples.local_sgd.train"),
                *(*SMALL, "--data", text, "--steps", "8", "--replicas", "1"),
            ],
            env={
                **os.environ,
                **{"GLOO_SOCKET_IFNAME": "nope0", "REPLICA_GROUP_ID": "0"},
                "TORCHFT_LIGHTHOUSE": lighthouse.address,
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert rank.returncode == 1, rank
    assert f"python -m torchft.examples.local_sgd.train: {IN_A_ROW}" in rank.stderr
    assert rank.stdout.count("rejected by 1 groups") == 4
    assert rank.stdout.count("Unable to find address for: nope0") == 4
    assert "exitcode  : 1" in rank.stderr


BROKEN_RANK = """
import os
from torchft._launch import cli
from torchft.examples.local_sgd.train import PROG, main
from torchft.process_group import ProcessGroupGloo

def broken(self, *args):
    raise RuntimeError("the cable is cut")

if os.environ["RANK"] == "1":
    ProcessGroupGloo.allreduce = broken
cli.run_rank(PROG, main)
"""


def test_the_rank_that_fails_says_why(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its votes are those of its whole group, whose other ranks do not know the reason."""
    program = ["-c", BROKEN_RANK, *SMALL, "--data", text, "--replicas", "1", "--steps", "8"]
    with ReplicaGroups(program, replicas=1, ranks=2) as groups:
        supervisor = Supervisor(groups, replicas=1, ranks=2, steps=8, commits=2, kills=[])
        with pytest.raises(GroupLost, match=f"group 0 gave up: {IN_A_ROW}the cable is cut"):
            supervisor.run()
    assert "group 0: the cable is cut" in capsys.readouterr().out


def test_for_want_of_groups_nobody_gives_up(text: str) -> None:
    """A lighthouse that lets one group alone form a quorum, in which two are needed to commit."""
    program = [
        "-m",
        "torchft.examples.local_sgd.train",
        *SMALL,
        "--data",
        text,
        "--replicas",
        "2",
        "--steps",
        "8",
    ]
    outcomes: list[tuple[bool, str]] = []
    with (
        LighthouseProcess(min_replicas=1) as lighthouse,
        ReplicaGroups(program, replicas=2, lighthouse=lighthouse.address) as groups,
    ):
        groups.start(0)
        for event in groups.events(timeout=120):
            if isinstance(event, Exit):
                event.check()
            elif isinstance(event, Message) and event.fields["kind"] == "synchronized" and event.group == 0:
                outcomes.append((event.fields["committed"], event.fields["reason"]))
                if len(outcomes) == 6:
                    groups.start(1)
    assert outcomes[:6] == [(False, "1 of the 2 groups that are needed took part")] * 6
    assert outcomes[-1] == (True, None)
