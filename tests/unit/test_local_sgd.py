"""LocalSGD with CPU staging: results, refusals, what it tells, and what it leaves behind."""

from __future__ import annotations

import gc
import inspect
import logging
import weakref
from collections.abc import Iterator
from typing import Any, Optional
from unittest.mock import create_autospec

import pytest
import simulated_accelerator as sim
import torch
import torch.distributed as dist
from averaging_models import Parameters, bits, equal_parameters, odd_parameters, random_tensor
from properties import make, synchronize_until_commit
from replica_threads import Replica, run_replicas
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchft import _upstream_local_sgd, local_sgd
from torchft.local_sgd import LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo
from torchft.work import _DummyWork

RELEASE, STAGED = None, "one at a time"


class LocalManager:
    """Stands for a Manager of a quorum of one where no collective is needed."""

    def __init__(self, commit: bool = True, use_async_quorum: bool = False, init_sync: bool = False) -> None:
        self._use_async_quorum = use_async_quorum
        self._init_sync = init_sync
        self.commit = commit
        self.quorums = 0

    def start_quorum(self) -> None:
        self.quorums += 1

    def wait_quorum(self) -> None:
        pass

    def allreduce(self, tensor: torch.Tensor) -> Any:
        return _DummyWork(tensor)

    def should_commit(self) -> bool:
        return self.commit

    def errored(self) -> Optional[Exception]:
        return None

    def report_error(self, error: Exception) -> None:
        self.commit = False


def staged(model: nn.Module, manager: Any = None, sync_every: Any = 1, **options: Any) -> LocalSGD:
    # A model without parameters has no optimizer of its own.
    optimizer = torch.optim.SGD([*model.parameters()] or [torch.zeros(1)], lr=0.1)
    stand_in: Any = manager or LocalManager()
    return LocalSGD(stand_in, model, optimizer, sync_every, True, **options)


def averaged_bits(modes: list[Any]) -> list[list[bytes]]:
    """Synchronizes one group per mode three times; returns the bits of all parameters, by group."""

    def body(replica: Replica) -> list[bytes]:
        model = odd_parameters(replica.index + 1)
        mode = modes[replica.index]
        window = {} if isinstance(mode, str) or mode is None else {"offload_window_mb": mode}
        local = make(LocalSGD, replica, model, mode is not RELEASE, **window)
        for step in range(3):
            synchronize_until_commit(replica, local)
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    parameter += random_tensor(
                        1000 * replica.index + 50 * step + number, *parameter.shape
                    ).to(parameter.dtype)
        synchronize_until_commit(replica, local)
        return bits(model)

    return run_replicas(len(modes), body)


@pytest.fixture(scope="module")
def release_bits() -> dict[int, list[bytes]]:
    return {groups: averaged_bits([RELEASE] * groups)[0] for groups in (2, 3)}


@pytest.mark.parametrize(
    "modes",
    [[STAGED, STAGED], [STAGED, RELEASE], [RELEASE, 0], [0.001, 100], [STAGED, RELEASE, 0]],
    ids=str,
)
def test_bit_identical_to_release_and_mixed(modes: list[Any], release_bits: dict[int, list[bytes]]) -> None:
    for group in averaged_bits(modes):
        assert group == release_bits[len(modes)]


def test_signature_extends_the_release() -> None:
    ours = list(inspect.signature(LocalSGD.__init__).parameters.values())
    release = list(inspect.signature(_upstream_local_sgd.LocalSGD.__init__).parameters.values())
    assert [p.name for p in ours[: len(release)]] == [p.name for p in release]
    assert [(p.name, p.default) for p in ours[len(release) :]] == [
        ("offload_averaged_parameters_to_cpu", False),
        ("offload_window_mb", None),
    ]


def test_calls_of_today_stay_valid() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    LocalSGD(create_autospec(Manager), model, optimizer, 2)
    LocalSGD(manager=create_autospec(Manager), model=model, optimizer=optimizer, sync_every=2)
    LocalSGD(create_autospec(Manager), model, optimizer, 2, True)


def test_every_name_of_the_release_is_reachable() -> None:
    for name in vars(_upstream_local_sgd):
        assert hasattr(local_sgd, name), name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = local_sgd.no_such_name  # pyright: ignore[reportAttributeAccessIssue]


