"""Replica groups as processes: what they get, what is heard of them, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from children import gone, scripted

from torchft._launch.cli import UserError
from torchft._launch.lighthouse import check_lighthouse
from torchft._launch.replicas import Exit, Message, ReplicaFailed, ReplicaGroups


def test_every_rank_gets_the_environment_of_torchrun() -> None:
    code = "send(**{name: os.environ.get(name) for name in sys.argv[1].split(',')}, argv=sys.argv)"
    names = (
        "RANK,WORLD_SIZE,LOCAL_RANK,LOCAL_WORLD_SIZE,MASTER_PORT,REPLICA_GROUP_ID,NUM_REPLICA_GROUPS,"
        "TORCHFT_LIGHTHOUSE,OMP_NUM_THREADS,EXTRA,no_proxy"
    )
    with ReplicaGroups([*scripted(code), names], replicas=2, ranks=2, env={"EXTRA": "yes"}) as groups:
        groups.start_all()
        events = list(groups.events(timeout=60))
        lighthouse = groups.lighthouse
    messages = {(event.group, event.rank): event.fields for event in events if isinstance(event, Message)}
    assert sorted(messages) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for (group, rank), fields in messages.items():
        assert (fields["RANK"], fields["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (fields["WORLD_SIZE"], fields["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert (fields["REPLICA_GROUP_ID"], fields["NUM_REPLICA_GROUPS"]) == (str(group), "2")
        assert (fields["TORCHFT_LIGHTHOUSE"], fields["EXTRA"]) == (lighthouse, "yes")
        assert int(fields["OMP_NUM_THREADS"]) >= 1
        assert socket.gethostname() in fields["no_proxy"].split(",")
        assert fields["argv"] == ["-c", names] or fields["argv"][1:] == [names]
    ports = {group: {messages[group, rank]["MASTER_PORT"] for rank in (0, 1)} for group in (0, 1)}
    assert len(ports[0]) == len(ports[1]) == 1
    assert ports[0] != ports[1]
    exits = [event for event in events if isinstance(event, Exit)]
    assert [end.returncode for end in exits] == [0, 0, 0, 0]


def given_by_torchrun(folder: Path) -> set[str]:
    """Names of the variables that torchrun, asked for a watchdog as well, adds for a worker of its own."""
    script = folder / "script.py"
    script.write_text("import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))")
    result = folder / "environment.json"
    before = {**os.environ, "TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", str(script), str(result)],
        env=before,
        check=True,
        capture_output=True,
        timeout=60,
    )
    return {name for name, value in json.loads(result.read_text()).items() if before.get(name) != value}


def test_what_only_one_process_can_have_is_not_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher may itself be started by torchrun, or where such variables are set for all programs."""
    torchrun = given_by_torchrun(tmp_path)
    # between torchrun and its workers
    private = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_TIMER_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    assert {"RANK", "GROUP_RANK", "ROLE_RANK", *private} <= torchrun
    # a setting, and torchrun's default for it
    torchrun.remove("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    torchft = {"TORCHFT_MANAGER_PORT", "TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"}
    others = {"TORCH_WORKER_SERVER_SOCKET", "TORCHCOMM_RANK", "TORCHCOMM_SIZE"}
    for name in torchrun | torchft | others:
        monkeypatch.setenv(name, "inherited")
    settings = {
        **{"TORCHFT_TIMEOUT_SEC": "77", "TORCHFT_QUORUM_RETRIES": "3", "TORCH_DISTRIBUTED_DEBUG": "INFO"},
        **{"GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
    }
    files = ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]
    for name, value in {**settings, **dict.fromkeys(files, "/tmp/rank_")}.items():
        monkeypatch.setenv(name, value)
    with ReplicaGroups(scripted("send(env=dict(os.environ))"), replicas=2) as groups:
        groups.start_all()
        events = list(groups.events(timeout=60))
    environments = [event.fields["env"] for event in events if isinstance(event, Message)]
    assert len(environments) == 2
    for env in environments:
        assert [name for name, value in env.items() if value == "inherited"] == []
        assert torchrun - private <= env.keys()
        assert settings.items() <= env.items()
    for name in files:
        assert len({env[name] for env in environments}) == 2


def test_ranks_share_the_store_of_their_group_and_reach_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        # Only one of the two Managers could have it.
        monkeypatch.setenv("TORCHFT_MANAGER_PORT", str(probe.getsockname()[1]))
    code = """
import os
import torch
import torch.distributed as dist
from torchft._launch import replicas
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo
dist.init_process_group("gloo")
manager = Manager(
    pg=ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=2,
    use_async_quorum=False, init_sync=False,
)
manager.start_quorum()
total = torch.tensor([10.0 * int(os.environ["REPLICA_GROUP_ID"]) + dist.get_rank()])
dist.all_reduce(total)
replicas.send(attached=replicas.attached(), total=total.item())
manager.shutdown(wait=False)
dist.destroy_process_group()
"""
    with ReplicaGroups(["-c", code], replicas=2, ranks=2) as groups:
        groups.start_all()
        totals = {}
        for event in groups.events(timeout=120):
            if isinstance(event, Exit):
                event.check()
            else:
                totals[event.group, event.rank] = event.fields
    expected = {0: {"attached": True, "total": 1.0}, 1: {"attached": True, "total": 21.0}}
    assert totals == {(group, rank): expected[group] for group in (0, 1) for rank in (0, 1)}


def test_a_failure_has_group_rank_and_traceback() -> None:
    code = """
print("a log line")
if os.environ["REPLICA_GROUP_ID"] == "1":
    raise RuntimeError("the disk is on fire")
"""
    with ReplicaGroups(scripted(code), replicas=2) as groups:
        groups.start_all()
        exits = {event.group: event for event in groups.events(timeout=60) if isinstance(event, Exit)}
    exits[0].check()
    with pytest.raises(ReplicaFailed) as failure:
        exits[1].check()
    message = str(failure.value)
    assert message.startswith("group 1 rank 0 failed (exit code 1)\nTraceback")
    assert message.endswith("RuntimeError: the disk is on fire")
    assert "a log line" in exits[1].output


def test_a_mistake_that_a_rank_finds_is_its_own_line() -> None:
    code = (
        "print('a log line'); print('python -m x.worker: --data: no such file', file=sys.stderr); sys.exit(2)"
    )
    with ReplicaGroups(scripted(code), replicas=1) as groups:
        groups.start_all()
        (end,) = groups.events(timeout=60)
    assert isinstance(end, Exit)
    with pytest.raises(UserError) as mistake:
        end.check()
    assert str(mistake.value) == "--data: no such file"


def test_a_group_can_be_killed_and_started_again_with_a_fresh_store() -> None:
    code = """
send(port=os.environ["MASTER_PORT"])
if os.environ["REPLICA_GROUP_ID"] == "1":
    time.sleep(60)
"""
    ports: list[str] = []
    with ReplicaGroups(scripted(code), replicas=2) as groups:
        groups.start_all()
        for event in groups.events(timeout=60):
            if isinstance(event, Message) and event.group == 1:
                assert event.start == len(ports)
                ports.append(event.fields["port"])
                groups.kill(1)
            elif isinstance(event, Exit) and event.group == 1:
                assert (event.returncode, event.killed) == (-signal.SIGKILL, True)
                event.check()
                if event.start == 0:
                    assert groups.start(1) == 1
    assert len(set(ports)) == 2


def test_a_signal_from_elsewhere_is_a_failure() -> None:
    with ReplicaGroups(scripted("os.kill(os.getpid(), signal.SIGKILL)"), replicas=1) as groups:
        groups.start_all()
        (end,) = groups.events(timeout=60)
    assert isinstance(end, Exit)
    with pytest.raises(ReplicaFailed, match="SIGKILL"):
        end.check()


def test_silence_is_noticed() -> None:
    with ReplicaGroups(scripted("time.sleep(60)"), replicas=1) as groups:
        groups.start_all()
        with pytest.raises(TimeoutError, match=r"0\.2 seconds"):
            list(groups.events(timeout=0.2))


def test_output_is_passed_on_line_by_line() -> None:
    lines: list[tuple[int, int, str]] = []
    code = "print('out'); print('err', file=sys.stderr)"
    with ReplicaGroups(scripted(code), replicas=1, on_output=lambda *line: lines.append(line)) as groups:
        groups.start_all()
        list(groups.events(timeout=60))
    assert sorted(lines) == [(0, 0, "err"), (0, 0, "out")]


# A rank that ignores SIGTERM and has a child of its own, which does so too.
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
send(pids=[os.getpid(), child.pid])
time.sleep(600)
"""


def test_leaving_the_context_ends_everything() -> None:
    with ReplicaGroups(scripted(STUBBORN), replicas=2) as groups:
        groups.start_all()
        pids: list[int] = []
        for event in groups.events(timeout=60):
            assert isinstance(event, Message)
            pids += event.fields["pids"]
            if len(pids) == 4:
                break
        lighthouse = groups.lighthouse
        check_lighthouse(lighthouse)
        children = [psutil.Process(pid) for pid in pids]
        assert all(child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert gone(children)
    with pytest.raises(ValueError, match="no lighthouse answers"):
        check_lighthouse(lighthouse)


def test_nothing_survives_a_sigkill_of_the_parent() -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import json, sys\n"
            "from torchft._launch.replicas import ReplicaGroups\n"
            "groups = ReplicaGroups(['-c', sys.argv[1]], replicas=2)\n"
            "groups.start_all()\n"
            "print(groups._own_lighthouse.pid, flush=True)\n"
            "for event in groups.events(): print(json.dumps(event.fields['pids']), flush=True)\n",
            scripted(STUBBORN)[1],
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline())]
        pids += [pid for _ in range(2) for pid in json.loads(parent.stdout.readline())]
        children = [psutil.Process(pid) for pid in pids]
        assert len(children) == 5
        assert all(child.status() != psutil.STATUS_ZOMBIE for child in children)
    finally:
        parent.kill()
        parent.communicate(timeout=20)
    assert gone(children)


def test_pipes_and_processes_do_not_pile_up() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with ReplicaGroups(scripted("pass"), replicas=1) as groups:
        groups.start(0)
        list(groups.events(timeout=60))
        before = open_files()
        for _ in range(5):
            groups.start(0)
            list(groups.events(timeout=60))
        # The store of the last start is open, then as now.
        assert open_files() == before
