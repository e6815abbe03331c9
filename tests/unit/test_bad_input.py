"""Bad input that one group can see, refused; the table of it is in the pages, a test per row."""

from __future__ import annotations

import re
import sys
from datetime import timedelta
from fractions import Fraction
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import simulated_accelerator as sim
import torch
import torch.distributed as dist
from averaging_models import Parameters
from local_manager import LocalManager, staged
from properties import HOST, WAYS
from replica_threads import Replica, run_replicas
from torch import nn

from torchft import process_group
from torchft._staging.checks import window_bytes
from torchft._staging.units import MIB
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroupDummy,
    ProcessGroupNCCL,
    ProcessGroupWrapper,
)


class Silent:
    """Stands where no Manager may be asked anything: it has no methods."""


@pytest.mark.parametrize("sync_every", [0, -1, 1.5, 2.0, True, None])
def test_sync_every(sync_every: Any) -> None:
    with pytest.raises(ValueError, match="sync_every must be a whole number"):
        staged(Parameters([torch.zeros(2)]), Silent(), sync_every=sync_every)


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_dtype_without_average(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"parameter 'p1' has dtype .* which has no average"):
        staged(Parameters([torch.zeros(2), torch.zeros(2, dtype=dtype)]), Silent())


def test_meta_parameter() -> None:
    with pytest.raises(ValueError, match=r"'p0' is on the meta device.*to_empty"):
        staged(Parameters([torch.zeros(2, device="meta")]), Silent())


def test_sparse_parameter() -> None:
    with pytest.raises(ValueError, match=r"'p0' has layout torch.sparse_coo.*averages dense parameters only"):
        staged(Parameters([torch.zeros(2, 2).to_sparse()]), Silent())


def test_expanded_parameter() -> None:
    with pytest.raises(ValueError, match=r"'p0' of shape .* is expanded.*make it contiguous"):
        staged(Parameters([torch.zeros(2, 1).expand(2, 3)]), Silent())


def test_lazy_parameter() -> None:
    model = nn.LazyLinear(3)
    manager = LocalManager()
    local_sgd = staged(model, manager)
    with pytest.raises(ValueError, match="run one forward pass before"):
        local_sgd.sync()
    assert manager.quorums == 0
    model(torch.zeros(1, 2))
    local_sgd.sync()
    assert manager.quorums == 1


@pytest.mark.parametrize("window", [-1, float("nan"), float("inf"), True, "1", [8], -(10**400)])
def test_window(window: Any) -> None:
    with pytest.raises(ValueError, match="offload_window_mb must be None or a number of MiB"):
        staged(Parameters([torch.zeros(2)]), Silent(), offload_window_mb=window)


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (np.int32(2048), 2048 * MIB),
        (np.uint8(200), 200 * MIB),
        (np.float16(0.5), MIB // 2),
        (Fraction(1, 2), MIB // 2),
        (1e305, sys.maxsize),
        (10**400, sys.maxsize),
        (Fraction(10**400), sys.maxsize),
    ],
    ids=lambda value: type(value).__name__,
)
def test_window_of_any_kind_of_number(window: Any, expected: int) -> None:
    """Numbers of NumPy would wrap around, and large ones overflow."""
    assert window_bytes(window, True) == expected
    staged(Parameters([torch.zeros(2)]), offload_window_mb=window).sync()


def test_window_without_the_option() -> None:
    with pytest.raises(ValueError, match="needs offload_averaged_parameters_to_cpu=True"):
        staged(
            Parameters([torch.zeros(2)]),
            Silent(),
            offload_averaged_parameters_to_cpu=False,
            offload_window_mb=8,
        )


def test_option_that_is_no_bool() -> None:
    with pytest.raises(ValueError, match="must be True or False, got 'false'"):
        staged(Parameters([torch.zeros(2)]), Silent(), offload_averaged_parameters_to_cpu="false")


@pytest.mark.parametrize("switch", ["true", 1, None, [True]])
def test_host_allreduce_that_is_no_bool(switch: Any) -> None:
    match = rf"offload_allreduce_to_cpu must be True or False, got {re.escape(repr(switch))}"
    with pytest.raises(ValueError, match=match):
        staged(Parameters([torch.zeros(2)]), Silent(), offload_allreduce_to_cpu=switch)


def test_host_allreduce_without_the_option() -> None:
    with pytest.raises(ValueError, match="allreduce_to_cpu=True needs offload_averaged_parameters_to_cpu"):
        staged(Parameters([torch.zeros(2)]), Silent(), offload_averaged_parameters_to_cpu=False, **HOST)


@pytest.mark.parametrize("window", [0, 8])
def test_host_allreduce_with_a_window(window: float) -> None:
    match = f"has no window, and offload_window_mb is {window}: pass one of them"
    with pytest.raises(ValueError, match=match):
        staged(Parameters([torch.zeros(2)]), Silent(), offload_window_mb=window, **HOST)


class Named:
    """A process group of a backend that is not built in here."""

    def __init__(self, name: Any) -> None:
        self.getBackendName = lambda: name


