"""When another synchronization may start, and when the model can't take an average over any more."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from averaging_models import bits, equal_parameters
from local_manager import LocalManager, staged
from properties import make, synchronize_until_commit
from replica_threads import Replica, run_replicas
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from torchft.local_sgd import LocalSGD
from torchft.process_group import ProcessGroupGloo


class Quorum(LocalManager):
    """Raises once in start_quorum(), with the quorum in the state that the real Manager would show."""

    def __init__(self, error: BaseException, *, done: bool, healing: bool) -> None:
        super().__init__()
        self.errors = [error]
        self._quorum_future: concurrent.futures.Future[None] = concurrent.futures.Future()
        if done:
            self._quorum_future.set_result(None)
        self._healing = healing

    def start_quorum(self) -> None:
        super().start_quorum()
        if self.errors:
            raise self.errors.pop()


@pytest.mark.parametrize(
    ("error", "done", "healing", "forgiven"),
    [
        (TimeoutError("injected"), True, False, True),
        (TimeoutError("injected"), False, False, False),
        (TimeoutError("injected"), True, True, False),
        (KeyboardInterrupt(), True, False, False),
    ],
)
def test_exception_in_the_quorum(error: BaseException, done: bool, healing: bool, forgiven: bool) -> None:
    manager = Quorum(error, done=done, healing=healing)
    local = staged(equal_parameters(1, 2), manager)
    with pytest.raises(type(error)):
        local.sync()
    manager._healing = False
    if forgiven:
        local.sync()
        assert manager.quorums == 2
    else:
        with pytest.raises(RuntimeError, match="left in its quorum, perhaps half healed"):
            local.sync()
        assert manager.quorums == 1


def test_alarm_in_the_quorum_of_a_group_that_has_to_heal() -> None:
    """The quorum goes on in the Manager's thread and heals: the stale weights must not be averaged."""

    def body(replica: Replica) -> list[float]:
        replica.model = model = nn.Module()
        model.register_parameter("p", nn.Parameter(torch.full((1,), 20.0)))
        synchronize_until_commit(replica, make(LocalSGD, replica, model, True))
        replica.barrier.wait()
        if replica.index == 0:
            # The other one has asked for a quorum and been called away by then.
            replica.barrier.wait()
            local = make(LocalSGD, replica, model, True)
            local.sync()
            return [model.get_parameter("p").item()]
        replica.close()
        again = replica.successor(ProcessGroupGloo())
        try:
            nn.init.constant_(model.get_parameter("p"), 100.0)
            local = make(LocalSGD, again, model, True)
            wait_quorum = again.manager.wait_quorum

            def alarm() -> None:
                raise TimeoutError("injected: an alarm")

            again.manager.wait_quorum = alarm  # type: ignore[method-assign]
            with pytest.raises(TimeoutError, match="alarm"):
                local.sync()
            again.manager.wait_quorum = wait_quorum  # type: ignore[method-assign]
            replica.barrier.wait()
            # Seconds later the quorum is there, and the Manager has fetched the peer's state.
            again.manager.wait_quorum()
            with pytest.raises(RuntimeError, match="left in its quorum"):
                local.sync()
        finally:
            again.close()
        return []

    # The group that is left without its peer need not wait for long.
    (kept,) = run_replicas(2, body, lambda: ProcessGroupGloo(timeout=timedelta(seconds=2)))[0]
    assert kept == 20.0


# Write-back


def add(model: nn.Module) -> None:
    model.register_parameter("more", nn.Parameter(torch.zeros(3)))


def remove(model: nn.Module) -> None:
    del model._parameters[next(reversed(model._parameters))]


def reshape(model: nn.Module) -> None:
    name = next(reversed(model._parameters))
    model._parameters[name] = nn.Parameter(torch.zeros(7))


def retype(model: nn.Module) -> None:
    name = next(reversed(model._parameters))
    model._parameters[name] = nn.Parameter(model.get_parameter(name).detach().bfloat16())


class Registered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "c"):
            self.register_parameter(name, nn.Parameter(torch.ones(5)))


@pytest.mark.parametrize("change", [add, remove, reshape, retype], ids=lambda change: change.__name__)
@pytest.mark.parametrize("options", [{}, {"offload_allreduce_to_cpu": True}], ids=["window", "host"])
def test_parameters_that_changed_in_the_vote_are_not_written(
    change: Callable[[nn.Module], None], options: dict[str, Any]
) -> None:
    model = Registered()

    class Changing(LocalManager):
        def allreduce(self, tensor: torch.Tensor) -> Any:
            return super().allreduce(tensor.mul_(2))

        def should_commit(self) -> bool:
            change(model)
            return True

    manager = Changing()
    local = staged(model, manager, **options)
    with pytest.raises(RuntimeError, match=r"can't be written back, and nothing was: (the model|parameter)"):
        local.sync()
    assert torch.equal(model.get_parameter("a"), torch.ones(5)), "one was written before the mismatch"
    with pytest.raises(RuntimeError, match="parameters were others by then"):
        local.sync()
    assert manager.quorums == 1


