"""The main job: real runs, with faults, checkpoints, signals and mistakes."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from docs_blocks import block, check_shown, commands
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torchft._launch import cli
from torchft._launch.lighthouse import LighthouseProcess
from torchft._launch.replicas import Exit, ReplicaGroups
from torchft.examples.local_sgd import __main__ as launcher
from torchft.examples.local_sgd import supervisor as supervisor_module
from torchft.examples.local_sgd import train
from torchft.examples.local_sgd.data import Corpus, read_text
from torchft.examples.local_sgd.model import ByteTransformer
from torchft.examples.local_sgd.options import add_training_options, as_arguments
from torchft.examples.local_sgd.supervisor import GroupLost, Supervisor

MODULE = "torchft.examples.local_sgd"
# A step takes about two milliseconds.
SMALL = ["--dim", "32", "--layers", "1", "--sequence-length", "32", "--batch-size", "4", "--sync-every", "4"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with text that a small model learns something of."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{n} bottles of beer on the wall, {n} bottles of beer\n" for n in range(4000)))
    return str(path)


class Run:
    """The launcher as a process; nothing of it may be left when it ends."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", MODULE, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            # as in a terminal of its own, so that Ctrl-C goes to this job alone
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def rank(self, group: int) -> psutil.Process:
        """The process of a group with one rank."""
        ranks = [p for p in self.children() if p.environ().get("REPLICA_GROUP_ID") == str(group)]
        assert len(ranks) == 1
        return ranks[0]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait_for(self, pattern: str, after: int = 0, seconds: float = 90.0) -> int:
        """Waits for a line from ``after`` on that matches, and returns the number of the next one."""
        deadline = time.monotonic() + seconds
        number = after
        while True:
            if number < len(self.lines):
                number += 1
                if re.search(pattern, self.lines[number - 1]):
                    return number
            else:
                assert self.process.poll() is None or self._reader.is_alive(), self.output
                assert time.monotonic() < deadline, f"no {pattern!r} in\n{self.output}"
                time.sleep(0.01)

    def end(self, timeout: float = 120.0) -> int:
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.end()
        assert self.process.stdout is not None
        self.process.stdout.close()


def run(*arguments: str, code: int = 0) -> str:
    with Run(*arguments) as job:
        assert job.end() == code, job.output
        return job.output


def options_of(command: str) -> list[str]:
    """Those of a documented command, which runs the launcher."""
    python, m, module, *rest = command.split()
    assert (python, m, module) == ("python", "-m", MODULE)
    return rest


