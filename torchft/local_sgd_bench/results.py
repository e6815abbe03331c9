"""The bench's samples, and what they say."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

from torchft._launch.cli import UserError, write_json

ORIGINAL = "original"


@dataclass(frozen=True)
class Spread:
    """The middle of some numbers, and how far they scatter.

    Attributes:
        median: half of them are below.
        low: the lower quartile.
        high: the upper quartile.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Computes median and quartiles of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class CaseSummary:
    """What the samples say about one case; ratios are to ``original``, synchronization by synchronization.

    Attributes:
        case: its name.
        steps: optimizer steps of each group that were timed.
        steps_per_second: of a group, synchronization included.
        speed: ratio of ``steps_per_second``.
        first_difference: first step whose loss or gradient norm is another one than ``original`` has in the
            same group, in words; None: all are identical, the weights at the end too.
        sync: milliseconds of a synchronization.
        sync_ratio: ratio of these.
        extra: bytes on the device on top of what was in use at entry; None: unknown.
        left: bytes of these still in use afterwards.
        reserved: bytes that the caching allocator held before and after; None: there is none.
        host_buffers: bytes of host memory that held averages.
        resident: bytes by which the process grew until the vote.
    """

    case: str
    steps: int
    steps_per_second: float
    speed: Spread
    first_difference: Optional[str]
    sync: Spread
    sync_ratio: Spread
    extra: Optional[int]
    left: Optional[int]
    reserved: Optional[tuple[int, int]]
    host_buffers: int
    resident: int


