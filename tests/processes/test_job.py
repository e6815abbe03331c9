"""The main job: real runs, with kills, healing, checkpoints and on two machines."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from children import free_port
from docs_blocks import block, check_shown, commands
from job import BOTH, SMALL, Run, options_of, results, run

from torchft._launch.lighthouse import LighthouseProcess
from torchft._launch.replicas import Exit, ReplicaGroups


def test_a_killed_group_heals_and_all_groups_end_equal(text: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = block("main_job.rst", "local_sgd --kill-replica-at-step 100")
    sizes = [*SMALL, "--sync-every", "8", "--steps", "120"]
    output = run(*options_of(command), *sizes, "--data", text, "--json", str(file))
    assert "group 1 healed from a peer" in output
    # The page shows what happens around the killing, and what a run without it prints.
    check_shown(block("main_job.rst", "killing group 1 (SIGKILL)"), output)
    assert command.startswith(block("main_job.rst", "python -m torchft.examples.local_sgd").rstrip())
    check_shown(block("main_job.rst", "step     16/480"), output)
    check_shown(block("main_job.rst", "bit-identical in all 2 groups"), output)
    # The README's command is this one, after the installation.
    assert block("README.md", "--kill-replica-at-step").endswith(f" && .venv/bin/{command}")
    result = results(file)
    assert (result["kills"], result["heals"], result["problems"]) == (1, 1, [])
    assert result["commits"] == 15
    assert [entry["step"] for entry in result["synchronizations"] if entry["committed"]] == list(
        range(8, 121, 8)
    )
    # the others waited: nothing was committed without the killed group
    for entry in result["synchronizations"]:
        assert None not in entry["losses"] or entry["healed"] == [1]
    assert result["validation_loss"]["after"] < result["validation_loss"]["before"] / 2
    (digests,) = result["sha256"].values()
    assert len(digests) == 2
    # every parameter of this model, in float32
    dim, length = 32, 32
    largest = 4 * 256 * dim
    rest = length * dim + 12 * dim * dim + 5 * dim + 3 * 2 * dim
    assert result["M_bytes"] == largest
    assert result["S_bytes"] == 2 * largest + 4 * rest


def test_two_ranks_per_group_shard_the_model_and_heal(text: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    run(
        *(*SMALL, "--ranks", "2", "--steps", "48", "--data", text, "--kill-replica-at-step", "18"),
        *("--json", str(file)),
    )
    result = results(file)
    assert (result["kills"], result["heals"], result["commits"]) == (1, 1, 12)
    assert sorted(result["sha256"]) == ["0", "1"]
    for digests in result["sha256"].values():
        assert len(digests) == 2
        assert len(set(digests)) == 1
    # each rank has half of every parameter
    assert result["M_bytes"] == 4 * 256 * 32 // 2


@pytest.mark.slow
def test_with_and_without_staging_the_bits_are_the_same(text: str, tmp_path: Path) -> None:
    digests = []
    for option, log in (
        ("--offload-averaged-parameters-to-cpu", r"15 parameters reduced on the host"),
        ("--no-allreduce-to-cpu", "15 parameters in 15 rounds"),
        ("--window-mb=0", r"15 parameters in \d rounds"),
        ("--no-offload-averaged-parameters-to-cpu", None),
    ):
        file = tmp_path / f"{option}.json"
        output = run(*SMALL, "--steps", "16", "--data", text, option, "--json", str(file), "--verbose")
        assert bool(re.search(log or "CPU staging is on", output)) == (log is not None)
        digests.append(results(file)["sha256"])
    assert digests == digests[:1] * 4


FIRST_ALONE = r"loss +\d\.\d+ +- +committed"


def test_the_others_go_on_without_a_group_where_they_may(text: str) -> None:
    # The group may be stopped in the middle of an all-reduce, which then has to time out.
    arguments = ["--steps", "100000", "--data", text, "--min-replicas", "1", "--timeout", "2"]
    with Run(*SMALL, *arguments) as job:
        job.wait_for(BOTH)
        job.rank(1).suspend()
        line = job.wait_for(FIRST_ALONE, after=len(job.lines))
        line = job.wait_for(FIRST_ALONE, after=line)
        job.rank(1).resume()
        line = job.wait_for("group 1 healed from a peer", after=line)
        job.wait_for(BOTH, after=line)


@pytest.mark.slow
def test_the_others_wait_for_a_group_by_default(text: str) -> None:
    with Run(*SMALL, "--steps", "100000", "--data", text) as job:
        job.wait_for(BOTH)
        job.rank(1).suspend()
        # what was under way
        time.sleep(1.0)
        before = len(job.lines)
        # longer than the lighthouse takes to give a group up
        time.sleep(4.0)
        assert len(job.lines) == before
        job.rank(1).resume()
        job.wait_for(BOTH, after=before)


@pytest.mark.slow
def test_a_group_killed_by_somebody_else_is_started_again(text: str) -> None:
    with Run(*SMALL, "--steps", "160", "--data", text) as job:
        job.wait_for("committed")
        job.rank(0).kill()
        assert job.end() == 0, job.output
        assert "group 0 rank 0 was killed by signal 9" in job.output
        assert "1 killed, 1 healed" in job.output


@pytest.mark.slow
def test_a_lighthouse_that_is_started_again_is_found_again(text: str) -> None:
    """Without Manager(quorum_retries) the groups would stand still for ten minutes."""
    port = free_port()
    lighthouse = LighthouseProcess(2, port=port)
    try:
        with Run(*SMALL, "--steps", "100000", "--data", text, "--lighthouse", lighthouse.address) as job:
            line = job.wait_for("committed")
            lighthouse.stop()
            # Long enough for the groups to ask while it is away.
            time.sleep(5)
            lighthouse = LighthouseProcess(2, port=port)
            for _ in range(3):
                line = job.wait_for("committed", after=max(line, len(job.lines)))
            job.process.send_signal(signal.SIGINT)
            assert job.end() == 130
    finally:
        lighthouse.stop()


SLOW_RANK = """
import os, time
from torchft._launch import cli
from torchft.examples.local_sgd.train import PROG, main
from torchft.process_group import ProcessGroupGloo

