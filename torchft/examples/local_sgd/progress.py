"""
What a rank tells about its training: to the launcher, or on its own standard output.
"""

from __future__ import annotations

import ctypes
import hashlib

import torch
from torch import nn

from torchft._launch import replicas
from torchft._staging.plan import local_shard
from torchft.examples.local_sgd.rejections import NothingCommitted, Rejections
from torchft.manager import Manager

__all__ = ["Progress"]


class Progress:
    """Reports of one rank.

    Args:
        group: its replica group.
        rank: its rank within the group.
        min_replicas: groups without which nothing is committed.
    """

    def __init__(self, group: int, rank: int, min_replicas: int) -> None:
        self._launched = replicas.attached()
        self._prints = rank == 0 and not self._launched
        self._group = group
        self._rejections = Rejections(min_replicas)

    def begin(self, step: int, model: nn.Module, validation_loss: float) -> None:
        """Training starts.

        Args:
            step: optimizer steps that a checkpoint brought.
            model: what is trained.
            validation_loss: the loss before the first step.
        """
        total, largest = _local_bytes(model)
        self._say(f"starts at step {step}, validation loss {validation_loss:.3f}")
        self._send(
            kind="begin",
            step=step,
            total_bytes=total,
            largest_bytes=largest,
            validation_loss=validation_loss,
        )

    def step(self, step: int) -> None:
        """An optimizer step is done.

        Args:
            step: its number, from 1.
        """
        self._send(kind="step", step=step)

    def synchronized(
        self,
        manager: Manager,
        step: int,
        attempt: int,
        loss: float,
        committed: bool,
        healed: bool,
        milliseconds: float,
    ) -> None:
        """A synchronization is over.

        Args:
            manager: of this rank, after the synchronization.
            step: optimizer steps that the weights have if it was committed.
            attempt: how often these steps had been rejected before.
            loss: mean training loss since the last one.
            committed: how the vote went.
            healed: whether this group took its state over from a peer.
            milliseconds: how long it took, waiting for the other groups included.

        Raises:
            NothingCommitted: it was one of too many in a row that were rejected.
        """
        self._rejections.count(manager, committed)
        reason = self._rejections.reason
        participants = manager.num_participants()
        outcome = "committed" if committed else "rejected"
        note = (", healed from a peer" if healed else "") + (f": {reason}" if reason else "")
        self._say(
            f"step {step}: loss {loss:.3f}, {outcome} by {participants} groups "
            f"after {milliseconds:.0f} ms{note}"
        )
        self._send(
            kind="synchronized",
            step=step,
            attempt=attempt,
            commits=manager.current_step(),
            loss=loss,
            committed=committed,
            reason=reason,
            healed=healed,
            participants=participants,
            milliseconds=milliseconds,
        )
        if self._rejections.too_many:
            self._send(kind="gave_up")
            raise NothingCommitted(reason)

    def finished(self, model: nn.Module, validation_loss: float) -> None:
        """Training is over.

        Args:
            model: what was trained.
            validation_loss: the loss after the last step.
        """
        digest = _digest(model)
        self._say(f"finished, validation loss {validation_loss:.3f}, parameters sha256 {digest[:16]}")
        self._send(kind="finished", digest=digest, validation_loss=validation_loss)

    def _say(self, text: str) -> None:
        if self._prints:
            print(f"group {self._group} {text}", flush=True)

    def _send(self, **fields: object) -> None:
        if self._launched:
            replicas.send(**fields)


def _local_bytes(model: nn.Module) -> tuple[int, int]:
    sizes = [local_shard(parameter).nbytes for parameter in model.parameters()]
    return sum(sizes), max(sizes)


def _digest(model: nn.Module) -> str:
    """Hashes this rank's shards, bit for bit; equal in all groups after a commit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        shard = local_shard(parameter.detach()).to("cpu", memory_format=torch.contiguous_format)
        digest.update(ctypes.string_at(shard.data_ptr(), shard.nbytes) if shard.nbytes else b"")
    return digest.hexdigest()
