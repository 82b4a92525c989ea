"""Strategy `auto`: each trial is trained by the strategy that suits it, the devices and their load.

A built candidate is surveyed (`planner.survey`), each strategy estimates its cost, and the fastest for the current load
is chosen (`planner.choice`). During training the choice is repeated now and then: when trials run out and devices fall
idle, the last trials are spread over them, from a checkpoint. A candidate that turns out not to fit continues by
another strategy. With the exact strategies alone, which is `auto`, results do not change; with `any` they may.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hydra_tune.core.errors import CandidateError
from hydra_tune.engine.remote import remote
from hydra_tune.engine.unit import Role, TrialEnded, UnitFailed
from hydra_tune.planner.admission import TooMuch
from hydra_tune.planner.choice import APPROXIMATE, EXACT, Choice
from hydra_tune.planner.planner import Planner
from hydra_tune.planner.question import Survey
from hydra_tune.strategies.base import Reconsidered, Strategy, TrialRun
from hydra_tune.strategies.estimate import Estimate, refused
from hydra_tune.strategies.pool import Pool
from hydra_tune.strategies.registry import find_strategy, known
from hydra_tune.strategies.whole.strategy import Whole
from hydra_tune.training.progress import Progress

if TYPE_CHECKING:
    from hydra_tune.planner import survey as surveying
else:
    surveying = remote("hydra_tune.planner.survey")

MOVES = 2
"""Most changes of strategy of a trial in training."""
WORTH_MOVING = 1.2
"""A trial changes strategy only if it then finishes at least this many times sooner."""
PARAMETER = "strategy"
"""Hyperparameter that names the strategy if the sampler chooses it."""
STRATEGY_NOTE = "strategy"
"""File beside a trial's checkpoints that names the strategy that wrote them."""
NO_MEMORY = "OUT_OF_MEMORY"


class DoesNotFit(TrialEnded):
    """No strategy can train the candidate on these devices."""

    status = NO_MEMORY


class Planned(TrialEnded):
    """The trial was only to be planned."""

    status = "PRUNED"


@dataclass(frozen=True)
class Auto(Strategy):
    """Strategy that chooses among other strategies for each trial."""

    name = "auto"
    exact = True
    summary = "for each trial the exact strategy with the shortest estimated time"
    plans: ClassVar[bool] = True

    among: tuple[Strategy, ...] = (Whole(),)
    apart: bool = False
    """True if even the first candidate is built in the builder, as devices may be too small for it."""
    drawn: bool = False
    """True if the sampler chooses, as one more hyperparameter: an approximate strategy, or the best exact one."""
    pools: tuple[Pool, ...] = ()
    """Pools to plan for without training; empty to train."""
    planner: Planner | None = None
    """The search's data for its plans; set once the search has begun."""
    policy: str = "lazy-lrtf"

    @property
    def builds_apart(self) -> bool:  # type: ignore[override]
        return self.apart

    @property
    def gangs(self) -> bool:  # type: ignore[override]
        return any(strategy.gangs for strategy in self.among)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(strategy.name for strategy in self.among)

    @staticmethod
    def _stays(name: str) -> bool:
        """True if a trial trained by this strategy can continue only by the same one."""
        kind = find_strategy(name)
        return kind is not None and kind.own_checkpoints

    def trials_at_once(self, devices: int) -> int:
        """Return one more than devices: while one trial is built, surveyed or cut, every device has another.

        Trials that train as one with others count as little more than one.
        """
        return max((strategy.joined(devices) for strategy in self.among), default=0) + devices + 1

    def check(self, devices: int) -> None:
        for strategy in self.among:
            strategy.check(devices)

    async def train(self, run: TrialRun) -> None:
        assert self.planner is not None
        names = self.names
        if self.drawn:
            name = await run.suggest(PARAMETER, ("auto", *APPROXIMATE))
            names = EXACT if name == "auto" else (name,)
        before = _strategy_of_checkpoints(run.checkpoints)
        if before and self._stays(before):
            names = (before,)
        elif before:
            names = tuple(name for name in names if not self._stays(name))
        await _Planned(run, self, self.planner, names).train()