def test_optimizer_hooks_drive_the_staged_path() -> None:
    model = equal_parameters(1, count=2)
    manager = LocalManager()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSGD(_with_hooks(manager), model, optimizer, 2, True):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert manager.quorums == 0
        optimizer.step()
        assert manager.quorums == 1


def _with_hooks(manager: LocalManager) -> Any:
    manager.disallow_state_dict_read = lambda: None  # type: ignore[attr-defined]
    manager.allow_state_dict_read = lambda: None  # type: ignore[attr-defined]
    return manager


@pytest.mark.parametrize("commit", [True, False])
def test_parameters_keep_storage_and_averages_have_no_history(commit: bool) -> None:
    model = odd_parameters(1)
    seen: list[torch.Tensor] = []

    class Recording(LocalManager):
        def allreduce(self, tensor: torch.Tensor) -> Any:
            seen.append(tensor)
            tensor.mul_(2)
            return _DummyWork(tensor)

    before = [p.detach().clone() for p in model.parameters()]
    storages = [p.data_ptr() for p in model.parameters()]
    staged(model, Recording(commit)).sync()
    assert len(seen) == len(before)
    assert all(t.grad_fn is None and not t.requires_grad for t in seen)
    assert [p.data_ptr() for p in model.parameters()] == storages
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old * 2 if commit else old)
        assert parameter.grad_fn is None


def test_model_without_parameters_votes() -> None:
    manager = LocalManager()
    staged(nn.Module(), manager).sync()
    assert manager.quorums == 1


def test_parameters_on_several_devices() -> None:
    tensors = [
        random_tensor(1, 100).to(sim.device(3)),
        random_tensor(2, 50),
        random_tensor(3, 300).to(sim.device(4)),
        random_tensor(4, 200).to(sim.device(3)),
    ]
    model = Parameters(tensors)
    entry = {index: sim.memory(index).alive for index in (3, 4)}
    for index in entry:
        sim.memory(index).reset_peak()
    before = bits(model)
    staged(model, offload_window_mb=0).sync()
    assert bits(model) == before
    # M of each device.
    assert {index: sim.memory(index).peak - alive for index, alive in entry.items()} == {3: 800, 4: 1200}


def test_healing_in_the_vote_may_replace_parameters() -> None:
    """load_state_dict(assign=True) puts new Parameter objects into the model; those get the average."""
    model = equal_parameters(1, count=3)
    healed = {name: tensor + 1 for name, tensor in model.state_dict().items()}

    class Healing(LocalManager):
        def should_commit(self) -> bool:
            model.load_state_dict(healed, assign=True)
            return True

    averages = bits(model)
    local = staged(model, Healing())
    old = list(model.parameters())
    local.sync()
    assert all(a is not b for a, b in zip(model.parameters(), old, strict=True))
    assert bits(model) == averages


