"""What the memory report says, and how it prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import torch

from torchft._staging.units import format_bytes, table

# Label, value and note, as wide in one table as in the other.
_COLUMNS = ("lrl", (20, 12))


@dataclass(frozen=True)
class DeviceShare:
    """What one device holds of a rank's parameters.

    Attributes:
        device: its name; ``meta`` stands for an accelerator that is not there yet.
        total_bytes: all local parameters on it: what a synchronization adds there without staging.
        largest_bytes: the largest of them.
        window_bytes: what a synchronization adds there with staging.
    """

    device: str
    total_bytes: int
    largest_bytes: int
    window_bytes: int

    @property
    def is_host(self) -> bool:
        """Whether the device is the CPU, so that its memory is host memory."""
        return torch.device(self.device).type == "cpu"


@dataclass(frozen=True)
class StagingMemory:
    """What CPU staging saves and costs for one rank. Prints as a table.

    S, M and "local" as in :class:`torchft.local_sgd.LocalSGD`. All sizes are bytes.

    Attributes:
        parameters: number of parameters (elements) of the module, of DTensors globally, tied ones once.
        tensors: number of parameter tensors.
        shards: over how many ranks the report has sharded them; 1: as they stand.
        total_bytes: S, all local parameters.
        largest_bytes: M, the largest local parameter.
        largest_name: its name.
        rounds: how often the window is filled in one synchronization; 1 with a host all-reduce.
        allreduce_to_cpu: whether the host copies themselves are reduced.
        by_dtype: S by element type.
        by_device: S, M and the window by device.
        device_bytes_original: what a synchronization without staging adds on the accelerator.
        device_bytes_staged: what one with staging adds there.
        saved_bytes: the difference.
        host_bytes: what staging takes on the host, for one rank; a window on the CPU included.
        link_bytes_committed: traffic over the host link of one committed synchronization.
        link_bytes_rejected: the same of a rejected one.
        ranks_per_host: ranks that need ``host_bytes`` at the same time.
        host_memory: host memory that is there for all of them; None where the system does not tell.
        host_memory_given: whether the caller gave that figure; otherwise it is what was available on this
            host, within its cgroup limits, when the report was made.
        bytes_by_tensor: the local parameters one by one, in the order of ``model.parameters()``.
    """

    parameters: int
    tensors: int
    shards: int
    total_bytes: int
    largest_bytes: int
    largest_name: str
    rounds: int
    allreduce_to_cpu: bool
    by_dtype: dict[str, int]
    by_device: tuple[DeviceShare, ...]
    device_bytes_original: int
    device_bytes_staged: int
    saved_bytes: int
    host_bytes: int
    link_bytes_committed: int
    link_bytes_rejected: int
    ranks_per_host: int
    host_memory: Optional[int]
    host_memory_given: bool
    bytes_by_tensor: tuple[int, ...] = field(repr=False)

    @property
    def saved_share(self) -> float:
        """The share of ``device_bytes_original`` that is saved, 1 - M/S; 0 without an accelerator."""
        return self.saved_bytes / self.device_bytes_original if self.device_bytes_original else 0.0

    @property
    def host_bytes_missing(self) -> int:
        """How much host memory all ranks of a host lack; 0 where it fits or is not known."""
        if self.host_memory is None:
            return 0
        return max(0, self.host_bytes * self.ranks_per_host - self.host_memory)

    @property
    def fits(self) -> Optional[bool]:
        """Whether all ranks of a host fit into its memory; None where that memory is not known."""
        return None if self.host_memory is None else self.host_bytes_missing == 0

    def peak(self, entry_memory: int, step_peak: int) -> PeakMemory:
        """Tells whether staging lowers the peak of a training run.

        Args:
            entry_memory: bytes in use on the device when a synchronization begins, which is weights,
                gradients and optimizer state: ``torch.cuda.memory_allocated()`` after an optimizer step.
            step_peak: bytes at the peak of a step that does not synchronize:
                ``torch.cuda.max_memory_allocated()``.

        Raises:
            ValueError: the figures contradict each other or the parameters, or the parameters are not on
                exactly one accelerator.
        """
        devices = [share.device for share in self.by_device if not share.is_host]
        if len(devices) != 1:
            raise ValueError(
                "entry_memory and step_peak are figures of one accelerator, and the parameters are on "
                f"{', '.join(share.device for share in self.by_device)}; leave them out"
            )
        if entry_memory < self.device_bytes_original:
            raise ValueError(
                f"entry_memory ({format_bytes(entry_memory)}) is less than the parameters alone take "
                f"({format_bytes(self.device_bytes_original)}); pass what is in use after an optimizer step: "
                "weights, gradients and optimizer state, of this rank"
            )
        if step_peak < entry_memory:
            raise ValueError(
                f"step_peak ({format_bytes(step_peak)}) is less than entry_memory "
                f"({format_bytes(entry_memory)}), which is in use at the end of each step; pass the peak of "
                "a whole step without a synchronization"
            )
        return PeakMemory(
            entry_memory=entry_memory,
            step_peak=step_peak,
            sync_peak_original=entry_memory + self.device_bytes_original,
            sync_peak_staged=entry_memory + self.device_bytes_staged,
        )

    def __str__(self) -> str:
        S, M = format_bytes(self.total_bytes), format_bytes(self.largest_bytes)
        sharded = f", on the fullest of {self.shards} ranks" if self.shards > 1 else ""
        dtypes = ", ".join(
            name if len(self.by_dtype) == 1 else f"{name} {format_bytes(nbytes)}"
            for name, nbytes in self.by_dtype.items()
        )
        rows = [
            (f"{self.parameters:,} parameters in {self.tensors:,} tensors{sharded}",),
            ("  S, all of a rank", S, dtypes),
            ("  M, the largest", M, self.largest_name),
        ]
        accelerators = [share for share in self.by_device if not share.is_host]
        rounds = (
            "reduced on the host"
            if self.allreduce_to_cpu
            else f"in {self.rounds:,} round{'s' * (self.rounds > 1)}"
        )
        for share in accelerators:
            where = "the device" if len(self.by_device) == 1 else share.device
            saved = share.total_bytes - share.window_bytes
            rows += [
                (f"Memory on {where}, added by a synchronization",),
                ("  without staging", format_bytes(share.total_bytes), ""),
                ("  with staging", format_bytes(share.window_bytes), rounds),
                ("  saved", format_bytes(saved), f"{100 * saved / max(1, share.total_bytes):.1f} %"),
            ]
        rows += [
            ("Host memory, from the first all-reduce to the end of write-back",),
            ("  per rank", format_bytes(self.host_bytes), ""),
            (
                f"  {self.ranks_per_host} rank{'s' * (self.ranks_per_host > 1)} per host",
                format_bytes(self.host_bytes * self.ranks_per_host),
                self._fit(),
            ),
        ]
        if accelerators:
            rows += [
                ("Host link, per rank and synchronization",),
                ("  committed", format_bytes(self.link_bytes_committed), ""),
                ("  rejected", format_bytes(self.link_bytes_rejected), ""),
            ]
        text = table(rows, *_COLUMNS)
        if len(accelerators) < len(self.by_device):
            text += "\nParameters on the CPU: staging saves nothing there and takes a window more."
        return text

    def _fit(self) -> str:
        if self.host_memory is None:
            return "not known how much there is"
        there = f"{format_bytes(self.host_memory)} " + (
            "given" if self.host_memory_given else "available on this host, within its limits"
        )
        if self.fits:
            return f"fits: {there}"
        return f"DOES NOT FIT, {format_bytes(self.host_bytes_missing)} too little: {there}"


@dataclass(frozen=True)
class PeakMemory:
    """The peak of a training run on one device, with and without staging. Prints as a table.

    Attributes:
        entry_memory: bytes in use when a synchronization begins.
        step_peak: bytes at the peak of a step without a synchronization.
        sync_peak_original: bytes at the peak of a synchronization without staging.
        sync_peak_staged: bytes at the peak of one with staging.
    """

    entry_memory: int
    step_peak: int
    sync_peak_original: int
    sync_peak_staged: int

    @property
    def run_peak_original(self) -> int:
        """Peak of the run without staging, in bytes."""
        return max(self.step_peak, self.sync_peak_original)

    @property
    def run_peak_staged(self) -> int:
        """Peak of the run with staging, in bytes."""
        return max(self.step_peak, self.sync_peak_staged)

    @property
    def lowered_bytes(self) -> int:
        """By how much staging lowers the peak of the run; 0 or less where it can't help."""
        return self.run_peak_original - self.run_peak_staged

    def __str__(self) -> str:
        if self.sync_peak_original <= self.step_peak:
            verdict = (
                "The synchronization is not the peak of this run, the step is: staging can't lower the peak."
            )
        elif self.lowered_bytes <= 0:
            verdict = (
                "The synchronization is the peak of this run, and the window takes as much as all copies: "
                "staging can't lower the peak."
            )
        elif self.sync_peak_staged >= self.step_peak:
            verdict = "The synchronization is the peak of this run, and staging takes all it saves off it."
        else:
            verdict = "The synchronization is the peak of this run; with staging the step is."
        rows = [
            ("Peak of the run on the device",),
            ("  at entry", format_bytes(self.entry_memory), "weights, gradients, optimizer state"),
            ("  step", format_bytes(self.step_peak), ""),
            ("  synchronization", format_bytes(self.sync_peak_original), "without staging"),
            ("  synchronization", format_bytes(self.sync_peak_staged), "with staging"),
            ("  lowered by", format_bytes(self.lowered_bytes), ""),
            (verdict,),
        ]
        return table(rows, *_COLUMNS)
