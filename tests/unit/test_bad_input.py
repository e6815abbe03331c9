"""Bad input that one group can see, refused; the table of it is in the pages, a test per row."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from averaging_models import Parameters
from local_manager import LocalManager, staged
from replica_threads import Replica, run_replicas
from torch import nn

from torchft.optim import OptimizerWrapper


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


@pytest.mark.parametrize("window", [-1, float("nan"), float("inf"), True, "1", [8]])
def test_window(window: Any) -> None:
    with pytest.raises(ValueError, match="offload_window_mb must be None or a number of MiB"):
        staged(Parameters([torch.zeros(2)]), Silent(), offload_window_mb=window)


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
