"""
LocalSGD
=========

LocalSGD and DiLoCo of TorchFT, where LocalSGD can keep averaged parameters on the host (CPU staging)
until the replica groups have voted.
"""

from __future__ import annotations

import logging
import time
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import FrameType
from typing import Any, Optional

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from torchft._distribution_check import check_distribution

# Before anything of the release is imported: what is installed here may not be one consistent package.
check_distribution()

from torchft import _upstream_local_sgd as _upstream  # noqa: E402
from torchft._staging.buffers import (  # noqa: E402
    ShardLayout,
    StagingBuffers,
    host_bytes,
    local_shard,
    plan_rounds,
    window_sizes,
)
from torchft._staging.checks import (  # noqa: E402
    check_parameters,
    check_quorum_mode,
    check_ready,
    check_step_hooks,
    check_sync_every,
    mesh_dimensions,
    window_bytes,
)
from torchft._staging.host_memory import host_shortage  # noqa: E402
from torchft._staging.ordering import finish_divisions, on_device  # noqa: E402
from torchft._staging.units import format_bytes  # noqa: E402
from torchft._upstream_local_sgd import DiLoCo, extract_local_tensor  # noqa: E402
from torchft.manager import Manager  # noqa: E402

__all__ = ["DiLoCo", "LocalSGD", "extract_local_tensor"]

logger: logging.Logger = logging.getLogger(__name__)

_IN_QUORUM = "in its quorum, perhaps half healed"


def __getattr__(name: str) -> Any:
    # Whatever else the release's module holds, private names included, stays reachable from here.
    return getattr(_upstream, name)


