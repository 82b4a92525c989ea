"""Strategy `elastic`: clients that train by themselves and exchange with a centre, on a changing set of devices.

After arXiv 1801.03855 and 1412.6651. A client has one device, or several that average their gradients at every step.
Every `tau` steps it and the centre move towards each other (`elastic`), or it adds its change and copies the centre
(`async`), or all clients are averaged at the same time (`sync`). One client of all devices needs no centre
(`allreduce`). Free clients take the next batches, so that a slow client gets fewer; clients join when devices are idle
and leave when other trials need them, and one that dies loses only its unfinished batches. The centre is evaluated and
saved.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra_tune.core.errors import SpecError, WorkerLost, quoted
from hydra_tune.core.tables import Table
from hydra_tune.engine.remote import remote
from hydra_tune.engine.unit import UnitResult
from hydra_tune.strategies.base import Strategy, TrialRun
from hydra_tune.strategies.concurrent_units import ConcurrentUnits
from hydra_tune.strategies.elastic import plan_table
from hydra_tune.strategies.elastic.work import BETA, ClientAssignment, ClientDone, Work
from hydra_tune.strategies.epochs import SLICE_SECONDS, SavedCheckpoint, train_epochs
from hydra_tune.strategies.estimate import Estimate, Look
from hydra_tune.strategies.pool import Pool
from hydra_tune.strategies.recovery import Recovery
from hydra_tune.strategies.subnets.rounds import InRounds
from hydra_tune.strategies.subnets.strategy import check_choice, check_count
from hydra_tune.strategies.subnets.work import SubnetRequest
from hydra_tune.training.progress import Progress

if TYPE_CHECKING:
    from hydra_tune.strategies.elastic import units as units
else:
    units = remote("hydra_tune.strategies.elastic.units")

MODES = ("elastic", "async", "sync", "allreduce")
TOGETHER_SECONDS = 5.0
"""Maximum seconds between two meetings of the clients: short enough to stop a search soon."""


@dataclass(frozen=True)
class Elastic(Strategy):
    """Train clients around a centre."""

    name = "elastic"
    exact = False
    summary = "clients around a centre (parameter server) that come and go with the devices, or all-reduce"
    builds_apart = True
    spans_devices = True

    mode: str = "elastic"
    clients: int | str = "auto"
    """Number of clients; auto: as many as the devices allow, changing as other trials come and go."""
    workers_per_client: int = 1
    """Devices of a client, which average their gradients at every step."""
    tau: int = 10
    """Steps of a client between two exchanges with the centre."""
    beta: float = BETA
    """For elastic exchange: with K clients each moves by beta / K of the difference."""
    server_shards: int = 1
    """Number of parts in which the centre is locked and exchanged."""

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        if self.clients != "auto":
            if isinstance(self.clients, str):
                raise SpecError(f"clients cannot be {quoted(self.clients)}", "give a whole number from 1 on, or auto")
            check_count("clients", self.clients, 1)
        for name in ("workers_per_client", "tau", "server_shards"):
            check_count(name, getattr(self, name), 1)
        if isinstance(self.beta, bool) or not isinstance(self.beta, int | float) or not 0 < self.beta < 1:
            raise SpecError(f"beta cannot be {quoted(self.beta)}", "give a number between 0 and 1")
        if self.mode == "sync" and self.workers_per_client > 1:
            raise SpecError("mode sync has clients of one worker", "leave workers_per_client out, or use mode elastic")

    def trials_at_once(self, devices: int) -> int:
        """Return 2 for trials that use all devices: one fills the gaps of the other; fixed clients allow more."""
        if self.clients == "auto" or self.mode == "allreduce":
            return 2
        return -(-devices // (int(self.clients) * self.workers_per_client)) + 1

    @classmethod
    def estimate(cls, look: Look, pool: Pool) -> Estimate:
        from hydra_tune.strategies.elastic.estimate import estimate  # imports torch, so only in workers

        return estimate(look, pool)

    @classmethod
    def describe_plan(cls, plan: Mapping[str, Any]) -> Iterable[str | Table]:
        return plan_table.describe(plan)

    async def train(self, run: TrialRun) -> None:
        candidate = await self._laid_out(run)
        self._note_plan(run, candidate)
        await run.restored(candidate.history, candidate.laid.notes)
        try:
            await train_epochs(run, candidate)
        finally:
            self._note_plan(run, candidate)

    def check(self, devices: int) -> None:
        workers = self._workers(devices)
        if workers > devices:
            raise SpecError(
                f"a client of {workers} workers cannot run on {devices} devices", f"give {devices} workers or fewer"
            )

    def _workers(self, devices: int) -> int:
        """Return the number of workers per client."""
        if self.mode != "allreduce":
            return self.workers_per_client
        return devices if self.clients == "auto" else int(self.clients) * self.workers_per_client

    async def _laid_out(self, run: TrialRun) -> InRounds:
        devices = len(run.engine.devices)
        workers = self._workers(devices)
        most = 1 if self.mode == "allreduce" else devices // workers if self.clients == "auto" else int(self.clients)
        if self.mode == "sync":
            return await InRounds.laid_out(run, SubnetRequest(most, self.tau, travels=True), skips=False)
        wanted = SubnetRequest(most, self.tau, True, shared_batches=True, centre_shards=self.server_shards)
        made = await InClients.laid_out(run, wanted, skips=False)
        made.mode, made.beta, made.workers, made.auto = self.mode, self.beta, workers, self.clients == "auto"
        return made

    def _note_plan(self, run: TrialRun, candidate: InRounds) -> None:
        plan: dict[str, Any] = {
            "mode": self.mode, "tau": self.tau, "clients": self.clients, "workers_per_client": self.workers_per_client,
            "server_shards": self.server_shards, "parameters": candidate.laid.parameters, "epochs": candidate.account,
        }  # fmt: skip
        run.planned(self.name, candidate.wanted.subnets, plan=plan)


@dataclass
class _Member:
    """The coordinator's record of a client."""

    id: int
    version: int = 0
    step_seconds: float = 0.0
    """Seconds per step, as last measured."""


