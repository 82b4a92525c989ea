"""Strategy `pipeline`: one model across all devices at once, several micro-batches in flight through its stages.

The builder lays the model out in stages, each on one device (`pipeline.prepare`). Each batch is divided into
micro-batches that follow each other through the stages, forward and backward; their gradients, weighted by rows, add up
to the batch's, and each device steps its own parameters. While a device waits, it runs units of other trials. The
weights equal those of a plain loop, up to rounding.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra_tune.core.errors import SpecError, nearest, quoted
from hydra_tune.core.tables import Table
from hydra_tune.engine.remote import remote
from hydra_tune.engine.unit import Memory, Role, StepRecord, UnitFailed, UnitResult
from hydra_tune.strategies.base import Strategy, TrialRun
from hydra_tune.strategies.concurrent_units import ConcurrentUnits, all_of
from hydra_tune.strategies.device_occupancy import DeviceOccupancy
from hydra_tune.strategies.epochs import SLICE_SECONDS, InTraining, SavedCheckpoint, train_epochs
from hydra_tune.strategies.estimate import Estimate, Look
from hydra_tune.strategies.pipeline import plan_table
from hydra_tune.strategies.pipeline.batch import Batch
from hydra_tune.strategies.pipeline.schedule import IN_TURN, ORDERS, bounds, in_flight, users_of
from hydra_tune.strategies.pipeline.staged import PLACERS, Evaluated, Fetched, PipelineRequest, Random, Sent, Staged
from hydra_tune.strategies.pipeline.stages import TARGETS, Stage
from hydra_tune.strategies.pool import Pool
from hydra_tune.training.progress import Diverged, Progress

if TYPE_CHECKING:
    from hydra_tune.strategies.pipeline import units as units
else:
    units = remote("hydra_tune.strategies.pipeline.units")

RECENT = 1000
"""Number of units and steps over which the shown median is taken."""


@dataclass(frozen=True)
class Pipeline(Strategy):
    """Train one model on several devices at once, in stages."""

    name = "pipeline"
    exact = True
    summary = "one model across several devices, micro-batches following each other through its stages"
    simpler = ("whole", "shard")
    begin_seconds = 3.0
    builds_apart = True
    spans_devices = True
    policy = "ranked"

    microbatches: int | None = None
    """Micro-batches per batch; by default four per device, or one if more would change the result."""
    placer: str = "best"
    """Name of the algorithm that places the model's parts on devices."""
    order: str = "1f1b"
    """1f1b: few micro-batches in flight; gpipe: all forwards first."""
    occupancy: DeviceOccupancy = field(default_factory=DeviceOccupancy, init=False, compare=False, repr=False)
    """Counts the trials on each of the two directions through the devices."""

    def __post_init__(self) -> None:
        if self.placer not in PLACERS:
            raise SpecError(f"placer cannot be {quoted(self.placer)}", nearest(str(self.placer), list(PLACERS)))
        if self.order not in ORDERS:
            raise SpecError(f"order cannot be {quoted(self.order)}", nearest(str(self.order), list(ORDERS)))
        count = self.microbatches
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise SpecError(f"microbatches cannot be {quoted(count)}", "give a whole number from 1 on")

    def trials_at_once(self, devices: int) -> int:
        """Return 2: each trial uses all devices, and a second one fills the gaps of the first."""
        return 2

    @classmethod
    def estimate(cls, look: Look, pool: Pool) -> Estimate:
        from hydra_tune.strategies.pipeline.estimate import estimate  # imports torch, so only in workers

        return estimate(look, pool)

    @classmethod
    def memory(cls, estimate: Estimate, *, alone: bool) -> Memory | None:
        return Memory(estimate.device_bytes, estimate.held_bytes)

    @classmethod
    def describe_plan(cls, plan: Mapping[str, Any]) -> Iterable[str | Table]:
        return plan_table.describe(plan)

    async def train(self, run: TrialRun) -> None:
        devices = range(len(run.engine.devices))
        # Two concurrent trials go through the devices in opposite directions, which evens out stages of unequal time.
        # If devices do not take forwards first, the two would block each other.
        with self.occupancy.taken(1, 2 if run.engine.in_stages else 1) as (way,):
            candidate = await InStages.laid_out(run, self, [devices[::-1], devices] if way else [devices])
            await run.restored(candidate.history, candidate.staged.notes)
            try:
                await train_epochs(run, candidate)
            finally:
                candidate.note_plan()  # with the measurements, also after pruning or failure


