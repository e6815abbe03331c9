"""Draws the time and the memory of a synchronization."""

from __future__ import annotations

from torchft._staging.units import MIB
from torchft.local_sgd_bench.results import ORIGINAL, Results


def write_plot(path: str, results: Results) -> None:
    """Draws, case by case, all times and their quartiles, and the extra device memory.

    Args:
        path: PNG file to write.
        results: of a run.
    """
    # The backend that needs no display, without changing the one of the process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = results.cases
    positions = list(range(len(cases), 0, -1))
    colors = ["tab:red" if case == ORIGINAL else "tab:blue" for case in cases]
    figure = Figure(figsize=(10, 1.9 + 0.5 * len(cases)), layout="constrained")
    FigureCanvasAgg(figure)
    time, memory = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])

    for case, position, color in zip(cases, positions, colors, strict=True):
        times = results.round_times(case, "sync_milliseconds")
        summary = results.summary(case)
        time.plot(times, [position] * len(times), "o", color=color, alpha=0.35, markersize=4)
        time.hlines(position, summary.sync.low, summary.sync.high, color=color, linewidth=10, alpha=0.3)
        time.plot(summary.sync.median, position, "|", color=color, markersize=22, markeredgewidth=2.5)
        if case != ORIGINAL:
            time.annotate(
                f"{summary.sync_ratio.median:.2f}x",
                (1, position),
                xycoords=("axes fraction", "data"),
                xytext=(-4, 0),
                textcoords="offset points",
                horizontalalignment="right",
                verticalalignment="center",
            )
    time.set_yticks(positions, cases)
    # Room for the ratios at the right.
    time.set_xlim(0, 1.2 * max(max(results.round_times(case, "sync_milliseconds")) for case in cases))
    time.set_xlabel("milliseconds of a synchronization (bar: quartiles), ratio to original")

    extra = [results.summary(case).extra or 0 for case in cases]
    bars = memory.barh(positions, [nbytes / MIB for nbytes in extra], color=colors, height=0.5)
    memory.bar_label(bars, fmt="%.2f", padding=3)
    memory.set_xlim(0, 1.25 * max(*extra, 1) / MIB)
    memory.set_xlabel(
        "extra device memory (MiB)" if results.device_statistics else "averaging temporaries at once (MiB)"
    )
    for axes in (time, memory):
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(
        f"{results.options['model']} on {results.device}, {results.options['replicas']} replica groups, "
        f"{results.pairs} pairs"
    )
    figure.savefig(path, format="png", dpi=120)
