"""What a search knows for its plans: the pool, the rates, how predictions turned out, and what trials have taken.

One for each search, in the coordinator. It decides nothing by itself: `choice.choose` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hydra_tune.planning.choice import Choice, Situation, choose, until_done
from hydra_tune.planning.estimates import Estimate
from hydra_tune.planning.pool import Pool
from hydra_tune.planning.survey import Question

PRIOR_TRIALS = 1.0
"""A measured trial moves a correction half of the way, the second a third of the rest, and so on."""
FURTHEST = 4.0
"""No correction goes beyond this factor: a trial that was disturbed for long is no rule."""
SOON_DONE = 20.0
"""Seconds of training below which a candidate that fits a device is not looked into further."""
UNKNOWN_BEGIN = 5.0
LONGEST_BEGIN = 30.0
"""Seconds; what took longer has waited for others."""
BEGIN_SECONDS = {"whole": 0.5, "shard": 2.0, "pipeline": 3.0}
"""To bring a candidate to its devices, where nothing is known yet."""


@dataclass
class Corrections:
    """Measured over predicted seconds of a batch, by strategy: a mean of logarithms with a prior of one."""

    _sums: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def add(self, strategy: str, ratio: float) -> None:
        """A trial took so many times what had been predicted, before any correction."""
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
    """How many trials want devices now: those in flight and, as far as there is room, those to come."""
    crowding: float = 1.0
    """How much longer work takes while all devices work."""
    corrections: Corrections = field(default_factory=Corrections)
    begin_seconds: dict[str, float] = field(default_factory=lambda: dict(BEGIN_SECONDS))
    """Seconds from a choice to the first batch, by strategy, as last measured."""

    def question(self, among: tuple[str, ...], pools: tuple[Pool, ...] = (), *, insist: bool = True) -> Question:
        """What to find out about a candidate; where pools are to be compared, everything there is."""
        if pools:
            return Question(pools, among)
        return Question((self.pool,), among, math.inf if self.pool.devices == 1 else SOON_DONE, insist)

    def choose(self, estimates: Sequence[Estimate], epochs: float) -> Choice | None:
        """The strategy for a trial that has not begun."""
        return choose(self.corrected(estimates), Situation(self.pool, max(1, self.rivals()), epochs))

    def reconsider(self, estimates: Sequence[Estimate], current: str, epochs: float, times: float) -> Choice | None:
        """Another strategy for a trial in training, where it would end so many times sooner, the move included.

        The estimates are corrected already, the present strategy's by its own pace.
        """
        setup = {each.strategy: self.begin_seconds.get(each.strategy, UNKNOWN_BEGIN) for each in estimates}
        situation = Situation(self.pool, max(1, self.rivals()), epochs, {**setup, current: 0.0})
        found = choose(estimates, situation)
        if found is None or found.strategy == current:
            return None
        now = next(each for each in estimates if each.strategy == current)
        return found if until_done(now, situation) > times * until_done(found.estimate, situation) else None

    def corrected(self, estimates: Sequence[Estimate]) -> list[Estimate]:
        """By what earlier trials took of their predictions; where none has, by how devices disturb each other."""
        known = self.corrections.factors()
        return [e if e.refused else e.scaled(known.get(e.strategy, self.crowding)) for e in estimates]

    def began(self, strategy: str, seconds: float) -> None:
        """A trial was on its devices after so many seconds."""
        self.begin_seconds[strategy] = min(seconds, LONGEST_BEGIN)