def _copy_local_tensor_to_parameter(parameter: torch.Tensor, local_tensor: torch.Tensor) -> None:
    """Writes a local shard into its parameter, in place.

    Args:
        parameter: plain tensor or DTensor; keeps its storage.
        local_tensor: the new value of this rank's shard, on the host or on the parameter's device.
    """
    if isinstance(parameter, DTensor):
        if local_shard(parameter).device.type != parameter.device_mesh.device_type:
            # Offloaded by FSDP2: from_local would take device memory for a tensor that belongs on the host.
            local_shard(parameter.detach()).copy_(local_tensor)
            return
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
    place, after a yes, and keep their bits after a no.

    With S the bytes of all parameters that this rank holds (of a DTensor: its local shard) and M the bytes
    of the largest one:

    * *Accelerator memory*: a synchronization takes M more than training does, instead of S; with
      ``offload_window_mb`` at most the larger of M and the window. Per device, where a model has several.
    * *Host memory*: S more per rank, from the first all-reduce until the vote has been carried out. All
      ranks of a host need it at the same time.
    * *Host link*: 2S per committed synchronization (S to the host and S back), S per rejected one.
    * *Time*: a synchronization takes longer, since parameters wait for one another and cross the host
      link. A larger ``sync_every`` spreads that over more steps.

    It offloads the averages alone: not the weights, the gradients or the optimizer state. It can lower the
    peak of a training run only where the synchronization is that peak.

    **What is averaged**: every parameter of ``model``, frozen ones too, tied ones once. Buffers are not
    (running statistics of BatchNorm stay each group's own), nor is optimizer state. Results are bit for bit
    those of the release, and groups with and without staging can train in one quorum.

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

    Raises:
        ValueError: for a ``sync_every`` or window that can't be used, for an optimizer without step hooks,
            for the quorum settings above, and for parameters that can't be averaged (dtype, device, layout),
            all of it with staging only; for a window without staging, and for a switch that is no bool.
    """

    def __init__(
        self,
        manager: Manager,
        model: nn.Module,
        optimizer: optim.Optimizer,
        sync_every: int,
        offload_averaged_parameters_to_cpu: bool = False,
        *,
        offload_window_mb: Optional[float] = None,
    ) -> None:
        if not isinstance(offload_averaged_parameters_to_cpu, bool):
            raise ValueError(
                "offload_averaged_parameters_to_cpu must be True or False, got "
                f"{offload_averaged_parameters_to_cpu!r}"
            )
        self._offload_averaged_parameters_to_cpu = offload_averaged_parameters_to_cpu
        self._window_bytes = window_bytes(offload_window_mb, offload_averaged_parameters_to_cpu)
        if offload_averaged_parameters_to_cpu:
            check_sync_every(sync_every)
            check_step_hooks(optimizer)
            check_quorum_mode(manager)
            check_parameters(model)
            self._mesh_dimensions = mesh_dimensions(model)
        self._host_checked = False
        self._plan_logged = False
        # Where a synchronization was left without a known outcome; None as long as none was.
        self._left: Optional[str] = None
        super().__init__(manager, model, optimizer, sync_every)

    def sync(self) -> None:
        """Averages the parameters across the replica groups now, whatever the step count.

        Raises:
            ValueError: (CPU staging) a parameter can't be averaged as it is; nothing has been sent.
            RuntimeError: (CPU staging) an earlier synchronization was left without a known outcome.
        """
        if self._offload_averaged_parameters_to_cpu:
            if self._left is not None:
                raise RuntimeError(
                    f"an earlier synchronization was left {self._left}; another one could pair its "
                    "collectives with new ones or spread half-written parameters. End this process and "
                    "start it again, so that it heals from a peer"
                )
            check_ready(self._model, self._mesh_dimensions)
            # Parameters may have been unsharded when this object was made.
            self._mesh_dimensions.update(mesh_dimensions(self._model))
            # An exception while a peer's state is taken over leaves it half loaded, with the peer's step.
            self._left = _IN_QUORUM
        try:
            super().sync()
        except Exception:
            # A quorum that never came about has changed nothing.
            if self._left == _IN_QUORUM and getattr(self._manager, "_healing", None) is not True:
                self._left = None
            raise

    def _perform_sync(self) -> None:
        if self._offload_averaged_parameters_to_cpu:
            self._perform_staged_sync()
        else:
            super()._perform_sync()

    def _perform_staged_sync(self) -> None:
        """Reduces, stages, votes and writes back; leaves no memory behind, however it ends."""
        buffers: Optional[StagingBuffers] = None
        begin = time.perf_counter()
        # Stays set when anything, Ctrl-C included, ends this method before the outcome is known.
        self._left = "before its commit vote"
        try:
            try:
                buffers = self._take_memory()
                self._reduce_and_stage(buffers)
            except Exception as error:
                self._reject(error)
                raise
            reduced = time.perf_counter()
            self._left = "in its commit vote"
            committed = self._manager.should_commit()
            voted = time.perf_counter()
            if committed:
                self._left = "in the middle of write-back"
                self._write_back(buffers)
            else:
                self._drop_failed_collective()
            self._left = None
        except BaseException as error:
            _drop_locals(error)
            raise
        finally:
            if buffers is not None:
                buffers.release()

        logger.info(
            "staged synchronization %s: %.1f ms to reduce and stage, %s",
            "committed" if committed else "rejected",
            (reduced - begin) * 1e3,
            f"{(time.perf_counter() - voted) * 1e3:.1f} ms to write back" if committed else "nothing written",
        )

    def _take_memory(self) -> StagingBuffers:
        # Before the first all-reduce, so that running out of memory can't leave a collective unpaired.
        layouts = [ShardLayout.of(parameter) for parameter in self._model.parameters()]
        if not self._host_checked:
            self._host_checked = True
            # While it can still be told: too little host memory ends in the kernel killing the process.
            shortage = host_shortage(host_bytes(layouts, plan_rounds(layouts, self._window_bytes)))
            if shortage is not None:
                logger.warning(shortage)
        buffers = StagingBuffers(layouts, self._window_bytes)
        if not self._plan_logged:
            self._plan_logged = True
            _log_plan(buffers)
        return buffers

    @torch.no_grad()
    @torch.profiler.record_function("torchft::local_sgd::reduce_and_stage")
    def _reduce_and_stage(self, buffers: StagingBuffers) -> None:
        """Averages every parameter across the replica groups and leaves the averages on the host."""
        parameters = list(self._model.parameters())
        for placements in buffers.rounds:
            in_flight = []
            for placement in placements:
                slot = buffers.slot(placement.index)
                with on_device(slot.device):
                    slot.copy_(local_shard(parameters[placement.index]))
                    in_flight.append((placement.index, slot, self._manager.allreduce(slot)))
            # All of a round is waited for before the window is filled again.
            for _, slot, work in in_flight:
                with on_device(slot.device):
                    work.wait()
            finish_divisions({slot.device for _, slot, _ in in_flight})
            for index, slot, _ in in_flight:
                with on_device(slot.device):
                    buffers.host[index].copy_(slot)

    @torch.no_grad()
    @torch.profiler.record_function("torchft::local_sgd::write_back")
    def _write_back(self, buffers: StagingBuffers) -> None:
        # The vote may have healed this group, and load_state_dict(assign=True) puts other Parameter objects
        # into the model: ask for them again.
        for index, parameter in enumerate(self._model.parameters()):
            with on_device(buffers.layouts[index].device):
                _copy_local_tensor_to_parameter(parameter, buffers.averaged(index))

    def _reject(self, error: Exception) -> None:
        """Votes no, so that the process group is configured anew.

        Without a vote the collectives under way would be paired with those of the next synchronization,
        which then commits wrong values.
        """
        self._manager.report_error(error)
        try:
            # A vote before an asynchronous quorum is complete would drop the state that heals this group and
            # keep its step.
            self._manager.wait_quorum()
            self._manager.should_commit()
        except Exception:
            logger.exception("the vote against a failed synchronization failed as well")
        else:
            self._left = None

    def _drop_failed_collective(self) -> None:
        # The Manager keeps the exception of a failed collective until the next quorum, and the frames of its
        # traceback hold the window.
        failure = getattr(self._manager.errored(), "original_exception", None)
        if isinstance(failure, BaseException):
            _drop_locals(failure)


def _drop_locals(error: BaseException) -> None:
    """Clears the finished frames of ``error``: they hold buffers for as long as somebody holds ``error``."""
    chain: list[BaseException] = []
    pending: list[Optional[BaseException]] = [error]
    while pending:
        link = pending.pop()
        if link is not None and link not in chain:
            chain.append(link)
            pending += [link.__cause__, link.__context__]
    for link in chain:
        trace = link.__traceback__
        # Frames that called into the traceback and have returned since stay linked to it, with their locals.
        frame = trace.tb_frame.f_back if trace is not None else None
        while frame is not None and _clear(frame):
            frame = frame.f_back
        while trace is not None:
            _clear(trace.tb_frame)
            trace = trace.tb_next


def _clear(frame: FrameType) -> bool:
    """Clears the locals of a frame; returns False if it is still running, as all its callers are then."""
    if frame.f_code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR):
        # It may be suspended, a user's watchdog say, and clearing would end it.
        return True
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True


def _log_plan(buffers: StagingBuffers) -> None:
    by_device = []
    for device, window in window_sizes(buffers.layouts, buffers.rounds).items():
        sizes = [layout.nbytes for layout in buffers.layouts if layout.device == device]
        by_device.append(
            f"{device}: S = {format_bytes(sum(sizes))}, M = {format_bytes(max(sizes))}, "
            f"window {format_bytes(window)}"
        )
    logger.info(
        "CPU staging is on: %d parameters in %d rounds; %s; host memory %s",
        len(buffers.layouts),
        len(buffers.rounds),
        "; ".join(by_device) or "nothing to average",
        format_bytes(host_bytes(buffers.layouts, buffers.rounds)),
    )
