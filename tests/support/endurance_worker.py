"""Hundreds of synchronizations of two replica groups, with counts of everything that could pile up.

``python tests/support/endurance_worker.py PATH [LEAK...]`` carries them out in this process with a real
Lighthouse, real Managers and real Gloo on the simulated accelerator, and prints one line of JSON. PATH is one
of ``PATHS``; each LEAK is one of ``LEAKS``, and is what makes the last group leak on purpose.

Seeded synchronizations are rejected in three ways.
"""

from __future__ import annotations

import collections
import ctypes
import gc
import json
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Optional

import psutil
import simulated_accelerator as sim
import torch
from averaging_models import Parameters, bits, random_tensor
from memory_replicas import host_bytes
from replica_threads import Replica, run_replicas
from ways import ON_HOST, Way, arguments_of

from torchft import local_sgd
from torchft._staging.buffers import StagingBuffers
from torchft.local_sgd import LocalSGD
from torchft.manager import Manager

SYNCHRONIZATIONS = 300
# Before the first sample: all kinds have happened, caches and arenas are filled.
WARM_UP = 60
SAMPLE_EVERY = 20
GROUPS = 2
RELEASE = "release"
# How each group stages.
PATHS: dict[str, Sequence[Way]] = {"window": (None, 0), ON_HOST: (ON_HOST,) * GROUPS, RELEASE: ()}
# Elements; the largest parameter, which is what is leaked, has 256 KiB.
SIZES = (64 * 1024, 100, 64 * 1024, 1)
LARGEST = 0

COMMITTED = "committed"
# A collective raises, in all groups.
RAISES = "raises"
# Something reports an error before the vote, in all groups.
REPORTED = "reported"
# One group reports an error before the vote, the others commit: it heals in the next synchronization.
BEHIND = "behind"
KINDS = (COMMITTED, RAISES, REPORTED, BEHIND)
WEIGHTS = (80, 8, 6, 6)
# The last ones, of which the end result is compared, are not made to fail.
CLEAN_AT_THE_END = 5
# Only a machine that stands still makes the Managers wait so long.
TIMEOUT = timedelta(seconds=60)


def plan() -> list[tuple[str, int]]:
    """Returns for each synchronization its kind, and at which parameter a collective raises."""
    rng = random.Random(6)
    kinds = (
        rng.choices(KINDS, WEIGHTS, k=SYNCHRONIZATIONS - CLEAN_AT_THE_END) + [COMMITTED] * CLEAN_AT_THE_END
    )
    return [(kind, rng.randrange(len(SIZES))) for kind in kinds]


# What a leaking group keeps of a synchronization, or of a rejected one.
KEPT: list[object] = []


def _idle_thread() -> threading.Thread:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    return thread


LEAKS: dict[str, Callable[[StagingBuffers], object]] = {
    "host tensor": lambda buffers: buffers.host[LARGEST],
    "window": lambda buffers: buffers.slot(LARGEST),
    "file": lambda buffers: os.dup(0),
    "thread": lambda buffers: _idle_thread(),
    "object": lambda buffers: [],
    # Only of rejected synchronizations: the exception, whose frames hold the window.
    "failure": lambda buffers: None,
}


class LeakingLocalSGD(LocalSGD):
    """Keeps something of every synchronization.

    Attributes:
        leaks: names of ``LEAKS``.
    """

    leaks: Sequence[str] = ()

    def _take_memory(self) -> StagingBuffers:
        buffers = super()._take_memory()
        KEPT.extend(LEAKS[leak](buffers) for leak in self.leaks)
        return buffers

    def _perform_sync(self) -> None:
        if "failure" in self.leaks:
            KEEPING.add(self._manager)
        super()._perform_sync()


# Whose failures are kept, as by somebody who does not clear their frames.
KEEPING: set[Manager] = set()
_drop = local_sgd.drop_failed_collective


def _keep_or_drop(manager: Manager) -> None:
    if manager in KEEPING:
        KEPT.append(manager.errored())
    else:
        _drop(manager)


local_sgd.drop_failed_collective = _keep_or_drop


class RejectingProcessGroup(sim.SimulatedProcessGroupGloo):
    """Gloo that can raise in place of an all-reduce.

    Attributes:
        raise_at: which all-reduce of the next synchronization raises; None: none.
        configured: how often it was configured.
    """

    def __init__(self) -> None:
        super().__init__(timeout=TIMEOUT)
        self.raise_at: Optional[int] = None
        self.configured = 0

    def configure(self, *args: Any, **kwargs: Any) -> None:
        self.configured += 1
        super().configure(*args, **kwargs)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        if self.raise_at is not None:
            self.raise_at -= 1
            if self.raise_at < 0:
                raise RuntimeError("injected: a collective raises")
        return super().allreduce(tensors, opts)


