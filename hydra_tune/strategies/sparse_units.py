"""What runs in workers for a pruned trial: each replica is resident in a worker of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hydra_tune.builds import receive
from hydra_tune.commits import read_commit, write_commit
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.sparse.pruning import Pruning
from hydra_tune.sparse.training import Account, SparseTraining
from hydra_tune.state_tree import NotStorable
from hydra_tune.strategies.epochs import Saved
from hydra_tune.strategies.whole import Loaded, OutOfMemory, restore, write_checkpoint
from hydra_tune.training import Progress


@dataclass
class Replica:
    """One replica in its worker; the first one keeps the trial's commits."""

    training: SparseTraining
    commit: Path

    def close(self) -> None:
        if self.training.rank == 0:
            self.commit.unlink(missing_ok=True)


@dataclass(frozen=True)
class Trained:
    """What a piece of training came to on one replica."""

    progress: Progress
    account: Account
    sent_bytes: int
    """Handed to all-reduce in this piece."""


def load(
    context: WorkerContext, attempt: str, seed: int, parcel: bytes, checkpoints: Path, pruning: Pruning, rank: int,
    size: int,
) -> Loaded:  # fmt: skip
    """Make a replica here, in the state of the last commit, else of the newest checkpoint."""
    training = SparseTraining(receive(parcel), seed, context.device, pruning, rank, size)
    commit = Path(context.setup.directory) / f"commit-{attempt}"
    context.resident[attempt] = Replica(training, commit)
    committed = read_commit(commit)
    if committed is None:
        return restore(training, checkpoints)
    training.restore(committed)
    return Loaded(training.history)


def train(context: WorkerContext, attempt: str, batches: int) -> Trained:
    """Train so many batches with the other replicas; the first one then commits."""
    replica: Replica = context.resident[attempt]
    training = replica.training
    training.look_for_mask()
    sent = training.weights.sent_bytes
    progress = training.train_batches(batches)
    context.unit_peak_bytes = training.peak_bytes
    if training.peak_bytes > context.setup.memory:
        raise OutOfMemory(training.peak_bytes, context.setup.memory, context.setup.device)
    _commit(replica)
    return Trained(progress, training.account(), training.weights.sent_bytes - sent)


def judge(context: WorkerContext, attempt: str, epoch: int) -> dict[str, float]:
    """Evaluate, unless a worker that is gone had done so; the weights are the same everywhere."""
    training: SparseTraining = context.resident[attempt].training
    return training.judge() if training.epoch == epoch else training.history[epoch]


def next_epoch(context: WorkerContext, attempt: str, epoch: int, judged: dict[str, float]) -> None:
    """Go to the epoch after this one."""
    replica: Replica = context.resident[attempt]
    if replica.training.epoch == epoch:
        replica.training.next_epoch(judged)
        _commit(replica)


def keep_weights(context: WorkerContext, attempt: str) -> None:
    """Remember this epoch's weights as the best so far."""
    replica: Replica = context.resident[attempt]
    replica.training.keep_weights()
    _commit(replica)


def checkpoint(context: WorkerContext, attempt: str, directory: Path) -> Saved:
    """Write all that another process needs to go on from here."""
    training: SparseTraining = context.resident[attempt].training
    return write_checkpoint(directory, training.epoch * len(training.batches) + training.batch, training.state)


def save(context: WorkerContext, attempt: str, path: Path) -> None:
    """Write the weights to keep."""
    training: SparseTraining = context.resident[attempt].training
    training.save(path)


def _commit(replica: Replica) -> None:
    if replica.training.rank == 0:
        try:
            write_commit(replica.commit, replica.training.state())
        except NotStorable:
            # What a module of the user's keeps besides tensors: the trial cannot go on elsewhere, but it can here.
            replica.commit.unlink(missing_ok=True)
