"""The bench counts what it says: temporaries that are alive at once."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from torchft.local_sgd_bench.probe import MemoryProbe

KIB = 1024


def _probe(count: bool = True) -> MemoryProbe:
    probe = MemoryProbe(torch.device("cpu"), count=count)
    probe.enter()
    return probe


def test_counts_storages_that_are_alive_at_once() -> None:
    probe = _probe()
    kept = [torch.empty(KIB, dtype=torch.uint8) for _ in range(3)]
    for index in range(3):
        probe.temporary(kept[index])
    kept.clear()
    # after the three are gone: never four at once
    probe.temporary(torch.empty(KIB, dtype=torch.uint8))
    probe.leave()
    assert probe.memory.extra == 3 * KIB
    assert probe.memory.left == 0


def test_views_of_one_window_count_once() -> None:
    window = torch.empty(8 * KIB, dtype=torch.uint8)
    probe = _probe()
    for index in range(8):
        probe.temporary(window[index * KIB : (index + 1) * KIB].view(torch.float32))
    assert probe.memory.extra is None
    del window
    probe.leave()
    assert probe.memory.extra == 8 * KIB


def test_host_buffers_are_no_temporaries() -> None:
    buffers = [torch.empty(2 * KIB, dtype=torch.uint8) for _ in range(3)]
    probe = _probe()
    probe.host_buffers(buffers)
    for buffer in buffers:
        probe.temporary(buffer)
    probe.temporary(torch.empty(KIB, dtype=torch.uint8))
    probe.leave()
    assert probe.memory.host_buffers == 6 * KIB
    assert probe.memory.extra == KIB
    assert probe.memory.left == 0


def test_waits_for_references_that_linger() -> None:
    held = [torch.empty(KIB, dtype=torch.uint8)]
    probe = _probe()
    probe.temporary(held[0])

    def release() -> None:
        time.sleep(0.05)
        held.clear()

    thread = threading.Thread(target=release)
    thread.start()
    probe.leave()
    thread.join()
    assert probe.memory.left == 0


def test_tells_what_is_left() -> None:
    leak = torch.empty(KIB, dtype=torch.uint8)
    probe = _probe()
    probe.temporary(leak)
    probe.leave()
    assert probe.memory.left == KIB


def test_counts_nothing_while_timing() -> None:
    probe = _probe(count=False)
    probe.temporary(torch.empty(KIB, dtype=torch.uint8))
    probe.vote()
    probe.leave()
    assert probe.memory.extra is None
    assert probe.memory.left is None
    assert probe.memory.resident is not None


def test_resident_memory_is_what_was_touched() -> None:
    probe = _probe()
    touched = torch.ones(64 * KIB * KIB, dtype=torch.uint8)
    probe.vote()
    assert probe.memory.resident == pytest.approx(touched.nbytes, rel=0.1)