@pytest.mark.parametrize(
    "averages", [[], [torch.zeros(5)] * 4, [torch.zeros(5), torch.zeros(5), torch.zeros(1)]]
)
def test_averages_of_a_subclass_that_do_not_fit(averages: list[torch.Tensor]) -> None:
    """They are voted down: after a commit nobody could take them over."""

    class Odd(LocalSGD):
        def _average(self) -> list[torch.Tensor]:
            return averages

    model, manager = Registered(), LocalManager()
    before = bits(model)
    local = Odd(manager, model, torch.optim.SGD(model.parameters(), lr=0.1), 1, True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"_average\(\) returned"):
        local.sync()
    assert not manager.commit
    assert bits(model) == before


def test_averages_may_come_one_by_one_and_be_kept() -> None:
    class Keeping(LocalSGD):
        kept: list[torch.Tensor]

        def _average(self) -> Any:
            self.kept = super()._average()
            return iter(self.kept)

    model, manager = Registered(), LocalManager()
    local = Keeping(manager, model, torch.optim.SGD(model.parameters(), lr=0.1), 1, True)  # pyright: ignore[reportArgumentType]
    local.sync()
    assert len(local.kept) == 3
    assert all(torch.equal(average, torch.ones(5)) for average in local.kept)


def test_another_object_on_the_same_manager_refuses_as_well() -> None:
    """A retry loop that makes a new LocalSGD would average a torn model."""

    class Torn(LocalSGD):
        def _write_back(self, averages: list[torch.Tensor]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
            raise KeyboardInterrupt

    model, manager = Registered(), LocalManager()
    torn = Torn(manager, model, torch.optim.SGD(model.parameters(), lr=0.1), 1, True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(KeyboardInterrupt):
        torn.sync()
    with pytest.raises(RuntimeError, match="left in the middle of write-back"):
        staged(model, manager).sync()
    staged(model, LocalManager()).sync()


@pytest.mark.parametrize("what", ["to_several", "to_meta", "to_integers"])
def test_parameters_that_healing_in_the_quorum_made_others_are_voted_down(what: str) -> None:
    model = Registered()
    odd = {
        "to_several": TwoTensor(torch.ones(5), torch.zeros(5)),
        "to_meta": torch.ones(5, device="meta"),
        "to_integers": torch.ones(5, dtype=torch.int64),
    }[what]

    class Healing(LocalManager):
        sent = 0

        def start_quorum(self) -> None:
            model.b = nn.Parameter(odd, requires_grad=False)

        def allreduce(self, tensor: torch.Tensor) -> Any:
            self.sent += 1
            return super().allreduce(tensor)

    manager = Healing()
    with pytest.raises(ValueError, match="parameter 'b'"):
        staged(model, manager).sync()
    assert (manager.sent, manager.commit) == (0, False)


def test_a_step_while_a_state_is_loaded_is_none_of_training() -> None:
    """Loading an optimizer's state may take a step, to have a state to load into."""
    model = Registered()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)

    class Healing(LocalManager):
        def start_quorum(self) -> None:
            super().start_quorum()
            optimizer.step()

        def disallow_state_dict_read(self) -> None:
            pass

        allow_state_dict_read = disallow_state_dict_read

    manager = Healing()
    with LocalSGD(manager, model, optimizer, 1, True) as local:  # pyright: ignore[reportArgumentType]
        local.sync()
        assert manager.quorums == 1
        optimizer.step()
        assert manager.quorums == 2


def test_buffers_and_hooks_go_whatever_the_manager_raises() -> None:
    class Raising(LocalManager):
        def errored(self) -> None:
            raise ConnectionError("injected: errored")

        def allow_state_dict_read(self) -> None:
            if self.quorums:
                raise ConnectionError("injected: the lock")

    model = Registered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalSGD(Raising(), model, optimizer, 1, True)  # pyright: ignore[reportArgumentType]
    local.__enter__()
    with pytest.raises(ConnectionError, match="errored"):
        local.sync()
    assert local._buffers is None
    with pytest.raises(ConnectionError, match="the lock"):
        local.__exit__(None, None, None)
    assert not optimizer._optimizer_step_post_hooks


def test_vote_that_fails_in_the_failure_path_is_not_forgiven() -> None:
    class Failing(LocalManager):
        def allreduce(self, tensor: torch.Tensor) -> Any:
            raise MemoryError("injected")

        def should_commit(self) -> bool:
            raise TimeoutError("injected: the vote")

    logging.getLogger("torchft.local_sgd").setLevel(logging.CRITICAL)
    try:
        local = staged(equal_parameters(1, 2), Failing())
        with pytest.raises(MemoryError):
            local.sync()
        with pytest.raises(RuntimeError, match="left before its commit vote"):
            local.sync()
    finally:
        logging.getLogger("torchft.local_sgd").setLevel(logging.NOTSET)
