"""What piles up where it may not: 300 synchronizations of two groups, and 20 deaths in one job."""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import endurance_worker
import psutil
import pytest
from children import gone
from endurance_worker import BEHIND, COMMITTED, RAISES, REPORTED, SYNCHRONIZATIONS, WARM_UP, Sample, plan
from job import BOTH, SMALL, Run, results
from ways import ON_HOST

from torchft._staging.units import MIB

# A leak grows from sample to sample, what is only late to go is not in every one.
SAMPLES_COMPARED = 3


@dataclass(frozen=True)
class Bound:
    """How much more there may be at the end than after warming up.

    Attributes:
        what: in words.
        growth: the bound, in ``unit``.
        unit: what the number in the sample is divided by.
    """

    what: str
    growth: float
    unit: int = 1


BOUNDS = {
    "resident": Bound("MiB of resident memory", 12, MIB),
    "allocated": Bound("MiB allocated", 4, MIB),
    "device": Bound("bytes on the devices", 0),
    "files": Bound("open files", 4),
    "threads": Bound("threads", 8),
    "objects": Bound("Python objects", 60),
}


@dataclass(frozen=True)
class Endured:
    """What the worker has printed.

    Attributes:
        groups: outcomes and more of each group.
        samples: in order.
    """

    groups: list[dict[str, Any]]
    samples: list[Sample]

    def growth(self, name: str) -> float:
        """Returns how much more of ``name`` there is in the last samples than in the first ones."""
        first = min(getattr(sample, name) for sample in self.samples[:SAMPLES_COMPARED])
        last = min(getattr(sample, name) for sample in self.samples[-SAMPLES_COMPARED:])
        return (last - first) / BOUNDS[name].unit

    def complaints(self) -> dict[str, str]:
        """Returns what grew beyond its bound, with a sentence each."""
        found = {}
        for name, bound in BOUNDS.items():
            growth = self.growth(name)
            if growth > bound.growth:
                seen = [round(getattr(sample, name) / bound.unit, 1) for sample in self.samples]
                found[name] = f"{growth:.1f} more {bound.what}, {bound.growth} allowed: {seen}"
        if "objects" in found:
            first, last = (collections.Counter(self.samples[index].types) for index in (0, -1))
            found["objects"] += f"; of types {(last - first).most_common(6)}"
        return found


