"""Faults at every point of a synchronization, drawn from seeds.

``FAULT_PLANS=500 pytest tests/faults/test_faults.py`` carries out that many plans instead of 40;
``FAULT_SEED=17 pytest tests/faults/test_faults.py`` that one alone.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fault_plans
import pytest
import torch
from fault_plans import KINDS, BrokenInvariant, Plan, run_plan
from torch import nn

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
        outcomes.append({"seed": seed, "kind": Plan.from_seed(seed).kind, "error": error})
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
    counts = collections.Counter(outcome["kind"] for outcome in outcomes)
    with capsys.disabled():
        print()
        for kind in KINDS:
            print(f"  {kind:22} {counts[kind]:4} {'#' * min(60, counts[kind])}")
    failed = [
        f"FAULT_SEED={outcome['seed']} pytest tests/test_faults.py -k test_plans  # {outcome['kind']}: "
        f"{outcome['error']}"
        for outcome in outcomes
        if outcome["error"]
    ]
    assert not failed, "\n".join(["plans failed; each alone:", *failed])
    assert len(outcomes) == len(seeds)


def test_forty_seeds_have_every_kind() -> None:
    assert {Plan.from_seed(seed).kind for seed in range(40)} == set(KINDS)


def _plan(kind: str, position: int = 2) -> Plan:
    return Plan(
        0, kind, groups=2, faulty=0, position=position, window_mb=(None, None), use_async_quorum=False
    )


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
        self._kept = (list(buffers.host), buffers.slot(0))
        return buffers


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        (_WritesBeforeTheVote, "vote_false"),
        (_WritesAfterARejection, "raises"),
        (_ForgetsTheFailedVote, "vote_raises"),
        (_KeepsTheBuffers, "vote_false"),
    ],
)
def test_plans_notice(broken: type[LocalSGD], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that breaks a promise fails a plan."""
    monkeypatch.setattr(fault_plans, "PATIENCE", 2.0)
    with pytest.raises(BrokenInvariant):
        run_plan(_plan(kind), local_sgd=broken)


def test_a_plan_whose_fault_does_not_fire_fails() -> None:
    with pytest.raises(BrokenInvariant, match="did not fire"):
        run_plan(_plan("raises", position=99))
