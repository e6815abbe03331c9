"""The command ``python -m torchft.local_sgd_memory``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Optional

import torch
from torch import nn

from torchft._launch import cli
from torchft._staging.units import parse_bytes, table
from torchft.local_sgd_memory import AddedTime, PeakMemory, StagingMemory, added_time, staging_memory

PROG = "python -m torchft.local_sgd_memory"
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_SYNC_EVERY = (1, 10, 100)


def command(argv: Optional[Sequence[str]] = None) -> int:
    """Runs the command; returns its exit code.

    Args:
        argv: the arguments; default: those of this process.
    """
    return cli.run(PROG, main, argv)


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
    added: list[AddedTime] = []
    if options.step_time is not None:
        added = added_time(
            options.sync_time, options.staged_sync_time, options.step_time, options.sync_every or _SYNC_EVERY
        )

    print(report)
    if peak is not None:
        print(peak)
    if added:
        print(_added_time_table(added))
    if options.json is not None:
        cli.write_json(options.json, _as_json(options.model, report, peak, added))
    if options.plot is not None:
        from torchft.local_sgd_memory.plot import write_plot

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
    time = parser.add_argument_group("what it costs in time")
    time.add_argument(
        "--sync-time",
        type=cli.positive_float,
        metavar="S",
        help="a synchronization without staging, seconds",
    )
    time.add_argument(
        "--staged-sync-time", type=cli.positive_float, metavar="S", help="one with staging, seconds"
    )
    time.add_argument(
        "--step-time", type=cli.positive_float, metavar="S", help="a step without a synchronization, seconds"
    )
    parser.add_common(
        "--sync-every",
        type=_int_list,
        default=None,
        metavar="K,K,...",
        help="optimizer steps between synchronizations, several to compare "
        f"(default: {','.join(map(str, _SYNC_EVERY))})",
    )
    parser.add_common("--json")
    parser.add_common("--plot")
    return parser


def _int_list(text: str) -> list[int]:
    return [cli.positive_int(part) for part in text.split(",")]


def _check(options: argparse.Namespace) -> None:
    """Refuses options that do not fit together, before the work."""
    peak = {"--entry-memory": options.entry_memory, "--step-peak": options.step_peak}
    time = {
        "--sync-time": options.sync_time,
        "--staged-sync-time": options.staged_sync_time,
        "--step-time": options.step_time,
    }
    for group in (peak, time):
        missing = [name for name, value in group.items() if value is None]
        if missing and len(missing) < len(group):
            given = ", ".join(name for name in group if name not in missing)
            raise cli.UserError(f"{given} needs {' and '.join(missing)} as well")
    if options.sync_every is not None and options.step_time is None:
        raise cli.UserError(f"--sync-every compares times; pass {', '.join(time)} as well")
    cli.check_output_file("--json", options.json)
    cli.check_output_file("--plot", options.plot)
    if options.plot is not None:
        if not options.plot.lower().endswith(".png"):
            raise cli.UserError(f"--plot {options.plot!r} is no PNG; pass a name that ends in .png")
        if importlib.util.find_spec("matplotlib") is None:
            raise cli.UserError('--plot needs matplotlib: pip install "torchft[tools]"')


def _build(spec: str) -> nn.Module:
    """Builds the model on the meta device.

    Args:
        spec: MODULE:CALLABLE.

    Raises:
        UserError: there is no such callable, it fails, or what it returns is no module.
    """
    module_name, colon, path = spec.partition(":")
    if not (module_name and colon and path):
        raise cli.UserError(f"{spec!r} does not name a model; pass MODULE:CALLABLE, such as my_models:build")
    # Whatever is wrong with it, SystemExit of a script without a main guard too, is for the user to repair.
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise cli.UserError(
            f"importing {module_name!r} failed, {_describe(error)}; pass a module that Python finds from "
            "this folder or on PYTHONPATH"
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise cli.UserError(f"{module_name!r} has no {path!r}; pass a function or class that it has")
        found = getattr(found, name)
    if not callable(found) or isinstance(found, nn.Module):
        raise cli.UserError(
            f"{spec!r} is a {type(found).__name__}; pass a function or class that builds the model"
        )
    try:
        with torch.device("meta"):
            model = found()
    except (Exception, SystemExit) as error:
        raise cli.UserError(
            f"building {spec!r} on the meta device failed, {_describe(error)}; pass a callable that takes no "
            "arguments and needs no values of tensors"
        ) from error
    if not isinstance(model, nn.Module):
        raise cli.UserError(
            f"{spec!r} returned a {type(model).__name__}; pass one that returns a torch.nn.Module"
        )
    return model


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _added_time_table(added: Sequence[AddedTime]) -> str:
    return table(
        [
            ("Time that staging adds to a step, on average",),
            *(
                (
                    f"  sync_every {result.sync_every}",
                    f"{result.seconds_per_step * 1e3:,.2f} ms",
                    f"{100 * result.share:+.2f} %",
                )
                for result in added
            ),
        ]
    )


def _as_json(
    model: str, report: StagingMemory, peak: Optional[PeakMemory], added: Sequence[AddedTime]
) -> dict[str, Any]:
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
        "added_time": [asdict(result) for result in added],
    }


if __name__ == "__main__":
    raise SystemExit(command())
