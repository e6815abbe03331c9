"""Seeded parameters and models for the tests of LocalSGD."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def random_tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns normal values that depend on ``seed`` and shape alone, whatever thread asks."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


class Parameters(nn.Module):
    """A module that holds the given tensors as its parameters, in their own memory layout."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        for index, tensor in enumerate(tensors):
            self.register_parameter(f"p{index}", nn.Parameter(tensor, tensor.is_floating_point()))


def equal_parameters(
    seed: int, count: int = 24, device: torch.device | str = "cpu", size: int = 1000
) -> Parameters:
    """Returns ``count`` float32 parameters of ``size`` elements: 4 * size bytes each."""
    return Parameters(random_tensor(seed * 1000 + i, size).to(device) for i in range(count))


def odd_parameters(seed: int, device: torch.device | str = "cpu") -> Parameters:
    """Returns parameters of every kind of layout, shape and dtype that is averaged, one frozen, one tied.

    The largest has 480 bytes, the largest of the two that are not dense in memory 384.
    """

    def tensor(number: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return random_tensor(seed * 1000 + number, *shape, dtype=dtype).to(device)

    model = Parameters(
        [
            tensor(0, 3, 5),
            tensor(1, 5, 3).t(),
            tensor(2, 2, 3, 4, 5).to(memory_format=torch.channels_last),
            tensor(3, 6, 8)[:, ::2],
            tensor(4, 4, 6, 8).permute(2, 0, 1)[::2],
            torch.tensor(float(seed) + 0.1).to(device),
            torch.empty(0).to(device),
            torch.empty(3, 0, 2).to(device),
            tensor(5, 17, dtype=torch.bfloat16),
            tensor(6, 7, dtype=torch.float16),
            tensor(7, 5, 2, dtype=torch.float64).t(),
            tensor(8, 1),
            tensor(9, 64),
        ]
    )
    model.get_parameter("p12").requires_grad_(False)
    model.register_parameter("tied", model.get_parameter("p0"))
    return model


def bits(model: nn.Module) -> list[bytes]:
    """Returns the raw bytes of every parameter, in logical order of elements."""
    with torch.no_grad():
        return [
            p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            for p in model.parameters()
        ]
