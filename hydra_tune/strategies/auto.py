"""Strategy `auto`: each trial is trained by the strategy that suits it, the devices and how busy they are.

A built candidate is looked at (`planning.survey`), each strategy says what it would take, and the quickest for the
present load is chosen (`planning.choice`). While it trains, the choice is made again now and then: when trials run out
and devices fall idle, the last ones are spread over them, from a checkpoint, in the middle of their training. A
candidate that turns out not to fit goes on by another strategy. With the exact strategies alone, which is `auto`, none
of this changes a result; with `any` it may.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from hydra_tune.engine.unit import Memory, Role, TrialEnded, UnitFailed
from hydra_tune.errors import CandidateError
from hydra_tune.planning.choice import APPROXIMATE, EXACT, Choice
from hydra_tune.planning.estimates import Estimate, refused
from hydra_tune.planning.planner import Planner
from hydra_tune.planning.pool import Pool
from hydra_tune.planning.survey import Survey, survey
from hydra_tune.strategies.base import Reconsidered, Strategy, TrialRun
from hydra_tune.strategies.planned_run import PlannedRun
from hydra_tune.strategies.whole import Whole
from hydra_tune.training import Progress

MOVES = 2
"""Times that a trial in training changes its strategy at the most."""
WORTH_MOVING = 1.2
"""Times by which it must end sooner for it."""
APART = ("sparse",)
"""Strategies whose checkpoints are of their own kind: no other can go on from them, nor they from others'."""
PARAMETER = "strategy"
"""The hyperparameter that names a strategy, where the sampler chooses."""
NO_MEMORY = "OUT_OF_MEMORY"


class DoesNotFit(TrialEnded):
    """No strategy can train the candidate on these devices."""

    status = NO_MEMORY


class Planned(TrialEnded):
    """The trial was to be planned only."""

    status = "PRUNED"


@dataclass(frozen=True)
class Auto(Strategy):
    """Choose a strategy for each trial."""

    name = "auto"
    exact = True
    summary = "for each trial the exact strategy that suits it, by what is measured of it"
    plans: ClassVar[bool] = True

    among: tuple[Strategy, ...] = (Whole(),)
    apart: bool = False
    """Whether candidates are built in the builder from the first one on, as devices may be too small for them."""
    drawn: bool = False
    """Whether the sampler chooses, as one more hyperparameter: an approximate strategy, or the best exact one."""
    pools: tuple[Pool, ...] = ()
    """Pools to plan for, without training; none to train."""
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

    def trials_at_once(self, devices: int) -> int:
        """One more than devices: while one is built, looked at or cut, every device has another."""
        return devices + 1

    def check(self, devices: int) -> None:
        for strategy in self.among:
            strategy.check(devices)

    async def train(self, run: TrialRun) -> None:
        assert isinstance(run, PlannedRun)
        assert run.planner is not None
        names = self.names
        if self.drawn:
            name = await run.suggest(PARAMETER, ("auto", *APPROXIMATE))
            names = EXACT if name == "auto" else (name,)
        before = run.strategy_before()
        if before in APART:
            names = (before,)
        elif before:
            names = tuple(name for name in names if name not in APART)
        await _Planned(run, self, run.planner, names).train()


