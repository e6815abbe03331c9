"""Runs one rank of a TorchTitan job on the CPU and records what it did.

The environment variable TITAN_RECORD names the replica group; into the file <that>_rank<rank>.json goes one
JSON object a line: the arguments that LocalSGD was given, each step's loss, and after each synchronization
the step of the Manager and the norm of this rank's parameters.
"""

from __future__ import annotations

import gc
import json
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

# TorchTitan settles its device while it is imported, and takes cuda where there is no accelerator.
from torchtitan.tools import utils

utils.device_type = "cpu"
utils.device_module = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
    **{name: getattr(torch.cpu, name) for name in ("device_count", "set_device", "synchronize")},
    current_device=lambda: 0,
    empty_cache=lambda: None,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
)

from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.train import main  # noqa: E402

from torchft import local_sgd  # noqa: E402

# Seconds less per rank: no collection, the last one neither, looks at what was imported.
gc.freeze()


def _record(**what: Any) -> None:
    with open(f"{os.environ['TITAN_RECORD']}_rank{os.environ['RANK']}.json", "a") as file:
        file.write(json.dumps(what) + "\n")


class RecordedLocalSGD(local_sgd.LocalSGD):
    """LocalSGD that tells what it was given and how each synchronization ended."""

    def __init__(self, **kwargs: Any) -> None:
        plain = {name: kwargs[name] for name in kwargs.keys() - {"manager", "model", "optimizer"}}
        _record(event="constructed", async_quorum=kwargs["manager"]._use_async_quorum, **plain)
        super().__init__(**kwargs)

    def sync(self) -> None:
        super().sync()
        shards = [
            parameter.to_local() if isinstance(parameter, DTensor) else parameter
            for parameter in self._model.parameters()
        ]
        norm = torch.stack([shard.detach().double().norm() for shard in shards]).norm().item()
        _record(event="synchronized", manager_step=self._manager.current_step(), norm=norm)


class RecordedMetrics(MetricsProcessor):
    """Tells the loss of each step, unrounded."""

    def log(self, step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        _record(event="step", step=step, loss=global_avg_loss)
        super().log(step, global_avg_loss, *args, **kwargs)


def run() -> None:
    """Does what ``python -m torchtitan.train`` does, with the command line of this process."""
    local_sgd.LocalSGD = RecordedLocalSGD
    MetricsProcessor.Config._owner = RecordedMetrics
    main()


if __name__ == "__main__":
    run()