@dataclass
class InClients(InRounds):
    """A candidate trained by clients around a centre."""

    mode: str = "elastic"
    beta: float = BETA
    workers: int = 1
    """Workers per client."""
    auto: bool = False
    """True if clients join and leave with the load of the devices."""
    members: list[_Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._left = [tuple(span) for span in self.laid.current.get("left", [(0, self.laid.batches)])]
        """Spans of this epoch's batches that no client has taken."""
        self._joined = 0
        self.recovery = Recovery()
        self._in_flight = 0

    def _nothing_yet(self) -> dict[str, Any]:
        return {"exchanges": 0, "least": 0, "most": 0, "lost": 0, "server": 0, "bytes": 0}

    # Training

    async def train(self, remaining: float | None) -> Progress:
        began, first = time.perf_counter(), self.batch
        self._until = began + TOGETHER_SECONDS
        async with ConcurrentUnits() as together:
            for member in list(self.members):
                together.start(self._go_on(member, together, remaining))
            self._welcome(together, remaining)
        total, rows = self._loss
        return Progress(
            epoch=self.epoch, batch=self.batch, batches=self.laid.batches, steps=self.steps,
            loss=total / max(rows, 1), batches_done=self.batch - first, seconds=time.perf_counter() - began,
        )  # fmt: skip

    def _welcome(self, together: ConcurrentUnits, remaining: float | None) -> None:
        """Add clients: all at the beginning, later one whenever devices are idle and no other trial needs them."""
        while self._left and len(self.members) < self._room():
            member = _Member(self._joined)
            self._joined += 1
            self.members.append(member)
            self._count_members()
            together.start(self._go_on(member, together, remaining))

    def _room(self) -> int:
        """Return the number of clients allowed now: the working ones, plus those that idle devices can run."""
        most = self.wanted.subnets
        if not self.auto or self.mode == "allreduce":
            return most
        load = self.run.engine.load(self.run.attempt)
        return 1 if load.waiting else min(most, max(1, self._in_flight + load.idle // self.workers))

    def _is_one_too_many(self) -> bool:
        """True if other trials wait while this one has more than its share of the devices."""
        if not self.auto or self.mode == "allreduce" or len(self.members) == 1:
            return False
        load = self.run.engine.load(self.run.attempt)
        share = len(self.run.engine.devices) // (load.others + 1)
        return load.waiting > 0 and len(self.members) * self.workers > share

    def _count_members(self) -> None:
        now = len(self.members)
        least = self.current["least"]
        self.current |= {"least": min(least, now) if least else now, "most": max(self.current["most"], now)}

    async def _go_on(self, member: _Member, together: ConcurrentUnits, remaining: float | None) -> None:
        """Run one client until the next meeting, the end of the batches, or its departure."""
        while member in self.members:
            if self._is_one_too_many():
                await self._leave(member)
                return
            work = self._take(member)
            if work is None:
                return
            try:
                done = await self._work(member, work, remaining)
            except WorkerLost as error:
                self._lose(member, work, error)
                self._welcome(together, remaining)
                continue
            self._note(done, work)
            member.version += 1
            self._welcome(together, remaining)
            if time.perf_counter() >= self._until or self.run.checkpoint_due():
                return

    async def _work(self, member: _Member, work: Work, remaining: float | None) -> list[ClientDone]:
        self._in_flight += 1
        try:
            results = await self._results(member, work, remaining)
        finally:
            self._in_flight -= 1
        done = [result.value for result in results]
        member.step_seconds = max(result.seconds for result in results) / max(1, done[0].steps)
        return done

    async def _results(self, member: _Member, work: Work, remaining: float | None) -> list[UnitResult]:
        run, spot, shards = self.run, self.laid.spot, self.wanted.centre_shards
        seats = [
            ClientAssignment(member.id, member.version, rank, self.workers, shards) for rank in range(self.workers)
        ]
        if self.workers == 1:
            return [await run.unit("train", units.train_client, run.attempt, spot, seats[0], work, remaining=remaining)]
        return await run.gang(
            "train", units.train_client, [(run.attempt, spot, seat, work) for seat in seats],
            workers=[None] * self.workers, remaining=remaining,
        )  # fmt: skip

    def _take(self, member: _Member) -> Work | None:
        """Return the next batches for a client: about a second of work, in whole phases, at most its share."""
        if not self._left:
            return None
        phase = self.wanted.local_steps * self.workers * self.laid.accumulate
        if self.mode == "allreduce":
            phase = self.workers * self.laid.accumulate
        wanted = phase
        if member.step_seconds:
            second = SLICE_SECONDS * (2 if self.workers > 1 else 1) / member.step_seconds
            share = sum(stop - start for start, stop in self._left) / len(self.members)
            wanted = max(phase, int(min(second * self.workers * self.laid.accumulate, share) // phase * phase))
        start, stop = self._left[0]
        end = min(stop, start + wanted)
        self._left[:1] = [(end, stop)] if end < stop else []
        alpha = self.beta / len(self.members)
        return Work(self.epoch, start, end, self.mode, self.wanted.local_steps, alpha)

    def _note(self, done: list[ClientDone], work: Work) -> None:
        first = done[0]
        self.batch += work.stop - work.start
        self.steps += first.steps
        self._loss = self._loss[0] + sum(d.loss_sum for d in done), self._loss[1] + sum(d.rows for d in done)
        moved = first.server_bytes + sum(d.collective_bytes for d in done)
        self.run.communicated(moved)
        self.current["exchanges"] += first.exchanges
        self.current["server"] += first.server_bytes
        self.current["bytes"] += moved

    def _lose(self, member: _Member, work: Work, error: WorkerLost) -> None:
        """Handle the death of a client: its batches go to the others, and its successor starts from the centre."""
        self.current["lost"] += 1
        if not self.recovery.again((self.epoch, self.batch), max(1, len(self.members))):
            raise error
        self._left.insert(0, (work.start, work.stop))
        if self.mode == "allreduce":
            what = "its batches are trained again from its last state"
        else:
            self.members.remove(member)
            self._count_members()
            what = "another one starts from the centre"
        self.run.note("lost", f"{error}; client {member.id} is gone, and {what}")

    async def _leave(self, member: _Member) -> None:
        self.members.remove(member)
        self._count_members()
        self.run.note("client", f"client {member.id} leaves its device to other trials")
        await self._unit("leave", units.leave, member.id)

    # Epochs

    async def _collect(self) -> None:
        position = {
            "epoch": self.epoch, "batch": self.batch, "steps": self.steps, "loss_sum": self._loss[0],
            "loss_rows": self._loss[1],
        }  # fmt: skip
        client = next((member.id for member in self.members if member.version), None)
        self.current["left"] = [list(span) for span in self._left]
        centred = self.mode != "allreduce"
        await self._unit("collect", units.collect, position, client, self.wanted.centre_shards, centred)

    async def end_epoch(self, remaining: float | None) -> dict[str, float]:
        await self._collect()
        del self.current["left"]
        metrics = await super().end_epoch(remaining)
        self._left = [(0, self.laid.batches)]
        self._count_members()
        return metrics

    async def checkpoint(self) -> SavedCheckpoint:
        await self._collect()
        return await super().checkpoint()
