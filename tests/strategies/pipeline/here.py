"""A trial in stages or shards in this process: the strategy's own code and units, with every argument and result
pickled as on its way between processes. Only the queue of the engine is left out: a unit runs when it is awaited."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle

import hydra_tune as ht
from hydra_tune.core.devices import Device
from hydra_tune.core.seeds import seed_everything
from hydra_tune.engine.jobs import Load
from hydra_tune.engine.unit import StepRecord, UnitResult
from hydra_tune.strategies.base import Candidacy, TrialRun
from hydra_tune.strategies.epochs import train_epochs
from hydra_tune.strategies.pipeline.strategy import InStages, Pipeline
from hydra_tune.training.prepared import Origin, Prepared
from hydra_tune.training.progress import Progress
from hydra_tune.training.remote_trial import TrialInfo
from tests.strategies.shard.models import CPU, SEED

BUILDER = 0
ROOM = 1 << 30


class Here(TrialRun):
    """An attempt whose units run at once, each in the context of its worker."""

    def __init__(
        self, made: ht.Candidate, folder: Path, devices: int, room: int = ROOM,
        again: Callable[[], ht.Candidate] | None = None,
    ) -> None:  # fmt: skip
        """`again` makes the candidate once more, for devices to which no copy of it can be sent."""
        names = [Device(f"cpu:{i}", "cpu", room, 1) for i in range(devices)]
        engine: Any = SimpleNamespace(
            devices=names, workers_of_all_devices=lambda: tuple(range(1, devices + 1)), drop=lambda *_: None,
            let_go=lambda *_: None, room=lambda _attempt: (room,) * devices,
            load=lambda _attempt: Load(idle=0, waiting=0, others=0), is_busy=lambda _worker: False,
        )  # fmt: skip
        blueprint: Any = SimpleNamespace(
            epochs=made.epochs, keep=made.keep, accumulate=made.accumulate, sparsity=made.sparsity
        )
        super().__init__(
            number=0, seed=SEED, attempt="a", metric="loss",
            maximize=False, weights=folder / "weights", checkpoints=folder / "checkpoints",
            profiles=folder / "profiles", engine=engine, at_once=1,
        )  # fmt: skip
        self.blueprint, self.candidacy = blueprint, Candidacy(BUILDER)
        place = folder / "run"
        place.mkdir(exist_ok=True)
        setup = SimpleNamespace(
            directory=str(place), overflow=(), memory=room, device="cpu", torch_devices=("cpu",), worker=0
        )
        self.contexts: list[Any] = [
            SimpleNamespace(
                setup=setup,
                blocks=None,
                block_limit=None,
                limit_blocks=lambda _size: None,
                device=CPU,
                resident={},
                cache={"build": lambda _trial: again and again()},
                unit_peak_bytes=None,
                steps=[],
                alive=lambda: None,
                unit="",
            )
            for _ in range(devices + 1)
        ]
        self.contexts[BUILDER].resident["a"] = Prepared(
            made, made.train, made.valid, again and Origin("", TrialInfo(0, SEED, "a"))
        )
        self.notes: list[str] = []
        self.ran: list[tuple[str, int]] = []
        self.ranks: dict[str, set[tuple[int, int] | None]] = {}
        """Of each kind of unit that ran."""
        self.plan: dict[str, Any] = {}
        self.peak = 0
        """Peak bytes of a unit on a device."""

    async def unit(self, kind: str, work: Any, *args: Any, worker: int | None = None, **rest: Any) -> UnitResult:
        worker = 1 if worker is None else worker
        given = cloudpickle.loads(cloudpickle.dumps(args))
        began = time.time()
        seed_everything(len(self.ran))  # other trials draw in this process too
        value = work(self.contexts[worker], *given)
        self.ran.append((kind, worker))
        self.ranks.setdefault(kind, set()).add(rest.get("rank"))
        self.peak = max(self.peak, self.contexts[worker].unit_peak_bytes or 0)
        seconds = time.time() - began
        return UnitResult(pickle.loads(cloudpickle.dumps(value)), worker, f"cpu:{worker - 1}", began, seconds, None)

    def planned(self, strategy: str, shards: int, plan: dict[str, Any] | None = None) -> None:
        self.plan = plan or {}

    def note(self, kind: str, message: str) -> None:
        self.notes.append(message)

    async def bring(self, *, apart: bool, anew: bool) -> None: ...

    async def suggest(self, name: str, choices: Sequence[str]) -> str:
        raise AssertionError("there is no sampler here")

    def chosen(self, strategy: str, choice: dict[str, Any]) -> None: ...
    def took(self, batch_seconds: float) -> None: ...
    def deadline(self, kind: str) -> float | None: ...
    def measured(self, kind: str, seconds: float) -> None: ...
    def progress(self, progress: Progress) -> None: ...
    def remaining(self, progress: Progress) -> float | None: ...
    def spilled(self, read: int, written: int) -> None: ...
    def communicated(self, size: int) -> None: ...
    def worked(self, device: str, steps: Sequence[StepRecord]) -> None: ...
    async def report(self, epoch: int, metrics: dict[str, float]) -> None: ...
    async def restored(self, history: list[dict[str, float]], notes: tuple[str, ...]) -> None: ...

    def checkpoint_due(self, *, waits: bool = False) -> bool:
        return False

    def checkpoint_made(self, step: int, size: int, seconds: float) -> None: ...
    def checkpoint_failed(self, reason: str) -> None: ...
    def stop_here(self) -> None: ...

    def state(self) -> dict[str, Any]:
        """The whole trial's state, as its devices collected it last."""
        found: dict[str, Any] = self.contexts[BUILDER].resident["a"].state()
        return found


async def train(run: Here, strategy: Pipeline) -> InStages:
    """Train to the last epoch, and collect."""
    candidate = await InStages.laid_out(run, strategy, [range(len(run.engine.devices))])
    await train_epochs(run, candidate)
    return candidate
