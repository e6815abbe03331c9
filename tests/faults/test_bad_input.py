"""The table of bad input in docs/source/failures.rst: a test per row."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from places import SUPPORT
from replica_threads import Replica, run_replicas
from torch import nn

from torchft.local_sgd import LocalSGD
from torchft.optim import OptimizerWrapper


class Silent:
    """Stands where no Manager may be asked anything: it has no methods."""


def model_of(*tensors: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for index, tensor in enumerate(tensors):
        model.register_parameter(f"p{index}", nn.Parameter(tensor, requires_grad=False))
    return model


def staged(manager: Any, model: nn.Module, optimizer: Any = None, sync_every: Any = 1) -> LocalSGD:
    if optimizer is None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    return LocalSGD(manager, model, optimizer, sync_every, True)


# What one group can see


@pytest.mark.parametrize("sync_every", [0, -1, 2.0, True, None])
def test_sync_every(sync_every: Any) -> None:
    with pytest.raises(ValueError, match="sync_every must be a whole number"):
        staged(Silent(), model_of(torch.zeros(2)), sync_every=sync_every)


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_dtype_without_average(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"parameter 'p1' has dtype .* which has no average"):
        staged(Silent(), model_of(torch.zeros(2), torch.zeros(2, dtype=dtype)))


def test_meta_parameter() -> None:
    with pytest.raises(ValueError, match=r"'p0' is on the meta device.*to_empty"):
        staged(Silent(), model_of(torch.zeros(2, device="meta")))


def test_sparse_parameter() -> None:
    with pytest.raises(ValueError, match="averages dense parameters only"):
        staged(Silent(), model_of(torch.zeros(2, 2).to_sparse()))


def test_expanded_parameter() -> None:
    with pytest.raises(ValueError, match=r"is expanded.*make it contiguous"):
        staged(Silent(), model_of(torch.zeros(2, 1).expand(2, 3)))


def test_lazy_parameter() -> None:
    local_sgd = staged(Silent(), nn.LazyLinear(3))
    with pytest.raises(ValueError, match="run one forward pass before"):
        local_sgd.sync()


@pytest.mark.parametrize("window", [-1, float("nan"), float("inf"), True, "1"])
def test_window(window: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    manager: Any = Silent()
    with pytest.raises(ValueError, match="offload_window_mb must be None or a number of MiB"):
        LocalSGD(manager, model_of(torch.zeros(2)), optimizer, 1, True, offload_window_mb=window)


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
        staged(manager, model, wrapped)


_UNSHARDED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchft.local_sgd import LocalSGD

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(nn.Linear(4, 4), mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
local_sgd = LocalSGD(object(), model, torch.optim.SGD(model.parameters(), lr=0.1), 1, True)
model(torch.ones(1, 4))
try:
    local_sgd.sync()
except ValueError as error:
    print("refused:", error)
# The same object takes it once it is sharded: the next thing it needs is the Manager.
model.reshard()
try:
    local_sgd.sync()
except AttributeError as error:
    print("accepted:", error)
"""


def test_unsharded_fsdp2_parameters() -> None:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _UNSHARDED], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert "refused: parameter 'weight' was a DTensor when LocalSGD was made" in process.stdout
    assert "accepted: 'object' object has no attribute 'start_quorum'" in process.stdout


# What only real Managers show


def test_quorum_mode_that_divides_weights() -> None:
    def body(replica: Replica) -> None:
        with pytest.raises(ValueError, match="use_async_quorum=True and init_sync=True"):
            staged(replica.manager, model_of(torch.zeros(2)))

    run_replicas(
        1, body, manager_args={"use_async_quorum": True, "init_sync": True}, warm_up=False, min_replicas=1
    )


def test_dtype_without_average_in_one_group_only() -> None:
    """That group ends; the other one waits for it until its quorum times out, and is unchanged."""

    def body(replica: Replica) -> str:
        dtype = torch.int64 if replica.index == 0 else torch.float32
        model = model_of(torch.ones(2, dtype=dtype))
        try:
            local_sgd = staged(replica.manager, model)
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


