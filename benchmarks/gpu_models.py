"""Models of some hundred MB to a few GB for the bench on a GPU, in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Layers(nn.Module):
    """Two vocabulary matrices around square layers, as in a language model; parameters alone.

    Args:
        vocabulary: rows of the vocabulary matrices.
        dim: width.
        layers: number of layers, each of four square matrices and a norm.
    """

    def __init__(self, vocabulary: int, dim: int, layers: int) -> None:
        super().__init__()
        shapes = [(vocabulary, dim), *([(dim, dim)] * 4 + [(dim,)]) * layers, (vocabulary, dim)]
        self.weights = nn.ParameterList([nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes])


def _with_quadratic_loss(model: Layers) -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    def step(number: int) -> torch.Tensor:
        targets = torch.randn(len(model.weights)).tolist()
        losses = [
            (weight - target).square().sum() for weight, target in zip(model.weights, targets, strict=True)
        ]
        return torch.stack(losses).sum() / 2

    return model, step


def half_gigabyte() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """S = 506 MiB, M = 125 MiB."""
    return _with_quadratic_loss(Layers(vocabulary=32_000, dim=1024, layers=16))


def two_gigabytes() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """S = 2.0 GiB, M = 500 MiB."""
    return _with_quadratic_loss(Layers(vocabulary=32_000, dim=4096, layers=4))
