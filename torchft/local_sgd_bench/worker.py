"""One replica group of the bench: trains all cases side by side and sends what it measured."""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Optional

import torch
from torch import nn

from torchft._launch import cli
from torchft._launch.rank import pick_device, process_group
from torchft._launch.replicas import send
from torchft._staging.buffers import StagingBuffers
from torchft.local_sgd import LocalSGD
from torchft.local_sgd_bench.cases import StepFn, build
from torchft.local_sgd_bench.probe import MemoryProbe, ObservedManager, SyncMemory, device_statistics

PROG = "python -m torchft.local_sgd_bench.worker"

_LEARNING_RATE = 0.1
# Of a collective, and of the wait for the other groups. A crash ends the bench at once; these are for hangs.
_TIMEOUT = timedelta(seconds=120)
_ATTEMPTS = 3


def add_worker_options(parser: cli.Parser) -> None:
    """Adds the options that the groups need.

    Args:
        parser: the parser to add them to.
    """
    parser.add_argument(
        "--model",
        default="rfc",
        metavar="MODEL",
        help="rfc: the sizes of the RFC, 154.09 MiB in 102 tensors of at most 63.13 MiB; many: 800 small "
        "tensors; MODULE:CALLABLE: what returns (model, step_fn), where step_fn(step) returns the loss "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--pairs",
        type=cli.positive_int,
        default=20,
        metavar="N",
        help="synchronizations of each case that are compared, one with one (default: %(default)s)",
    )
    parser.add_argument(
        "--warm-up",
        type=cli.positive_int,
        default=2,
        metavar="N",
        help="synchronizations of each case before that, not timed; where the device has no memory "
        "statistics these count the temporaries (default: %(default)s)",
    )
    parser.add_common("--sync-every", default=1)
    parser.add_common(
        "--window-mb",
        action="append",
        default=[],
        help="also measure staging with this window, in MiB; may be repeated (0: as many parameters in "
        "flight as fit into the largest one's size)",
    )
    parser.add_common("--device")
    parser.add_common("--process-group")
    parser.add_common("--seed")


def case_names(options: argparse.Namespace) -> list[str]:
    """Returns the names of the cases, ``original`` first.

    Args:
        options: as parsed by a parser with ``add_worker_options``.
    """
    return list(_configurations(options))


def _configurations(options: argparse.Namespace) -> dict[str, tuple[bool, Optional[float]]]:
    """Returns by name: whether it stages, and the window in MiB."""
    configurations: dict[str, tuple[bool, Optional[float]]] = {
        "original": (False, None),
        "staged": (True, None),
    }
    for window in options.window_mb:
        configurations[f"window {window:g}"] = (True, window)
    return configurations


class _MeasuredLocalSGD(LocalSGD):
    """Times the synchronization proper, without the quorum, in which groups wait for each other."""

    probe: MemoryProbe
    milliseconds: float = 0.0
    host_bytes: int = 0
    device: torch.device

    def _perform_sync(self) -> None:
        _synchronize(self.device)
        self.probe.enter()
        begin = time.perf_counter()
        super()._perform_sync()
        _synchronize(self.device)
        self.milliseconds = (time.perf_counter() - begin) * 1e3

    def _take_memory(self) -> StagingBuffers:
        buffers = super()._take_memory()
        self.host_bytes = sum(tensor.untyped_storage().nbytes() for tensor in buffers.host)
        return buffers


