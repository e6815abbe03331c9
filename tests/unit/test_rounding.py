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


def weights(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(1)).to(dtype)


def averages(groups: list[torch.Tensor], staged: bool) -> list[torch.Tensor]:
    """Synchronizes groups with these parameters once; returns what each has then."""

    def body(replica: Replica) -> torch.Tensor:
        model = Parameters([groups[replica.index].clone()])
        synchronize_until_commit(replica, make(LocalSGD, replica, model, staged))
        (parameter,) = model.parameters()
        return parameter.detach()

    return run_replicas(len(groups), body)


def changed(groups: int, dtype: torch.dtype, staged: bool) -> tuple[int, float]:
    """Returns how many percent of equal weights a synchronization changes, and by how many at most."""
    before = weights(dtype)
    (after, *others) = averages([before] * groups, staged)
    assert all(torch.equal(after, other) for other in others)
    worst = (after - before).double().abs() / before.double().abs().clamp_min(1e-9)
    return round(100 * int((after != before).sum()) / COUNT), 100 * float(worst.max())


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "release"])
def test_equal_weights_move_unless_the_number_of_groups_is_a_power_of_two(staged: bool) -> None:
    assert changed(2, torch.bfloat16, staged) == (0, 0)
    share, worst = changed(3, torch.bfloat16, staged)
    assert f"of 3 groups changed {share} %, by up to {worst:.2f} %" in PAGE
    if staged:
        share, _ = changed(7, torch.bfloat16, staged)
        assert f"of 7 groups {share} %." in PAGE
        (three, _), (seven, worst) = changed(3, torch.float32, staged), changed(7, torch.float32, staged)
        assert f"In float32 it is {three} % and {seven} %, by a unit in the last place" in PAGE
        assert worst <= 100 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "release"])
def test_what_is_not_finite_spreads(staged: bool) -> None:
    nan = torch.tensor([float("nan"), 2.0])
    for average in averages([torch.full((2,), 4.0), nan], staged):
        assert torch.isnan(average[0])
        assert average[1] == 3
    for value, dtype in ((60000.0, torch.float16), (2e38, torch.float32)):
        for average in averages([torch.full((2,), value, dtype=dtype)] * 2, staged):
            assert torch.isinf(average).all()
    assert "two groups that both have 60,000 in float16, or 2e38 in float32, get infinity" in PAGE
