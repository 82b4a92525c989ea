"""Strategy `sparse`: a pruned network on several devices at once, its state compressed to the weights that survive.

Every replica has all of the network and takes its part of each batch; gradients are reduced over the replicas in a gang
unit (AxoNN with SAMO, arXiv 2302.05045). A mask is found in the first epochs, which are dense, or given. Each piece of
training ends with a commit of the whole state, which is small: when a replica dies, all are made anew from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hydra_tune.builds import pack_held
from hydra_tune.engine.unit import Role
from hydra_tune.errors import SpecError, WorkerLost, nearest, quoted
from hydra_tune.sparse.training import MASKS, Pruning
from hydra_tune.strategies import sparse_units as units
from hydra_tune.strategies.base import Strategy, TrialRun
from hydra_tune.strategies.epochs import InTraining, Saved, train_epochs
from hydra_tune.strategies.sparse_units import Trained
from hydra_tune.strategies.together import all_of
from hydra_tune.training import Progress

_T = TypeVar("_T")

PRECISIONS = ("mixed", "full")
SLICE_SECONDS = 2.0
"""How long a piece of training lasts: each makes a process group, for some 30 ms, and ends with a commit."""
RECOVERIES = 3
"""Times that replicas are made anew without getting any further, before the attempt is lost."""


@dataclass(frozen=True)
class Sparse(Strategy):
    """Train a pruned network, on one device or on several at once."""

    name = "sparse"
    exact = False
    summary = "a pruned network with compressed state, data-parallel on several devices"
    builds_apart = True
    spans_devices = True
    gangs = True

    sparsity: float = 0.9
    """The part of each pruned layer's weights that goes; a candidate's own `sparsity` comes first."""
    mask: str = "early-bird"
    """early-bird: by magnitude, when it has settled; magnitude: at once; random; or a safetensors file of masks."""
    replicas: int | None = None
    """How many devices train the network at the same time; by default all."""
    precision: str = "mixed"
    """mixed: 16-bit compute weights with float32 masters; full: all in the type that the candidate has."""
    dense_epochs: int | None = None
    """Epochs that early-bird may search for its mask; by default a fifth of all."""
    rewind: bool = False
    """Whether the survivors start again from their first weights once the mask is found."""
    least: int = 8
    """Weights that survive in each layer at the least."""

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        if not isinstance(self.mask, str):
            raise SpecError(f"mask cannot be {quoted(self.mask)}", f"give {', '.join(MASKS)} or a safetensors file")
        if self.mask not in MASKS and not self.mask.endswith(".safetensors"):
            raise SpecError(
                f"mask cannot be {quoted(self.mask)}", f"{nearest(self.mask, MASKS)}, or a .safetensors file"
            )
        if self.mask not in MASKS and not Path(self.mask).is_file():
            raise SpecError(f"there is no mask file {quoted(self.mask)}", "give the path of a safetensors file")
        if self.precision not in PRECISIONS:
            raise SpecError(f"precision cannot be {quoted(self.precision)}", nearest(str(self.precision), PRECISIONS))
        for option, at_least in (("replicas", 1), ("dense_epochs", 0), ("least", 1)):
            value = getattr(self, option)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < at_least):
                raise SpecError(f"{option} cannot be {quoted(value)}", f"give a whole number from {at_least} on")

    def check(self, devices: int) -> None:
        if self.replicas is not None and self.replicas > devices:
            raise SpecError(f"replicas cannot be {self.replicas}", f"there are {devices} devices")

    def pruning(self, run: TrialRun) -> Pruning:
        """What is to be left of this candidate."""
        blueprint = run.blueprint
        dense = max(1, blueprint.epochs // 5) if self.dense_epochs is None else self.dense_epochs
        return Pruning(
            sparsity=self.sparsity if blueprint.sparsity is None else blueprint.sparsity, mask=self.mask,
            dense_epochs=min(dense, blueprint.epochs - 1),  # at least the last epoch is that of the pruned network
            least=self.least, rewind=self.rewind, mixed=self.precision == "mixed",
        )  # fmt: skip

    def trials_at_once(self, devices: int) -> int:
        """One for each group of replicas, and one more: while one is evaluated or built, the others train."""
        return devices // (self.replicas or devices) + 1

    async def train(self, run: TrialRun) -> None:
        candidate = await InReplicas.loaded(run, self)
        await train_epochs(run, candidate)


def check_sparsity(value: Any) -> None:
    """Raise where it is no part of a layer."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise SpecError(f"sparsity cannot be {quoted(value)}", "give a number from 0 to below 1, such as 0.9")


