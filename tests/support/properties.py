"""What CPU staging promises, as checks that take the class: each raises AssertionError when it is broken.

The tests run them on the real class, in both ways of staging, and on variants broken on purpose to see that
they notice.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import simulated_accelerator as sim
import torch
from averaging_models import Parameters, bits, equal_parameters, odd_parameters, random_tensor
from replica_threads import Replica, run_replicas
from torch import nn
from ways import ON_HOST, arguments_of

from torchft.local_sgd import LocalSGD
from torchft.process_group import ProcessGroupGloo

MakeLocalSGD = Callable[..., LocalSGD]

# Arguments of the two ways of staging.
WINDOW, HOST = arguments_of(None), arguments_of(ON_HOST)
WAYS = [pytest.param(WINDOW, id="window"), pytest.param(HOST, id=ON_HOST)]


def make(cls: MakeLocalSGD, replica: Replica, model: nn.Module, offload: bool, **options: Any) -> LocalSGD:
    """Returns a LocalSGD over ``model`` that synchronizes at every step."""
    replica.model = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cls(replica.manager, model, optimizer, 1, offload, **options)


def synchronize_until_commit(replica: Replica, local_sgd: LocalSGD, tries: int = 3) -> None:
    """Synchronizes until the groups have committed one step, or fails after ``tries``."""
    step = replica.manager.current_step()
    for _ in range(tries):
        local_sgd.sync()
        if replica.manager.current_step() == step + 1:
            return
    raise AssertionError(f"no commit in {tries} synchronizations")


def equal_on_device(index: int) -> Parameters:
    """Returns 24 parameters of 4000 bytes each on the device of group ``index``."""
    return equal_parameters(index, 24, sim.device(index))


def odd_on_device(index: int) -> Parameters:
    """Returns parameters of all kinds on the device of group ``index``."""
    return odd_parameters(index, sim.device(index))


def extra_device_memory(
    cls: MakeLocalSGD,
    offload: bool,
    model_of: Callable[[int], nn.Module] = equal_on_device,
    synchronizations: int = 20,
    **options: Any,
) -> list[set[int]]:
    """Returns, per group, the peaks of extra device bytes of all synchronizations that were seen.

    Args:
        cls: LocalSGD.
        offload: whether it stages.
        model_of: makes the model of a group from its number, on its own device.
        synchronizations: how many, all of which have to be committed.
        options: further arguments of LocalSGD.
    """

    def body(replica: Replica) -> set[int]:
        model = model_of(replica.index)
        local_sgd = make(cls, replica, model, offload, **options)
        memory = sim.memory(replica.index)
        peaks = set()
        for _ in range(synchronizations):
            memory.reset_peak()
            entry = memory.alive
            local_sgd.sync()
            peaks.add(memory.peak - entry)
            sim.wait_until_alive(replica.index, entry)
        assert replica.manager.current_step() == synchronizations + 1, "not every synchronization committed"
        return peaks

    # What earlier tests left to the garbage collector must not be freed in the middle of a measurement.
    gc.collect()
    return run_replicas(2, body, sim.SimulatedProcessGroupGloo)


def check_device_memory(cls: MakeLocalSGD, **options: Any) -> None:
    """The extra device memory is exactly M, and nothing with a host all-reduce, every time."""
    expected = 0 if options == HOST else 4000
    for peaks in extra_device_memory(cls, True, **options):
        assert peaks == {expected}, f"{expected} bytes are right, the peaks were {sorted(peaks)}"


def check_copies(cls: MakeLocalSGD, **options: Any) -> None:
    """No copy between host and device needs a temporary, whatever the layouts, so that none is on the device.

    With a host all-reduce what is not dense in memory, and that alone, goes through a window of the largest.
    """
    expected = 384 if options == HOST else 480
    with sim.recorded_copies() as copies:
        seen = extra_device_memory(cls, True, odd_on_device, **options)
    for peaks in seen:
        assert peaks == {expected}, f"{expected} bytes are right, the peaks were {sorted(peaks)}"
    # 2 groups, 20 synchronizations, to the host and back, 13 parameters.
    assert len(copies) >= 2 * 20 * 2 * 13, len(copies)
    assert [copy for copy in copies if not copy.straight] == []


def check_rejection_keeps_parameters(cls: MakeLocalSGD, **options: Any) -> None:
    """A synchronization that is voted down leaves every bit of the parameters."""

    def body(replica: Replica) -> None:
        model = equal_parameters(replica.index, count=4)
        local_sgd = make(cls, replica, model, True, **options)
        before = bits(model)
        vote = replica.manager.should_commit

        def vote_no() -> bool:
            replica.manager.report_error(RuntimeError("injected"))
            return vote()

        replica.manager.should_commit = vote_no  # type: ignore[method-assign]
        local_sgd.sync()
        assert replica.manager.current_step() == 1, "the injected error did not reject the synchronization"
        assert bits(model) == before, "a rejected synchronization wrote to the parameters"

    run_replicas(2, body)


def check_mixes_with_release(cls: MakeLocalSGD, **options: Any) -> None:
    """A staged group beside an unstaged one gets the right average of transposed and strided parameters."""

    def tensors(seed: int) -> list[torch.Tensor]:
        return [random_tensor(seed, 4, 6).t(), random_tensor(seed + 10, 6, 8)[:, ::2]]

    def body(replica: Replica) -> None:
        model = Parameters(tensors(replica.index))
        staged = replica.index == 0
        synchronize_until_commit(replica, make(cls, replica, model, staged, **options if staged else {}))
        for parameter, a, b in zip(model.parameters(), tensors(0), tensors(1), strict=True):
            assert torch.equal(parameter, (a + b) / 2), "not the average of the two groups"

    run_replicas(2, body)


def check_votes_after_exception(cls: MakeLocalSGD, **options: Any) -> None:
    """After exceptions in the middle of a synchronization the next one pairs the right collectives."""
    count = 6

    def start(index: int) -> list[torch.Tensor]:
        return [torch.full((8,), float(100 * index + 10 * i)) for i in range(count)]

    def body(replica: Replica) -> None:
        model = Parameters(start(replica.index))
        local_sgd = make(cls, replica, model, True, **options)
        manager = replica.manager
        allreduce = manager.allreduce
        calls = 0

        def fail_at_third(tensor: torch.Tensor) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3 and replica.index == 0:
                raise RuntimeError("injected")
            work = allreduce(tensor)
            if calls == 3:
                # This group has launched a collective that the other one never answers.
                raise RuntimeError("injected")
            return work

        manager.allreduce = fail_at_third  # type: ignore[method-assign, assignment]
        with pytest.raises(RuntimeError, match="injected"):
            local_sgd.sync()
        assert calls == 3, "the injected failure did not happen"
        manager.allreduce = allreduce  # type: ignore[method-assign]
        local_sgd._outcome.at = None  # a variant may leave it set; the point here is what is committed next
        for _ in range(3):
            # In step: a group that has failed ends the other one here instead of in a quorum without it.
            replica.barrier.wait()
            local_sgd.sync()
            if manager.current_step() == 2:
                break
        assert manager.current_step() == 2, "no commit in three synchronizations"
        for parameter, a, b in zip(model.parameters(), start(0), start(1), strict=True):
            assert torch.equal(parameter, (a + b) / 2), "committed values that are not the average"

    logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)
    seconds = timedelta(seconds=3)
    run_replicas(2, body, lambda: ProcessGroupGloo(timeout=seconds), timeout=seconds)


PROPERTIES = [
    check_device_memory,
    check_copies,
    check_rejection_keeps_parameters,
    check_mixes_with_release,
    check_votes_after_exception,
]