@dataclass
class Sample:
    """What is in use after a number of synchronizations.

    Attributes:
        synchronizations: how many.
        resident: bytes of this process in memory.
        allocated: bytes in use from malloc, memory of CPU tensors included.
        device: bytes on the simulated devices.
        files: open file descriptors.
        threads: threads of the process, those of Gloo and of the Managers' servers included.
        objects: Python objects that the garbage collector knows, without those of before half the warm-up.
        types: the most frequent of their types, with counts.
    """

    synchronizations: int
    resident: int = 0
    allocated: int = 0
    device: int = 0
    files: int = 0
    threads: int = 0
    objects: int = 0
    types: dict[str, int] = field(default_factory=dict)

    @classmethod
    def take(cls, synchronizations: int) -> Sample:
        """Measures once nothing falls any more: threads let go of things a little later."""
        sample = cls._now(synchronizations)
        deadline = time.monotonic() + 10
        unchanged = 0
        while unchanged < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
            later = cls._now(synchronizations)
            fell = any(
                getattr(later, name) < getattr(sample, name)
                for name in ("device", "files", "threads", "objects")
            )
            unchanged = 0 if fell else unchanged + 1
            if fell:
                sample = later
        objects = gc.get_objects()
        counts = collections.Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in objects)
        sample.types = dict(counts.most_common(200))
        return sample

    @classmethod
    def _now(cls, synchronizations: int) -> Sample:
        gc.collect()
        # What malloc keeps for later is no leak.
        ctypes.CDLL(None).malloc_trim(0)
        process = psutil.Process()
        return cls(
            synchronizations,
            resident=process.memory_info().rss,
            allocated=host_bytes(),
            device=sum(sim.memory(group).alive for group in range(GROUPS)),
            files=process.num_fds(),
            threads=process.num_threads(),
            objects=len(gc.get_objects()),
        )


class Group:
    """One replica group and its training.

    Attributes:
        outcomes: for each synchronization its planned kind and what became of it.
        unconfigured: synchronizations after a rejection whose process group was not configured anew.
        heals: how often it took a peer's state over.
    """

    def __init__(self, replica: Replica, path: str, leaks: Sequence[str]) -> None:
        self.replica = replica
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.unconfigured: list[int] = []
        self.heals = 0
        index, device = replica.index, sim.device(replica.index)
        # Identical in all groups; what they train differs.
        model = Parameters(random_tensor(number, size).to(device) for number, size in enumerate(SIZES))
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = random_tensor(1000 * (index + 1) + number, parameter.numel()).to(device)
        self.model = replica.model = model
        # A checkpoint for a peer is made of host tensors, as that of a GPU is.
        model.state_dict = self._state_dict  # type: ignore[method-assign]
        model.load_state_dict = self._load_state_dict  # type: ignore[method-assign]
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        leaking = bool(leaks) and index == GROUPS - 1
        self.local_sgd = (LeakingLocalSGD if leaking else LocalSGD)(
            replica.manager,
            model,
            self.optimizer,
            sync_every=1,
            offload_averaged_parameters_to_cpu=path != RELEASE,
            **({} if path == RELEASE else arguments_of(PATHS[path][index])),
        )
        if isinstance(self.local_sgd, LeakingLocalSGD):
            self.local_sgd.leaks = leaks
        self._vote = replica.manager.should_commit
        replica.manager.should_commit = self._vote_as_planned  # type: ignore[method-assign]
        self._reports_error = False
        self._committed = True

    def _state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"values": [parameter.detach().cpu() for parameter in self.model.parameters()]}

    @torch.no_grad()
    def _load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.heals += 1
        for parameter, value in zip(self.model.parameters(), state_dict["values"], strict=True):
            parameter.copy_(value.to(parameter.device))

    def _vote_as_planned(self) -> bool:
        if self._reports_error:
            self.replica.manager.report_error(RuntimeError("injected: an error before the vote"))
        self._committed = self._vote()
        return self._committed

    def train(self, rejected: list[bool], samples: list[Sample]) -> None:
        """Takes all steps; group 0 samples.

        Args:
            rejected: shared by all groups: whether the last synchronization of each was rejected.
            samples: where samples go.
        """
        index, group = self.replica.index, self.replica.process_group
        assert isinstance(group, RejectingProcessGroup)
        with self.local_sgd:
            for number, (kind, position) in enumerate(plan()):
                if number == WARM_UP // 2:
                    self._freeze()
                if number >= WARM_UP and number % SAMPLE_EVERY == 0:
                    self._sample(number, samples)
                after_rejection = any(rejected)
                configured = group.configured
                group.raise_at = position if kind == RAISES else None
                self._reports_error = kind == REPORTED or (kind == BEHIND and index == number % GROUPS)
                self.replica.barrier.wait()
                self.optimizer.step()
                if after_rejection and group.configured == configured:
                    self.unconfigured.append(number)
                rejected[index] = not self._committed
                expected = kind if kind != BEHIND or self._reports_error else COMMITTED
                self.outcomes[f"{expected}: {'committed' if self._committed else 'rejected'}"] += 1
                self.replica.barrier.wait()
        self._sample(SYNCHRONIZATIONS, samples)

    def _sample(self, number: int, samples: list[Sample]) -> None:
        self.replica.barrier.wait()
        if self.replica.index == 0:
            samples.append(Sample.take(number))
        self.replica.barrier.wait()

    def _freeze(self) -> None:
        """Takes what there is out of the count: PyTorch's own objects are hundreds of thousands."""
        self.replica.barrier.wait()
        if self.replica.index == 0:
            gc.collect()
            gc.freeze()
        self.replica.barrier.wait()


def main(arguments: Sequence[str]) -> None:
    """Trains, and prints the samples and what happened as JSON."""
    path, *leaks = arguments
    assert path in PATHS
    assert set(leaks) <= set(LEAKS)
    # Tracebacks of what is made to fail.
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    rejected = [False] * GROUPS
    samples: list[Sample] = []

    def body(replica: Replica) -> dict[str, Any]:
        group = Group(replica, path, leaks)
        begin = time.perf_counter()
        group.train(rejected, samples)
        return {
            "outcomes": group.outcomes,
            "unconfigured": group.unconfigured,
            "heals": group.heals,
            "seconds": time.perf_counter() - begin,
            "bits": hash(tuple(bits(group.model))),
        }

    groups = run_replicas(GROUPS, body, RejectingProcessGroup, timeout=TIMEOUT)
    print(json.dumps({"groups": groups, "samples": [asdict(sample) for sample in samples]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
