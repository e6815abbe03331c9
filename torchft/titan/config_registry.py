"""The configurations of TorchTitan's own TorchFT registry, under their own names, with the flag.

TorchTitan finds them with ``--module torchft.titan --config NAME``. Its ``--module torchft.llama3`` keeps the
configurations without the flag.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

try:
    from torchtitan.experiments.torchft.llama3 import config_registry as _titan

    from torchft.titan.trainer import FaultTolerantTrainer, with_local_sgd_offload
except ImportError as error:
    # TorchTitan takes an ImportError for "there is no such registry" and reports an unknown --config.
    raise RuntimeError(
        f"torchft.titan can't be imported: {error}. It needs TorchTitan 0.3.0 with PyTorch later than 2.13: "
        "pip install 'torchft[titan]' (see the page \"TorchTitan\" of the documentation)"
    ) from error


def __dir__() -> list[str]:
    # What TorchTitan lists after an unknown --config.
    return [
        name
        for name, value in vars(_titan).items()
        if inspect.isfunction(value) and value.__module__ == _titan.__name__ and not name.startswith("_")
    ]


def __getattr__(name: str) -> Callable[[], FaultTolerantTrainer.Config]:
    if name not in __dir__():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    configuration = getattr(_titan, name)

    @functools.wraps(configuration)
    def knows_flag() -> FaultTolerantTrainer.Config:
        return with_local_sgd_offload(configuration())

    return knows_flag