class _Case:
    """A model of its own, trained and synchronized in one way.

    Args:
        name: of the case.
        manager: of this rank; all cases share it, and its connections.
        options: of the bench.
        device: where to train.
        stage: whether CPU staging is on.
        window: ``offload_window_mb``.
    """

    def __init__(
        self,
        name: str,
        manager: ObservedManager,
        options: argparse.Namespace,
        device: torch.device,
        stage: bool,
        window: Optional[float],
    ) -> None:
        self.name = name
        self.model: nn.Module
        self.step_fn: StepFn
        self.model, self.step_fn = build(options.model, device, options.seed)
        self._manager = manager
        self._options = options
        self._device = device
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=_LEARNING_RATE)
        self._local_sgd = _MeasuredLocalSGD(
            manager, self.model, self._optimizer, options.sync_every, stage, offload_window_mb=window
        )
        self._local_sgd.device = device

    def run(self, round_number: int, warm_up: bool) -> dict[str, Any]:
        """Trains up to and including one synchronization; returns what was measured."""
        losses, norms = [], []
        seconds = 0.0
        first = round_number * self._options.sync_every
        commits = self._manager.current_step()
        probe = self._observe(warm_up)
        with self._local_sgd:
            for step in range(first, first + self._options.sync_every):
                # The same randomness, batches and dropout alike, for every case; another for every group.
                torch.manual_seed(_step_seed(self._options.seed, step))
                begin = time.perf_counter()
                loss = self.step_fn(step)
                self._optimizer.zero_grad(set_to_none=True)
                loss.backward()
                _synchronize(self._device)
                seconds += time.perf_counter() - begin
                losses.append(float(loss.detach()))
                norms.append(_gradient_norm(self.model))
                begin = time.perf_counter()
                self._optimizer.step()
                _synchronize(self._device)
                seconds += time.perf_counter() - begin
        probe.leave()
        memory = self._finish(probe)
        rejected = self._repeat_rejected(commits)
        # Gradients of cases that wait for their turn would only take memory.
        self._optimizer.zero_grad(set_to_none=True)
        return {
            "round": round_number,
            "warm_up": warm_up,
            "case": self.name,
            "losses": losses,
            "gradient_norms": norms,
            "train_seconds": seconds,
            "sync_milliseconds": self._local_sgd.milliseconds,
            "rejected": rejected,
            **memory.as_json(),
        }

    def _observe(self, warm_up: bool) -> MemoryProbe:
        probe = MemoryProbe(self._device, count=warm_up)
        self._manager.probe = self._local_sgd.probe = probe
        return probe

    def _finish(self, probe: MemoryProbe) -> SyncMemory:
        self._manager.probe = None
        probe.memory.host_buffers = self._local_sgd.host_bytes
        return probe.memory

    def _repeat_rejected(self, commits: int) -> int:
        """Synchronizes again after a rejected vote, so that all cases go on from an average."""
        for attempt in range(_ATTEMPTS):
            if self._manager.current_step() > commits:
                return attempt
            milliseconds = self._local_sgd.milliseconds
            self._observe(False)
            self._local_sgd.sync()
            self._local_sgd.milliseconds = milliseconds
        if self._manager.current_step() > commits:
            return _ATTEMPTS
        raise RuntimeError(f"{self.name}: {_ATTEMPTS + 1} synchronizations in a row were rejected")


def measure(options: argparse.Namespace) -> None:
    """Runs all cases, in random order in each round, and sends the samples.

    Args:
        options: as parsed by a parser with ``add_worker_options``.
    """
    group = int(os.environ["REPLICA_GROUP_ID"])
    device = pick_device(options.device)
    manager = ObservedManager(
        pg=process_group(options.process_group, _TIMEOUT),
        state_dict=dict,
        load_state_dict=_refuse_to_heal,
        min_replica_size=int(os.environ["NUM_REPLICA_GROUPS"]),
        use_async_quorum=False,
        init_sync=False,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        replica_id=f"bench_{group}",
    )
    cases = [
        _Case(name, manager, options, device, *configuration)
        for name, configuration in _configurations(options).items()
    ]
    sizes = [parameter.nbytes for parameter in cases[0].model.parameters()]
    send(
        kind="begin",
        total_bytes=sum(sizes),
        largest_bytes=max(sizes),
        tensors=len(sizes),
        device=torch.get_device_module(device).get_device_name() if device.type == "cuda" else device.type,
        device_statistics=device_statistics(device) is not None,
    )
    for round_number in range(options.warm_up + options.pairs):
        # Whatever a case does to caches and to the frequency hits the next one, so that is not always the
        # same; but all groups must agree.
        order = random.Random(f"{options.seed} {round_number}").sample(cases, len(cases))
        for case in order:
            send(kind="sample", **case.run(round_number, round_number < options.warm_up))
    send(
        kind="finished",
        same_weights={case.name: _same_weights(cases[0].model, case.model) for case in cases},
    )
    manager.shutdown(wait=False)


def _step_seed(seed: int, step: int) -> int:
    return random.Random(f"{seed} {os.environ['REPLICA_GROUP_ID']} {step}").getrandbits(63)


def _refuse_to_heal(state: dict[str, Any]) -> None:
    raise RuntimeError("a group fell behind the others; nothing measured after that would be comparable")


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@torch.no_grad()
def _gradient_norm(model: nn.Module) -> float:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients])))


def _same_weights(model: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(_bits(parameter), _bits(other_parameter))
        for parameter, other_parameter in zip(model.parameters(), other.parameters(), strict=True)
    )


def _bits(parameter: torch.Tensor) -> torch.Tensor:
    # As bytes NaN equals itself, and 0.0 is not -0.0.
    return parameter.detach().flatten().view(torch.uint8)


def main(argv: Sequence[str]) -> int:
    """Measures in this replica group.

    Args:
        argv: the arguments.

    Returns:
        0.
    """
    parser = cli.Parser(PROG, "A replica group of the bench; the bench starts it.")
    add_worker_options(parser)
    measure(parser.parse_args(argv))
    return 0


if __name__ == "__main__":
    cli.run_rank(PROG, main)