def test_offloaded_shards_take_no_device_memory_in_write_back() -> None:
    """FSDP2's CPU offload keeps the shards of an accelerator's mesh on the host."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = DeviceMesh(sim.NAME, [0])

        def offloaded(seed: int) -> DTensor:
            # As FSDP2 makes them: from_local would move the shard to the device of the mesh.
            shard = random_tensor(seed, 1000)
            meta = TensorMeta(shard.shape, shard.stride(), shard.dtype)
            return DTensor(shard, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=True)  # pyright: ignore[reportCallIssue]

        model = Parameters(offloaded(seed) for seed in range(3))
        shards = [shard for p in model.parameters() if isinstance(p, DTensor) for shard in [p.to_local()]]
        assert len(shards) == 3
        assert all(shard.device.type == "cpu" for shard in shards)

        class Doubling(LocalManager):
            def allreduce(self, tensor: torch.Tensor) -> Any:
                return _DummyWork(tensor.mul_(2))

        gc.collect()
        memory = sim.memory(0)
        memory.reset_peak()
        entry = memory.alive
        staged(model, Doubling()).sync()
        assert memory.peak == entry
        for seed, shard in enumerate(shards):
            assert torch.equal(shard, 2 * random_tensor(seed, 1000))
    finally:
        dist.destroy_process_group()


# What is refused


@pytest.mark.parametrize("window", [True, "8", -1, float("nan"), float("inf"), [8]])
def test_window_that_is_no_number_of_mib(window: Any) -> None:
    with pytest.raises(ValueError, match="offload_window_mb must be None or a number of MiB"):
        staged(nn.Linear(2, 2), offload_window_mb=window)


def test_window_without_the_option() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="needs offload_averaged_parameters_to_cpu=True"):
        LocalSGD(create_autospec(Manager), model, optimizer, 1, offload_window_mb=8)


def test_option_that_is_no_bool() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="must be True or False, got 'false'"):
        LocalSGD(create_autospec(Manager), model, optimizer, 1, "false")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("sync_every", [0, -1, 1.5, True, None])
def test_sync_every_that_is_no_step_count(sync_every: Any) -> None:
    with pytest.raises(ValueError, match="sync_every must be a whole number"):
        staged(nn.Linear(2, 2), sync_every=sync_every)


@pytest.mark.parametrize(("use_async_quorum", "init_sync"), [(True, True), (True, False), (False, True)])
def test_quorum_settings_that_destroy_weights(use_async_quorum: bool, init_sync: bool) -> None:
    manager = LocalManager(use_async_quorum=use_async_quorum, init_sync=init_sync)
    if use_async_quorum and init_sync:
        with pytest.raises(ValueError, match="use_async_quorum=False or init_sync=False"):
            staged(nn.Linear(2, 2), manager)
    else:
        staged(nn.Linear(2, 2), manager)


def test_quorum_settings_are_read_from_the_real_manager() -> None:
    """The names of the Manager's private attributes are the release's."""

    def body(replica: Replica) -> None:
        with pytest.raises(ValueError, match="use_async_quorum=True and init_sync=True"):
            make(LocalSGD, replica, nn.Linear(2, 2), True)

    run_replicas(1, body, manager_args={"use_async_quorum": True, "init_sync": True}, warm_up=False)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, dtype=torch.int64), "dtype torch.int64"),
        (torch.zeros(2, dtype=torch.bool), "dtype torch.bool"),
        (torch.zeros(2, dtype=torch.complex64), "dtype torch.complex64"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "dtype torch.float8_e4m3fn"),
        (torch.zeros(2, device="meta"), "meta device"),
        (torch.zeros(2, 1).expand(2, 3), "expanded"),
        (torch.zeros(2, 2).to_sparse(), "layout torch.sparse_coo"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parameter_that_has_no_average(tensor: torch.Tensor, message: str) -> None:
    model = nn.Module()
    model.register_parameter("odd", nn.Parameter(tensor, requires_grad=False))
    with pytest.raises(ValueError, match=f"parameter 'odd'.*{message}"):
        staged(model)


def test_lazy_parameters_are_refused_while_uninitialized() -> None:
    model = nn.LazyLinear(3)
    manager = LocalManager()
    local = LocalSGD(manager, model, torch.optim.SGD(model.parameters(), lr=0.1), 1, True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="run one forward pass"):
        local.sync()
    assert manager.quorums == 0
    model(torch.zeros(1, 2))
    local.sync()
    assert manager.quorums == 1


# What it tells


@pytest.mark.parametrize("commit", [True, False])
def test_log_lines(commit: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torchft.local_sgd")
    local = staged(equal_parameters(1, count=4, size=1 << 18), LocalManager(commit), offload_window_mb=2)
    local.sync()
    local.sync()
    first, *rest = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert first == (
        "CPU staging is on: 4 parameters in 2 rounds; cpu: S = 4.00 MiB, M = 1.00 MiB, window 2.00 MiB; "
        "host memory 6.00 MiB"
    )
    outcome, end = ("committed", "ms to write back") if commit else ("rejected", "nothing written")
    assert len(rest) == 2
    for line in rest:
        assert line.startswith(f"staged synchronization {outcome}: ")
        assert "ms to reduce and stage" in line
        assert line.endswith(end)


def test_spans_show_in_a_trace() -> None:
    local = staged(equal_parameters(1, count=2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        local.sync()
    names = {event.name for event in trace.events() or []}
    assert {"torchft::local_sgd::reduce_and_stage", "torchft::local_sgd::write_back"} <= names


def test_staging_off_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torchft.local_sgd")
    model = nn.Linear(2, 2)
    manager: Any = LocalManager()
    LocalSGD(manager, model, torch.optim.SGD(model.parameters()), 1).sync()
    assert not caplog.records


# What it leaves behind


class Interrupting(LocalManager):
    """Raises ``error`` in the second all-reduce, or in the vote."""

    def __init__(self, error: BaseException, in_vote: bool = False) -> None:
        super().__init__()
        self.error = error
        self.in_vote = in_vote
        self.calls = 0
        self.votes = 0
        self.windows: list[weakref.ref[torch.Tensor]] = []

    def allreduce(self, tensor: torch.Tensor) -> Any:
        self.calls += 1
        self.windows.append(weakref.ref(tensor._base))  # type: ignore[arg-type]
        if self.calls == 2 and not self.in_vote:
            raise self.error
        return super().allreduce(tensor)

    def should_commit(self) -> bool:
        self.votes += 1
        if self.in_vote:
            raise self.error
        return super().should_commit()


def test_exception_before_the_vote_votes_no_and_passes() -> None:
    model = equal_parameters(1, count=3)
    before = bits(model)
    manager = Interrupting(MemoryError("injected"))
    local = staged(model, manager)
    with pytest.raises(MemoryError, match="injected"):
        local.sync()
    assert manager.votes == 1
    assert bits(model) == before
    manager.commit = True
    local.sync()


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
    error: BaseException, in_vote: bool, where: str
) -> None:
    model = equal_parameters(1, count=3)
    before = bits(model)
    manager = Interrupting(error, in_vote)
    local = staged(model, manager)
    with pytest.raises(type(error)):
        local.sync()
    assert bits(model) == before
    quorums = manager.quorums
    with pytest.raises(RuntimeError, match=f"was left {where}.*start it again"):
        local.sync()
    assert manager.quorums == quorums, "the refusal must come before the quorum"


def test_exception_in_write_back_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = local_sgd._copy_local_tensor_to_parameter
    written = 0

    def fail_at_second(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        nonlocal written
        written += 1
        if written == 2:
            raise RuntimeError("injected")
        copy(parameter, tensor)

    monkeypatch.setattr(local_sgd, "_copy_local_tensor_to_parameter", fail_at_second)
    local = staged(equal_parameters(1, count=3))
    with pytest.raises(RuntimeError, match="injected"):
        local.sync()
    with pytest.raises(RuntimeError, match="in the middle of write-back"):
        local.sync()


def test_no_memory_for_staging_rejects_before_any_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("injected")

    manager = Interrupting(KeyboardInterrupt())
    local = staged(equal_parameters(1, count=3), manager)
    monkeypatch.setattr(local_sgd, "StagingBuffers", no_memory)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        local.sync()
    assert (manager.calls, manager.votes) == (0, 1)


@pytest.mark.parametrize("in_vote", [False, True])
def test_held_exception_holds_no_buffers(in_vote: bool) -> None:
    manager = Interrupting(ValueError("injected"), in_vote)
    local = staged(equal_parameters(1, count=3), manager)
    with pytest.raises(ValueError, match="injected") as held:
        local.sync()
    gc.collect()
    assert manager.windows
    assert all(window() is None for window in manager.windows)
    assert held.value is manager.error


@pytest.mark.parametrize("how", ["cause", "context"])
def test_held_chain_of_exceptions_holds_no_buffers(how: str) -> None:
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
        staged(equal_parameters(1, count=3), manager).sync()
    gc.collect()
    assert manager.windows
    assert all(window() is None for window in manager.windows)
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
    local_sgd._drop_locals(errors[0])
    assert next(generator) == 2


def test_staging_off_asks_no_more_of_the_model_than_the_release() -> None:
    class OnlyParameters:
        def parameters(self) -> list[torch.Tensor]:
            return []

    model: Any = OnlyParameters()
    manager: Any = LocalManager()
    LocalSGD(manager, model, torch.optim.SGD([torch.zeros(1)]), 1).sync()


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


def test_failed_collective_leaves_no_memory() -> None:
    """The Manager keeps the exception, whose traceback would hold the window until the next quorum."""

    def body(replica: Replica) -> None:
        model = equal_parameters(replica.index, 4, sim.device(replica.index))
        before = bits(model)
        local = make(LocalSGD, replica, model, True)
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

    class FailingSimulated(FailingProcessGroup, sim.SimulatedProcessGroupGloo):
        pass

    logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)
    gc.collect()
    run_replicas(2, body, FailingSimulated)
