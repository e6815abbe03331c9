"""Models for the tests of the bench, as a user would write them."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

_built: list[nn.Module] = []


def classifier() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """A small network with dropout: its training is the same only if its random numbers are."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))

    def step(number: int) -> torch.Tensor:
        batch = torch.randn(16, 8) + number
        return model(batch).square().mean()

    return model, step


def unequal() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """Its second copy in a process, which is the staged case's, has another loss from the third step on."""
    model = nn.Linear(4, 4)
    _built.append(model)
    copy = len(_built)

    def step(number: int) -> torch.Tensor:
        factor = 1.0 if copy != 2 or number < 2 else 2.0
        return factor * model(torch.ones(1, 4)).square().sum()

    return model, step


def diverging() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """Its loss is not a number, the same one in all cases."""
    model = nn.Linear(4, 4)
    return model, lambda number: model(torch.ones(1, 4)).sum() * float("nan")


def failing() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """Can't be built."""
    raise OSError("no weights here")


def only_a_model() -> nn.Module:
    """Returns too little."""
    return nn.Linear(4, 4)


def no_parameters() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """Nothing to average."""
    return nn.ReLU(), lambda number: torch.zeros(())


def crashing() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """One group fails in its second step."""
    model = nn.Linear(4, 4)

    def step(number: int) -> torch.Tensor:
        if number == 1 and os.environ["REPLICA_GROUP_ID"] == "1":
            raise RuntimeError("out of luck")
        return model(torch.ones(1, 4)).sum()

    return model, step
