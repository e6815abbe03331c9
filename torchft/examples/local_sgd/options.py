"""
The training options, shared by the launcher and the training loop.
"""

from __future__ import annotations

import argparse
import os

from torchft._launch.cli import Parser, UserError, positive_float, positive_int

__all__ = ["add_training_options", "as_arguments", "check_training_options"]


def add_training_options(parser: Parser) -> None:
    """Adds the options that every rank needs.

    Args:
        parser: the parser to add them to.
    """
    parser.add_common("--replicas")
    parser.add_argument(
        "--min-replicas",
        type=positive_int,
        metavar="N",
        help="replica groups without which nothing is committed: the others wait for a lost group, or go "
        "on without it where N is smaller than --replicas (default: all)",
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=480,
        metavar="N",
        help="optimizer steps of each group (default: %(default)s)",
    )
    parser.add_common("--sync-every", default=16)
    parser.add_argument(
        "--offload-averaged-parameters-to-cpu",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep averaged parameters on the host until the vote: CPU staging (default: on)",
    )
    parser.add_common("--window-mb")
    parser.add_common(
        "--allreduce-to-cpu",
        help="reduce the averages on the host, without device memory for them (default: on with gloo, unless "
        "--window-mb is given)",
    )
    parser.add_common("--device")
    parser.add_common("--process-group")
    parser.add_argument(
        "--timeout",
        type=positive_float,
        default=30.0,
        metavar="SECONDS",
        help="how long an all-reduce may wait for a group that hangs before the synchronization is rejected "
        "(default: %(default)g)",
    )
    parser.add_common("--seed")
    parser.add_argument(
        "--data",
        metavar="FILE_OR_FOLDER",
        help="text to train on (default: the source files of Python's standard library)",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="save there, and go on from what an earlier run saved there",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=positive_int,
        default=5,
        metavar="N",
        help="commits between two saves (default: %(default)s)",
    )
    sizes = parser.add_argument_group("model and optimizer")
    sizes.add_argument("--batch-size", type=positive_int, default=8, metavar="N", help="%(default)s")
    sizes.add_argument("--sequence-length", type=positive_int, default=128, metavar="N", help="%(default)s")
    sizes.add_argument("--dim", type=positive_int, default=128, metavar="N", help="%(default)s")
    sizes.add_argument("--layers", type=positive_int, default=2, metavar="N", help="%(default)s")
    sizes.add_argument("--heads", type=positive_int, default=4, metavar="N", help="%(default)s")
    sizes.add_argument("--learning-rate", type=positive_float, default=5e-3, metavar="X", help="%(default)s")


def check_training_options(options: argparse.Namespace) -> None:
    """Refuses values that do not fit together, fills in defaults that depend on others, and creates the
    checkpoint folder.

    Args:
        options: as parsed.

    Raises:
        UserError: two options contradict each other, or checkpoints can't be written.
    """
    if options.min_replicas is None:
        options.min_replicas = options.replicas
    if options.min_replicas > options.replicas:
        raise UserError(
            f"--min-replicas {options.min_replicas} is more than --replicas {options.replicas}; "
            f"pass at most {options.replicas}"
        )
    if options.dim % options.heads:
        raise UserError(
            f"--dim {options.dim} is no multiple of --heads {options.heads}; pass sizes of which it is"
        )
    if options.window_mb is not None and not options.offload_averaged_parameters_to_cpu:
        raise UserError(
            f"--window-mb {options.window_mb:g} does nothing without CPU staging; leave it or "
            "--no-offload-averaged-parameters-to-cpu out"
        )
    _settle_allreduce_to_cpu(options)
    if options.checkpoint is not None:
        try:
            os.makedirs(options.checkpoint, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--checkpoint {options.checkpoint!r} can't be a folder ({error.strerror}); pass another one"
            ) from None
        if not os.access(options.checkpoint, os.W_OK | os.X_OK):
            raise UserError(f"--checkpoint {options.checkpoint!r} can't be written; pass another place")


def _settle_allreduce_to_cpu(options: argparse.Namespace) -> None:
    obstacles = {
        "works with gloo only, and --process-group is nccl": options.process_group == "nccl",
        f"has no window, and --window-mb is {options.window_mb}": options.window_mb is not None,
        "is a kind of CPU staging, which --no-offload-averaged-parameters-to-cpu switches off": (
            not options.offload_averaged_parameters_to_cpu
        ),
    }
    if options.allreduce_to_cpu is None:
        options.allreduce_to_cpu = not any(obstacles.values())
    for obstacle, present in obstacles.items():
        if options.allreduce_to_cpu and present:
            raise UserError(f"--allreduce-to-cpu {obstacle}; leave one of the two out")


def as_arguments(options: argparse.Namespace) -> list[str]:
    """Turns training options back into the arguments that give them.

    Args:
        options: as parsed; options of the launcher itself are left out.
    """
    parser = Parser(prog="", description="", add_help=False)
    add_training_options(parser)
    arguments: list[str] = []
    for action in parser._actions:
        value = getattr(options, action.dest)
        if value is None:
            continue
        if isinstance(action, argparse.BooleanOptionalAction):
            arguments.append(action.option_strings[0 if value else 1])
        else:
            arguments.append(f"{action.option_strings[0]}={value}")
    return arguments
