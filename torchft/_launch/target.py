"""What the user names as MODULE:CALLABLE."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from torchft._launch.cli import UserError

__all__ = ["find", "users_code"]


def find(spec: str) -> Callable[[], Any]:
    """Imports what MODULE:CALLABLE names; CALLABLE may have dots.

    Args:
        spec: as the user passed it.

    Raises:
        UserError: there is no such callable, or its module can't be imported.
    """
    module, _, name = spec.partition(":")
    if not module or not name:
        raise UserError(f"{spec!r} does not name a model; pass MODULE:CALLABLE, such as my_models:build")
    instead = "pass a function or class of a module that Python finds from this folder or on PYTHONPATH"
    with users_code(f"importing {spec!r}", instead):
        found = pkgutil.resolve_name(spec)
    # A module that is built already could be called, but not without arguments.
    if not callable(found) or isinstance(found, nn.Module):
        raise UserError(
            f"{spec!r} is a {type(found).__name__}; pass a function or class that builds the model"
        )
    return found


@contextmanager
def users_code(doing: str, instead: str) -> Iterator[None]:
    """Turns whatever the user's code raises into a UserError: none of it is a defect of the command.

    Args:
        doing: what was done, such as "importing 'x:y'".
        instead: what to pass instead.

    Raises:
        UserError: something was raised; SystemExit counts, of a script without a main guard.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        raise UserError(f"{doing} failed, {what}; {instead}") from error
