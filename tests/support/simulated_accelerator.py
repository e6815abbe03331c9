"""An accelerator made of host memory, whose bytes are counted exactly.

On a CPU-only PyTorch a staged and an unstaged synchronization look alike: the same memory holds both. This
registers a PrivateUse1 device named ``simulated`` with real data: each tensor on it wraps a CPU tensor whose
storage is a numpy array, and a finalizer on that array tells when the storage is freed. Nothing is estimated.

Its operators are synchronous, but for one: the division with which the Manager ends an all-reduce is pending
until the device is synchronized or the group votes, as on an accelerator whose streams TorchFT does not know.
Under :func:`like_cuda` it stays pending only where the device was not the current one, as on CUDA.

Copies between host and device take the temporaries that PyTorch's take, and can be recorded.

Use one device index per replica group to count each group's bytes on its own. Autograd runs on index 0 only.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

from torchft._staging import ordering
from torchft.process_group import ProcessGroupGloo

NAME = "simulated"


@dataclass
class DeviceMemory:
    """Bytes of all storages alive on one simulated device, and the most there have been at once."""

    alive: int = 0
    peak: int = 0

    def reset_peak(self) -> None:
        """Makes the peak the bytes alive now."""
        with _LOCK:
            self.peak = self.alive


_LOCK = threading.RLock()
_MEMORY: dict[int, DeviceMemory] = {}


def device(index: int = 0) -> torch.device:
    """Returns the simulated device number ``index``."""
    return torch.device(NAME, index)


def memory(index: int = 0) -> DeviceMemory:
    """Returns the counters of simulated device number ``index``."""
    return _MEMORY.setdefault(index, DeviceMemory())


def wait_until_alive(index: int, nbytes: int, seconds: float = 5.0) -> None:
    """Waits for the Manager's threads to drop their last references after a synchronization.

    Raises:
        AssertionError: other than ``nbytes`` bytes are still alive after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while memory(index).alive != nbytes:
        surplus = memory(index).alive - nbytes
        assert time.monotonic() < deadline, f"{surplus} bytes stay on the device"
        time.sleep(0.001)


class _Stream:
    """The one stream of a device; the Manager compares streams and records events on them."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = device(index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.index == self.index

    def record_event(self) -> torch.Event:
        return torch.Event()


class _Current(threading.local):
    index = 0


_CURRENT = _Current()


class _Divisions:
    """Divisions of all-reduced tensors that the devices have not carried out yet."""

    def __init__(self) -> None:
        self.like_cuda = False
        # By storage: whether the device was the current one in the all-reduce.
        self._reduced: dict[int, bool] = {}
        self._pending: dict[int, list[Callable[[], Any]]] = {}

    def expect(self, reduced: SimulatedTensor) -> None:
        """An all-reduce of the tensor begins, so that its next division is the Manager's."""
        storage = reduced.data_on_device.untyped_storage().data_ptr()
        self._reduced[storage] = _CURRENT.index == reduced.number

    def put_off(self, tensor: SimulatedTensor, divide: Callable[[], Any]) -> bool:
        """Takes a division to be carried out later, or returns False where it is to happen at once."""
        current = self._reduced.pop(tensor.data_on_device.untyped_storage().data_ptr(), None)
        if current is None or (self.like_cuda and current):
            return False
        with _LOCK:
            self._pending.setdefault(tensor.number, []).append(divide)
        return True

    def finish(self, index: int) -> None:
        """Carries out what is pending on a device."""
        with _LOCK:
            pending = self._pending.pop(index, [])
        for divide in pending:
            divide()


_DIVISIONS = _Divisions()