def averages(
    values: Callable[[int], nn.Module], staging: bool, pg_seconds: Optional[float] = None
) -> list[tuple[bool, list[torch.Tensor]]]:
    """Synchronizes two groups once: whether each committed, and its parameters then."""
    from torchft.process_group import ProcessGroupGloo

    def process_group() -> ProcessGroupGloo:
        return ProcessGroupGloo(timedelta(seconds=pg_seconds or 30))

    def body(replica: Replica) -> tuple[bool, list[torch.Tensor]]:
        model = values(replica.index)
        replica.model = model
        step = replica.manager.current_step()
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        LocalSGD(replica.manager, model, optimizer, 1, staging).sync()
        return replica.manager.current_step() == step + 1, list(model.parameters())

    return run_replicas(2, body, process_group)


BOTH_PATHS = pytest.mark.parametrize("staging", [True, False], ids=["staged", "release"])


@BOTH_PATHS
def test_memory_order_differs(staging: bool) -> None:
    """Committed, and wrong: elements are paired by their place in memory. The release does the same."""
    value = torch.arange(2.0 * 3 * 2 * 2).reshape(2, 3, 2, 2)

    def values(index: int) -> nn.Module:
        order = torch.channels_last if index == 0 else torch.contiguous_format
        return model_of(value.clone(memory_format=order))

    for committed, (average,) in averages(values, staging):
        assert committed
        # Both groups hold the same values, so the average should be these.
        assert not torch.equal(average, value)


@BOTH_PATHS
def test_dtypes_of_the_same_size_differ(staging: bool) -> None:
    """Committed, and wrong: each group reads the other's bits as its own dtype."""
    results = averages(
        lambda index: model_of(torch.ones(8, dtype=(torch.float16, torch.bfloat16)[index])), staging
    )
    assert all(committed for committed, _ in results)
    assert any(not torch.equal(average.float(), torch.ones(8)) for _, (average,) in results)


@BOTH_PATHS
def test_order_of_parameters_differs(staging: bool) -> None:
    """Committed, and wrong: parameters are paired by their position."""
    first, second = torch.zeros(4), torch.ones(4)
    for committed, (average, _) in averages(
        lambda index: model_of(*((first, second), (second, first))[index]), staging
    ):
        assert committed
        assert torch.equal(average, torch.full((4,), 0.5))


def test_numbers_of_parameters_differ() -> None:
    """The group with more of them times out and rejects; the other one commits."""
    results = averages(lambda index: model_of(*_ones(2 + index)), True, pg_seconds=3)
    (fewer, _), (more, parameters) = results
    assert fewer
    assert not more
    assert all(torch.equal(parameter, torch.ones(4)) for parameter in parameters)


def _ones(count: int) -> list[torch.Tensor]:
    return [torch.ones(4) for _ in range(count)]


_SHAPES = """
import sys
import torch
sys.path[:0] = sys.argv[1:]
from test_bad_input import averages, model_of
small, large = (torch.zeros(*size, dtype=dtype) for size, dtype in {cases})
for committed, _ in averages(lambda index: model_of((small, large)[index]), {staging}, pg_seconds=5):
    print("committed", committed)
"""


@BOTH_PATHS
@pytest.mark.parametrize(
    "cases",
    ["[((4,), torch.float32), ((8,), torch.float32)]", "[((4,), torch.bfloat16), ((4,), torch.float32)]"],
    ids=["shapes", "sizes of dtypes"],
)
def test_sizes_differ(cases: str, staging: bool) -> None:
    """Gloo aborts the process of the group with the smaller parameter; nothing is committed."""
    program = _SHAPES.format(cases=cases, staging=staging)
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(SUPPORT), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == -6, process.stdout + process.stderr
    assert "Is there a distributed collective mismatch in your code?" in process.stderr
    assert "committed True" not in process.stdout
