"""Replica groups as threads of one process: real Lighthouse, real Managers, real Gloo, one rank per group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Optional, TypeVar

import torch
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroup, ProcessGroupGloo

T = TypeVar("T")

MANAGER_TIMEOUT = timedelta(seconds=10)


class Replica:
    """One replica group of a :func:`run_replicas` call.

    Attributes:
        index: 0 to count - 1.
        manager: its Manager; heals into ``model`` if that is set.
        process_group: what the Manager reduces on.
        model: set by the test when a peer may heal from or into it.
        lighthouse: its address.
        barrier: waits for all groups of the call; raises BrokenBarrierError when one of them has failed.
    """

    def __init__(
        self,
        index: int,
        count: int,
        lighthouse: str,
        process_group: ProcessGroup,
        barrier: threading.Barrier,
        timeout: timedelta,
        manager_args: dict[str, Any],
    ) -> None:
        self.index = index
        self.lighthouse = lighthouse
        self.process_group = process_group
        self._same_again = (index, count, lighthouse)
        self._settings = (barrier, timeout, manager_args)
        self.barrier = barrier
        self.model: nn.Module = nn.Module()
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        settings = {
            "use_async_quorum": False,
            "init_sync": False,
            "min_replica_size": count,
            "timeout": timeout,
            "quorum_timeout": timedelta(seconds=30),
            "connect_timeout": timedelta(seconds=30),
        }
        self.manager = Manager(
            pg=process_group,
            load_state_dict=self._load_state_dict,
            state_dict=lambda: self.model.state_dict(),
            replica_id=f"group_{index}",
            store_addr="localhost",
            store_port=self._store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse,
            hostname="localhost",
            **{**settings, **manager_args},
        )

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)

    def close(self) -> None:
        self.manager.shutdown(wait=False)

    def successor(self, process_group: ProcessGroup) -> Replica:
        """Returns this group as it starts again: a new Manager at step 0. Close both."""
        return Replica(*self._same_again, process_group, *self._settings)


def run_replicas(
    count: int,
    body: Callable[[Replica], T],
    process_group: Callable[[], ProcessGroup] = ProcessGroupGloo,
    timeout: timedelta = MANAGER_TIMEOUT,
    manager_args: Optional[dict[str, Any]] = None,
    warm_up: bool = True,
    min_replicas: Optional[int] = None,
) -> list[T]:
    """Runs ``body`` in ``count`` replica groups at once.

    Args:
        count: number of groups, all of them needed for a quorum unless ``manager_args`` says otherwise.
        body: what each group does with its :class:`Replica`.
        process_group: makes the process group of one Manager.
        timeout: the Manager's time-out.
        manager_args: further or other arguments of every Manager.
        warm_up: first let all groups commit one step together. In threads of one process a few percent of
            the first collectives fail while Gloo connects, on the release path, too.
        min_replicas: groups without which there is no quorum; default: all.

    Returns:
        What ``body`` returned, by group.

    Raises:
        BaseException: the first exception of any group.
    """
    needed = count if min_replicas is None else min_replicas
    # It runs from the request of the first group in a quorum: one that waits to join, for longer than this,
    # makes the next quorum close without whoever is a moment later. Groups that are gone are known earlier.
    join_timeout_ms = 1000 if needed == count else 30_000
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=needed, join_timeout_ms=join_timeout_ms, heartbeat_timeout_ms=2000
    )
    barrier = threading.Barrier(count, timeout=60)
    committed = [False] * count

    def together(replica: Replica) -> None:
        for _ in range(5):
            if needed < count:
                # Until the lighthouse has heard of all, some groups would be a quorum without the rest.
                barrier.wait()
                time.sleep(0.5)
            try:
                replica.manager.start_quorum()
            except TimeoutError:
                committed[replica.index] = False
            else:
                replica.manager.allreduce(torch.ones(1)).wait()
                committed[replica.index] = replica.manager.should_commit()
            barrier.wait()
            everyone = all(committed)
            barrier.wait()
            if everyone:
                return
        raise RuntimeError("the groups did not commit a first step together")

    def run(index: int) -> T:
        replica = None
        try:
            replica = Replica(
                index,
                count,
                lighthouse.address(),
                process_group(),
                barrier,
                timeout,
                {"min_replica_size": needed, **(manager_args or {})},
            )
            if warm_up:
                together(replica)
            return body(replica)
        except BaseException:
            # The others need not wait for a group that is gone.
            barrier.abort()
            raise
        finally:
            if replica is not None:
                replica.close()

    try:
        with ThreadPoolExecutor(count) as threads:
            futures = [threads.submit(run, index) for index in range(count)]
            errors = [error for future in futures if (error := future.exception()) is not None]
    finally:
        lighthouse.shutdown()
    # A broken barrier is the echo of another group's failure.
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