@contextmanager
def like_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Orders divisions as CUDA does, and lets staging take the device for one that does."""
    monkeypatch.setattr(ordering, "_ORDERED_BY_WAIT", ("cpu", NAME))
    _DIVISIONS.like_cuda = True
    try:
        yield
    finally:
        _DIVISIONS.like_cuda = False


@dataclass(frozen=True)
class HostCopy:
    """A copy between the host and a device, in either direction.

    Attributes:
        shape: sizes of what is copied, in elements.
        on_device: strides on the device, in elements.
        on_host: strides on the host, in elements.
    """

    shape: tuple[int, ...]
    on_device: tuple[int, ...]
    on_host: tuple[int, ...]

    @property
    def straight(self) -> bool:
        """Whether it is one block of memory in the same order on both sides, which needs no temporary."""
        on_device, on_host = (
            [(stride, size) for stride, size in zip(strides, self.shape, strict=True) if size > 1]
            for strides in (self.on_device, self.on_host)
        )
        block = 1
        for stride, size in sorted(on_device):
            if stride != block:
                return 0 in self.shape
            block *= size
        return on_device == on_host


_RECORDS: list[list[HostCopy]] = []


@contextmanager
def recorded_copies() -> Iterator[list[HostCopy]]:
    """Records all copies between the host and any device."""
    record: list[HostCopy] = []
    _RECORDS.append(record)
    try:
        yield record
    finally:
        _RECORDS.remove(record)


def _copied(on_device: torch.Tensor, on_host: torch.Tensor, index: int) -> Optional[SimulatedTensor]:
    """Records a copy; returns the temporary that PyTorch takes for it on the device, if it takes one."""
    copy = HostCopy(tuple(on_device.shape), on_device.stride(), on_host.stride())
    for record in _RECORDS:
        record.append(copy)
    if copy.straight or on_device.is_contiguous():
        return None
    return _on_device(torch.empty(copy.shape, dtype=on_device.dtype), index)


def _synchronize(where: Any = None, /) -> None:
    index = _CURRENT.index if where is None else torch.device(where).index
    _DIVISIONS.finish(index)


def _set_device_index(index: int, /) -> None:
    _CURRENT.index = index


@contextmanager
def _device_index(index: int) -> Iterator[None]:
    before, _CURRENT.index = _CURRENT.index, index
    try:
        yield
    finally:
        _CURRENT.index = before


def _free(index: int, nbytes: int) -> None:
    with _LOCK:
        memory(index).alive -= nbytes


def _on_device(fresh: torch.Tensor, index: int) -> SimulatedTensor:
    """Moves a CPU tensor with a storage of its own into counted memory."""
    nbytes = fresh.untyped_storage().nbytes()
    array = np.zeros(nbytes, dtype=np.uint8)
    with _LOCK:
        counters = memory(index)
        counters.alive += nbytes
        counters.peak = max(counters.peak, counters.alive)
    weakref.finalize(array, _free, index, nbytes)
    counted = torch.empty(0, dtype=fresh.dtype)
    counted.set_(
        torch.from_numpy(array).untyped_storage(), fresh.storage_offset(), fresh.shape, fresh.stride()
    )
    counted.copy_(fresh)
    return SimulatedTensor(counted, index)


class SimulatedTensor(torch.Tensor):
    """A tensor on a simulated device.

    Attributes:
        data_on_device: the CPU tensor with the values.
        number: the number of the device.
    """

    data_on_device: torch.Tensor
    number: int

    @staticmethod
    def __new__(cls, data: torch.Tensor, index: int) -> SimulatedTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=device(index),
        )

    def __init__(self, data: torch.Tensor, index: int) -> None:
        self.data_on_device = data
        self.number = index

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.data_on_device}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, SimulatedTensor)]
        index = inputs[0].number
        to_host = False
        if kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
            to_host = target.type != NAME
            if not to_host:
                kwargs["device"] = torch.device("cpu")
                index = target.index or 0

        def unwrap(x: SimulatedTensor) -> torch.Tensor:
            return x.data_on_device

        cpu_args, cpu_kwargs = tree_map_only(SimulatedTensor, unwrap, (args, kwargs))
        if func.overloadpacket is torch.ops.aten.div_ and _DIVISIONS.put_off(
            args[0], lambda: func(*cpu_args, **cpu_kwargs)
        ):
            return args[0]
        temporary = None
        if func is torch.ops.aten.copy_.default and len(inputs) == 1:
            target, source = cpu_args[0], cpu_args[1].expand_as(cpu_args[0])
            to_device = isinstance(args[0], SimulatedTensor)
            temporary = _copied(*((target, source) if to_device else (source, target)), index)
        before = {x.data_on_device.untyped_storage().data_ptr() for x in inputs}
        before.discard(0)
        out = func(*cpu_args, **cpu_kwargs)
        del temporary

        def wrap(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if to_host:
                # Leaving the device is a copy, never the same memory.
                copy = x.clone() if x.untyped_storage().data_ptr() in before else x
                if func is torch.ops.aten._to_copy.default:
                    _copied(cpu_args[0], copy, index)
                return copy
            if x.untyped_storage().data_ptr() in before:
                return SimulatedTensor(x, index)
            return _on_device(x, index)

        if func is torch.ops.aten.copy_.default and not isinstance(args[0], SimulatedTensor):
            return args[0]
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            return out
        return return_and_correct_aliasing(func, args, kwargs, tree_map(wrap, out))


class _Module(_DummyBackendModule):
    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 8

    def set_device(self, where: Any) -> None:
        # Of whoever takes the first accelerator that PyTorch reports for the one to train on.
        _set_device_index(torch.device(where).index or 0)


class _Hook(_DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return True


def _empty(size: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return _on_device(torch.empty(size, dtype=dtype), device.index or 0)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return _on_device(torch.empty_strided(size, stride, dtype=dtype), device.index or 0)


def _register() -> torch.library.Library:
    _setup_privateuseone_for_python_backend(NAME, _Module(), _Hook())
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    return library


_LIBRARY = _register()

# What PyTorch offers a backend written in Python has one device, no streams and nothing to wait for.
torch.accelerator.synchronize = _synchronize
torch.accelerator.device_index = _device_index  # pyright: ignore[reportAttributeAccessIssue]
torch.accelerator.current_device_index = lambda: _CURRENT.index
torch.accelerator.set_device_index = _set_device_index
torch.accelerator.current_stream = lambda *_: _Stream(_CURRENT.index)  # pyright: ignore[reportAttributeAccessIssue]


class SimulatedProcessGroupGloo(ProcessGroupGloo):
    """TorchFT's Gloo process group, reducing the memory that simulated tensors wrap."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._devices: set[int] = set()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        for tensor in tensors:
            if isinstance(tensor, SimulatedTensor):
                self._devices.add(tensor.number)
                _DIVISIONS.expect(tensor)
        return super().allreduce(
            [t.data_on_device if isinstance(t, SimulatedTensor) else t for t in tensors], opts
        )

    def errored(self) -> Optional[Exception]:
        # The Manager asks in its vote, which takes longer than any division.
        for index in self._devices:
            _DIVISIONS.finish(index)
        return super().errored()
