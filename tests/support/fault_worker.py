"""One rank of fault_groups.py: trains and synchronizes a sharded model, and comes to harm on demand."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from averaging_models import Parameters, random_tensor
from fault_groups import (
    COLLECTIVE_TIMEOUT,
    CONTROL_PORT,
    HOSTS,
    MANAGER_TIMEOUT,
    QUORUM_TIMEOUT,
    RANKS,
    SHAPES,
    WAY,
    Fault,
    encode,
)
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import Work
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from ways import arguments_of

from torchft import local_sgd
from torchft._launch import cli
from torchft._launch.replicas import send
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

GROUP, RANK = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["RANK"])
STAGING = arguments_of(json.loads(os.environ[f"{WAY}_{GROUP}"]))
# Under which this rank's group is reached, and the parent.
HOST, CONTROL_HOST = os.environ[f"{HOSTS}_{GROUP}"], os.environ[f"{HOSTS}_CONTROL"]
# More than the socket buffers take: whoever reads this rank's checkpoint slowly keeps the reading open.
PADDING = 48 << 20


class Faults:
    """The faults of this rank in the round under way."""

    def __init__(self, control: TCPStore) -> None:
        self.round = -1
        self.reduction = -1
        self.drifted = False
        self._control = control
        self._mine: list[Fault] = []

    def begin(self, number: int) -> None:
        self.round = number
        plan = [Fault(**fields) for fields in json.loads(self._control.get(f"plan/{number}"))]
        self._mine = [fault for fault in plan if fault.group == GROUP and RANK in fault.ranks]

    def reach(self, point: str, index: int = 0) -> None:
        """Has a fault happen, if there is one for this point."""
        self.drifted = False
        for fault in self._mine:
            if fault.point == point and fault.index in (None, index):
                send(round=self.round, reached=point)
                self._happen(fault)

    def _happen(self, fault: Fault) -> None:
        if fault.action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action == "hold":
            self._control.get(f"go/{self.round}/{GROUP}/{RANK}/{fault.point}")
        elif fault.action == "sleep":
            time.sleep(fault.seconds)
        elif fault.action == "drift":
            self.drifted = True
        else:
            raise RuntimeError("injected")


class FaultyGloo(ProcessGroupGloo):
    def __init__(self, faults: Faults) -> None:
        super().__init__(COLLECTIVE_TIMEOUT)
        self._faults = faults

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        self._faults.reach("in_collective", self._faults.reduction)
        return super().allreduce(tensors, opts)


class FaultyManager(Manager):
    """Announces where a synchronization is."""

    rank: Rank

    def start_quorum(self, *args: Any, **kwargs: Any) -> None:
        self.rank.healed = False
        self.rank.faults.reduction = -1
        self.rank.faults.reach("asks_for_quorum")
        super().start_quorum(*args, **kwargs)
        self.rank.faults.reach("after_quorum")
        self.rank.in_quorum()

    def allreduce(self, *args: Any, **kwargs: Any) -> Work:  # pyright: ignore[reportIncompatibleVariableOverride]
        faults = self.rank.faults
        faults.reduction += 1
        faults.reach("before_allreduce", faults.reduction)
        work = super().allreduce(*args, **kwargs)
        faults.reach("in_flight", faults.reduction)
        return work

    def should_commit(self, *args: Any, **kwargs: Any) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.rank.faults.reach("before_vote")
        committed = super().should_commit(*args, **kwargs)
        if committed:
            self.rank.written = 0
            self.rank.faults.reach("after_vote")
        return committed


class Rank:
    """The model of this rank and its training."""

    def __init__(self, control: TCPStore) -> None:
        self.faults = Faults(control)
        self.healed = False
        self.written = 0
        mesh = init_device_mesh("cpu", (RANKS,))
        self.model = Parameters(random_tensor(number, *shape) for number, shape in enumerate(SHAPES))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        # First in the state, so that it is read first.
        self._padding = torch.zeros(PADDING, dtype=torch.uint8)
        self.manager = FaultyManager(
            pg=FaultyGloo(self.faults),
            load_state_dict=self._load_state_dict,
            state_dict=lambda: {"padding": self._padding, "model": self.model.state_dict()},
            min_replica_size=2,
            use_async_quorum=False,
            init_sync=False,
            timeout=MANAGER_TIMEOUT,
            quorum_timeout=QUORUM_TIMEOUT,
            replica_id=f"group_{GROUP}",
            store_addr=HOST,
            hostname=HOST,
        )
        self.manager.rank = self

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self.faults.reach("healing")
        self.model.load_state_dict(state["model"])
        self.healed = True

    def shards(self) -> list[torch.Tensor]:
        shards = []
        for parameter in self.model.parameters():
            assert isinstance(parameter, DTensor)
            shards.append(parameter.to_local())
        return shards

    def in_quorum(self) -> None:
        if self.faults.drifted:
            with torch.no_grad():
                for number, shard in enumerate(self.shards()):
                    shard.add_(random_tensor(number + 1, *shard.shape))
        send(
            round=self.faults.round,
            before=encode(self.shards()),
            step=self.manager.current_step(),
            healed=self.healed,
            checkpoint=self.manager._checkpoint_transport.metadata(),
        )

    def train(self) -> None:
        """One optimizer step with gradients that differ by round, group and rank; it synchronizes."""
        seed = ((self.faults.round * 2 + GROUP) * RANKS + RANK) * 100
        for number, parameter in enumerate(self.model.parameters()):
            assert isinstance(parameter, DTensor)
            parameter.grad = DTensor.from_local(
                random_tensor(seed + number, *parameter.to_local().shape),
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        self.optimizer.step()

    def watch_write_back(self) -> None:
        copy = local_sgd._copy_local_tensor_to_parameter

        def watched(parameter: torch.Tensor, local_tensor: torch.Tensor) -> None:
            index, self.written = self.written, self.written + 1
            self.faults.reach("in_write_back", index)
            copy(parameter, local_tensor)

        local_sgd._copy_local_tensor_to_parameter = watched

    def run(self, first: int) -> None:
        number = first
        with local_sgd.LocalSGD(self.manager, self.model, self.optimizer, 1, True, **STAGING):
            while True:
                self.faults.begin(number)
                failure: Optional[Exception] = None
                try:
                    self.train()
                except Exception as error:
                    failure = error
                send(
                    round=number,
                    after=encode(self.shards()),
                    step=self.manager.current_step(),
                    failed=failure and repr(failure),
                )
                if failure is not None:
                    # As the documentation says: such a process has to start again.
                    raise failure
                number += 1


def main(argv: Sequence[str]) -> int:
    send(pid=os.getpid())
    control = TCPStore(CONTROL_HOST, int(os.environ[CONTROL_PORT]), is_master=False, wait_for_workers=False)
    first = int(control.get(f"first/{GROUP}"))
    dist.init_process_group("gloo")
    rank = Rank(control)
    rank.watch_write_back()
    rank.run(first)
    return 0


if __name__ == "__main__":
    cli.run_rank("fault_worker", main)
