"""
What the commands of this package share: options that mean the same everywhere, and exit codes.

0: fine. 1: a check failed. 2: the user's mistake, one line on stderr. 130 and 143: stopped by Ctrl-C and
by SIGTERM.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn, Optional

import torch

__all__ = [
    "LIGHTHOUSE_ENV",
    "Parser",
    "UserError",
    "check_output_file",
    "check_plot_file",
    "non_negative_float",
    "non_negative_int",
    "positive_float",
    "positive_int",
    "resolve_device",
    "resolve_lighthouse",
    "run",
    "write_json",
]

LIGHTHOUSE_ENV = "TORCHFT_LIGHTHOUSE"


class UserError(Exception):
    """The user's mistake. The message says what was wrong, the value, and what to pass instead."""


def positive_int(text: str) -> int:
    """Argparse type: a whole number of at least 1."""
    return _number(text, int, "a whole number of at least 1", lambda value: value >= 1)


def non_negative_int(text: str) -> int:
    """Argparse type: a whole number of at least 0."""
    return _number(text, int, "a whole number of at least 0", lambda value: value >= 0)


def positive_float(text: str) -> float:
    """Argparse type: a finite number above 0."""
    return _number(text, float, "a number above 0", lambda value: value > 0)


def non_negative_float(text: str) -> float:
    """Argparse type: a finite number of at least 0."""
    return _number(text, float, "a number of at least 0", lambda value: value >= 0)


def _number(text: str, kind: Callable[[str], Any], expected: str, valid: Callable[[Any], bool]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    # nan compares false with everything, so one test refuses it and text that is no number
    if not valid(value) or math.isinf(value):
        raise argparse.ArgumentTypeError(f"got {text!r}, pass {expected}")
    return value


# One meaning per option; a command sets its own default, and adds to the help where it must.
_COMMON_OPTIONS: dict[str, dict[str, Any]] = {
    "--replicas": {
        "type": positive_int,
        "default": 2,
        "metavar": "N",
        "help": "replica groups; LocalSGD averages across them (default: %(default)s)",
    },
    "--ranks": {
        "type": positive_int,
        "default": 1,
        "metavar": "N",
        "help": "ranks per replica group; more than one shards the model with FSDP2 (default: %(default)s)",
    },
    "--sync-every": {
        "type": positive_int,
        "default": 8,
        "metavar": "K",
        "help": "optimizer steps between synchronizations (default: %(default)s)",
    },
    "--window-mb": {
        "type": non_negative_float,
        "default": None,
        "metavar": "MIB",
        "help": "device memory for parameters in flight while staging, in MiB (default: one parameter at a "
        "time; 0: as many as fit into the largest one's size)",
    },
    "--device": {
        "default": "auto",
        "metavar": "TYPE",
        "help": "device type: auto, cpu, cuda, ... (default: auto, the accelerator if there is one)",
    },
    "--process-group": {
        "choices": ("gloo", "nccl"),
        "default": "gloo",
        "help": "what carries the all-reduce between replica groups (default: %(default)s)",
    },
    "--seed": {
        "type": non_negative_int,
        "default": 0,
        "metavar": "N",
        "help": "seed of everything random (default: %(default)s)",
    },
    "--lighthouse": {
        "default": None,
        "metavar": "URL",
        "help": f"a running lighthouse, http://HOST:PORT (default: ${LIGHTHOUSE_ENV}, else one of its own)",
    },
    "--json": {"default": None, "metavar": "FILE", "help": "also write the results to FILE as JSON"},
    "--plot": {
        "default": None,
        "metavar": "FILE.png",
        "help": 'also draw the results to FILE.png (needs matplotlib: pip install "torchft[tools]")',
    },
}


class Parser(argparse.ArgumentParser):
    """An argument parser that knows the common options and answers a mistake with one line.

    Args:
        prog: the command as the user types it, such as ``python -m torchft.local_sgd_bench``.
        description: what the command does, for its help.
    """

    def __init__(self, prog: str, description: str, **kwargs: Any) -> None:
        # A prefix that is unique today would change its meaning with the next option.
        super().__init__(prog=prog, description=description, allow_abbrev=False, **kwargs)

    def add_common(self, option: str, **overrides: Any) -> None:
        """Adds an option that all commands share.

        Args:
            option: its name, such as ``--replicas``.
            overrides: what differs here, as for ``add_argument``: usually ``default`` or ``help``.
        """
        self.add_argument(option, **{**_COMMON_OPTIONS[option], **overrides})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_one_line(message)} (--help lists all options)\n")


