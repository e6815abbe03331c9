"""Steps of an optimizer: which ones count."""

from __future__ import annotations

import sys

from torch import optim

# The function that PyTorch puts around every step() and that calls the hooks; its code is the same for all.
_HOOKED_STEP = optim.Optimizer.profile_hook_step(lambda *_: None).__code__


def inside_another_step(optimizer: object) -> bool:
    """Whether the step whose hook asks is part of another step of the same optimizer.

    PyTorch puts hooks around ``step`` of every class that was ever instantiated. A subclass whose ``step()``
    calls ``super().step()`` therefore has its hooks called twice, the first time in the middle of a step, as
    soon as anybody has made an optimizer of the base class.

    Args:
        optimizer: whose hook asks.
    """
    steps = 0
    frame = sys._getframe()
    while frame is not None:
        steps += frame.f_code is _HOOKED_STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1
