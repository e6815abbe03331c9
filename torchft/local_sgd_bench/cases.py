"""What the bench trains: its own models with a seeded quadratic loss, or whatever the user builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from torchft._launch.cli import UserError
from torchft._launch.target import find, users_code

# Returns the scalar loss of a step, given the step's number.
StepFn = Callable[[int], torch.Tensor]

# Of two ranks each holds half of the rows; two rows more make M print as 63.13 MiB, as in the RFC.
_VOCABULARY = 129_280 // 2 + 2
_DIM = 256


def _rfc_shapes() -> dict[str, tuple[int, ...]]:
    # One rank's half of the model that the RFC measured: S = 154.09 MiB, M = 63.13 MiB in float32.
    shapes: dict[str, tuple[int, ...]] = {"embedding": (_VOCABULARY, _DIM)}
    for layer in range(4):
        for kind, count, shape in (
            ("norm", 7, (_DIM,)),
            ("projection", 9, (_DIM, _DIM)),
            ("gate", 4, (_DIM, 48)),
            ("bias", 2, (2048,)),
            ("expert", 3, (_DIM, 1536)),
        ):
            for index in range(count):
                shapes[f"layer{layer}_{kind}{index}"] = shape
    shapes["output"] = (_VOCABULARY, _DIM)
    return shapes


def _many_shapes() -> dict[str, tuple[int, ...]]:
    # A deep and narrow model: what counts is the number of tensors, and that most are smaller than M.
    shapes: dict[str, tuple[int, ...]] = {"embedding": (4096, 64)}
    for index in range(799):
        shapes[f"tensor{index}"] = (64, 64) if index % 2 else (64,)
    return shapes


_SHAPES = {"rfc": _rfc_shapes, "many": _many_shapes}


class _Parameters(nn.Module):
    """Nothing but parameters, normally distributed.

    Args:
        shapes: shape of each parameter by name.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(0.02 * torch.randn(shape)))


def _quadratic(model: nn.Module) -> StepFn:
    def step(number: int) -> torch.Tensor:
        # The bench seeds torch for every step and group: that is the batch.
        targets = torch.randn(len(list(model.parameters()))).tolist()
        losses = [(p - target).square().sum() for p, target in zip(model.parameters(), targets, strict=True)]
        return torch.stack(losses).sum() / 2

    return step


def check_model(name: str) -> None:
    """Refuses a ``--model`` that can't be found, before anything is started.

    Args:
        name: ``rfc``, ``many`` or ``MODULE:CALLABLE``.

    Raises:
        UserError: it is none of these, or can't be imported.
    """
    if name not in _SHAPES:
        _find(name)


def build(name: str, device: torch.device, seed: int) -> tuple[nn.Module, StepFn]:
    """Builds a model and moves it to the device.

    Args:
        name: ``rfc``, ``many`` or ``MODULE:CALLABLE``.
        device: where to train it.
        seed: of the weights; equal seeds give equal weights.

    Returns:
        The model, and what computes the loss of a step.

    Raises:
        UserError: the callable fails, or returns something else.
    """
    torch.manual_seed(seed)
    if name in _SHAPES:
        own = _Parameters(_SHAPES[name]()).to(device)
        return own, _quadratic(own)
    build_model = _find(name)
    with users_code(f"building {name!r}", "pass a callable that takes no arguments"):
        built = build_model()
    model: Any
    step_fn: Any
    try:
        model, step_fn = built
    except (TypeError, ValueError):
        model = step_fn = None
    if not isinstance(model, nn.Module) or not callable(step_fn):
        raise UserError(
            f"--model {name} returned {type(built).__name__}; return (model, step_fn), a torch.nn.Module and "
            "a function that takes the step's number and returns its loss"
        )
    if not any(True for _ in model.parameters()):
        raise UserError(f"--model {name} has no parameters, so there is nothing to average")
    return model.to(device), cast(StepFn, step_fn)


def _find(name: str) -> Callable[[], Any]:
    if ":" not in name:
        raise UserError(f"--model {name!r} is unknown; pass {', '.join(_SHAPES)} or MODULE:CALLABLE")
    return find(name)
