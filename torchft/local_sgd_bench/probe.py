"""How much memory a synchronization takes, as far as the device can tell."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Optional

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchft.manager import Manager

# References to a reduced tensor outlive the synchronization by as long as the Manager's threads need. seconds
_SETTLE = 1.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class SyncMemory:
    """The memory of one synchronization, in bytes; None: not measured in it.

    Attributes:
        extra: device memory on top of what was in use at entry, at its peak. On a device without memory
            statistics: temporaries given to ``Manager.allreduce`` and alive at once; host buffers are none.
        left: device memory, or temporaries, still in use after it.
        reserved_before: what the device's caching allocator held at entry.
        reserved_after: what it held at the end.
        host_buffers: host memory that held the averages.
        resident: growth of the resident memory of the process between entry and vote.
    """

    extra: Optional[int] = None
    left: Optional[int] = None
    reserved_before: Optional[int] = None
    reserved_after: Optional[int] = None
    host_buffers: int = 0
    resident: Optional[int] = None

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as plain types."""
        return asdict(self)


def device_statistics(device: torch.device) -> Any:
    """Returns the module with the device's memory statistics, such as ``torch.cuda``; None without any."""
    module = torch.get_device_module(device) if device.type != "cpu" else None
    return module if hasattr(module, "max_memory_allocated") else None


class ObservedManager(Manager):
    """A Manager that tells a :class:`MemoryProbe` what it is given, and when it votes."""

    probe: Optional[MemoryProbe] = None

    # The Manager's methods are wrapped to be traced, which hides from the checker that they are functions.
    def allreduce(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if self.probe is not None:
            self.probe.temporary(tensor)
        return super().allreduce(tensor, *args, **kwargs)

    def should_commit(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, *args: Any, **kwargs: Any
    ) -> bool:
        if self.probe is not None:
            self.probe.vote()
        return super().should_commit(*args, **kwargs)


class MemoryProbe:
    """Measures one synchronization.

    Args:
        device: where the model is.
        count: on a device without statistics, whether to count temporaries. Looking at all of them at every
            all-reduce takes time, so this is not for synchronizations that are timed.
    """

    def __init__(self, device: torch.device, count: bool) -> None:
        self._statistics = device_statistics(device)
        self._count = count and self._statistics is None
        self._entry = 0
        self._resident = 0
        self._peak = 0
        self._temporaries: dict[int, tuple[StorageWeakRef, int]] = {}
        self._host_buffers: dict[int, StorageWeakRef] = {}
        self.memory = SyncMemory()

    def enter(self) -> None:
        """Call it right before the synchronization."""
        self._resident = _resident_bytes()
        if self._statistics is not None:
            self._statistics.reset_peak_memory_stats()
            self._entry = self._statistics.memory_allocated()
            self.memory.reserved_before = self._statistics.memory_reserved()

    def host_buffers(self, tensors: Iterable[torch.Tensor]) -> None:
        """Takes note of the host tensors that are going to hold the averages."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        self.memory.host_buffers = sum(storage.nbytes() for storage in storages)
        if self._count:
            references = map(StorageWeakRef, storages)
            self._host_buffers = {reference.cdata: reference for reference in references}

    def temporary(self, tensor: torch.Tensor) -> None:
        """Takes note of a tensor that is about to be all-reduced."""
        if self._count:
            storage = tensor.untyped_storage()
            # The weak reference keeps the address from being used again, so an address is one storage.
            reference = StorageWeakRef(storage)
            # With a host all-reduce these are what is reduced, and would be on the host with any device.
            if reference.cdata not in self._host_buffers:
                self._temporaries[reference.cdata] = (reference, storage.nbytes())
                self._peak = max(self._peak, self._alive())

    def vote(self) -> None:
        """Takes note of the host memory, which is at its peak at the vote."""
        self.memory.resident = _resident_bytes() - self._resident

    def leave(self) -> None:
        """Call it after the synchronization, off the clock; waits for lingering references."""
        if self._statistics is not None:
            self.memory.extra = self._statistics.max_memory_allocated() - self._entry
            self.memory.reserved_after = self._statistics.memory_reserved()
        elif self._count:
            self.memory.extra = self._peak
        else:
            return
        deadline = time.monotonic() + _SETTLE
        while self._left() > 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        self.memory.left = self._left()
        self._temporaries.clear()

    def _left(self) -> int:
        if self._statistics is not None:
            return self._statistics.memory_allocated() - self._entry
        return self._alive()

    def _alive(self) -> int:
        # Forgetting one gives its address back, so only those that are gone may be forgotten.
        for key in [key for key, (reference, _) in self._temporaries.items() if reference.expired()]:
            del self._temporaries[key]
        return sum(nbytes for _, nbytes in self._temporaries.values())


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * _PAGE