def results(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def gone(processes: list[psutil.Process], seconds: float = 15.0) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


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


def test_the_documented_sizes_are_those_of_the_default_model() -> None:
    parser = cli.Parser("prog", "")
    add_training_options(parser)
    options = parser.parse_args([])
    with torch.device("meta"):
        model = ByteTransformer(options.dim, options.layers, options.heads, options.sequence_length)
    sizes = [parameter.nbytes / 2**20 for parameter in model.parameters()]
    line = f"per rank          S {sum(sizes):.2f} MiB of parameters, M {max(sizes):.2f} MiB the largest one"
    assert line in block("main_job.rst", "bit-identical in all 2 groups").splitlines()


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
    for option in ("--offload-averaged-parameters-to-cpu", "--no-offload-averaged-parameters-to-cpu"):
        file = tmp_path / f"{option}.json"
        run(*SMALL, "--steps", "16", "--data", text, option, "--json", str(file))
        digests.append(results(file)["sha256"])
    assert digests[0] == digests[1]


BOTH = r"loss +\d\.\d+ +\d\.\d+ +committed"
FIRST_ALONE = r"loss +\d\.\d+ +- +committed"


# The next two tests stop a group rather than kill it: a killed one is back before anybody has to decide.


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


def scripted(code: str) -> list[str]:
    send = "import json, os, time\ndef send(**fields):\n"
    send += "    os.write(int(os.environ['_TORCHFT_REPLICAS_FD']), (json.dumps(fields) + '\\n').encode())\n"
    return ["-c", send + code]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        # group 0 finishes; group 1 reaches step 1, is killed, and finds nobody after its restart
        (
            "last = dict(kind='synchronized', quorum=0, step=1, commits=1, loss=1.0, committed=True,"
            " healed=False, participants=1, milliseconds=1.0)\n"
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
def sync(committed, step, quorum=0, healed=False, participants=2):
    send(kind='synchronized', quorum=quorum, step=step, commits=step - (not committed), loss=1.0,
         committed=committed, healed=healed, participants=participants, milliseconds=1.0)
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
            "if back(): sync(True, 1, 1, healed=True); time.sleep(2)\nelse: time.sleep(1); " + DIE,
        ),
        # The rejection is heard of when the group is back and has committed.
        (
            "while not back(): time.sleep(0.01)\ntime.sleep(2); sync(False, 1); sync(True, 1, 1)",
            "if back(): sync(True, 1, 1, healed=True); time.sleep(3)\nelse: " + DIE,
        ),
    ],
)
def test_a_rejection_is_no_part_of_the_next_synchronization(
    survivor: str, other: str, tmp_path: Path
) -> None:
    code = SYNC + "def back(): return os.path.exists(os.environ['KILLED'])\n"
    code += "if os.environ['REPLICA_GROUP_ID'] == '0':\n" + textwrap.indent(survivor, "    ")
    code += "\nelse:\n" + textwrap.indent(other, "    ") + "\nsync(True, 2, 1)" + FINISH
    with ReplicaGroups(scripted(code), replicas=2, env={"KILLED": str(tmp_path / "killed")}) as groups:
        results = Supervisor(groups, replicas=2, ranks=1, steps=2, commits=2, kills=[]).run()
    assert [(entry["step"], entry["committed"]) for entry in results.history] == [
        (1, False),
        (1, True),
        (2, True),
    ]


def test_a_commit_whose_report_is_late_counts_once(tmp_path: Path) -> None:
    """Group 1 reports a commit, dies and is back before its peer's report of that commit arrives."""
    code = (
        SYNC
        + (
            "if os.environ['REPLICA_GROUP_ID'] == '0':\n"
            "    while not os.path.exists(os.environ['KILLED']): time.sleep(0.01)\n"
            "    time.sleep(2); sync(True, 1, 1); sync(True, 2, 2)\n"
            "elif os.path.exists(os.environ['KILLED']): time.sleep(4); sync(True, 2, 2, healed=True)\n"
            "else: sync(True, 1, 1); time.sleep(0.5); " + DIE
        )
        + FINISH
    )
    with ReplicaGroups(scripted(code), replicas=2, env={"KILLED": str(tmp_path / "killed")}) as groups:
        results = Supervisor(groups, replicas=2, ranks=1, steps=2, commits=2, kills=[]).run()
    assert [(entry["step"], entry["committed"]) for entry in results.history] == [(1, True), (2, True)]


def test_groups_that_differ_are_found_out() -> None:
    code = (
        "group = int(os.environ['REPLICA_GROUP_ID'])\n"
        "send(kind='begin', step=0, commits=0, total_bytes=8, largest_bytes=4, validation_loss=5.0)\n"
        "send(kind='finished', digest=str(group), validation_loss=2.0)\n"
    )
    with ReplicaGroups(scripted(code), replicas=2) as groups:
        results = Supervisor(groups, replicas=2, ranks=1, steps=1, commits=1, kills=[]).run()
    assert results.digests == {0: ["0", "1"]} or results.digests == {0: ["1", "0"]}
    assert not results.identical


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


@pytest.mark.parametrize(
    ("number", "code", "moment"),
    [
        (signal.SIGINT, 130, "replica groups x"),
        (signal.SIGTERM, 143, "committed"),
        pytest.param(signal.SIGINT, 130, "training starts", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, "committed", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, "replica groups x", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, "killing group", marks=pytest.mark.slow),
    ],
)
def test_signals_stop_everything_within_seconds(
    text: str, number: signal.Signals, code: int, moment: str
) -> None:
    with Run(*SMALL, "--steps", "100000", "--data", text, "--kill-replica-at-step", "400") as job:
        job.wait_for(moment)
        children = job.children()
        begin = time.monotonic()
        # as a terminal does: to the whole foreground process group
        os.killpg(job.process.pid, number)
        assert job.end(timeout=20) == code, job.output
        assert time.monotonic() - begin < 15
        assert gone(children)
        assert "Traceback" not in job.output, job.output


