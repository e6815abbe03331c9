"""The bench's results as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from torchft._staging.units import MIB, table
from torchft.local_sgd_bench.results import ORIGINAL, CaseSummary, Results, Spread

# Optimizer steps between synchronizations for which the added time is spread.
_SYNC_EVERY = (1, 10, 100)

_COUNTED_NOTES = (
    "temporaries: MiB of tensors given to Manager.allreduce and alive at once, counted in the warm-up, since",
    "  this device has no memory statistics. freed: none is left afterwards. reserved: not measurable here.",
)
_STATISTICS_NOTES = (
    "extra memory: MiB in use on the device at the peak, less what was in use at entry. freed: back at that",
    "  afterwards. reserved: MiB that the device's caching allocator held before > after.",
)
_NOTES = (
    "ms, ratio: median (quartiles) of the slowest group, without its wait for the quorum; pair by pair.",
    "host buffers: MiB that hold the averages until the vote. resident: MiB by which the process grew until",
    "  then.",
)


def report(results: Results) -> str:
    """Returns all tables, with what they were measured on.

    Args:
        results: of a run.
    """
    summaries = [results.summary(case) for case in results.cases]
    parts = [_head(results), _training(summaries), _synchronization(results, summaries), _amortized(results)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _head(results: Results) -> list[str]:
    machine, options, model = results.machine, results.options, results.model
    settings = "".join(f", {name}={value}" for name, value in sorted(machine["environment"].items()))
    rejected = f", {results.rejected} rejected and repeated" if results.rejected else ""
    return [
        f"torch {machine['torch']}, torchft {machine['torchft']}, {results.device}, "
        f"{machine['cores']} cores ({machine['processor']}){settings}",
        f"model {options['model']}: S = {model['total_bytes'] / MIB:.2f} MiB in {model['tensors']} tensors, "
        f"M = {model['largest_bytes'] / MIB:.2f} MiB, per rank",
        f"{options['replicas']} replica groups over {options['process_group']}, a synchronization every "
        f"{_count(options['sync_every'], 'step')}; {_count(results.pairs, 'pair')}, cases interleaved"
        f"{rejected}",
    ]


def _training(summaries: Sequence[CaseSummary]) -> list[str]:
    rows = [["Training", "steps", "steps/s", "pairwise", "loss, gradient norm, weights"]]
    for summary in summaries:
        baseline = summary.case == ORIGINAL
        difference = summary.first_difference
        rows.append(
            [
                summary.case,
                str(summary.steps),
                f"{summary.steps_per_second:.2f}",
                "" if baseline else f"{(summary.speed.median - 1) * 100:+.1f} %",
                "baseline"
                if baseline
                else "identical at every step"
                if difference is None
                else f"DIFFERENT, {difference}",
            ]
        )
    return [table(rows, "lrrrl")]


def _synchronization(results: Results, summaries: Sequence[CaseSummary]) -> list[str]:
    counted = not results.device_statistics
    rows = [
        [
            "Synchronization",
            "temporaries" if counted else "extra memory",
            "freed",
            "ms",
            "ratio",
            "reserved",
            "host buffers",
            "resident",
        ]
    ]
    for summary in summaries:
        ratio = "" if summary.case == ORIGINAL else _spread(summary.sync_ratio, ".2f")
        reserved = summary.reserved
        rows.append(
            [
                summary.case,
                _mib(summary.extra),
                "?" if summary.left is None else f"NO, {_mib(summary.left)}" if summary.left else "yes",
                _spread(summary.sync, ".1f"),
                ratio,
                "-" if reserved is None else f"{_mib(reserved[0])} > {_mib(reserved[1])}",
                _mib(summary.host_buffers),
                _mib(summary.resident),
            ]
        )
    if all(summary.reserved is None for summary in summaries):
        # The note says why; a column of nothing would only make the table wide.
        reserved_column = rows[0].index("reserved")
        rows = [row[:reserved_column] + row[reserved_column + 1 :] for row in rows]
    return [
        table(rows, "l" + "r" * (len(rows[0]) - 1)),
        *(_COUNTED_NOTES if counted else _STATISTICS_NOTES),
        *_NOTES,
    ]


def _amortized(results: Results) -> list[str]:
    rows = [["Added per step", *(f"sync_every {every}" for every in _SYNC_EVERY)]]
    for case in results.cases:
        if case != ORIGINAL:
            added = [results.added_per_step(case, every) for every in _SYNC_EVERY]
            rows.append([case, *(f"{ms:+.2f} ms ({100 * share:+.1f} %)" for ms, share in added)])
    step = results.step_milliseconds
    return [
        table(rows, "l" + "r" * len(_SYNC_EVERY)),
        "added per step: (ms - ms of original) / sync_every, by the medians above, and its share of a step",
        f"  of original: {step:.1f} ms, the wait for the quorum included, and its ms / sync_every.",
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _mib(nbytes: Optional[int]) -> str:
    return "?" if nbytes is None else f"{nbytes / MIB:.2f}"


def _spread(spread: Spread, form: str) -> str:
    return f"{spread.median:{form}} ({spread.low:{form}} to {spread.high:{form}})"