@dataclass
class Results:
    """All that a run of the bench found out.

    Attributes:
        machine: what it ran on.
        options: how it was called.
        cases: names of the cases.
        model: ``total_bytes``, ``largest_bytes``, ``tensors`` of one rank.
        device: name of the device.
        device_statistics: whether the device counts its memory.
        samples: one per synchronization, case and group, as the groups sent them.
        same_weights: by group and case, whether the weights ended as those of ``original``.
    """

    machine: dict[str, Any]
    options: dict[str, Any]
    cases: list[str]
    model: dict[str, int] = field(default_factory=dict)
    device: str = ""
    device_statistics: bool = False
    samples: list[dict[str, Any]] = field(default_factory=list)
    same_weights: dict[str, dict[str, bool]] = field(default_factory=dict)

    def write(self, path: str) -> None:
        """Writes everything as JSON, with the summaries."""
        write_json(path, {**asdict(self), "summary": [asdict(self.summary(case)) for case in self.cases]})

    @classmethod
    def read(cls, path: str) -> Results:
        """Reads what ``write`` wrote.

        Raises:
            UserError: the file can't be read, or is something else.
        """
        try:
            with open(path, encoding="utf-8") as file:
                fields = json.load(file)
            del fields["summary"]
            results = cls(**fields)
            for case in results.cases:
                results.summary(case)
        except OSError as error:
            raise UserError(f"--from-json {path!r} can't be read: {error.strerror}") from None
        except (ValueError, TypeError, LookupError, AttributeError):
            raise UserError(
                f"--from-json {path!r} is no result of this bench; pass what its --json has written"
            ) from None
        return results

    @property
    def rejected(self) -> int:
        """Synchronizations that were rejected and repeated, in all cases, warm-up included."""
        return sum(sample["rejected"] for sample in self.samples if sample["group"] == 0)

    @property
    def pairs(self) -> int:
        """Rounds that are compared."""
        return len(self._timed_rounds())

    def round_times(self, case: str, what: str) -> list[float]:
        """Returns one time per compared round, of the group that took longest.

        Args:
            case: its name.
            what: ``sync_milliseconds`` or ``train_seconds``.
        """
        longest: dict[int, float] = {}
        timed = self._timed_rounds()
        for sample in self.samples:
            if sample["case"] == case and sample["round"] in timed:
                longest[sample["round"]] = max(longest.get(sample["round"], 0.0), sample[what])
        return [longest[round_number] for round_number in sorted(longest)]

    def ratios(self, case: str, what: str) -> list[float]:
        """Returns the ratios of ``round_times`` to those of ``original``, round by round."""
        pairs = zip(self.round_times(case, what), self.round_times(ORIGINAL, what), strict=True)
        return [time / original for time, original in pairs]

    def summary(self, case: str) -> CaseSummary:
        """Computes what the samples say about a case."""
        samples = [sample for sample in self.samples if sample["case"] == case]
        extra = [sample["extra"] for sample in samples if sample["extra"] is not None]
        left = [sample["left"] for sample in samples if sample["left"] is not None]
        # The first synchronization sets things up that stay, as connections do.
        reserved = [sample for sample in samples if not sample["warm_up"] and sample["reserved_before"]]
        train = self.round_times(case, "train_seconds")
        steps = self.options["sync_every"]
        return CaseSummary(
            case=case,
            steps=len(train) * steps,
            steps_per_second=steps / statistics.median(train),
            speed=Spread.of([1 / ratio for ratio in self.ratios(case, "train_seconds")]),
            first_difference=self._first_difference(case),
            sync=Spread.of(self.round_times(case, "sync_milliseconds")),
            sync_ratio=Spread.of(self.ratios(case, "sync_milliseconds")),
            extra=max(extra) if extra else None,
            # A leak is what stays every time.
            left=min(left) if left else None,
            reserved=(
                max(sample["reserved_before"] for sample in reserved),
                max(sample["reserved_after"] for sample in reserved),
            )
            if reserved
            else None,
            host_buffers=max(sample["host_buffers"] for sample in samples),
            resident=round(
                statistics.median(sample["resident"] for sample in samples if not sample["warm_up"])
            ),
        )

    @property
    def step_milliseconds(self) -> float:
        """Milliseconds of a step of ``original`` without synchronizations, but with the wait for quorums."""
        original = self.summary(ORIGINAL)
        return 1e3 / original.steps_per_second - original.sync.median / self.options["sync_every"]

    def added_per_step(self, case: str, sync_every: int) -> tuple[float, float]:
        """Spreads the longer synchronization over the steps between two of them.

        Args:
            case: its name.
            sync_every: optimizer steps between synchronizations, which need not be those of the run.

        Returns:
            Milliseconds added to the average step, negative where the case is faster, and their share of the
            average step of ``original``.
        """
        original = self.summary(ORIGINAL).sync.median / sync_every
        added = self.summary(case).sync.median / sync_every - original
        return added, added / (self.step_milliseconds + original)

    def problems(self) -> list[str]:
        """Returns what failed, in one sentence each; nothing if all is well."""
        problems = []
        for case in self.cases:
            summary = self.summary(case)
            if summary.first_difference is not None:
                problems.append(f"{case}: training differs from {ORIGINAL}, {summary.first_difference}")
            if summary.left:
                problems.append(
                    f"{case}: every synchronization left at least {summary.left:,} bytes in use on the device"
                )
        return problems

    def _timed_rounds(self) -> set[int]:
        rejected = {sample["round"] for sample in self.samples if sample["rejected"]}
        return {sample["round"] for sample in self.samples if not sample["warm_up"]} - rejected

    def _first_difference(self, case: str) -> Optional[str]:
        originals = {
            (sample["group"], sample["round"]): sample
            for sample in self.samples
            if sample["case"] == ORIGINAL
        }
        mine = [sample for sample in self.samples if sample["case"] == case]
        for sample in sorted(mine, key=lambda sample: (sample["round"], sample["group"])):
            original = originals[sample["group"], sample["round"]]
            for what, name in (("losses", "loss"), ("gradient_norms", "gradient norm")):
                for index, (value, expected) in enumerate(zip(sample[what], original[what], strict=True)):
                    # repr: NaN is to equal itself
                    if repr(value) != repr(expected):
                        step = sample["round"] * self.options["sync_every"] + index + 1
                        return f"first at step {step}: {name} {value} instead of {expected}"
        if not all(same[case] for same in self.same_weights.values()):
            return "in the weights at the end"
        return None
