"""Models that differ between the groups, which no group can see: what is committed, and what fails."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import mismatched_groups
import pytest
import torch
from averaging_models import Parameters
from mismatched_groups import averages
from properties import WAYS
from torch import nn

BOTH_PATHS = pytest.mark.parametrize("staging", [True, False], ids=["staged", "release"])


@BOTH_PATHS
def test_memory_order_differs(staging: bool) -> None:
    """Committed, and wrong: elements are paired by their place in memory. The release does the same."""
    value = torch.arange(2.0 * 3 * 2 * 2).reshape(2, 3, 2, 2)

    def values(index: int) -> nn.Module:
        order = torch.channels_last if index == 0 else torch.contiguous_format
        return Parameters([value.clone(memory_format=order)])

    for committed, (average,) in averages(values, staging):
        assert committed
        # Both groups hold the same values, so the average should be these.
        assert not torch.equal(average, value)


@BOTH_PATHS
def test_dtypes_of_the_same_size_differ(staging: bool) -> None:
    """Committed, and wrong: each group reads the other's bits as its own dtype."""
    results = averages(
        lambda index: Parameters([torch.ones(8, dtype=(torch.float16, torch.bfloat16)[index])]), staging
    )
    assert all(committed for committed, _ in results)
    assert any(not torch.equal(average.float(), torch.ones(8)) for _, (average,) in results)


@BOTH_PATHS
def test_order_of_parameters_differs(staging: bool) -> None:
    """Committed, and wrong: parameters are paired by their position."""
    first, second = torch.zeros(4), torch.ones(4)
    for committed, (average, _) in averages(
        lambda index: Parameters(((first, second), (second, first))[index]), staging
    ):
        assert committed
        assert torch.equal(average, torch.full((4,), 0.5))


@pytest.mark.parametrize("options", WAYS)
def test_numbers_of_parameters_differ(options: dict[str, Any]) -> None:
    """The group with more of them times out and rejects; the other one commits."""
    results = averages(lambda index: Parameters(_ones(2 + index)), True, pg_seconds=3, **options)
    (fewer, _), (more, parameters) = results
    assert fewer
    assert not more
    assert all(torch.equal(parameter, torch.ones(4)) for parameter in parameters)


def _ones(count: int) -> list[torch.Tensor]:
    return [torch.ones(4) for _ in range(count)]


@BOTH_PATHS
@pytest.mark.parametrize("sizes", mismatched_groups.SIZES)
def test_sizes_differ(sizes: str, staging: bool) -> None:
    """Gloo aborts the process of the group with the smaller parameter; nothing is committed."""
    process = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            mismatched_groups.__file__,
            sizes,
            "staged" if staging else "release",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == -6, process.stdout + process.stderr
    assert "Is there a distributed collective mismatch in your code?" in process.stderr
    assert "committed True" not in process.stdout