calls = 0
allreduce = ProcessGroupGloo.allreduce

def late(self, *args):
    global calls
    calls += 1
    if calls == 5 and os.environ["REPLICA_GROUP_ID"] == os.environ["RANK"] == "1":
        time.sleep(6)
    return allreduce(self, *args)

ProcessGroupGloo.allreduce = late
cli.run_rank(PROG, main)
"""


@pytest.mark.slow
def test_a_slow_rank_costs_a_synchronization_and_no_process(text: str) -> None:
    """The other rank of its group votes at once, and has to wait for longer than an all-reduce may take."""
    job = ["--replicas", "2", *SMALL, "--steps", "8", "--timeout", "3", "--data", text]
    outcomes: dict[tuple[int, int], list[bool]] = collections.defaultdict(list)
    with ReplicaGroups(["-c", SLOW_RANK, *job], replicas=2, ranks=2) as groups:
        groups.start_all()
        for event in groups.events(timeout=100):
            if isinstance(event, Exit):
                event.check()
            elif event.fields["kind"] == "synchronized":
                outcomes[event.group, event.rank].append(event.fields["committed"])
    assert outcomes.keys() == {(group, rank) for group in (0, 1) for rank in (0, 1)}
    for seen in outcomes.values():
        assert seen[0] is False
        assert sum(seen) == 2


def test_checkpoints_survive_a_cold_restart(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = tmp_path / "saved", tmp_path / "results.json"
    monkeypatch.chdir(tmp_path)
    begin, go_on = map(options_of, commands(block("main_job.rst", "--checkpoint saved --steps 240")))
    common = [*SMALL, "--sync-every", "16", "--data", text, "--json", str(file)]
    run(*begin, *common)
    first = results(file)
    # the two newest ones, of each group
    for group in (0, 1):
        saved = folder / f"group_{group}"
        assert sorted(entry.name for entry in saved.iterdir()) == ["step_160", "step_240"]
        # what a save that was cut short leaves behind: newer, and never read
        (saved / "step_256.partial").mkdir()
        (saved / "step_256.partial" / "__0_0.distcp").write_bytes(b"half")

    output = run(*go_on, *common)
    second = results(file)
    assert "training starts at step 240" in output
    assert second["validation_loss"]["before"] == pytest.approx(first["validation_loss"]["after"], abs=1e-6)
    assert (second["commits"], second["problems"]) == (15, [])
    # A run that was not interrupted gives the same bits: optimizer state and data went on, too.
    whole = tmp_path / "whole.json"
    run(*common, "--steps", "480", "--json", str(whole))
    assert results(whole)["sha256"] == second["sha256"]


@pytest.mark.slow
def test_checkpoints_that_do_not_fit_are_refused(text: str, tmp_path: Path) -> None:
    common = [*SMALL, "--data", text, "--checkpoint", str(tmp_path)]
    run(*common, "--steps", "8")
    for arguments, words in (
        (["--dim", "64"], "does not fit this model"),
        (["--sync-every", "5"], "was saved with --sync-every 4, not 5"),
    ):
        output = run(*common, "--steps", "40", *arguments, code=2)
        assert words in output.splitlines()[-1]
        assert "Traceback" not in output


def shell(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
        },
        start_new_session=True,
    )


def test_the_documented_commands_for_two_machines_work(text: str) -> None:
    # Both machines are this one: a name and ports of its own instead of the documented ones.
    port = free_port()
    commands = [block("main_job.rst", "--min_replicas 2 --bind")]
    first = block("main_job.rst", "export REPLICA_GROUP_ID=0")
    second = block("main_job.rst", "export REPLICA_GROUP_ID=1")
    for group in (first, second):
        command = group.rstrip() + f" {' '.join(SMALL)} --steps 24 --data {text}"
        assert "--master-port 29500" in command
        commands.append(command.replace("--master-port 29500", f"--master-port {free_port()}"))
    processes = []
    try:
        for command in commands:
            assert "29510" in command
            processes.append(shell(command.replace("29510", str(port)).replace("machine-a", "localhost")))
        outputs = [process.communicate(timeout=150)[0] for process in processes[1:]]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
    digests = []
    for group, (process, output) in enumerate(zip(processes[1:], outputs, strict=True)):
        assert process.returncode == 0, output
        assert output.count("committed by 2 groups") == 6, output
        assert "reduced on the host" in output
        digests += re.findall(rf"group {group} finished, .* parameters sha256 (\w+)", output)
    assert len(digests) == 2
    assert digests[0] == digests[1]
