"""The command ``python -m torchft.local_sgd_bench``."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Optional

import torch

from torchft._launch import cli
from torchft._launch.replicas import Exit, Message, ReplicaFailed, ReplicaGroups
from torchft.local_sgd_bench.cases import check_model
from torchft.local_sgd_bench.plot import write_plot
from torchft.local_sgd_bench.results import Results
from torchft.local_sgd_bench.tables import report
from torchft.local_sgd_bench.worker import add_worker_options, case_names

PROG = "python -m torchft.local_sgd_bench"
# A synchronization gives up before; this only ends a bench that hangs elsewhere. seconds
_SILENCE = 600
# What changes how memory is allocated and cores are used, and so the results. Of a path the name will do.
_ENVIRONMENT = ("OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ENVIRONMENT_PREFIXES = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
# A result is made to be published: paths and addresses of this machine are nobody's business.
_UNPUBLISHED = ("from_json", "json", "lighthouse", "plot")


def main(argv: Sequence[str]) -> int:
    """Measures, or reads an earlier run, and prints the tables.

    Args:
        argv: the arguments.

    Returns:
        0, or 1 when a check or a group failed.

    Raises:
        UserError: for arguments that can't be used.
    """
    options = _parse(argv)
    try:
        results = Results.read(options.from_json) if options.from_json is not None else _measure(options)
    except ReplicaFailed as error:
        print(f"{PROG}: {error}", file=sys.stderr, flush=True)
        return 1
    if not results.pairs:
        print(f"{PROG}: every pair had a rejected synchronization", file=sys.stderr, flush=True)
        return 1
    print(report(results), flush=True)
    if options.json is not None:
        results.write(options.json)
    if options.plot is not None:
        write_plot(options.plot, results)
    problems = results.problems()
    for problem in problems:
        print(f"{PROG}: {problem}", file=sys.stderr, flush=True)
    return 1 if problems else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = cli.Parser(
        PROG,
        "Compares the original synchronization of LocalSGD with CPU staging on this machine: training "
        "speed, time and memory of a synchronization, and that training stays the same bit for bit.",
        epilog="Exit codes: 0 fine; 1 training differs between the cases, memory is left in use, or a group "
        "failed; 2 an argument can't be used; 130 interrupted. Every case trains a model of its own: the "
        "device must hold one copy of the parameters per case.",
    )
    add_worker_options(parser)
    parser.add_common("--replicas")
    parser.add_common("--lighthouse")
    parser.add_common("--json", help="also write the results, with every sample, to FILE as JSON")
    parser.add_common("--plot")
    parser.add_argument(
        "--from-json",
        metavar="FILE",
        help="measure nothing; print (and with --plot draw) what an earlier run has written with --json",
    )
    options = parser.parse_args(argv)
    cli.check_output_file("--json", options.json)
    cli.check_plot_file("--plot", options.plot)
    if options.from_json is not None:
        if options.json is not None:
            raise cli.UserError("--json and --from-json together would only copy a file; pass one of them")
        return options
    if options.replicas < 2:
        raise cli.UserError("--replicas 1 leaves nothing to average; pass 2 or more")
    names = case_names(options)
    if len(names) != 2 + len(options.window_mb):
        raise cli.UserError("the same case is asked for twice; pass every --window-mb once")
    check_model(options.model)
    device = cli.resolve_device(options.device)
    options.device = device.type
    cli.check_nccl(options.process_group, device, options.replicas)
    options.lighthouse = cli.resolve_lighthouse(options.lighthouse)
    return options


def _measure(options: argparse.Namespace) -> Results:
    results = Results(
        machine=_machine(),
        options={name: value for name, value in sorted(vars(options).items()) if name not in _UNPUBLISHED},
        cases=case_names(options),
    )
    try:
        groups = ReplicaGroups(
            ["-m", "torchft.local_sgd_bench.worker", *_worker_arguments(options)],
            replicas=options.replicas,
            lighthouse=options.lighthouse,
        )
    except ValueError as error:
        raise cli.UserError(str(error)) from None
    progress = _Progress(options, results)
    with groups:
        groups.start_all()
        for event in groups.events(timeout=_SILENCE):
            if isinstance(event, Exit):
                event.check()
            else:
                _take(event, results)
                progress.update()
    return results


def _worker_arguments(options: argparse.Namespace) -> list[str]:
    arguments = [
        f"--model={options.model}",
        f"--pairs={options.pairs}",
        f"--warm-up={options.warm_up}",
        f"--sync-every={options.sync_every}",
        f"--device={options.device}",
        f"--process-group={options.process_group}",
        f"--seed={options.seed}",
    ]
    return arguments + [f"--window-mb={window}" for window in options.window_mb]


def _take(message: Message, results: Results) -> None:
    fields = dict(message.fields)
    kind = fields.pop("kind")
    if kind == "begin":
        results.device = fields.pop("device")
        results.device_statistics = fields.pop("device_statistics")
        results.model = fields
    elif kind == "sample":
        results.samples.append({"group": message.group, **fields})
    else:
        results.same_weights[str(message.group)] = fields["same_weights"]


class _Progress:
    """Tells on stderr about every round that all groups have finished.

    Args:
        options: of the bench.
        results: to which samples are added.
    """

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self._options = options
        self._results = results
        self._rounds = options.warm_up + options.pairs
        self._done = 0
        self._begin: Optional[float] = None
        self._print(
            f"{', '.join(results.cases)}: {self._rounds} rounds, {options.warm_up} of them to warm up; "
            f"starting {options.replicas} replica groups"
        )

    def update(self) -> None:
        """Call it after every message."""
        if self._begin is None:
            self._begin = time.monotonic()
        per_round = len(self._results.cases) * self._options.replicas
        if not self._results.samples or len(self._results.samples) < (self._done + 1) * per_round:
            return
        last = [sample for sample in self._results.samples if sample["round"] == self._done]
        self._done += 1
        shown = []
        for case in self._results.cases:
            longest = max(sample["sync_milliseconds"] for sample in last if sample["case"] == case)
            shown.append(f"{case} {longest:.1f}")
        left = (time.monotonic() - self._begin) / self._done * (self._rounds - self._done)
        warm_up = " (warm-up)" if self._done <= self._options.warm_up else ""
        self._print(
            f"round {self._done:3d}/{self._rounds}{warm_up}  {', '.join(shown)} ms; about {left:.0f} s left"
        )

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _machine() -> dict[str, Any]:
    names = [
        name for name in sorted(os.environ) if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
    ]
    return {
        "torch": torch.__version__,
        "torchft": importlib.metadata.version("torchft"),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        # Above 0 somebody else was at work when the bench began.
        "load_average": os.getloadavg()[0],
        "environment": {name: os.path.basename(os.environ[name]) for name in names},
    }


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine


if __name__ == "__main__":
    sys.exit(cli.run(PROG, main))