def test_a_failing_rank_is_shown_once_and_leaves_nothing(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with Run(
        *(*SMALL, "--steps", "100000", "--data", text, "--ranks", "2", "--checkpoint", str(folder)),
        *("--checkpoint-every", "1"),
    ) as job:
        job.wait_for("committed")
        children = job.children()
        # a file system that fails in the middle of training
        moved = tmp_path / "moved"
        while True:
            try:
                os.rename(folder, moved)
                folder.write_text("no folder")
                break
            except FileExistsError:
                time.sleep(0.01)
            except IsADirectoryError:
                moved = tmp_path / f"{moved.name}_"
        assert job.end() == 1, job.output
        assert gone(children)
    heads = [line for line in job.lines if re.fullmatch(r"group \d rank \d failed \(exit code 1\)", line)]
    assert len(heads) == 1
    assert job.output.count("Traceback (most recent call last)") >= 1
    assert "committed anything" not in job.output


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code = cli.run("prog", launcher.main, arguments)
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert code == 2, captured
    assert captured.err.count("\n") == 1
    assert "training starts" not in captured.out
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replicas", "0"], "got '0'"),
        (["--ranks", "-1"], "got '-1'"),
        (["--steps", "0"], "got '0'"),
        (["--learning-rate", "nan"], "got 'nan'"),
        (["--window-mb", "inf"], "got 'inf'"),
        (["--min-replicas", "3"], "--min-replicas 3 is more than --replicas 2"),
        (["--dim", "30"], "--dim 30 is no multiple of --heads 4"),
        (["--device", "warp"], "'warp' is not available here"),
        (["--device", "cpu", "--process-group", "nccl"], "pass gloo"),
        (["--lighthouse", "http://localhost:1"], "no lighthouse answers at 'http://localhost:1'"),
        (["--lighthouse", "nonsense"], "pass http://HOST:PORT"),
        (["--kill-replica-at-step", "480"], "not before the last step"),
        (["--kill-replica-at-step", "5", "--replicas", "1"], "needs a peer"),
        (["--no-offload-averaged-parameters-to-cpu", "--window-mb", "1"], "does nothing without CPU staging"),
        (["--data", "/no/such/file"], "does not exist"),
        (["--data", "/dev/zero"], "neither a file nor a folder"),
        (["--json", "/no/such/folder/file"], "there is no folder"),
        (["--checkpoint", "/dev/null"], "can't be a folder"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(arguments, capsys)


def test_the_environment_names_the_lighthouse_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:2")
    assert "no lighthouse answers at 'http://localhost:2'" in refused([], capsys)


def test_nccl_ranks_that_would_share_a_gpu_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The check is all that is reached, so that machines without a GPU can run it.
    monkeypatch.setattr(cli, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "pass --process-group gloo" in refused(["--process-group", "nccl"], capsys)


def test_data_without_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image").write_bytes(b"\x89PNG\0\0\0\0" * 9999)
    (tmp_path / "short.txt").write_text("short")
    assert "is empty" in refused(["--data", str(tmp_path / "empty.txt")], capsys)
    assert "no text" in refused(["--data", str(tmp_path / "image")], capsys)
    assert "the data has 5 bytes" in refused(["--data", str(tmp_path)], capsys)


def test_training_options_reach_the_ranks() -> None:
    parser = cli.Parser("prog", "")
    add_training_options(parser)
    for arguments in (
        [],
        ["--no-offload-averaged-parameters-to-cpu", "--steps", "7", "--data", "a b", "--min-replicas", "1"],
        ["--window-mb", "0", "--learning-rate", "1e-4", "--checkpoint", "saved"],
    ):
        options = parser.parse_args(arguments)
        assert parser.parse_args(as_arguments(options)) == options


def test_parts_of_the_text_are_disjoint_and_nobody_trains_on_the_held_out_one() -> None:
    # Each block is one byte repeated, so that a batch shows where it comes from.
    text = b"".join(bytes([index]) * 100 for index in range(120))
    corpora = [Corpus(text, part, 2, 16) for part in range(2)]
    block = len(text) // (20 * 2)
    assert block == 300
    seen = [
        {int(byte) for key in range(300) for byte in corpus.batch(8, (part, key))[0].flatten().unique()}
        for part, corpus in enumerate(corpora)
    ]
    held_out = {int(byte) for inputs, _ in corpora[0].validation(8, 8) for byte in inputs.unique()}
    assert seen[0].isdisjoint(seen[1])
    assert held_out == {57, 58, 59, 117, 118, 119}
    assert held_out.isdisjoint(seen[0] | seen[1])


def test_batches_are_decided_by_their_key_and_targets_follow_inputs() -> None:
    corpus = Corpus(bytes(range(256)) * 100, 0, 1, 16)
    inputs, targets = corpus.batch(4, (1, 2, 3))
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets, (inputs + 1) % 256)
    assert torch.equal(corpus.batch(4, (1, 2, 3))[0], inputs)
    for other in ((0, 2, 3), (1, 3, 2), (1, 2)):
        assert not torch.equal(corpus.batch(4, other)[0], inputs)


def test_the_standard_library_is_enough_text() -> None:
    text = read_text(None)
    assert len(text) > 2_000_000
    assert text.count(b"import") > 1000


def free_port() -> int:
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        return probe.getsockname()[1]


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
        digests += re.findall(rf"group {group} finished, .* parameters sha256 (\w+)", output)
    assert len(digests) == 2
    assert digests[0] == digests[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_waits_for_a_peer_dies_at_once(text: str, number: signal.Signals) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with LighthouseProcess(min_replicas=2) as lighthouse:
        rank = subprocess.Popen(
            [sys.executable, "-u", "-m", f"{MODULE}.train", *SMALL, "--steps", "4", "--data", text],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={
                **os.environ,
                **{"RANK": "0", "WORLD_SIZE": "1", "REPLICA_GROUP_ID": "0", "OMP_NUM_THREADS": "1"},
                **{"MASTER_ADDR": "localhost", "TORCHFT_LIGHTHOUSE": lighthouse.address},
                "MASTER_PORT": str(store.port),
            },
        )
        try:
            assert rank.stdout is not None
            assert "starts at step 0" in rank.stdout.readline()
            # four steps take milliseconds: by then it waits in the quorum
            time.sleep(1.0)
            assert rank.poll() is None
            rank.send_signal(number)
            assert rank.wait(5) == -number
        finally:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "RANK is not set; start this with torchrun"),
        ({"RANK": "0"}, "REPLICA_GROUP_ID is not set"),
        ({"RANK": "0", "REPLICA_GROUP_ID": "0"}, "TORCHFT_LIGHTHOUSE is not set"),
        (
            {"RANK": "0", "REPLICA_GROUP_ID": "2", "TORCHFT_LIGHTHOUSE": "http://x:1"},
            "REPLICA_GROUP_ID is '2'",
        ),
        (
            {"RANK": "0", "REPLICA_GROUP_ID": "x", "TORCHFT_LIGHTHOUSE": "http://x:1"},
            "REPLICA_GROUP_ID is 'x'",
        ),
    ],
)
def test_train_says_what_its_environment_lacks(
    env: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "REPLICA_GROUP_ID", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)
    if "RANK" in env:
        env = {"WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", **env}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cli.run("prog", train.main, []) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_loss_that_is_no_number_fails_the_run(text: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    output = run(
        *(*SMALL, "--steps", "8", "--data", text, "--learning-rate", "1e30", "--json", str(file)), code=1
    )
    assert "training diverged" in output
    assert results(file)["validation_loss"]["after"] is None
    assert math.isfinite(results(file)["validation_loss"]["before"])
