"""
Fault-tolerant LocalSGD training on this machine, with nothing to set up.

Starts a lighthouse and replica groups, trains a small language model on real text, kills groups if asked to,
and checks that all groups end with the same parameters.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from typing import Any

from torchft._launch import cli
from torchft._launch.replicas import ReplicaFailed, ReplicaGroups
from torchft._staging.units import MIB, table
from torchft.examples.local_sgd.data import Corpus, read_text
from torchft.examples.local_sgd.options import add_training_options, as_arguments, check_training_options
from torchft.examples.local_sgd.supervisor import GroupLost, Results, Supervisor

__all__ = ["main"]

PROG = "python -m torchft.examples.local_sgd"


def main(argv: Sequence[str]) -> int:
    """Trains, prints progress and a summary.

    Args:
        argv: the arguments.

    Returns:
        0, or 1 when a group failed or the groups' parameters differ.
    """
    options = _parse(argv)
    commits = -(-options.steps // options.sync_every)
    arguments = ["-m", "torchft.examples.local_sgd.train", *as_arguments(options)]
    try:
        groups = ReplicaGroups(
            arguments,
            replicas=options.replicas,
            ranks=options.ranks,
            min_replicas=options.min_replicas,
            lighthouse=options.lighthouse,
            on_output=_Echo() if options.verbose else None,
        )
    except ValueError as error:
        raise cli.UserError(str(error)) from None
    with groups:
        staging = "on" if options.offload_averaged_parameters_to_cpu else "off"
        staging += ", all-reduce on the host" if options.allreduce_to_cpu else ""
        print(
            f"{options.replicas} replica groups x {options.ranks} ranks on {options.device}, CPU staging "
            f"{staging}, {options.steps} steps, a synchronization every {options.sync_every}",
            flush=True,
        )
        supervisor = Supervisor(
            groups,
            replicas=options.replicas,
            ranks=options.ranks,
            steps=options.steps,
            commits=commits,
            kills=options.kill_replica_at_step,
        )
        failure = ""
        try:
            supervisor.run()
        except (ReplicaFailed, GroupLost) as error:
            failure = str(error)
    results = supervisor.results
    problems = [failure] if failure else _problems(results, supervisor.kills_left, options)
    if not failure:
        _print_summary(results, options)
    if options.json is not None:
        cli.write_json(options.json, _as_json(results, options, problems))
    if problems:
        print("\n".join(problems), file=sys.stderr, flush=True)
    return 1 if problems else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = cli.Parser(
        PROG,
        "Fault-tolerant LocalSGD training of a small byte-level language model on real text, on this "
        "machine. Starts its own lighthouse and the replica groups.",
    )
    add_training_options(parser)
    parser.add_common("--ranks")
    parser.add_argument(
        "--kill-replica-at-step",
        type=cli.positive_int,
        action="append",
        default=[],
        metavar="N",
        help="kill a replica group with SIGKILL after its step N and start it again; may be repeated (the "
        "last group first, then the one before it, in turn)",
    )
    parser.add_common("--lighthouse")
    parser.add_common("--json")
    parser.add_argument(
        "--verbose", action="store_true", help="show what the ranks print, their log lines included"
    )
    options = parser.parse_args(argv)
    check_training_options(options)
    cli.check_output_file("--json", options.json)
    for step in options.kill_replica_at_step:
        if step >= options.steps:
            raise cli.UserError(
                f"--kill-replica-at-step {step} is not before the last step; pass 1 to {options.steps - 1}"
            )
    if options.kill_replica_at_step and options.replicas < 2:
        raise cli.UserError("--kill-replica-at-step needs a peer to heal from; pass --replicas 2 or more")
    device = cli.resolve_device(options.device)
    options.device = device.type
    cli.check_nccl(options.process_group, device, options.replicas * options.ranks)
    # The same checks as in every rank, here first: one line instead of one per rank.
    text = read_text(options.data)
    Corpus(text, 0, options.replicas * options.ranks, options.sequence_length)
    options.lighthouse = cli.resolve_lighthouse(options.lighthouse)
    return options


class _Echo:
    """Prints the ranks' lines, one at a time, with group and rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, group: int, rank: int, line: str) -> None:
        with self._lock:
            print(f"[group {group} rank {rank}] {line}", file=sys.stderr, flush=True)


def _problems(results: Results, kills_left: list[int], options: argparse.Namespace) -> list[str]:
    problems = []
    if not results.identical:
        problems.append("the groups' parameters differ after the last commit")
    if results.validation_after != results.validation_after:
        problems.append(
            f"the loss is not a number: training diverged; lower --learning-rate {options.learning_rate:g}"
        )
    problems += [f"the kill at step {step} did not happen" for step in kills_left]
    return problems


def _print_summary(results: Results, options: argparse.Namespace) -> None:
    digests = [digests[0][:12] for _, digests in sorted(results.digests.items())]
    same = (
        f"bit-identical in all {options.replicas} groups (sha256 {' '.join(digests)})"
        if results.identical
        else "NOT the same in all groups"
    )
    size, largest = results.total_bytes / MIB, results.largest_bytes / MIB
    lines = [
        ("validation loss", f"{results.validation_before:.3f} before, {results.validation_after:.3f} after"),
        ("synchronizations", f"{results.commits} committed, {results.rejections} rejected"),
        ("replica groups", f"{results.kills} killed, {results.heals} healed from a peer"),
        ("per rank", f"S {size:.2f} MiB of parameters, M {largest:.2f} MiB the largest one"),
        ("parameters", same),
    ]
    print(f"\n{table(lines, 'll')}", flush=True)


def _as_json(results: Results, options: argparse.Namespace, problems: list[str]) -> dict[str, Any]:
    return {
        "options": {key: value for key, value in sorted(vars(options).items())},
        "validation_loss": {"before": results.validation_before, "after": results.validation_after},
        "commits": results.commits,
        "rejections": results.rejections,
        "kills": results.kills,
        "heals": results.heals,
        "S_bytes": results.total_bytes,
        "M_bytes": results.largest_bytes,
        "identical": results.identical,
        "sha256": {str(rank): digests for rank, digests in sorted(results.digests.items())},
        "problems": problems,
        "synchronizations": results.history,
    }


if __name__ == "__main__":
    sys.exit(cli.run(PROG, main))
