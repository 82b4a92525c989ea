"""Units of a pruned trial in replicas: each replica is resident in a worker of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hydra_tune.core.state_tree import NotStorable
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.spill.state_file import read_commit, write_commit
from hydra_tune.strategies.epochs import Loaded, SavedCheckpoint
from hydra_tune.strategies.sparse.pruned_trial import Trained
from hydra_tune.strategies.sparse.pruning import Pruning
from hydra_tune.strategies.sparse.training import SparseTraining
from hydra_tune.strategies.whole.units import OutOfMemory, restore, write_checkpoint
from hydra_tune.training.prepared import receive


@dataclass
class Replica:
    """One replica in its worker; the first replica keeps the trial's commits."""

    training: SparseTraining
    commit: Path

    def close(self) -> None:
        if self.training.rank == 0:
            self.commit.unlink(missing_ok=True)


def load(
    context: WorkerContext, attempt: str, seed: int, parcel: bytes, checkpoints: Path, pruning: Pruning, rank: int,
    size: int,
) -> Loaded:  # fmt: skip
    """Create a replica in this worker, in the state of the last commit or else of the newest checkpoint."""
    training = SparseTraining(receive(parcel), seed, context.device, pruning, rank, size)
    commit = Path(context.setup.directory) / f"commit-{attempt}"
    context.resident[attempt] = Replica(training, commit)
    committed = read_commit(commit)
    if committed is None:
        return restore(training, checkpoints)
    training.restore(committed)
    return Loaded(training.history)


def train(context: WorkerContext, attempt: str, batches: int) -> Trained:
    """Train this many batches with the other replicas; the first replica then commits."""
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
    """Return the epoch's metrics, evaluating unless a lost worker did so before; all replicas have equal weights."""
    training: SparseTraining = context.resident[attempt].training
    return training.judge() if training.epoch == epoch else training.history[epoch]


def next_epoch(context: WorkerContext, attempt: str, epoch: int, judged: dict[str, float]) -> None:
    """Advance from this epoch to the next."""
    replica: Replica = context.resident[attempt]
    if replica.training.epoch == epoch:
        replica.training.next_epoch(judged)
        _commit(replica)


def keep_weights(context: WorkerContext, attempt: str) -> None:
    """Keep a copy of this epoch's weights as the best so far."""
    replica: Replica = context.resident[attempt]
    replica.training.keep_weights()
    _commit(replica)


def checkpoint(context: WorkerContext, attempt: str, directory: Path) -> SavedCheckpoint:
    """Write the state that another process needs to resume from here."""
    training: SparseTraining = context.resident[attempt].training
    return write_checkpoint(directory, training.epoch * len(training.batches) + training.batch, training.state)


def save(context: WorkerContext, attempt: str, path: Path) -> None:
    """Write the final weights."""
    training: SparseTraining = context.resident[attempt].training
    training.save(path)


def _commit(replica: Replica) -> None:
    if replica.training.rank == 0:
        try:
            write_commit(replica.commit, replica.training.state())
        except NotStorable:
            # A module keeps state other than tensors: the trial cannot be recovered elsewhere, but can continue here.
            replica.commit.unlink(missing_ok=True)
