"""The command ``python -m torchft.local_sgd_memory``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Optional

import torch
from torch import nn

from torchft._launch import cli, target
from torchft._staging.units import parse_bytes
from torchft.local_sgd_memory import PeakMemory, StagingMemory, staging_memory
from torchft.local_sgd_memory.plot import write_plot

PROG = "python -m torchft.local_sgd_memory"
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def main(argv: Sequence[str]) -> int:
    """Reports on a model.

    Args:
        argv: the arguments.

    Returns:
        0, or 1 when the host memory does not suffice.

    Raises:
        UserError: for arguments that can't be used.
    """
    options = _parser().parse_args(argv)
    _check(options)
    model = _build(options.model)
    try:
        report = staging_memory(
            model,
            shards=options.shards,
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            offload_window_mb=options.window_mb,
            ranks_per_host=options.ranks_per_host,
            host_memory=options.host_memory,
        )
        peak = None
        if options.entry_memory is not None:
            peak = report.peak(options.entry_memory, options.step_peak)
    except ValueError as error:
        raise cli.UserError(f"{options.model}: {error}") from error
    if options.plot is not None and any(share.is_host for share in report.by_device):
        raise cli.UserError(
            f"--plot draws device memory, and {options.model} has parameters on the CPU; leave it out"
        )

    print(report)
    if peak is not None:
        print(peak)
    if options.json is not None:
        cli.write_json(options.json, _as_json(options.model, report, peak))
    if options.plot is not None:
        write_plot(options.plot, options.model.rpartition(":")[2], report, peak)
    return 1 if report.fits is False else 0


def _parser() -> cli.Parser:
    parser = cli.Parser(
        PROG,
        "What CPU staging of LocalSGD saves and costs on a model that need not exist yet. The model is built "
        "on the meta device, so nothing is allocated.",
        epilog="Exit codes: 0 fine; 1 the host memory does not suffice; 2 an argument can't be used. SIZE is "
        "a number with a unit, such as 80GiB or 512MiB.",
    )
    parser.add_argument(
        "model",
        metavar="MODULE:CALLABLE",
        help="what builds the model: a function or class of an importable module, called without arguments",
    )
    parser.add_argument(
        "--shards",
        type=cli.positive_int,
        default=1,
        metavar="N",
        help="FSDP2 ranks over which the model is going to be sharded; the fullest one counts (default: 1)",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="element type of the parameters in training (default: as the model is built)",
    )
    parser.add_common("--window-mb")
    host = parser.add_argument_group("does the host have the memory")
    host.add_argument(
        "--ranks-per-host",
        type=cli.positive_int,
        metavar="N",
        help="ranks that stage on one host at the same time (default: $LOCAL_WORLD_SIZE, else 1)",
    )
    host.add_argument(
        "--host-memory",
        type=parse_bytes,
        metavar="SIZE",
        help="host memory that they may take (default: what is available here and now, within the limits of "
        "this process's cgroups)",
    )
    peak = parser.add_argument_group("is the synchronization the peak at all")
    peak.add_argument(
        "--entry-memory",
        type=parse_bytes,
        metavar="SIZE",
        help="device memory in use after an optimizer step: weights, gradients and optimizer state of a rank",
    )
    peak.add_argument(
        "--step-peak",
        type=parse_bytes,
        metavar="SIZE",
        help="device memory at the peak of a step without a synchronization",
    )
    parser.add_common("--json")
    parser.add_common("--plot")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Refuses options that do not fit together, before the work."""
    peak = {"--entry-memory": options.entry_memory, "--step-peak": options.step_peak}
    missing = [name for name, value in peak.items() if value is None]
    if len(missing) == 1:
        given = ", ".join(name for name in peak if name not in missing)
        raise cli.UserError(f"{given} needs {missing[0]} as well")
    cli.check_output_file("--json", options.json)
    cli.check_plot_file("--plot", options.plot)


def _build(spec: str) -> nn.Module:
    """Builds the model on the meta device.

    Args:
        spec: MODULE:CALLABLE.

    Raises:
        UserError: there is no such callable, it fails, or what it returns is no module.
    """
    build = target.find(spec)
    instead = "pass a callable that takes no arguments and needs no values of tensors"
    with target.users_code(f"building {spec!r} on the meta device", instead), torch.device("meta"):
        model = build()
    if not isinstance(model, nn.Module):
        raise cli.UserError(
            f"{spec!r} returned a {type(model).__name__}; pass one that returns a torch.nn.Module"
        )
    return model


def _as_json(model: str, report: StagingMemory, peak: Optional[PeakMemory]) -> dict[str, Any]:
    figures = asdict(report)
    del figures["bytes_by_tensor"]
    figures.update(
        saved_share=report.saved_share, host_bytes_missing=report.host_bytes_missing, fits=report.fits
    )
    return {
        "model": model,
        "staging_memory": figures,
        "peak": None
        if peak is None
        else {
            **asdict(peak),
            "run_peak_original": peak.run_peak_original,
            "run_peak_staged": peak.run_peak_staged,
            "lowered_bytes": peak.lowered_bytes,
        },
    }


if __name__ == "__main__":
    sys.exit(cli.run(PROG, main))
