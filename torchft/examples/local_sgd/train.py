"""
LocalSGD training of one rank: the loop to copy.

The launcher (``python -m torchft.examples.local_sgd``) starts it, and so does ``torchrun``, once per replica
group and with a lighthouse that all groups can reach::

    torchft_lighthouse --min_replicas 2
    export TORCHFT_LIGHTHOUSE=http://HOST:29510
    export REPLICA_GROUP_ID=0  # 1 for the second group
    torchrun --nproc-per-node 2 --master-addr $(hostname) -m torchft.examples.local_sgd.train

On one machine the two also need different ports, with ``--master-port``.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from torchft._launch import cli, replicas
from torchft._launch.rank import pick_device, process_group
from torchft.examples.local_sgd.checkpoint import Checkpoint
from torchft.examples.local_sgd.data import Corpus, read_text
from torchft.examples.local_sgd.environment import check_environment
from torchft.examples.local_sgd.model import ByteTransformer
from torchft.examples.local_sgd.options import add_training_options, check_training_options
from torchft.examples.local_sgd.progress import Progress
from torchft.examples.local_sgd.rejections import NothingCommitted
from torchft.local_sgd import LocalSGD
from torchft.manager import Manager

__all__ = ["main", "train"]

PROG = "python -m torchft.examples.local_sgd.train"
# How long a group waits for the others to arrive at a synchronization. It must outlast the restart of a
# group that died, since that is what the others are waiting for.
QUORUM_TIMEOUT = timedelta(minutes=10)


def train(options: argparse.Namespace) -> None:
    """Trains on this rank until the group has committed everything.

    Args:
        options: the options of ``add_training_options``, checked.

    Raises:
        NothingCommitted: too many synchronizations in a row were rejected.
    """
    group = int(os.environ["REPLICA_GROUP_ID"])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = pick_device(options.device)
    corpus = Corpus(
        read_text(options.data), group * ranks + rank, options.replicas * ranks, options.sequence_length
    )

    # Identical initial weights in all groups: with init_sync=False nobody copies them around.
    torch.manual_seed(options.seed)
    model: nn.Module = ByteTransformer(
        options.dim, options.layers, options.heads, options.sequence_length
    ).to(device)
    if ranks > 1:
        shard(model, device, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    progress = Progress(group, rank, options.min_replicas)
    healed_at: Optional[int] = None

    # A group that joins late gets its state from these functions of a peer. Without the optimizer it would
    # go on with the peer's weights and its own, stale, moments.
    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        nonlocal healed_at
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        healed_at = manager.current_step()

    # Under torchrun --max-restarts the group's store still has the address of the Manager that died: the
    # others must not read it before rank 0 has written the new one.
    if ranks > 1 and rank > 0:
        dist.barrier()
    timeout = timedelta(seconds=options.timeout)
    manager = Manager(
        pg=process_group(options.process_group, timeout),
        state_dict=state_dict,
        load_state_dict=load_state_dict,
        min_replica_size=options.min_replicas,
        # LocalSGD needs both. The Manager's defaults (True, True) would multiply the weights by
        # 1 / replicas at the first synchronization; all groups must use the same settings.
        use_async_quorum=False,
        init_sync=False,
        # The vote waits for the slowest rank of the group, whose all-reduce may have timed out.
        timeout=3 * timeout,
        quorum_timeout=QUORUM_TIMEOUT,
        # Without it a lighthouse that was started again is not noticed before that.
        quorum_retries=20,
        replica_id=f"group_{group}",
    )
    if ranks > 1 and rank == 0:
        dist.barrier()

    checkpoint = None
    if options.checkpoint is not None:
        checkpoint = Checkpoint(options.checkpoint, group, model, optimizer, manager, options.sync_every)
        checkpoint.load()

    # The Manager counts commits, and a group that heals takes the count over with the weights: so the count,
    # and no step counter of one's own, decides when training is over.
    commits = -(-options.steps // options.sync_every)
    attempt = 0
    progress.begin(
        min(options.steps, manager.current_step() * options.sync_every),
        model,
        validate(model, corpus, options.batch_size, device),
    )
    # While inside, optimizer.step() synchronizes every sync_every steps.
    with LocalSGD(
        manager,
        model,
        optimizer,
        options.sync_every,
        options.offload_averaged_parameters_to_cpu,
        offload_window_mb=options.window_mb,
        offload_allreduce_to_cpu=options.allreduce_to_cpu,
    ) as local_sgd:
        while manager.current_step() < commits:
            commit, healed_at = manager.current_step(), None
            first = commit * options.sync_every
            steps = min(options.sync_every, options.steps - first)
            loss_sum = torch.zeros((), device=device)
            begin = 0.0
            for step in range(first, first + steps):
                inputs, targets = corpus.batch(options.batch_size, (options.seed, group, rank, step, attempt))
                loss = loss_of(model, inputs.to(device), targets.to(device))
                optimizer.zero_grad()
                loss.backward()
                loss_sum += loss.detach()
                begin = time.perf_counter()
                optimizer.step()
                progress.step(step + 1)
            if steps < options.sync_every:
                local_sgd.sync()

            milliseconds = (time.perf_counter() - begin) * 1e3
            if healed_at is not None:
                commit = healed_at
            committed = manager.current_step() > commit
            step = min(options.steps, (commit + 1) * options.sync_every)
            healed = healed_at is not None
            # Raises when nothing has been committed for too long.
            progress.synchronized(
                manager, step, attempt, float(loss_sum / steps), committed, healed, milliseconds
            )
            # A rejected interval is trained once more, from where it ended and on other data.
            attempt = 0 if committed else attempt + 1
            done = manager.current_step()
            due = done % options.checkpoint_every == 0 or done == commits
            if checkpoint is not None and committed and due:
                checkpoint.save(step)

    progress.finished(model, validate(model, corpus, options.batch_size, device))
    manager.shutdown(wait=False)
    if ranks > 1:
        dist.destroy_process_group()


def shard(model: nn.Module, device: torch.device, ranks: int) -> None:
    """Shards the model over the ranks of this group with FSDP2.

    Args:
        model: a ByteTransformer on ``device``; sharded in place.
        device: this rank's device.
        ranks: ranks of the group.
    """
    alone = device.type == "cuda" and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if alone else "gloo")
    mesh = init_device_mesh(device.type, (ranks,))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    # True for the root too: after a validation its parameters would otherwise stay unsharded, and
    # LocalSGD averages shards.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Computes the mean cross-entropy, in nats per byte.

    Args:
        model: a ByteTransformer.
        inputs: bytes, [batch, length].
        targets: the byte after each, [batch, length].
    """
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: nn.Module, corpus: Corpus, batch_size: int, device: torch.device) -> float:
    """Computes the loss on text that nobody trains on; the same on every rank of every group.

    Args:
        model: a ByteTransformer.
        corpus: where the text comes from.
        batch_size: sequences per batch.
        device: this rank's device.
    """
    batches = [
        loss_of(model, inputs.to(device), targets.to(device))
        for inputs, targets in corpus.validation(batch_size, 8)
    ]
    return float(torch.stack(batches).mean())


def main(argv: Sequence[str]) -> int:
    """Trains on this rank.

    Args:
        argv: the arguments.

    Returns:
        0, or 1 when nothing could be committed.
    """
    parser = cli.Parser(PROG, "LocalSGD training of one rank, under torchrun or the launcher.")
    add_training_options(parser)
    options = parser.parse_args(argv)
    check_training_options(options)
    check_environment(options.replicas)
    # the launcher names its ranks itself
    name = (
        "" if replicas.attached() else f"[group {os.environ['REPLICA_GROUP_ID']} rank {os.environ['RANK']}] "
    )
    logging.basicConfig(format=name + "%(message)s")
    logging.getLogger("torchft.local_sgd").setLevel(logging.INFO)
    try:
        train(options)
    except NothingCommitted as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    cli.run_rank(PROG, main)
