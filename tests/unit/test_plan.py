"""Layouts, rounds, windows and buffers of a staged synchronization."""

from __future__ import annotations

import pytest
import simulated_accelerator as sim
import torch
from averaging_models import odd_parameters

from torchft._staging.buffers import StagingBuffers
from torchft._staging.plan import ShardLayout, StagingPlan


def layouts_of(*sizes: int, device: str = "cpu") -> list[ShardLayout]:
    return [ShardLayout((size,), (1,), torch.uint8, torch.device(device), size) for size in sizes]


def test_layout_is_that_of_clone() -> None:
    for parameter in odd_parameters(1).parameters():
        layout, clone = ShardLayout.of(parameter), parameter.detach().clone()
        assert layout.stride == clone.stride()
        assert layout.shape == tuple(clone.shape)
        assert layout.nbytes == clone.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("window_bytes", "expected"),
    [
        (None, [[0], [1], [2], [3], [4]]),
        (0, [[0, 1], [2], [3, 4]]),
        (320, [[0, 1], [2, 3], [4]]),
        (10_000, [[0, 1, 2, 3, 4]]),
    ],
)
def test_rounds_keep_order_and_fit(window_bytes: int | None, expected: list[list[int]]) -> None:
    layouts = layouts_of(100, 100, 250, 64, 128)
    plan = StagingPlan.of(layouts, window_bytes)
    assert [list(indices) for indices in plan.rounds] == expected
    (size,) = plan.windows.values()
    assert size >= 250
    if window_bytes is not None:
        assert size <= max(window_bytes, 250)


def test_slots_of_a_round_are_aligned_and_apart() -> None:
    layouts = [ShardLayout.of(parameter) for parameter in odd_parameters(1).parameters()]
    buffers = StagingBuffers(StagingPlan.of(layouts, 1 << 20))
    assert len(buffers.plan.rounds) == 1
    for index in range(len(layouts)):
        slot = buffers.slot(index)
        assert slot.data_ptr() % 64 == 0 or slot.numel() == 0
        slot.fill_(index + 1)
    for index in range(len(layouts)):
        assert (buffers.slot(index) == index + 1).all()


def test_each_device_has_its_own_window() -> None:
    layouts = [*layouts_of(100, 100), *layouts_of(40, 40, device="meta"), *layouts_of(100)]
    plan = StagingPlan.of(layouts, 0)
    # 100 fills the window of the first device; the other device's 40 is alone in its own.
    assert plan.rounds == ((0,), (1, 2), (3, 4))
    assert {device.type: size for device, size in plan.windows.items()} == {"cpu": 100, "meta": 40}


def test_host_copy_of_a_host_tensor_is_a_copy() -> None:
    parameter = torch.arange(6.0).view(2, 3)
    buffers = StagingBuffers(StagingPlan.of([ShardLayout.of(parameter)], None))
    buffers.slot(0).copy_(parameter)
    buffers.host[0].copy_(buffers.slot(0))
    buffers.slot(0).zero_()
    assert torch.equal(buffers.bring_back(0, buffers.host[0]), parameter)


def test_host_allreduce_is_one_round_and_only_what_is_strided_has_a_window() -> None:
    def strided(rows: int, device: torch.device | str) -> torch.Tensor:
        return torch.empty(rows, 6, device=device)[:, ::2]

    one, other = sim.device(0), sim.device(1)
    tensors = [
        torch.empty(100, device=one),
        strided(2, one),
        torch.empty(5, 3, device=one).t(),
        strided(40, "cpu"),
        strided(5, other),
        torch.empty(100, device=other),
        strided(4, one),
        strided(0, other),
    ]
    plan = StagingPlan.of(map(ShardLayout.of, tensors), None, allreduce_to_cpu=True)
    assert plan.rounds == (tuple(range(8)),)
    # One at a time, each from the beginning.
    assert {index: offset for index, offset in plan.offsets.items() if tensors[index].numel()} == {
        1: 0,
        4: 0,
        6: 0,
    }
    assert plan.windows == {one: 4 * 3 * 4, other: 5 * 3 * 4}
    assert plan.host_bytes == 4 * sum(tensor.numel() for tensor in tensors)


def test_host_allreduce_of_no_parameters() -> None:
    plan = StagingPlan.of([], None, allreduce_to_cpu=True)
    assert (plan.rounds, plan.offsets, plan.windows, plan.host_bytes) == ((), {}, {}, 0)


@pytest.mark.parametrize("device", ["cpu", sim.device()])
def test_copies_of_a_host_allreduce_go_there_and_back(device: torch.device | str) -> None:
    """Strided ones by way of the window; on the CPU as well they are copies, not the same memory."""
    parameters = [torch.arange(6.0).view(2, 3).to(device), torch.arange(8.0).to(device)[::2]]
    buffers = StagingBuffers(StagingPlan.of(map(ShardLayout.of, parameters), None, allreduce_to_cpu=True))
    for index, parameter in enumerate(parameters):
        copy = buffers.copy_to_host(index, parameter)
        assert copy is buffers.host[index]
        assert torch.equal(copy, parameter.cpu())
        copy.add_(1)
        back = buffers.bring_back(index, copy)
        assert torch.equal(back.cpu(), parameter.cpu() + 1)
        assert (back is copy) == (device == "cpu" or index == 0)