def resolve_device(name: str) -> torch.device:
    """Turns ``--device`` into a device of this machine, without an index.

    Args:
        name: ``auto`` or a device type.

    Raises:
        UserError: PyTorch does not know the type, or has no such device here.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return torch.device(accelerator.type if accelerator is not None else "cpu")
    available = ["auto", "cpu"] + ([accelerator.type] if accelerator is not None else [])
    if name not in available:
        raise UserError(f"--device {name!r} is not available here; pass one of {', '.join(available)}")
    return torch.device(name)


def resolve_lighthouse(url: Optional[str]) -> Optional[str]:
    """Turns ``--lighthouse`` into the URL to use; None means: start one.

    Args:
        url: what the user passed, or None.
    """
    return url or os.environ.get(LIGHTHOUSE_ENV) or None


def check_output_file(option: str, path: Optional[str]) -> None:
    """Refuses an output file that can't be written, before the work and not after it.

    Args:
        option: the option that named it, for the message.
        path: the file; None passes.

    Raises:
        UserError: its folder is missing or not writable, or it is a folder itself.
    """
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if path == "":
        raise UserError(f"{option} is empty; pass a file name")
    if os.path.isdir(path):
        raise UserError(f"{option} {path!r} is a folder; pass a file name")
    if not os.path.isdir(folder):
        raise UserError(f"{option} {path!r}: there is no folder {folder!r}; create it first")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UserError(f"{option} {path!r} can't be written; pass another place")


def check_plot_file(option: str, path: Optional[str]) -> None:
    """Refuses a plot that can't be drawn or written, before the work and not after it.

    Args:
        option: the option that named it, for the message.
        path: the file; None passes.

    Raises:
        UserError: as for ``check_output_file``, it is no PNG, or there is no matplotlib.
    """
    check_output_file(option, path)
    if path is None:
        return
    if not path.lower().endswith(".png"):
        raise UserError(f"{option} {path!r} is no PNG; pass a name that ends in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f'{option} needs matplotlib: pip install "torchft[tools]"')


def write_json(path: str, value: Any) -> None:
    """Writes results as JSON, whole or not at all; numbers that JSON lacks (NaN) become null.

    Fields of objects have lines of their own, and so has each item of a list of objects, a sample say.

    Args:
        path: the file.
        value: what to write, of plain Python types.
    """
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(_lines(_finite(value)) + "\n")
    os.replace(partial, path)


def _lines(value: Any, indent: str = "") -> str:
    deeper = indent + "  "
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(key)}: {_lines(item, deeper)}" for key, item in value.items()]
        begin, end = "{}"
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        items = [json.dumps(item, allow_nan=False) for item in value]
        begin, end = "[]"
    else:
        return json.dumps(value, allow_nan=False)
    return begin + ",".join(f"\n{deeper}{item}" for item in items) + f"\n{indent}{end}"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


class _Terminated(BaseException):
    """SIGTERM, as an exception, so that it unwinds as Ctrl-C does."""


def run(prog: str, main: Callable[[Sequence[str]], int], argv: Optional[Sequence[str]] = None) -> int:
    """Runs a command and turns how it ends into an exit code.

    Args:
        prog: the command as the user types it, for messages.
        main: takes the arguments and returns the exit code, 0 or 1.
        argv: the arguments; default: those of this process.

    Returns:
        The exit code.
    """

    def terminate(number: int, frame: Optional[FrameType]) -> None:
        raise _Terminated

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        return main(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print(f"{prog}: {_one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except _Terminated:
        print(f"{prog}: terminated", file=sys.stderr)
        return 143
    except BrokenPipeError:
        # The reader of our output is gone (| head): a second failure at exit would only be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    finally:
        signal.signal(signal.SIGTERM, previous)


def run_rank(prog: str, main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs the program of a rank, which has a Manager, and ends this process.

    Args:
        prog: the command as the user types it, for messages.
        main: takes the arguments of this process and returns the exit code, 0 or 1.
    """

    def main_with_default_signals(argv: Sequence[str]) -> int:
        # A rank has nothing to clean up, and Python's own way out would wait for the Manager's threads, which
        # may be waiting for a lost peer.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        return main(argv)

    try:
        code = run(prog, main_with_default_signals)
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The Manager's threads still run. One that comes back from C++ while the interpreter is being finalized
    # is unwound there, which now and then aborts the process.
    os._exit(code)


def check_nccl(process_group: str, device: torch.device, processes: int) -> None:
    """Checks that NCCL, if it is asked for, can connect the processes.

    Args:
        process_group: the value of ``--process-group``.
        device: where the parameters are going to be.
        processes: ranks of all replica groups on this machine.

    Raises:
        UserError: no CUDA, or fewer GPUs than processes.
    """
    if process_group != "nccl":
        return
    if device.type != "cuda":
        raise UserError(f"--process-group nccl needs CUDA, and the device is {device.type}; pass gloo")
    if processes > torch.cuda.device_count():
        raise UserError(
            f"--process-group nccl: {processes} ranks would share {torch.cuda.device_count()} GPUs, and NCCL "
            "refuses two ranks on one GPU; pass --process-group gloo"
        )


def _one_line(text: str) -> str:
    return " ".join(text.split())