@pytest.fixture
def third_party_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two backends as packages outside PyTorch register theirs: for an NPU, and for an NPU and the CPU."""
    backend = dist.Backend
    for registry in ("backend_capability", "backend_type_map", "default_device_backend_map", "_plugins"):
        monkeypatch.setattr(backend, registry, dict(getattr(backend, registry)))
    monkeypatch.setattr(backend, "backend_list", [*backend.backend_list])
    for name, devices in (("npuccl", ["npu"]), ("npugloo", ["npu", "cpu"])):
        monkeypatch.setattr(backend, name.upper(), name, raising=False)
        backend.register_backend(name, lambda *_: None, devices=devices)


def process_group_of(kind: str) -> Any:
    made = {
        "Wrapper of NCCL": lambda: ErrorSwallowingProcessGroupWrapper(ProcessGroupNCCL()),
        "Dummy": lambda: ProcessGroupDummy(0, 1),
        # Says nothing of itself.
        "Unnamed": lambda: ProcessGroupWrapper(),
    }
    if kind in made:
        return made[kind]()
    return getattr(process_group, f"ProcessGroup{kind}", lambda: Named(kind))()


@pytest.mark.usefixtures("third_party_backends")
@pytest.mark.filterwarnings("ignore:TORCH_.*_NONBLOCKING_TIMEOUT is not set")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NCCL", "torchft-nccl"),
        ("BabyNCCL", "torchft-baby-nccl"),
        ("XCCL", "torchft-xccl"),
        ("BabyXCCL", "torchft-baby-xccl"),
        ("Wrapper of NCCL", "torchft-nccl"),
        ("npuccl", "npuccl"),
        ("torchft-npuccl", "torchft-npuccl"),
    ],
)
def test_process_group_that_cannot_reduce_on_the_host(kind: str, name: str) -> None:
    manager = LocalManager(process_group=process_group_of(kind))
    # Whatever the device: the copies are on the host.
    model = Parameters([torch.zeros(2, device=sim.device())])
    match = f"reduces CPU tensors, and the Manager's is '{name}': pass the Manager a ProcessGroupGloo, or"
    with pytest.raises(ValueError, match=match):
        staged(model, manager, **HOST)
    staged(model, manager, offload_window_mb=0)
    # Without it the same holds for parameters that are on the host themselves.
    with pytest.raises(ValueError, match=f"'p0' is on the CPU, .* group, '{name}', can't reduce CPU tensors"):
        staged(Parameters([torch.zeros(2)]), manager)


@pytest.mark.usefixtures("third_party_backends")
@pytest.mark.parametrize("kind", ["Gloo", "BabyGloo", "Dummy", "Unnamed", "npugloo", "never heard of"])
@pytest.mark.parametrize("options", WAYS)
def test_process_group_that_may_reduce_on_the_host(kind: str, options: dict[str, Any]) -> None:
    staged(Parameters([torch.zeros(2)]), LocalManager(process_group=process_group_of(kind)), **options)


@pytest.mark.parametrize("double", [Silent(), LocalManager(), create_autospec(Manager)])
def test_double_of_a_manager_passes(double: Any) -> None:
    staged(Parameters([torch.zeros(2)]), double, **HOST)


class _StepOnly:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


@pytest.mark.parametrize("wrapper", ["step only", "torchft.optim.OptimizerWrapper"])
def test_optimizer_without_step_hooks(wrapper: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager: Any = Silent()
    wrapped = _StepOnly(optimizer) if wrapper == "step only" else OptimizerWrapper(manager, optimizer)
    with pytest.raises(ValueError, match=r"optimizer of type .* has no step hooks .*pass a torch\.optim"):
        staged(model, manager, optimizer=wrapped)


@pytest.mark.parametrize(("use_async_quorum", "init_sync"), [(True, True), (True, False), (False, True)])
def test_quorum_settings_that_destroy_weights(use_async_quorum: bool, init_sync: bool) -> None:
    manager = LocalManager(use_async_quorum=use_async_quorum, init_sync=init_sync)
    if use_async_quorum and init_sync:
        with pytest.raises(ValueError, match="use_async_quorum=False or init_sync=False"):
            staged(nn.Linear(2, 2), manager)
    else:
        staged(nn.Linear(2, 2), manager)


# What only real Managers show


def test_quorum_settings_are_read_from_the_real_manager() -> None:
    """The names of the Manager's private attributes are the release's."""

    def body(replica: Replica) -> None:
        with pytest.raises(ValueError, match="use_async_quorum=True and init_sync=True"):
            staged(Parameters([torch.zeros(2)]), replica.manager)

    run_replicas(
        1, body, manager_args={"use_async_quorum": True, "init_sync": True}, warm_up=False, min_replicas=1
    )


def test_dtype_without_average_in_one_group_only() -> None:
    """That group ends; the other one waits for it until its quorum times out, and is unchanged."""

    def body(replica: Replica) -> str:
        dtype = torch.int64 if replica.index == 0 else torch.float32
        model = Parameters([torch.ones(2, dtype=dtype)])
        try:
            local_sgd = staged(model, replica.manager)
        except ValueError as error:
            return str(error)
        replica.manager._quorum_timeout = timedelta(seconds=2)
        with pytest.raises(TimeoutError):
            local_sgd.sync()
        assert torch.equal(next(model.parameters()), torch.ones(2))
        return "quorum timed out"

    refused, waited = run_replicas(2, body)
    assert "torch.int64" in refused
    assert waited == "quorum timed out"
