"""What averaging in the parameter's dtype does, on both paths alike; the page for users has the figures."""

from __future__ import annotations

import pytest
import torch
from averaging_models import Parameters
from places import ROOT
from properties import make, synchronize_until_commit
from replica_threads import Replica, run_replicas

from torchft.local_sgd import LocalSGD

COUNT = 4096
PAGE = " ".join((ROOT / "docs" / "source" / "local_sgd.rst").read_text(encoding="utf-8").split())


def averages(groups: list[list[torch.Tensor]], staged: bool) -> list[list[torch.Tensor]]:
    """Synchronizes groups with these parameters once; returns what each has then."""

    def body(replica: Replica) -> list[torch.Tensor]:
        model = Parameters(tensor.clone() for tensor in groups[replica.index])
        synchronize_until_commit(replica, make(LocalSGD, replica, model, staged))
        return [parameter.detach() for parameter in model.parameters()]

    return run_replicas(len(groups), body)


def changed(groups: int, staged: bool) -> list[tuple[int, float]]:
    """Returns how many percent of equal weights a synchronization changes, and by how many percent at most.

    In bfloat16 and in float32.
    """
    weights = torch.randn(COUNT, generator=torch.Generator().manual_seed(1))
    before = [weights.bfloat16(), weights]
    results = averages([before] * groups, staged)
    figures = []
    for first, *others in zip(before, *results, strict=True):
        assert all(torch.equal(others[0], other) for other in others)
        worst = (others[0] - first).double().abs() / first.double().abs().clamp_min(1e-9)
        figures.append((round(100 * int((others[0] != first).sum()) / COUNT), 100 * float(worst.max())))
    return figures


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "release"])
def test_equal_weights_of_three_groups_move(staged: bool) -> None:
    (share, worst), (share_of_float32, worst_of_float32) = changed(3, staged)
    assert f"of 3 groups changed {share} %, by up to {worst:.2f} %" in PAGE
    assert f"In float32 it is {share_of_float32} % and" in PAGE
    assert worst_of_float32 <= 2 * 100 * torch.finfo(torch.float32).eps


def test_equal_weights_of_seven_groups_move() -> None:
    (share, _), (share_of_float32, _) = changed(7, True)
    assert f"of 7 groups {share} %." in PAGE
    assert f"% and {share_of_float32} %, by one or two units in the last place" in PAGE


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "release"])
def test_what_is_not_finite_spreads_and_equal_weights_of_two_groups_stay(staged: bool) -> None:
    equal = [
        torch.full((2,), 60000.0, dtype=torch.float16),
        torch.full((2,), 2e38),
        torch.randn(99).bfloat16(),
    ]
    groups = [[torch.tensor([4.0, 4.0]), *equal], [torch.tensor([float("nan"), 2.0]), *equal]]
    for nan, half, single, kept in averages(groups, staged):
        assert torch.isnan(nan[0])
        assert nan[1] == 3
        assert torch.isinf(half).all()
        assert torch.isinf(single).all()
        assert torch.equal(kept, equal[2])
    assert "two groups that both have 60,000 in float16, or 2e38 in float32, get infinity" in PAGE
