"""
Durable checkpoints of one replica group, for a cold restart of all of them.

FOLDER/group_0/step_80 and so on. Healing while others live does not need them: that goes from peer to peer.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, Optional

import torch.distributed as dist
from torch import nn, optim
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from torchft._launch.cli import UserError
from torchft.manager import Manager

__all__ = ["Checkpoint"]

_KEPT = 2
_PARTIAL = ".partial"


class Checkpoint:
    """Saves and loads model, optimizer and Manager. All ranks of the group call it together.

    The Manager's state is part of it: without the step count a restarted group would take itself for a
    newcomer and heal, or be taken for the peer to heal from.

    Args:
        folder: where all groups save; a shared file system if they run on several machines.
        group: this replica group.
        model: what is trained.
        optimizer: its optimizer.
        manager: its Manager.
        sync_every: optimizer steps between commits, which must be those of the run that saved.
    """

    def __init__(
        self,
        folder: str,
        group: int,
        model: nn.Module,
        optimizer: optim.Optimizer,
        manager: Manager,
        sync_every: int,
    ) -> None:
        self._folder = Path(folder) / f"group_{group}"
        self._model = model
        self._optimizer = optimizer
        self._manager = manager
        self._sync_every = sync_every
        self._writes = not dist.is_initialized() or dist.get_rank() == 0

    def load(self) -> None:
        """Takes over the newest complete checkpoint, if there is one.

        Call it before entering ``LocalSGD``: preparing the optimizer's state takes an optimizer step.

        Raises:
            UserError: the checkpoint does not fit the model or ``sync_every``.
        """
        complete = self._complete()
        if not complete:
            return
        newest = complete[max(complete)]
        state = self._state()
        try:
            load(state, checkpoint_id=newest, no_dist=not dist.is_initialized())
        except (CheckpointException, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(
                f"--checkpoint: {str(newest)!r} does not fit this model ({reason}); pass the sizes that it "
                "was saved with, or another folder"
            ) from None
        # The Manager counts commits; with another interval they would be other steps.
        if state["sync_every"] != self._sync_every:
            raise UserError(
                f"--checkpoint: {str(newest)!r} was saved with --sync-every {state['sync_every']}, not "
                f"{self._sync_every}; pass that one, or another folder"
            )
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self._manager.load_state_dict(state["manager"])

    def save(self, step: int) -> None:
        """Saves what training has after a commit.

        Args:
            step: optimizer steps so far.
        """
        final = self._folder / f"step_{step}"
        partial = final.with_name(final.name + _PARTIAL)
        if self._writes:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _barrier()
        save(self._state(), checkpoint_id=partial, no_dist=not dist.is_initialized())
        if self._writes:
            # Only a whole checkpoint ever has the name that load() looks for.
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            complete = self._complete()
            for old in sorted(complete)[:-_KEPT]:
                shutil.rmtree(complete[old], ignore_errors=True)
        _barrier()

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "manager": self._manager.state_dict(),
            "sync_every": self._sync_every,
        }

    def _complete(self) -> dict[int, Path]:
        """Maps the steps of which there is a whole checkpoint to their folders."""
        steps: dict[int, Path] = {}
        for entry in self._folder.glob("step_*"):
            match: Optional[re.Match[str]] = re.fullmatch(r"step_(\d+)", entry.name)
            if match is not None:
                steps[int(match.group(1))] = entry
        return steps


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