@dataclass
class InReplicas(InTraining):
    """A candidate with a replica on each of several devices."""

    run: TrialRun
    strategy: Sparse
    workers: list[int]
    parcel: bytes
    history: list[dict[str, float]] = field(default_factory=list)
    _pace: float | None = None
    """Seconds for a batch, as last measured."""
    _recovered: tuple[int, int] = (0, -1)
    """How often at this step."""
    _at: Progress | None = None
    """Where training stands."""

    @classmethod
    async def loaded(cls, run: TrialRun, strategy: Sparse) -> InReplicas:
        """Bring a replica of the candidate, which waits in the builder, to each device."""
        builder = run.candidacy.worker
        packed = await run.unit("pack", pack_held, run.attempt, role=Role.BUILDER, worker=builder)
        found = cls(run, strategy, [], packed.value)
        run.planned(Sparse.name, shards=1, plan=None)
        notes = await found._again(found._load)
        await run.restored(found.history, notes)
        return found

    async def _load(self) -> tuple[str, ...]:
        run, strategy = self.run, self.strategy
        at, pruning = run.engine.workers_of_all_devices(), strategy.pruning(run)
        size = strategy.replicas or len(at)
        self.workers = [at[(run.number * size + rank) % len(at)] for rank in range(size)]
        found = await all_of(
            run.unit("load", units.load, run.attempt, run.seed, self.parcel, run.checkpoints, pruning, rank, size,
                     worker=worker)
            for rank, worker in enumerate(self.workers)
        )  # fmt: skip
        self.history = list(found[0].value.history)
        notes: tuple[str, ...] = found[0].value.notes
        return notes

    async def train(self, remaining: float | None) -> Progress:
        trained = await self._again(lambda: self._train_some(remaining))
        progress = trained.progress
        self._at = progress
        if progress.batches_done:
            self._pace = progress.seconds / progress.batches_done
        self.run.communicated(trained.sent_bytes * len(self.workers))
        self._note_plan(trained)
        return progress

    async def _train_some(self, remaining: float | None) -> Trained:
        run = self.run
        accumulate = run.blueprint.accumulate
        count = 2 if self._pace is None else max(1, int(SLICE_SECONDS / self._pace))
        batches = -(-count // accumulate) * accumulate  # a commit holds no gradients
        members = [(run.attempt, batches)] * len(self.workers)
        results = await run.gang("train", units.train, members, workers=self.workers, remaining=remaining)
        trained: Trained = results[0].value
        return trained

    async def end_epoch(self, remaining: float | None) -> dict[str, float]:
        return await self._again(lambda: self._end_epoch(remaining))

    async def _end_epoch(self, remaining: float | None) -> dict[str, float]:
        run, epoch = self.run, self._at.epoch if self._at else 0
        result = await run.unit(
            "evaluate", units.judge, run.attempt, epoch, worker=self.workers[0], remaining=remaining
        )
        judged: dict[str, float] = result.value
        # The first one last: its commit says that all have done it.
        for worker in reversed(self.workers):
            await run.unit("end epoch", units.next_epoch, run.attempt, epoch, judged, worker=worker, recorded=False)
        return judged

    async def keep_weights(self) -> None:
        await self._on_first("keep", units.keep_weights)

    async def checkpoint(self) -> Saved:
        saved: Saved = await self._on_first("checkpoint", units.checkpoint, self.run.checkpoints)
        return saved

    async def save(self) -> None:
        await self._on_first("save", units.save, self.run.weights)

    async def _on_first(self, kind: str, work: Callable[..., Any], *args: Any) -> Any:
        run = self.run
        return (await self._again(lambda: run.unit(kind, work, run.attempt, *args, worker=self.workers[0]))).value

    async def _again(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Do the work; when a worker is lost, make all replicas anew from the last commit and do it again."""
        while True:
            try:
                return await work()
            except WorkerLost as error:
                now = self._at.steps if self._at else 0
                times, step = self._recovered
                self._recovered = (times + 1, step) if step == now else (1, now)
                if self._recovered[0] > RECOVERIES or not self.parcel:
                    raise
                self.run.note("replicas", f"{error.message}; all replicas go on from the last commit")
                if self.workers:
                    await self._again(self._load)

    def _note_plan(self, trained: Trained) -> None:
        account = trained.account
        self.run.planned(Sparse.name, shards=1, plan={
            "replicas": len(self.workers), "phase": account.phase, "precision": self.strategy.precision,
            "mask": self.strategy.mask, "pruned_weights": account.pruned, "survivors": account.survivors,
            "state_bytes": account.state_bytes, "dense_state_bytes": account.dense_state_bytes,
            "step_bytes": account.step_bytes, "dense_step_bytes": account.dense_step_bytes,
        })  # fmt: skip
