"""A rejected synchronization says why, and one that never can succeed says so."""

from __future__ import annotations

import logging
from typing import Any, Optional

import pytest
import simulated_accelerator as sim
import torch
from averaging_models import bits, equal_parameters
from local_manager import LocalManager, staged
from properties import make
from replica_threads import Replica, run_replicas

from torchft.local_sgd import LocalSGD
from torchft.manager import ExceptionWithTraceback
from torchft.process_group import ProcessGroupDummy, ProcessGroupGloo, ProcessGroupNCCL


class Rejecting(LocalManager):
    """Votes no ``times`` times, for a reason of its own or of another group."""

    def __init__(self, times: int, reason: Optional[Exception] = None) -> None:
        super().__init__()
        self.left = times
        self.reason = reason

    def current_step(self) -> int:
        return 7

    def errored(self) -> Any:
        return None if self.reason is None else ExceptionWithTraceback(self.reason)

    def should_commit(self) -> bool:
        self.left -= 1
        return self.left < 0


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_each_rejection_is_a_warning_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    local = staged(equal_parameters(1, 2), Rejecting(1, ConnectionError("peer 3 is gone")))
    local.sync()
    local.sync()
    (warning,) = warnings(caplog)
    assert warning.startswith("staged synchronization rejected: ")
    assert warning.endswith("nothing written; ConnectionError: peer 3 is gone")


def test_the_third_in_a_row_says_since_when_and_what_usually_is_wrong(
    caplog: pytest.LogCaptureFixture,
) -> None:
    local = staged(equal_parameters(1, 2), Rejecting(4))
    for _ in range(5):
        local.sync()
    first, second, third, fourth = warnings(caplog)
    for early in (first, second):
        assert early.endswith("another rank or replica group voted no, or too few groups took part")
    for late, count in ((third, 3), (fourth, 4)):
        assert (
            f"nothing has been committed since the Manager's step 7, after {count} rejections in a row"
            in late
        )
        assert "GLOO_SOCKET_IFNAME" in late


def test_a_commit_starts_the_count_again(caplog: pytest.LogCaptureFixture) -> None:
    manager = Rejecting(2)
    local = staged(equal_parameters(1, 2), manager)
    for _ in range(3):
        local.sync()
    manager.left = 2
    for _ in range(2):
        local.sync()
    assert len(warnings(caplog)) == 4
    assert not any("in a row" in warning for warning in warnings(caplog))


class AcceleratorOnly(ProcessGroupGloo):
    """Says to CPU tensors of more than one element what a group without a CPU side says."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        if tensors[0].numel() > 1:
            raise RuntimeError("No backend type associated with device type cpu")
        return super().allreduce(tensors, opts)


@pytest.mark.parametrize("options", [{}, {"offload_allreduce_to_cpu": True}], ids=["window", "host"])
def test_group_that_cannot_take_the_device_is_an_error_after_a_rejection(options: dict[str, Any]) -> None:
    def body(replica: Replica) -> None:
        model = equal_parameters(replica.index, 2)
        before = bits(model)
        local = make(LocalSGD, replica, model, True, **options)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"No backend type .* device type cpu\): (move|leave)"):
                local.sync()
        assert bits(model) == before

    logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)
    run_replicas(2, body, AcceleratorOnly)


class Named(LocalManager):
    def __init__(self, process_group: Any) -> None:
        super().__init__()
        self._pg = process_group


def test_nccl_is_refused_for_parameters_on_the_cpu() -> None:
    nccl = ProcessGroupNCCL.__new__(ProcessGroupNCCL)
    with pytest.raises(ValueError, match=r"parameter '.*' is on the CPU.*'torchft-nccl', can't reduce CPU"):
        staged(equal_parameters(1, 2), Named(nccl))
    staged(equal_parameters(1, 2, sim.device(6)), Named(nccl))


@pytest.mark.parametrize(
    "group", [ProcessGroupGloo(), ProcessGroupDummy(0, 1), object()], ids=["gloo", "dummy", "double"]
)
def test_other_groups_pass(group: Any) -> None:
    staged(equal_parameters(1, 2), Named(group)).sync()
