"""Faults at every point of a synchronization, drawn from seeds.

``FAULT_PLANS=500 pytest tests/faults/test_faults.py`` carries out that many plans instead of 40;
``FAULT_SEED=17 pytest tests/faults/test_faults.py`` that one alone.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import fault_plans
import pytest
import torch
from fault_plans import KINDS, BrokenInvariant, Plan, run_plan
from torch import nn
from ways import ON_HOST, Way

from torchft._staging.buffers import StagingBuffers
from torchft._staging.plan import local_shard
from torchft.local_sgd import LocalSGD

PLANS = int(os.environ.get("FAULT_PLANS", "40"))
# Plans wait more than they compute.
WORKERS = 4
SECONDS_PER_PLAN = 120
# The Managers' servers leave some ten threads per plan behind, on the release path as well; more of them than
# these would slow everything down until time-outs fire that are no faults.
PLANS_PER_PROCESS = 10


def _carry_out(seeds: list[int]) -> list[dict[str, Any]]:
    """Runs the plans of ``seeds`` in a process of their own; Gloo may abort it."""
    program = fault_plans.__file__
    process = subprocess.run(
        [sys.executable, program, *map(str, seeds)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "warn"},
        capture_output=True,
        text=True,
        timeout=SECONDS_PER_PLAN * len(seeds),
    )
    outcomes = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    for seed in seeds[len(outcomes) :][:1]:
        tail = process.stderr.strip()[-500:]
        error = f"the process ended with {process.returncode}: {tail}"
        outcomes.append({**asdict(Plan.from_seed(seed)), "error": error})
    return outcomes


@pytest.mark.timeout(SECONDS_PER_PLAN * (PLANS // WORKERS + 1))
def test_plans(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever goes wrong, parameters are the old ones or the average, and the next synchronizations work."""
    one = os.environ.get("FAULT_SEED")
    seeds = list(range(PLANS)) if one is None else [int(one)]
    processes = max(WORKERS, -(-len(seeds) // PLANS_PER_PROCESS))
    shares = [share for number in range(processes) if (share := seeds[number::processes])]
    outcomes: list[dict[str, Any]] = []
    with ThreadPoolExecutor(WORKERS) as workers:
        for some in workers.map(_carry_out, shares):
            outcomes += some
            with capsys.disabled():
                print(f"\n{len(outcomes)} of {len(seeds)} fault plans", end="", flush=True)
    counts = collections.Counter(
        (outcome["kind"], outcome["ways"][outcome["faulty"]] == ON_HOST) for outcome in outcomes
    )
    with capsys.disabled():
        print("\n  the group that fails has      a window  host all-reduce")
        for kind in KINDS:
            print(f"  {kind:29} {counts[kind, False]:8} {counts[kind, True]:16}")
    failed = [
        f"FAULT_SEED={outcome['seed']} pytest tests/faults/test_faults.py -k test_plans"
        f"  # {outcome['kind']}: {outcome['error']}"
        for outcome in outcomes
        if outcome["error"]
    ]
    assert not failed, "\n".join(["plans failed; each alone:", *failed])
    assert len(outcomes) == len(seeds)


def test_forty_seeds_have_every_kind_in_both_ways() -> None:
    plans = [Plan.from_seed(seed) for seed in range(40)]
    seen = {(plan.kind, plan.ways[plan.faulty] == ON_HOST) for plan in plans}
    assert seen == set(itertools.product(KINDS, (False, True)))
    # Beside the group that fails, too, there are both, in all combinations.
    assert {frozenset(way == ON_HOST for way in plan.ways) for plan in plans} == {
        frozenset({False}),
        frozenset({True}),
        frozenset({False, True}),
    }


def _plan(kind: str, way: Way = None, position: int = 2) -> Plan:
    return Plan(0, kind, groups=2, faulty=0, position=position, ways=(way, None), use_async_quorum=False)


class _WritesBeforeTheVote(LocalSGD):
    """Writes each average as soon as it is there."""

    @torch.no_grad()
    def _average(self) -> list[torch.Tensor]:
        buffers = self._buffers
        assert buffers is not None
        for index, parameter in enumerate(self._model.parameters()):
            slot = buffers.slot(index)
            slot.copy_(local_shard(parameter))
            self._manager.allreduce(slot).wait()
            parameter.copy_(slot)
            buffers.host[index].copy_(slot)
        return buffers.host


class _WritesAfterARejection(LocalSGD):
    """Writes parameters after a vote of no."""

    def _report(self, committed: bool, reduced: float, written: float) -> None:
        if not committed:
            for parameter in self._model.parameters():
                nn.init.zeros_(parameter)


class _ForgetsTheFailedVote(LocalSGD):
    """Synchronizes again after an unknown outcome."""

    def sync(self) -> None:
        self._outcome.at = None
        super().sync()


class _KeepsTheBuffers(LocalSGD):
    """Holds on to the buffers of its last synchronization."""

    def _take_memory(self) -> StagingBuffers:
        buffers = super()._take_memory()
        self._kept = [*buffers.host, *buffers._windows.values()]
        return buffers


@pytest.mark.parametrize(
    ("broken", "kind", "way"),
    [
        (_WritesBeforeTheVote, "vote_false", None),
        (_WritesAfterARejection, "raises", None),
        (_WritesAfterARejection, "fails_alone_in_wait", ON_HOST),
        (_ForgetsTheFailedVote, "vote_raises", None),
        (_KeepsTheBuffers, "vote_false", None),
        (_KeepsTheBuffers, "vote_false", ON_HOST),
    ],
)
def test_plans_notice(broken: type[LocalSGD], kind: str, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that breaks a promise fails a plan."""
    monkeypatch.setattr(fault_plans, "PATIENCE", 2.0)
    with pytest.raises(BrokenInvariant):
        run_plan(_plan(kind, way), local_sgd=broken)


@pytest.mark.parametrize("way", [None, ON_HOST])
def test_a_plan_whose_fault_does_not_fire_fails(way: Way) -> None:
    with pytest.raises(BrokenInvariant, match="did not fire"):
        run_plan(_plan("raises", way, position=99))