@dataclass
class _Planned:
    """A trial trained by one or several strategies in turn."""

    run: TrialRun
    auto: Auto
    planner: Planner
    names: tuple[str, ...]
    """Names of the strategies to choose from."""
    estimates: tuple[Estimate, ...] = ()
    moves: int = 0
    seconds: float = 0.0
    """Seconds of training by the current strategy."""
    batches: int = 0
    better: Choice | None = None

    async def train(self) -> None:
        run = self.run
        choice = await self._first_choice()
        anew = False
        while True:
            self._note_choice(choice)
            strategy = next(each for each in self.auto.among if each.name == choice.strategy)
            self._prepare(choice)
            present = choice
            try:
                await self._admit(choice)
                await run.bring(apart=strategy.builds_apart, anew=anew)
                if strategy.spans_devices and run.memory is not None:
                    await run.engine.reserve(run.attempt, run.memory)
                await strategy.train(run)
                return
            except Reconsidered:
                assert self.better is not None
                choice = self.better
                self.moves += 1
                run.note("strategy", f"goes on by {choice.strategy}: {choice.because}")
            except (UnitFailed, TrialEnded) as error:
                choice = self._instead(choice, error)
            finally:
                self._note_pace(present)
            run.engine.drop(run.attempt)
            anew = True

    async def _first_choice(self) -> Choice:
        run, auto = self.run, self.auto
        if len(self.names) == 1 and self.names[0] in APPROXIMATE:
            return self._unmeasured("the sampler chose it" if auto.drawn else "it is the only strategy given")
        assert run.candidacy.worker is not None
        because = run.blueprint.whole_because
        if because and "whole" not in self.names:
            raise CandidateError(f"the candidate cannot be cut: {because}", "use strategy 'whole' or 'auto'")
        among = ("whole",) if because else self.names
        question = self.planner.question(among, auto.pools, insist=auto.apart)
        result = await run.unit(
            "survey", surveying.survey, run.attempt, run.seed, run.profiles, question, worker=run.candidacy.worker,
            role=Role.BUILDER if run.candidacy.held else Role.DEVICE,
        )  # fmt: skip
        found: Survey = result.value
        if because:
            others = tuple(refused(name, f"it cannot be cut: {because}") for name in self.names if name != "whole")
            found = replace(found, estimates=tuple((*each, *others) for each in found.estimates))
        self.planner.surveys[run.number] = found
        if found.failed and because:
            return self._unmeasured(f"it cannot be cut: {because}")
        self.estimates = found.estimates[0]
        choice = self.planner.choose(self.estimates, found.epochs)
        if auto.pools:
            raise Planned
        if found.failed and (choice is None or not auto.apart or found.stays):
            return self._unmeasured(f"its rehearsal failed ({found.failed})")
        if choice is None:
            raise DoesNotFit(why_none(self.estimates))
        return choice

    async def _admit(self, choice: Choice) -> None:
        try:
            await self.planner.admit(self.run.number, choice)
        except TooMuch as error:
            raise DoesNotFit(str(error)) from error

    def _note_choice(self, choice: Choice) -> None:
        """Record the choice, and write the strategy's name beside the checkpoints if resuming depends on it."""
        self.run.chosen(choice.strategy, choice.stored())
        if any(strategy.own_checkpoints for strategy in self.auto.among):
            self.run.checkpoints.mkdir(parents=True, exist_ok=True)
            (self.run.checkpoints / STRATEGY_NOTE).write_text(choice.strategy)

    def _unmeasured(self, because: str) -> Choice:
        """Return the plain loop as the choice if there are no estimates."""
        if self.auto.pools:
            raise Planned
        name = "whole" if "whole" in self.names else self.names[0]
        return Choice(Estimate(strategy=name), because, (), self.run.blueprint.epochs)

    def _prepare(self, choice: Choice) -> None:
        """Set the trial's device memory and start the repeated check for a better strategy."""
        run, began = self.run, time.monotonic()
        self.seconds, self.batches = 0.0, 0
        # With more trials at once than devices need, as a user may request, trials take turns on them.
        alone = self.planner.rivals() <= self.planner.pool.devices + 1
        kind = known()[choice.strategy]
        run.memory = kind.memory(choice.estimate, alone=alone)
        run.signature, run.members = choice.estimate.signature, choice.estimate.members
        run.remaining_at_first = choice.seconds if choice.options else None
        if kind.spans_devices and run.memory is not None:
            run.at_once = 1  # its memory on each device is reserved

        def reconsider(progress: Progress) -> bool:
            if not self.batches:
                self.planner.began(choice.strategy, time.monotonic() - began - progress.seconds)
            self.seconds += progress.seconds
            self.batches += progress.batches_done
            self.better = self._better_than(choice, progress)
            return self.better is not None

        run.reconsider = reconsider

    def _better_than(self, choice: Choice, progress: Progress) -> Choice | None:
        """Return another strategy that would finish the trial much sooner on idle devices; else None."""
        planner = self.planner
        if choice.estimate.members > 1:
            return None
        if not choice.options or self.moves >= MOVES or not self.batches or planner.rivals() >= planner.pool.devices:
            return None
        if known()[choice.strategy].own_checkpoints:
            return None
        room = min(self.run.engine.room(self.run.attempt))
        left = self.run.blueprint.epochs - progress.epoch - progress.batch / max(progress.batches, 1)
        now = [
            estimate.at_pace(self.seconds / self.batches) if estimate.strategy == choice.strategy else estimate
            for estimate in planner.corrected(self.estimates)
            if not known()[estimate.strategy].own_checkpoints
            and (estimate.devices == 1 or estimate.device_bytes <= room)
        ]
        return planner.reconsider(now, choice.strategy, left, WORTH_MOVING)

    def _note_pace(self, choice: Choice) -> None:
        """Record the strategy's measured pace, for this trial's record and for the plans of others."""
        raw = next((each for each in self.estimates if each.strategy == choice.strategy), None)
        if self.batches and raw is not None and not raw.refused and raw.members == 1:
            self.planner.corrections.add(choice.strategy, self.seconds / self.batches / raw.batch_seconds)
            self.run.took(self.seconds / self.batches)

    def _instead(self, choice: Choice, error: UnitFailed | TrialEnded) -> Choice:
        """Return another choice for a trial that did not fit; raise the error if there is none."""
        status = error.failure.status if isinstance(error, UnitFailed) else error.status
        said = error.failure.message if isinstance(error, UnitFailed) else str(error)
        kind = known()[choice.strategy]
        if status != NO_MEMORY or kind.last_resort or (kind.own_checkpoints and self.batches):
            raise error
        trained = self.batches or self.moves
        self.estimates = tuple(
            each
            for each in self.estimates
            if each.strategy != choice.strategy and not (trained and known()[each.strategy].own_checkpoints)
        )
        found = self.planner.choose(self.estimates, choice.epochs)
        last = next((strategy.name for strategy in self.auto.among if strategy.last_resort), None)
        if found is None and last in self.names and last is not None and not self.run.blueprint.whole_because:
            # Not surveyed before, as the whole model seemed to fit.
            found = Choice(Estimate(strategy=last), "", (), choice.epochs)
        if found is None:
            raise error
        self.run.note("out of memory", f"{said}; goes on by {found.strategy}")
        return replace(found, because=f"by {choice.strategy} it ran out of memory: {said}")


def _strategy_of_checkpoints(checkpoints: Path) -> str:
    """Return the recorded strategy of a trial's checkpoints; empty if unknown."""
    note = checkpoints / STRATEGY_NOTE
    return note.read_text() if note.exists() and any(checkpoints.glob("*.safetensors")) else ""


def why_none(estimates: Sequence[Estimate]) -> str:
    """Return the reason why no strategy can train a candidate, with a hint."""
    budgets = [each.smallest_budget for each in estimates if each.smallest_budget]
    hint = f" (the smallest device_memory for it is {min(budgets) // 2**20}MiB)" if budgets else ""
    return "; ".join(f"{each.strategy}: {each.refused}" for each in estimates) + hint