def endure(path: str, *leaks: str) -> Endured:
    """Carries all synchronizations out in a process of their own: that of pytest is no quiet place."""
    process = subprocess.run(
        [sys.executable, endurance_worker.__file__, path, *leaks],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "warn"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    said = json.loads(process.stdout.splitlines()[-1])
    return Endured(said["groups"], [Sample(**sample) for sample in said["samples"]])


def report(endured: Endured) -> str:
    grown = ", ".join(f"{endured.growth(name):+.1f} {bound.what}" for name, bound in BOUNDS.items())
    return f"{grown}; {max(group['seconds'] for group in endured.groups):.1f} s"


@pytest.mark.parametrize("path", ["window", ON_HOST, pytest.param("release", marks=pytest.mark.slow)])
def test_nothing_grows(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """300 synchronizations, a fifth of them rejected, leave nothing behind but the model."""
    endured = endure(path)
    with capsys.disabled():
        print(f"\n{path}: {report(endured)}")
    planned = collections.Counter(kind for kind, _ in plan())
    for index, group in enumerate(endured.groups):
        outcomes = collections.Counter(group["outcomes"])
        assert outcomes.total() == SYNCHRONIZATIONS
        behind = sum(kind == BEHIND and number % 2 == index for number, (kind, _) in enumerate(plan()))
        expected = {RAISES: planned[RAISES], REPORTED: planned[REPORTED], BEHIND: behind}
        for kind, count in expected.items():
            assert count >= 5, "the plan has too few of them"
            assert outcomes[f"{kind}: rejected"] == count, outcomes
        # Now and then the first collectives after a failure are rejected in the process group's set-up.
        assert outcomes[f"{COMMITTED}: committed"] >= 0.7 * SYNCHRONIZATIONS, outcomes
        assert group["unconfigured"] == []
        assert group["heals"] >= behind
    assert len({group["bits"] for group in endured.groups}) == 1, "the groups differ"
    assert endured.complaints() == {}


def test_the_plan_has_all_kinds_before_the_first_sample() -> None:
    assert {kind for kind, _ in plan()[:WARM_UP]} == set(endurance_worker.KINDS)


def test_all_that_is_counted_has_a_bound() -> None:
    assert {field.name for field in fields(Sample)} - {"synchronizations", "types"} == set(BOUNDS)


@pytest.mark.parametrize(
    ("path", "leaks", "grows"),
    [
        ("window", ["host tensor"], {"resident", "allocated", "objects"}),
        pytest.param(ON_HOST, ["host tensor"], {"resident", "allocated", "objects"}, marks=pytest.mark.slow),
        pytest.param(
            "window",
            ["window", "file", "thread"],
            {"resident", "allocated", "device", "files", "threads", "objects"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "window", ["window"], {"resident", "allocated", "device", "objects"}, marks=pytest.mark.slow
        ),
        pytest.param(ON_HOST, ["object"], {"objects"}, marks=pytest.mark.slow),
        pytest.param("window", ["failure"], {"device", "objects"}, marks=pytest.mark.slow),
        pytest.param(ON_HOST, ["failure"], {"allocated", "objects"}, marks=pytest.mark.slow),
    ],
)
def test_a_leak_is_named(path: str, leaks: list[str], grows: set[str]) -> None:
    """One parameter, file, thread or object per synchronization in one group, or per rejected one."""
    endured = endure(path, *leaks)
    complaints = endured.complaints()
    assert grows <= set(complaints), f"{complaints}; {report(endured)}"


KILLS = 20
# Synchronizations of both groups between a group's return and the next kill, at most.
BETWEEN_KILLS = 12
# Several times as many as are needed: this process may be slower to kill than the job is to train.
JOB_STEPS = 4 * KILLS * BETWEEN_KILLS * 4


@dataclass(frozen=True)
class Supervisor:
    """What the process that watches the groups holds.

    Attributes:
        resident: bytes in memory.
        files: open file descriptors.
        threads: its threads.
        children: its processes, the lighthouse included.
    """

    resident: int
    files: int
    threads: int
    children: int

    @classmethod
    def of(cls, job: Run) -> Supervisor:
        process = psutil.Process(job.process.pid)
        resident, files = process.memory_info().rss, process.num_fds()
        return cls(resident, files, process.num_threads(), len(job.children()))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_kills_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A group dies at a random moment, comes back and heals, twenty times; all groups end bit-identical."""
    text, file = tmp_path / "text.txt", tmp_path / "results.json"
    text.write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(8000)))
    rng = random.Random(20)
    killed = [0, 0]
    processes: set[psutil.Process] = set()
    begin = time.monotonic()
    with Run(*SMALL, "--steps", str(JOB_STEPS), "--data", str(text), "--json", str(file)) as job:
        line = job.wait_for(BOTH)
        states = []
        for _ in range(KILLS):
            for _ in range(rng.randint(1, BETWEEN_KILLS)):
                line = job.wait_for(BOTH, after=line)
            group = rng.randrange(2)
            rank = job.rank(group)
            processes.update(job.children())
            # Anywhere in training or in a synchronization.
            time.sleep(rng.uniform(0, 0.05))
            rank.kill()
            killed[group] += 1
            line = job.wait_for(f"group {group} rank 0 was killed by signal 9", after=line)
            line = job.wait_for(f"starting group {group} again", after=line)
            line = job.wait_for(f"group {group} healed from a peer", after=line)
            # A group that dies before it has committed anything is given up.
            line = job.wait_for(BOTH, after=line)
            line = job.wait_for(BOTH, after=line)
            states.append(Supervisor.of(job))
        processes.update(job.children())
        assert job.end(600) == 0, job.output
    assert gone(list(processes))
    result = results(file)
    with capsys.disabled():
        print(
            f"\n{KILLS} kills, of each group {killed}, in {time.monotonic() - begin:.0f} s; "
            f"{result['commits']} synchronizations committed, {result['rejections']} rejected\n"
            f"the supervisor after the first one: {states[0]}, after the last one: {states[-1]}"
        )
    assert min(killed) >= 5
    assert (result["kills"], result["problems"], result["identical"]) == (KILLS, [], True)
    healed = collections.Counter(group for entry in result["synchronizations"] for group in entry["healed"])
    assert [healed[0], healed[1]] == killed
    assert result["heals"] == KILLS
    committed = [entry["step"] for entry in result["synchronizations"] if entry["committed"]]
    assert sorted(set(committed)) == list(range(4, JOB_STEPS + 1, 4))
    # A group that dies right after its own commit may take that to the grave, while its peer rejected.
    assert len(committed) <= JOB_STEPS // 4 + KILLS
    first, last = states[0], states[-1]
    assert last.children == first.children == 3
    assert last.threads <= first.threads + 2
    assert last.files <= first.files + 2
    assert last.resident <= first.resident + 8 * MIB