@dataclass
class InStages(InTraining):
    """A candidate in stages on all devices."""

    run: TrialRun
    staged: Staged
    order: str
    devices: Sequence[int]
    """Engine devices that have a share of the model, the one with the model's inputs first."""
    workers: Sequence[int]
    """Worker id of each device above."""
    builder: int
    random: Random = None
    """Random state, for a model that draws random numbers."""
    step_seconds: list[float] = field(default_factory=list)
    _stage_seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    _steps: dict[str, list[StepRecord]] = field(default_factory=dict)
    """By device: units that ran since the last record."""
    _stepping: list[asyncio.Task[None]] = field(default_factory=list)
    """For each device, its step after the last batch; other devices need not wait for it."""

    @classmethod
    async def laid_out(cls, run: TrialRun, strategy: Pipeline, ways: Sequence[Sequence[int]]) -> InStages:
        """Lay out a candidate that waits in the builder, and load its parts on the devices.

        `ways` are orders of the devices, which may differ in memory; the first order in which the model fits is used.
        """
        builder = run.candidacy.worker
        assert builder is not None
        started, room = run.engine.workers_of_all_devices(), run.room()
        on_cores = all(device.torch_device == "cpu" for device in run.engine.devices)
        for devices in ways:
            capacity = tuple(room[device] for device in devices)
            wanted = PipelineRequest(
                strategy.microbatches, strategy.placer, strategy.order, capacity, run.at_once, on_cores
            )
            try:
                result = await run.unit(
                    "lay out", units.stage, run.attempt, run.number, run.seed, wanted, run.checkpoints, run.profiles,
                    role=Role.BUILDER, worker=builder,
                )  # fmt: skip
                break
            except UnitFailed as error:
                if error.failure.status != "OUT_OF_MEMORY" or devices is ways[-1]:
                    raise
        found = cls(run, result.value, strategy.order, devices, [started[device] for device in devices], builder)
        await found.bring_in()
        return found

    async def bring_in(self) -> None:
        """Let each device load its share."""
        run, staged = self.run, self.staged
        if staged.warning:
            run.note("pipeline", staged.warning)
        self.note_plan()
        shares = enumerate(self.workers)
        await all_of(run.unit("load", units.load, run.attempt, staged, i, worker=worker) for i, worker in shares)

    def __post_init__(self) -> None:
        self.position: dict[str, Any] = dict(self.staged.position)
        self.history = list(self.staged.history)
        self.limits = in_flight(self.staged.stages, self.order, self.staged.microbatches)
        self.users = users_of(self.staged.stages)
        first = len(self.staged.inputs)
        self._made_on = {first + op: stage.device for stage in self.staged.stages for op in stage.ops}
        """Device that makes each value; the batch itself is made on the first device."""

    # Training

    async def train(self, remaining: float | None) -> Progress:
        began, first = time.perf_counter(), self.position["batch"]
        batches = self.staged.data[2]
        async with ConcurrentUnits() as steps:
            while self.position["batch"] < batches:
                clock = time.perf_counter()
                await self._train_batch(remaining, steps)
                self.step_seconds.append(time.perf_counter() - clock)
                del self.step_seconds[:-RECENT]
                if time.perf_counter() - began >= SLICE_SECONDS and self._may_pause():
                    break
        self._record()
        at = self.position
        return Progress(
            epoch=at["epoch"], batch=at["batch"], batches=batches, steps=at["steps"],
            loss=at["loss_sum"] / max(at["loss_rows"], 1), batches_done=at["batch"] - first,
            seconds=time.perf_counter() - began,
        )  # fmt: skip

    async def _train_batch(self, remaining: float | None, steps: ConcurrentUnits) -> None:
        """Train one batch and start its steps; a device's units of the next batch wait for that device's step."""
        at = self.position
        rows = self._rows_at(at["batch"])
        parts = bounds(rows, min(self.staged.microbatches, rows))
        await self.stepped(0)
        result = await self.on(
            0, "fetch", units.fetch, at["epoch"], at["batch"], len(parts), self.random, recorded=False
        )
        fetched: Fetched = result.value
        self.random = fetched.random
        weights = [(stop - start) / rows for start, stop in parts]
        batch = Batch(self, fetched.sent, weights, remaining)
        await batch.run()
        if self.staged.draws:
            self.random = batch.random_after
        at["batch"] += 1
        stepping = at["batch"] % self.staged.accumulate == 0 or at["batch"] == self.staged.data[2]
        await self._begin_steps(stepping, steps)
        at["steps"] += stepping
        at["loss_sum"] += batch.loss * rows
        at["loss_rows"] += rows

    def _may_pause(self) -> bool:
        return not self.staged.between_steps or self.position["batch"] % self.staged.accumulate == 0

    async def _begin_steps(self, stepping: bool, steps: ConcurrentUnits) -> None:
        """Start each device's step; if gradients are clipped, compute their total norm first."""
        factor: float | None = 1.0 if stepping else None
        if stepping and self.staged.clip_grad_norm is not None:
            found = await self.everywhere("norms", units.norms, recorded=False)
            total = math.sqrt(sum(norm**2 for result in found for norm in result.value.values()))
            coefficient = self.staged.clip_grad_norm / (total + 1e-6)
            factor = 1.0 if coefficient >= 1.0 else coefficient  # NaN stays NaN, as in torch
        self._stepping = [steps.start(self._step(device, factor)) for device in range(len(self.workers))]

    async def _step(self, device: int, factor: float | None) -> None:
        result = await self.on(device, "step", units.step, factor, recorded=False)
        self._steps.setdefault(result.device, []).append(StepRecord("step", 0, result.started, result.seconds, 0, 0))

    async def stepped(self, device: int) -> None:
        """Wait for a device's step after the last batch, if it is still running."""
        if self._stepping:
            await self._stepping[device]

    def _rows_at(self, batch: int) -> int:
        rows, size, _ = self.staged.data
        return min(size, rows - batch * size)

    # Epochs

    async def end_epoch(self, remaining: float | None) -> dict[str, float]:
        at = self.position
        train_loss = at["loss_sum"] / max(at["loss_rows"], 1)
        judged = {"train_loss": train_loss, **(await self._evaluate() or {"loss": train_loss})}
        self._record()
        await self.everywhere("end epoch", units.end_epoch, judged["loss"])
        self.history.append(judged)
        self.position |= {"epoch": at["epoch"] + 1, "batch": 0, "loss_sum": 0.0, "loss_rows": 0}
        return judged

    async def _evaluate(self) -> dict[str, float]:
        """Evaluate the validation data, with several batches in flight through the stages."""
        rows = self.staged.valid_rows
        lanes: asyncio.Queue[int] = asyncio.Queue()
        for lane in range(1 if self.staged.judged_at_random else len(self.workers) + 1):
            lanes.put_nowait(lane)
        found: list[dict[str, float]] = [{} for _ in rows]
        streams = [self.random]

        async def batch(position: int, lane: int) -> None:
            found[position] = await self._judge(position, lane, streams)
            lanes.put_nowait(lane)

        async with ConcurrentUnits() as together:
            for position in range(len(rows)):
                together.start(batch(position, await lanes.get()))
        sums: dict[str, float] = {}
        for position, judged in enumerate(found):
            for name, value in judged.items():
                sums[name] = sums.get(name, 0.0) + value * rows[position]
        means = {name: total / sum(rows) for name, total in sums.items()}
        if means and not math.isfinite(means["loss"]):
            raise Diverged("the validation loss", means["loss"], self.position["steps"])
        return means

    async def _judge(self, position: int, lane: int, streams: list[Random]) -> dict[str, float]:
        """Evaluate one batch; `streams` holds the random state, which advances if evaluation draws from it."""
        random = streams[0] if position == 0 or self.staged.judged_at_random else None
        result = await self.on(0, "fetch", units.fetch_valid, position, lane, random, recorded=False, rank=IN_TURN)
        given: Fetched = result.value
        random = given.random if self.staged.judged_at_random else None
        made: dict[int, Sent] = {}
        judged: dict[str, float] = {}
        for stage in self.staged.stages:
            arrived = self.arriving(stage, given.sent[0], [made[other] for other in stage.before])
            work = (units.judge, stage.index, lane, arrived, random)
            result = await self.on(stage.device, "evaluate", *work, recorded=False, rank=IN_TURN)
            self.took("evaluate", stage, result)
            done: Evaluated = result.value
            made[stage.index], random = done.sent, done.random
            judged |= done.metrics
        streams[0] = random
        return judged

    def arriving(self, stage: Stage, batch: Sent, made: Sequence[Sent]) -> Sent:
        """Return the values that a stage takes from other devices."""
        takes = {*stage.takes, *((TARGETS,) if stage.loss else ())}
        everything = {value: tree for sent in made for value, tree in sent.items()} | batch
        return {v: tree for v, tree in everything.items() if v in takes and self._made_on.get(v, 0) != stage.device}

    async def keep_weights(self) -> None:
        await self.everywhere("keep", units.keep_weights)

    async def checkpoint(self) -> SavedCheckpoint:
        await self._collect()
        saved: SavedCheckpoint = (await self._in_builder("checkpoint", units.checkpoint, self.run.checkpoints)).value
        return saved

    def checkpoint_waits(self) -> bool:
        return self.run.engine.is_busy(self.builder)

    async def save(self) -> None:
        await self._collect()
        await self._in_builder("save", units.save, self.run.weights)

    async def _collect(self) -> None:
        await self.everywhere("collect", units.collect, dict(self.position), self.history, self.random)

    # Units

    async def on(self, device: int, kind: str, work: Callable[..., Any], *args: Any, **options: Any) -> UnitResult:
        return await self.run.unit(kind, work, self.run.attempt, *args, worker=self.workers[device], **options)

    async def everywhere(
        self, kind: str, work: Callable[..., Any], *args: Any, recorded: bool = True
    ) -> list[UnitResult]:
        devices = range(len(self.workers))
        return await all_of(self.on(device, kind, work, *args, recorded=recorded) for device in devices)

    async def _in_builder(self, kind: str, work: Callable[..., Any], *args: Any) -> UnitResult:
        return await self.run.unit(kind, work, self.run.attempt, *args, role=Role.BUILDER, worker=self.builder)

    # Records and plan

    def took(self, kind: str, stage: Stage, result: UnitResult) -> None:
        """Record the time of a stage's unit for a micro-batch."""
        recent = self._stage_seconds.setdefault((kind, stage.index), [])
        recent.append(result.seconds)
        del recent[:-RECENT]
        self._steps.setdefault(result.device, []).append(
            StepRecord(kind, stage.index, result.started, result.seconds, 0, 0)
        )

    def _record(self) -> None:
        """Record one row for each stage and kind, not one for each micro-batch."""
        for device, steps in self._steps.items():
            self.run.worked(device, steps)
        self._steps.clear()

    def note_plan(self) -> None:
        """Record the stages with their predicted and measured times."""
        self.run.planned(Pipeline.name, len(self.staged.stages), plan=self.plan())

    def plan(self) -> dict[str, Any]:
        """Return the stages as plain data."""
        # In the last micro-batch, which may be the only one, weight gradients are a unit of their own.
        kinds = ("forward", "backward", *(("weights",) if self.staged.microbatches == 1 else ()))
        devices = [self.run.engine.devices[device].name for device in self.devices]
        return {
            "placer": self.staged.placer, "microbatches": self.staged.microbatches, "order": self.order,
            "predicted_step_ms": 1000 * self.staged.predicted_seconds,
            "measured_step_ms": 1000 * _median(self.step_seconds),
            "stages": [
                {
                    "device": devices[stage.device], "nodes": list(stage.nodes),
                    "bytes": stage.state_bytes + stage.activation_bytes * self.limits[stage.index],
                    "predicted_ms": 1000 * (stage.forward_seconds + stage.backward_seconds),
                    "measured_ms": 1000 * sum(
                        _median(self._stage_seconds.get((kind, stage.index), [])) for kind in kinds
                    ),
                }
                for stage in self.staged.stages
            ],
        }  # fmt: skip


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
