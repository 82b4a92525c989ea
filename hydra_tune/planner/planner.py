"""Data for a search's plans: the pool, the rates, the accuracy of predictions, and measured trials.

Each search has one, in the coordinator. It decides nothing by itself: `choice.choose` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hydra_tune.planner.admission import Admission, Taken
from hydra_tune.planner.choice import Choice, Situation, choose, until_done
from hydra_tune.planner.question import Question, Survey
from hydra_tune.strategies.estimate import Estimate
from hydra_tune.strategies.pool import Pool
from hydra_tune.strategies.registry import known

PRIOR_TRIALS = 1.0
"""Weight of the prior in trials: the first measured trial moves a correction half of the way."""
FURTHEST = 4.0
"""Largest correction factor: a trial that was disturbed for long is no rule."""
SOON_DONE = 20.0
"""Seconds of training below which a candidate that fits a device is not surveyed further."""
LONGEST_BEGIN = 30.0
"""Longest start in seconds that counts; longer ones have waited for other trials."""


@dataclass
class Corrections:
    """Measured over predicted seconds of a batch, by strategy: a mean of logarithms with a prior of one."""

    _sums: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def add(self, strategy: str, ratio: float) -> None:
        """Record a trial's ratio of measured to predicted time, before any correction."""
        bounded = min(FURTHEST, max(1 / FURTHEST, ratio))
        self._sums[strategy] = self._sums.get(strategy, 0.0) + math.log(bounded)
        self._counts[strategy] = self._counts.get(strategy, 0) + 1

    def factors(self) -> dict[str, float]:
        return {name: math.exp(total / (self._counts[name] + PRIOR_TRIALS)) for name, total in self._sums.items()}


@dataclass
class Planner:
    """Makes the choices of one search."""

    pool: Pool
    rivals: Callable[[], int]
    """Returns the number of trials that want devices now: those in flight and, as far as there is room, those to come.
    """
    admission: Admission
    """Makes trials wait for host memory."""
    left: Callable[[], int] = lambda: 0
    """Returns the number of trials that have not ended, including those to come."""
    crowding: float = 1.0
    """Factor by which work takes longer while all devices are busy."""
    corrections: Corrections = field(default_factory=Corrections)
    begin_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds from a choice to the first batch, by strategy, as last measured."""
    surveys: dict[int, Survey] = field(default_factory=dict)
    """Surveys of candidates, by trial."""

    def question(self, among: tuple[str, ...], pools: tuple[Pool, ...] = (), *, insist: bool = True) -> Question:
        """Return the question for a survey of a candidate; exhaustive if pools are to be compared."""
        if pools:
            return Question(pools, among)
        return Question((self.pool,), among, math.inf if self.pool.devices == 1 else SOON_DONE, insist)

    def choose(self, estimates: Sequence[Estimate], epochs: float) -> Choice | None:
        """Return the strategy for a trial that has not begun."""
        return choose(self.corrected(estimates), Situation(self.pool, max(1, self.rivals()), epochs, self.left()))

    def reconsider(self, estimates: Sequence[Estimate], current: str, epochs: float, times: float) -> Choice | None:
        """Return another strategy for a trial in training if it finishes `times` times sooner, including the move.

        The estimates are corrected already, the current strategy's by its own pace.
        """
        setup = {each.strategy: self._begins_in(each.strategy) for each in estimates}
        situation = Situation(self.pool, max(1, self.rivals()), epochs, self.left(), {**setup, current: 0.0})
        found = choose(estimates, situation)
        if found is None or found.strategy == current:
            return None
        now = next(each for each in estimates if each.strategy == current)
        return found if until_done(now, situation) > times * until_done(found.estimate, situation) else None

    def corrected(self, estimates: Sequence[Estimate]) -> list[Estimate]:
        """Correct estimates by earlier trials' measured times; without any, by the slowdown of busy devices."""
        known = self.corrections.factors()
        return [e if e.refused else e.scaled(known.get(e.strategy, self.crowding)) for e in estimates]

    async def admit(self, trial: int, choice: Choice) -> None:
        """Wait until there is host memory, or disk, for a trial by that choice. Raises TooMuch."""
        estimate = choice.estimate
        on_devices = estimate.devices * estimate.device_bytes if self.pool.cpu else 0
        spilled = max(0, estimate.host_bytes + estimate.disk_bytes - on_devices)
        on_devices //= estimate.members  # each of those that train as one is admitted with its share
        await self.admission.admit(trial, Taken(on_devices, spilled))

    def _begins_in(self, strategy: str) -> float:
        return self.begin_seconds.get(strategy, known()[strategy].begin_seconds)

    def began(self, strategy: str, seconds: float) -> None:
        """Record the seconds after which a trial began on its devices."""
        self.begin_seconds[strategy] = min(seconds, LONGEST_BEGIN)
