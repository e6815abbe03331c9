"""What a synchronization that was interrupted leaves behind: old bits, a vote, no memory."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import simulated_accelerator as sim
import torch
from averaging_models import bits, equal_parameters
from local_manager import LocalManager, staged
from properties import WAYS, make
from replica_threads import Replica, run_replicas

from torchft import local_sgd
from torchft._staging.buffers import StagingBuffers
from torchft._staging.frames import drop_locals
from torchft.local_sgd import LocalSGD
from torchft.manager import ExceptionWithTraceback
from torchft.process_group import ProcessGroupGloo

both_ways = pytest.mark.parametrize("options", WAYS)


class Interrupting(LocalManager):
    """Raises ``error`` in the second all-reduce, or in the vote."""

    def __init__(self, error: BaseException, in_vote: bool = False) -> None:
        super().__init__()
        self.error = error
        self.in_vote = in_vote
        self.calls = 0
        self.votes = 0
        # Windows, and host tensors of a host all-reduce.
        self.reduced: list[weakref.ref[torch.Tensor]] = []

    def allreduce(self, tensor: torch.Tensor) -> Any:
        self.calls += 1
        self.reduced.append(weakref.ref(tensor if tensor._base is None else tensor._base))
        if self.calls == 2 and not self.in_vote:
            raise self.error
        return super().allreduce(tensor)

    def should_commit(self) -> bool:
        self.votes += 1
        if self.in_vote:
            raise self.error
        return super().should_commit()


@both_ways
def test_exception_before_the_vote_votes_no_and_passes(options: dict[str, Any]) -> None:
    model = equal_parameters(1, count=3)
    before = bits(model)
    manager = Interrupting(MemoryError("injected"))
    local = staged(model, manager, **options)
    with pytest.raises(MemoryError, match="injected"):
        local.sync()
    assert manager.votes == 1
    assert bits(model) == before
    manager.commit = True
    local.sync()


@both_ways
@pytest.mark.parametrize(
    ("error", "in_vote", "where"),
    [
        (KeyboardInterrupt(), False, "before its commit vote"),
        (SystemExit(1), False, "before its commit vote"),
        (TimeoutError("injected"), True, "in its commit vote"),
        (KeyboardInterrupt(), True, "in its commit vote"),
    ],
)
def test_synchronization_without_known_outcome_is_the_last(
    error: BaseException, in_vote: bool, where: str, options: dict[str, Any]
) -> None:
    model = equal_parameters(1, count=3)
    before = bits(model)
    manager = Interrupting(error, in_vote)
    local = staged(model, manager, **options)
    with pytest.raises(type(error)):
        local.sync()
    assert bits(model) == before
    quorums = manager.quorums
    with pytest.raises(RuntimeError, match=f"was left {where}.*start it again"):
        local.sync()
    assert manager.quorums == quorums, "the refusal must come before the quorum"


@both_ways
def test_exception_in_write_back_is_the_last(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = local_sgd._copy_local_tensor_to_parameter
    written = 0

    def fail_at_second(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        nonlocal written
        written += 1
        if written == 2:
            raise RuntimeError("injected")
        copy(parameter, tensor)

    monkeypatch.setattr(local_sgd, "_copy_local_tensor_to_parameter", fail_at_second)
    local = staged(equal_parameters(1, count=3), **options)
    with pytest.raises(RuntimeError, match="injected"):
        local.sync()
    with pytest.raises(RuntimeError, match="in the middle of write-back"):
        local.sync()


@both_ways
def test_no_memory_for_staging_rejects_before_any_collective(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("injected")

    manager = Interrupting(KeyboardInterrupt())
    local = staged(equal_parameters(1, count=3), manager, **options)
    monkeypatch.setattr(local_sgd, "StagingBuffers", no_memory)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        local.sync()
    assert (manager.calls, manager.votes) == (0, 1)


@both_ways
@pytest.mark.parametrize("in_vote", [False, True])
def test_held_exception_holds_no_buffers(in_vote: bool, options: dict[str, Any]) -> None:
    manager = Interrupting(ValueError("injected"), in_vote)
    local = staged(equal_parameters(1, count=3), manager, **options)
    with pytest.raises(ValueError, match="injected") as held:
        local.sync()
    gc.collect()
    assert manager.reduced
    assert all(memory() is None for memory in manager.reduced)
    assert held.value is manager.error


@both_ways
@pytest.mark.parametrize("how", ["cause", "context"])
def test_held_chain_of_exceptions_holds_no_buffers(how: str, options: dict[str, Any]) -> None:
    class Wrapping(Interrupting):
        def allreduce(self, tensor: torch.Tensor) -> Any:
            try:
                return super().allreduce(tensor)
            except ValueError as error:
                if how == "cause":
                    raise RuntimeError("wrapped") from error
                raise RuntimeError("wrapped")  # noqa: B904

    manager = Wrapping(ValueError("injected"))
    with pytest.raises(RuntimeError, match="wrapped") as held:
        staged(equal_parameters(1, count=3), manager, **options).sync()
    gc.collect()
    assert manager.reduced
    assert all(memory() is None for memory in manager.reduced)
    assert held.value.__context__ is manager.error


def test_dropping_locals_ends_no_suspended_generator() -> None:
    errors: list[Exception] = []

    def watchdog() -> Iterator[int]:
        try:
            raise ValueError("seen by the watchdog")
        except ValueError as error:
            errors.append(error)
        yield 1
        yield 2

    generator = watchdog()
    assert next(generator) == 1
    drop_locals(errors[0])
    assert next(generator) == 2


class FailingProcessGroup(ProcessGroupGloo):
    """Fails in the second all-reduce of a synchronization, inside the collective."""

    fail = False
    calls = 0

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        if self.fail:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("injected")
        return super().allreduce(tensors, opts)


@both_ways
def test_failed_collective_leaves_no_memory(options: dict[str, Any]) -> None:
    """The Manager keeps the exception, whose traceback would hold the memory until the next quorum."""

    def body(replica: Replica) -> None:
        model = equal_parameters(replica.index, 4, sim.device(replica.index))
        before = bits(model)
        host: list[weakref.ref[torch.Tensor]] = []

        class Watched(LocalSGD):
            def _take_memory(self) -> StagingBuffers:
                buffers = super()._take_memory()
                host.extend(map(weakref.ref, buffers.host))
                return buffers

        local = make(Watched, replica, model, True, **options)
        memory = sim.memory(replica.index)
        entry = memory.alive
        group = replica.process_group
        assert isinstance(group, FailingSimulated)
        group.fail = True
        local.sync()
        assert group.calls >= 2, "the injected failure did not happen"
        assert replica.manager.errored() is not None
        assert bits(model) == before
        sim.wait_until_alive(replica.index, entry)
        deadline = time.monotonic() + 5
        while any(tensor() is not None for tensor in host):
            assert time.monotonic() < deadline, "host tensors stay"
            time.sleep(0.001)
        assert len(host) == 4

    class FailingSimulated(FailingProcessGroup, sim.SimulatedProcessGroupGloo):
        pass

    logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)
    gc.collect()
    run_replicas(2, body, FailingSimulated)


class MaxRetries(sim.SimulatedProcessGroupGloo):
    """Fails in the second all-reduce of each synchronization while it is armed."""

    armed = False
    calls = 0

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        self.calls += self.armed
        if self.calls == 2:
            raise RuntimeError("injected")
        return super().allreduce(tensors, opts)


def test_vote_that_raises_after_a_failed_collective_leaves_no_memory() -> None:
    """With max_retries the vote itself raises; then, too, the exception of the collective holds buffers."""

    def body(replica: Replica) -> None:
        model = equal_parameters(replica.index, 4, sim.device(replica.index))
        local = make(LocalSGD, replica, model, True)
        entry = sim.memory(replica.index).alive
        group = replica.process_group
        assert isinstance(group, MaxRetries)
        group.armed = True
        with pytest.raises(RuntimeError, match="max_retries"):
            local.sync()
        assert replica.manager.errored() is not None
        sim.wait_until_alive(replica.index, entry)

    logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)
    gc.collect()
    run_replicas(2, body, MaxRetries, manager_args={"max_retries": 0})


class Reporting(LocalManager):
    """Two all-reduces of a round fail one after the other, and a log handler keeps what it was told."""

    def __init__(self, read_locals: bool) -> None:
        super().__init__()
        self._errored: Any = None
        self._read_locals = read_locals
        self.kept: list[BaseException] = []

    def allreduce(self, tensor: torch.Tensor) -> Any:
        return FailingWork(self, tensor)

    def errored(self) -> Any:
        return self._errored

    def report_error(self, error: Exception) -> None:
        self.commit = False
        self.kept.append(error)
        self._errored = ExceptionWithTraceback(error)
        trace = error.__traceback__
        while trace is not None and self._read_locals:
            # As a handler does that shows the locals of a traceback.
            assert dict(trace.tb_frame.f_locals)
            trace = trace.tb_next


class FailingWork:
    def __init__(self, manager: Reporting, tensor: torch.Tensor) -> None:
        self.manager = manager
        self.tensor = tensor

    def wait(self) -> bool:
        try:
            self._fail(self.tensor)
        except Exception as error:
            self.manager.report_error(error)
        return False

    def _fail(self, tensor: torch.Tensor) -> None:
        raise ConnectionError(f"injected, over {tensor.numel()} elements")


@pytest.mark.parametrize("read_locals", [False, True])
@pytest.mark.parametrize(
    "options", [{"offload_window_mb": 1}, {"offload_allreduce_to_cpu": True}], ids=["window", "host"]
)
def test_several_kept_failures_hold_no_memory(options: dict[str, Any], read_locals: bool) -> None:
    model = equal_parameters(1, 3, sim.device(6))
    manager = Reporting(read_locals)
    local = staged(model, manager, **options)
    references: list[weakref.ref[torch.Tensor]] = []
    take = local._take_memory

    def watched() -> Any:
        buffers = take()
        references.extend(weakref.ref(tensor) for tensor in buffers.host)
        return buffers

    local._take_memory = watched  # type: ignore[method-assign]
    gc.collect()
    entry = sim.memory(6).alive
    local.sync()
    assert len(manager.kept) == 3
    assert sim.memory(6).alive == entry
    assert all(reference() is None for reference in references)