@dataclass
class _Planned:
    """One trial on its way through one strategy or several."""

    run: PlannedRun
    auto: Auto
    planner: Planner
    names: tuple[str, ...]
    """To choose from."""
    estimates: tuple[Estimate, ...] = ()
    moves: int = 0
    seconds: float = 0.0
    """Of training by the present strategy."""
    batches: int = 0
    better: Choice | None = None

    async def train(self) -> None:
        run = self.run
        choice = await self._first_choice()
        anew = False
        while True:
            run.chosen(choice)
            strategy = next(each for each in self.auto.among if each.name == choice.strategy)
            self._prepare(choice)
            present = choice
            try:
                await run.admit(choice)
                await run.bring(apart=strategy.builds_apart, anew=anew)
                if choice.strategy == "pipeline" and run.memory is not None:
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
            return self._unmeasured("the sampler chose it" if auto.drawn else "nothing else was asked for")
        assert run.candidacy.worker is not None
        because = run.blueprint.whole_because
        if because and "whole" not in self.names:
            raise CandidateError(f"the candidate cannot be cut: {because}", "use strategy 'whole' or 'auto'")
        among = ("whole",) if because else self.names
        question = self.planner.question(among, auto.pools, insist=auto.apart)
        result = await run.unit(
            "survey", survey, run.attempt, run.seed, run.profiles, question, worker=run.candidacy.worker,
            role=Role.BUILDER if run.candidacy.held else Role.DEVICE,
        )  # fmt: skip
        found: Survey = result.value
        if because:
            others = tuple(refused(name, f"it cannot be cut: {because}") for name in self.names if name != "whole")
            found = replace(found, estimates=tuple((*each, *others) for each in found.estimates))
        run.surveyed(found)
        if found.failed and because:
            return self._unmeasured(f"it cannot be cut: {because}")
        self.estimates = found.estimates[0]
        choice = self.planner.choose(self.estimates, found.epochs)
        if auto.pools:
            raise Planned
        if found.failed and (choice is None or not auto.apart or found.stays):
            return self._unmeasured(f"trying it out failed ({found.failed})")
        if choice is None:
            raise DoesNotFit(why_none(self.estimates))
        return choice

    def _unmeasured(self, because: str) -> Choice:
        """The plain loop, for want of anything better."""
        if self.auto.pools:
            raise Planned
        name = "whole" if "whole" in self.names else self.names[0]
        return Choice(Estimate(strategy=name), because, (), self.run.blueprint.epochs)

    def _prepare(self, choice: Choice) -> None:
        """Say what the trial takes of its devices, and look now and then whether another strategy would be better."""
        run, began = self.run, time.monotonic()
        self.seconds, self.batches = 0.0, 0
        # More trials at once than devices want, as a user may ask for, take turns on them.
        alone = self.planner.rivals() <= self.planner.pool.devices + 1
        run.memory = _memory(choice.estimate, alone)
        run.remaining_at_first = choice.seconds if choice.options else None
        if choice.strategy == "pipeline":
            run.at_once = 1  # what it takes of each device is kept for it

        def reconsider(progress: Progress) -> bool:
            if not self.batches:
                self.planner.began(choice.strategy, time.monotonic() - began - progress.seconds)
            self.seconds += progress.seconds
            self.batches += progress.batches_done
            self.better = self._better_than(choice, progress)
            return self.better is not None

        run.reconsider = reconsider

    def _better_than(self, choice: Choice, progress: Progress) -> Choice | None:
        """Another strategy that would end the trial well sooner, where devices idle."""
        planner = self.planner
        if not choice.options or self.moves >= MOVES or not self.batches or planner.rivals() >= planner.pool.devices:
            return None
        if choice.strategy in APART:
            return None
        room = min(self.run.engine.room(self.run.attempt))
        left = self.run.blueprint.epochs - progress.epoch - progress.batch / max(progress.batches, 1)
        now = [
            estimate.at_pace(self.seconds / self.batches) if estimate.strategy == choice.strategy else estimate
            for estimate in planner.corrected(self.estimates)
            if estimate.strategy not in APART and (estimate.devices == 1 or estimate.device_bytes <= room)
        ]
        return planner.reconsider(now, choice.strategy, left, WORTH_MOVING)

    def _note_pace(self, choice: Choice) -> None:
        """What the strategy really took, for this trial's record and for the plans of others."""
        raw = next((each for each in self.estimates if each.strategy == choice.strategy), None)
        if self.batches and raw is not None and not raw.refused:
            self.planner.corrections.add(choice.strategy, self.seconds / self.batches / raw.batch_seconds)
            self.run.took(self.seconds / self.batches)

    def _instead(self, choice: Choice, error: UnitFailed | TrialEnded) -> Choice:
        """The trial did not fit after all: what else is there? Raises the error where there is nothing."""
        status = error.failure.status if isinstance(error, UnitFailed) else error.status
        said = error.failure.message if isinstance(error, UnitFailed) else str(error)
        # What a strategy of its own kind has trained nobody can go on from.
        if status != NO_MEMORY or choice.strategy == "shard" or (choice.strategy in APART and self.batches):
            raise error
        gone = {choice.strategy, *(APART if self.batches or self.moves else ())}
        self.estimates = tuple(each for each in self.estimates if each.strategy not in gone)
        found = self.planner.choose(self.estimates, choice.epochs)
        if found is None and "shard" in self.names and not self.run.blueprint.whole_because:
            # Not looked into before, as the whole seemed to fit.
            found = Choice(Estimate(strategy="shard"), "", (), choice.epochs)
        if found is None:
            raise error
        self.run.note("out of memory", f"{said}; goes on by {found.strategy}")
        return replace(found, because=f"by {choice.strategy} it ran out of memory: {said}")


def _memory(estimate: Estimate, alone: bool) -> Memory | None:
    """What a trial by that estimate takes of a device; None where that is not known."""
    match estimate.strategy:
        case "whole" if estimate.device_bytes:
            return Memory(estimate.device_bytes, estimate.held_bytes, alone=alone)
        case "shard" if estimate.needed_bytes:
            return Memory(estimate.needed_bytes, spills=True)
        case "pipeline":
            return Memory(estimate.device_bytes, estimate.held_bytes)
    return None


def why_none(estimates: Sequence[Estimate]) -> str:
    """Why no strategy can train a candidate, and what would help."""
    budgets = [each.smallest_budget for each in estimates if each.smallest_budget]
    hint = f" (the smallest device_memory for it is {min(budgets) // 2**20}MiB)" if budgets else ""
    return "; ".join(f"{each.strategy}: {each.refused}" for each in estimates) + hint
