"""
LocalSGD
=========

LocalSGD and DiLoCo of TorchFT, where LocalSGD can keep averaged parameters on the host (CPU staging)
until the replica groups have voted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Optional

import torch
from torch import nn, optim
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor

from torchft._distribution_check import check_distribution

# Before anything of the release is imported: what is installed here may not be one consistent package.
check_distribution()

from torchft import _upstream_local_sgd as _upstream  # noqa: E402
from torchft._staging import checks, outcome  # noqa: E402
from torchft._staging.buffers import StagingBuffers  # noqa: E402
from torchft._staging.frames import drop_failed_collective, drop_locals, failure_of  # noqa: E402
from torchft._staging.host_memory import host_shortage  # noqa: E402
from torchft._staging.ordering import finish_divisions, on_device  # noqa: E402
from torchft._staging.plan import ShardLayout, StagingPlan, local_shard  # noqa: E402
from torchft._staging.report import describe_plan  # noqa: E402
from torchft._staging.steps import inside_another_step  # noqa: E402
from torchft._upstream_local_sgd import DiLoCo, extract_local_tensor  # noqa: E402
from torchft.manager import Manager  # noqa: E402

__all__ = ["DiLoCo", "LocalSGD", "extract_local_tensor"]

logger: logging.Logger = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    # Whatever else the release's module holds, private names included, stays reachable from here.
    return getattr(_upstream, name)


def _copy_local_tensor_to_parameter(parameter: torch.Tensor, local_tensor: torch.Tensor) -> None:
    """Writes a local shard into its parameter, in place.

    Args:
        parameter: plain tensor or DTensor; keeps its storage.
        local_tensor: the new value of this rank's shard. Of a DTensor on the device of its mesh: elsewhere,
            ``from_local`` would take memory there.
    """
    if isinstance(parameter, DTensor):
        local_tensor = DTensor.from_local(
            local_tensor,
            parameter.device_mesh,
            parameter.placements,
            # Of uneven shards the global shape can't be computed from the local one.
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    parameter.data.copy_(local_tensor)


class LocalSGD(_upstream.LocalSGD):
    """Trains each replica group alone and averages the parameters every ``sync_every`` optimizer steps.

    A context manager for the algorithm of https://arxiv.org/pdf/1805.09767 under TorchFT's quorum: the
    groups average their parameters, vote, and take the average over only if the vote is yes. Without
    ``offload_averaged_parameters_to_cpu`` this is the class of the TorchFT release, unchanged.

    **CPU staging.** With ``offload_averaged_parameters_to_cpu=True`` each parameter is reduced in a scratch
    window on the accelerator and its average waits on the host for the vote; the parameters are written, in
    place, after a yes, and keep their bits after a no. With ``offload_allreduce_to_cpu=True`` as well, the
    host copies themselves are reduced (host all-reduce), for process groups that reduce CPU tensors.

    With S the bytes of all parameters that this rank holds (of a DTensor: its local shard) and M the bytes
    of the largest one:

    * *Accelerator memory*: a synchronization takes M more than training does, instead of S; with
      ``offload_window_mb`` at most the larger of M and the window; with a host all-reduce nothing. Per
      device, where a model has several.
    * *Host memory*: S more per rank, from the first all-reduce until the vote has been carried out. All
      ranks of a host need it at the same time.
    * *Host link*: 2S per committed synchronization (S to the host and S back), S per rejected one. A process
      group that reduces on the host, as Gloo does, adds 2S of its own unless the all-reduce is a host one.
    * *Time*: a synchronization takes longer, since parameters wait for one another and cross the host
      link; not with a host all-reduce, in which all are under way together. A larger ``sync_every``
      spreads it over more steps.

    It offloads the averages alone: not the weights, the gradients or the optimizer state. It can lower the
    peak of a training run only where the synchronization is that peak.

    **What is averaged**: every parameter of ``model``, frozen ones too, tied ones once. Buffers are not
    (running statistics of BatchNorm stay each group's own), nor is optimizer state. Results are bit for bit
    those of the release, and groups with and without staging can train in one quorum. With a host all-reduce
    on accelerators all groups must use it: the host divides where an accelerator multiplies by the
    reciprocal, so the last bit may differ where the number of groups is no power of two.

    .. warning::
        The Manager's defaults, ``use_async_quorum=True`` with ``init_sync=True``, destroy weights under
        LocalSGD: at the first synchronization all groups but one are healing, contribute zeros and are
        still counted, so the committed average is the model divided by the number of groups. CPU staging
        refuses this combination; without staging nothing notices. Give all groups identical initial weights
        and use ``use_async_quorum=False, init_sync=False`` in every group.

    Args:
        manager: the Manager of this rank; all replica groups must use the same quorum settings.
        model: the module whose parameters are averaged, sharded as it will be trained.
        optimizer: the optimizer that steps ``model``; its step hooks drive the synchronization.
        sync_every: optimizer steps between synchronizations, at least 1.
        offload_averaged_parameters_to_cpu: keep averaged parameters on the host until the vote (CPU
            staging).
        offload_window_mb: accelerator memory, in MiB per device, in which staging may keep several
            parameters in flight. None: one parameter at a time. 0: as many consecutive parameters as fit
            into M. More: as many as fit into that, for speed. A parameter larger than the window takes its
            own size.
        offload_allreduce_to_cpu: reduce the host copies themselves, all of them in flight together, without a
            window (host all-reduce). The process group must reduce CPU tensors in every group, as Gloo does.

    Raises:
        ValueError: for a ``sync_every`` or window that can't be used, for an optimizer without step hooks,
            for the quorum settings above, for parameters that can't be averaged (dtype, device, layout,
            tensors made of several), and for a process group that is known not to reduce them, all of it
            with staging only; for a window or a host all-reduce without staging, for both at once, and for a
            switch that is no bool.
    """

    # Also of subclasses and stand-ins that never call __init__.
    _offload_averaged_parameters_to_cpu = False

    def __init__(
        self,
        manager: Manager,
        model: nn.Module,
        optimizer: optim.Optimizer,
        sync_every: int,
        offload_averaged_parameters_to_cpu: bool = False,
        *,
        offload_window_mb: Optional[float] = None,
        offload_allreduce_to_cpu: bool = False,
    ) -> None:
        staging = offload_averaged_parameters_to_cpu
        checks.check_switch("offload_averaged_parameters_to_cpu", staging)
        self._offload_averaged_parameters_to_cpu = staging
        self._window_bytes = checks.window_bytes(offload_window_mb, staging)
        checks.check_allreduce_to_cpu(offload_allreduce_to_cpu, staging, offload_window_mb)
        self._allreduce_to_cpu = offload_allreduce_to_cpu
        if staging:
            checks.check_sync_every(sync_every)
            checks.check_step_hooks(optimizer)
            checks.check_quorum_mode(manager)
            checks.check_parameters(model)
            checks.check_process_group(manager, model, offload_allreduce_to_cpu)
            checks.warn_of_other_optimizers(model, optimizer)
        self._outcome = outcome.Outcome.of(manager)
        # Of the synchronization under way.
        self._buffers: Optional[StagingBuffers] = None
        self._synchronizing = False
        self._plan_logged = False
        super().__init__(manager, model, optimizer, sync_every)

    def __exit__(
        self,
        exc_type: Optional[type[BaseException]],
        exc_value: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> bool:
        try:
            return super().__exit__(exc_type, exc_value, traceback)
        finally:
            if self._offload_averaged_parameters_to_cpu:
                self._let_peers_read()

    # A compiled optimizer step would trace the hooks, and the Manager inside them, which nothing can.
    @_disable_dynamo
    def _step_pre_hook(
        self, _optim: optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]
    ) -> None:
        if self._counts(_optim):
            super()._step_pre_hook(_optim, _args, _kwargs)

    @_disable_dynamo
    def _step_post_hook(
        self, _optim: optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]
    ) -> None:
        if self._counts(_optim):
            super()._step_post_hook(_optim, _args, _kwargs)

    def _counts(self, optimizer: optim.Optimizer) -> bool:
        """Whether a step whose hook asks is one of training."""
        if not self._offload_averaged_parameters_to_cpu:
            return True
        # While a peer's state is loaded, an optimizer may be stepped to have a state to load into.
        return not self._synchronizing and not inside_another_step(optimizer)

    def sync(self) -> None:
        """Averages the parameters across the replica groups now, whatever the step count.

        Raises:
            ValueError: (CPU staging) a parameter can't be averaged as it is, and nothing has been sent; or
                the process group can't take the parameters' device, and the synchronization was rejected.
            RuntimeError: (CPU staging) an earlier synchronization was left without a known outcome.
        """
        if not self._offload_averaged_parameters_to_cpu:
            super().sync()
            return
        self._outcome.check()
        checks.check_ready(self._model)
        self._let_peers_read()
        # An exception while a peer's state is taken over leaves it half loaded, with the peer's step.
        self._outcome.at = outcome.IN_QUORUM
        self._synchronizing = True
        try:
            super().sync()
        except Exception:
            # A quorum that never came about has changed nothing.
            if self._outcome.at == outcome.IN_QUORUM and outcome.quorum_is_over(self._manager):
                self._outcome.at = None
            raise
        finally:
            self._synchronizing = False
        if self._outcome.at == outcome.IN_QUORUM:
            # A subclass with a _perform_sync() of its own is done.
            self._outcome.at = None

    def _perform_sync(self) -> None:
        """Averages, votes and writes back; leaves no memory behind, however it ends."""
        if not self._offload_averaged_parameters_to_cpu:
            super()._perform_sync()
            return
        self._outcome.check(outcome.IN_QUORUM)
        averages: list[torch.Tensor] = []
        written = 0.0
        begin = time.perf_counter()
        try:
            with self._rejecting():
                self._buffers = self._take_memory()
                averages = list(self._average())
                checks.check_averages(self._buffers.plan, averages)
            self._outcome.at = outcome.IN_VOTE
            reduced = time.perf_counter()
            committed = self._manager.should_commit()
            if committed:
                self._outcome.at = outcome.IN_WRITE_BACK
                voted = time.perf_counter()
                self._write_back(averages)
                written = time.perf_counter() - voted
            self._outcome.at = None
        except BaseException as error:
            drop_locals(error)
            raise
        finally:
            averages = []
            if self._buffers is not None:
                self._buffers.release()
                self._buffers = None
            drop_failed_collective(self._manager)
        self._report(committed, reduced - begin, written)

    def _average(self) -> list[torch.Tensor]:
        """Averages the parameters across the replica groups.

        Returns:
            The averages in the order of ``model.parameters()``, as tensors on the host with staging.
        """
        if not self._offload_averaged_parameters_to_cpu:
            return super()._average()
        if self._buffers is not None:
            return self._reduce_and_stage(self._buffers)
        # Called by a subclass that votes and writes back by itself.
        before = self._outcome.at
        self._outcome.check(outcome.IN_QUORUM)
        with self._rejecting():
            buffers = self._take_memory()
            try:
                averages = self._reduce_and_stage(buffers)
            finally:
                buffers.release_window()
        self._outcome.at = before
        return averages

    @torch.no_grad()
    @torch.profiler.record_function("torchft::local_sgd::reduce_and_stage")
    def _reduce_and_stage(self, buffers: StagingBuffers) -> list[torch.Tensor]:
        parameters = list(self._model.parameters())
        reduce = self._reduce_on_host if buffers.plan.allreduce_to_cpu else self._reduce_in_window
        for indices in buffers.plan.rounds:
            reduce(buffers, [(index, parameters[index]) for index in indices])
        # Another list than the one that is emptied: what a subclass does with it is its own business.
        return list(buffers.host)

    def _reduce_in_window(self, buffers: StagingBuffers, parameters: list[tuple[int, torch.Tensor]]) -> None:
        in_flight = []
        for index, parameter in parameters:
            slot = buffers.slot(index)
            with on_device(slot.device):
                slot.copy_(local_shard(parameter))
                in_flight.append((index, slot, self._manager.allreduce(slot)))
        drop_failed_collective(self._manager)
        # All of a round is waited for before the window is filled again.
        for _, slot, work in in_flight:
            with on_device(slot.device):
                work.wait()
            drop_failed_collective(self._manager)
        finish_divisions({slot.device for _, slot, _ in in_flight})
        for index, slot, _ in in_flight:
            with on_device(slot.device):
                buffers.host[index].copy_(slot)

    def _reduce_on_host(self, buffers: StagingBuffers, parameters: list[tuple[int, torch.Tensor]]) -> None:
        in_flight = []
        for index, parameter in parameters:
            with on_device(buffers.plan.layouts[index].device):
                copy = buffers.copy_to_host(index, parameter)
            in_flight.append(self._manager.allreduce(copy))
        drop_failed_collective(self._manager)
        for work in in_flight:
            work.wait()
            drop_failed_collective(self._manager)

    @torch.no_grad()
    @torch.profiler.record_function("torchft::local_sgd::write_back")
    def _write_back(self, averages: list[torch.Tensor]) -> None:
        assert self._buffers is not None
        # The vote may have healed this group, and load_state_dict(assign=True) puts other Parameter objects
        # into the model: ask for them again.
        parameters = list(self._model.parameters())
        change = checks.find_change(self._buffers.plan, parameters)
        if change is not None:
            self._outcome.at = outcome.CHANGED
            raise RuntimeError(f"the committed average can't be written back, and nothing was: {change}")
        for index, (parameter, average) in enumerate(zip(parameters, averages, strict=True)):
            with on_device(self._buffers.plan.layouts[index].device):
                average = self._buffers.bring_back(index, average)
                if (
                    isinstance(parameter, DTensor)
                    and average.device.type != parameter.device_mesh.device_type
                ):
                    # Straight into the shard: from_local would take memory on the device of the mesh.
                    parameter = local_shard(parameter.detach())
                _copy_local_tensor_to_parameter(parameter, average)

    def _take_memory(self) -> StagingBuffers:
        # Before the first all-reduce, so that running out of memory can't leave a collective unpaired.
        plan = StagingPlan.of(
            map(ShardLayout.of, self._model.parameters()), self._window_bytes, self._allreduce_to_cpu
        )
        shortage = None if self._plan_logged else host_shortage(plan.host_bytes)
        if shortage is not None:
            # While it can still be told: too little host memory ends in the kernel killing the process.
            logger.warning(shortage)
        buffers = StagingBuffers(plan)
        if not self._plan_logged:
            self._plan_logged = True
            logger.info(describe_plan(plan, checks.process_group_name(self._manager)))
        return buffers

    @contextmanager
    def _rejecting(self) -> Iterator[None]:
        """Votes no if an exception ends what comes before the vote."""
        self._outcome.at = outcome.BEFORE_VOTE
        try:
            # Again: healing in the quorum may have replaced parameters, and a subclass may have a sync() of
            # its own.
            checks.check_ready(self._model)
            yield
        except Exception as error:
            self._reject(error)
            raise

    def _reject(self, error: Exception) -> None:
        """Votes no, so that the process group is configured anew.

        Without a vote the collectives under way would be paired with those of the next synchronization,
        which then commits wrong values.
        """
        try:
            self._manager.report_error(error)
            # A vote before an asynchronous quorum is complete would drop the state that heals this group and
            # keep its step.
            self._manager.wait_quorum()
            self._manager.should_commit()
        except Exception:
            logger.exception("the vote against a failed synchronization failed as well")
        else:
            self._outcome.at = None

    def _let_peers_read(self) -> None:
        # A step that raised has left the Manager's lock on the state held, and no peer could heal from it.
        allow = getattr(self._manager, "allow_state_dict_read", None)
        if callable(allow):
            allow()

    def _report(self, committed: bool, reduced: float, written: float) -> None:
        """Logs how a synchronization ended.

        Args:
            committed: what the vote was.
            reduced: seconds to reduce and stage.
            written: seconds to write back.

        Raises:
            ValueError: it was rejected for a reason that lets none succeed.
        """
        if committed:
            self._outcome.committed()
            logger.info(
                "staged synchronization committed: %.1f ms to reduce and stage, %.1f ms to write back",
                reduced * 1e3,
                written * 1e3,
            )
            return
        reason = self._outcome.rejected(self._manager)
        logger.warning(
            "staged synchronization rejected: %.1f ms to reduce and stage, nothing written; %s",
            reduced * 1e3,
            reason,
        )
        checks.check_backend(failure_of(self._manager), self._allreduce_to_cpu)
