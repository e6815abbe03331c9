"""Draws the device memory of a synchronization."""

from __future__ import annotations

from itertools import accumulate
from typing import Optional

from torchft._staging.units import format_bytes
from torchft.local_sgd_memory.report import PeakMemory, StagingMemory


def write_plot(path: str, title: str, report: StagingMemory, peak: Optional[PeakMemory]) -> None:
    """Draws device memory parameter by parameter, without and with staging.

    Args:
        path: PNG file to write.
        title: what the model is called.
        report: of a model all of whose parameters are on accelerators.
        peak: where known, what else is on the device.
    """
    # The backend that needs no display, without changing the one of the process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entry = 0 if peak is None else peak.entry_memory
    # One average after another, then all of them until the end of write-back.
    averaged = [entry, *(entry + nbytes for nbytes in accumulate(report.bytes_by_tensor))]
    count = len(report.bytes_by_tensor)
    original = averaged + [averaged[-1]] * count
    staged = [entry + report.device_bytes_staged] * (2 * count + 1)
    highest = max(original[-1], staged[-1], 0 if peak is None else peak.step_peak)
    unit, name = next(
        ((1024**power, name) for power, name in ((3, "GiB"), (2, "MiB")) if highest >= 1024**power),
        (1024, "KiB"),
    )

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = range(2 * count + 1)

    def draw(values: list[int], label: str, color: str) -> None:
        # Before and after: back at what was there.
        x = [0, *steps, 2 * count]
        y = [value / unit for value in (entry, *values, entry)]
        axes.plot(x, y, color=color, linewidth=2, label=label, drawstyle="steps-post")

    draw(original, f"without staging: + {format_bytes(report.device_bytes_original)}", "tab:red")
    draw(staged, f"with staging: + {format_bytes(report.device_bytes_staged)}", "tab:blue")
    if peak is not None:
        axes.axhline(
            peak.step_peak / unit,
            color="tab:gray",
            linestyle="--",
            label=f"peak of a step: {format_bytes(peak.step_peak)}",
        )
        axes.axhspan(0, entry / unit, color="0.92", label=f"at entry: {format_bytes(entry)}")
    axes.axvline(count, color="black", linestyle=":", linewidth=1)
    axes.annotate(
        "commit vote",
        (count, 0.3),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        rotation=90,
        verticalalignment="bottom",
    )
    axes.set_xlim(-0.02 * count, 2.02 * count)
    axes.set_ylim(0, 1.05 * highest / unit)
    axes.set_xticks([0, count / 2, count, 1.5 * count, 2 * count])
    axes.set_xticklabels(["0", "averaging, parameter by parameter", f"{count:,}", "write-back", f"{count:,}"])
    for phase in (axes.get_xticklabels()[1], axes.get_xticklabels()[3]):
        phase.set_fontstyle("italic")
    axes.set_ylabel(f"device memory ({name})")
    sharded = f", fullest of {report.shards} ranks" if report.shards > 1 else ""
    axes.set_title(f"{title}{sharded}: device memory of one synchronization")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, format="png", dpi=120)
