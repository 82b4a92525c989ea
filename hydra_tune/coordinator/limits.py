"""Limits of a search: its number of trials, in total and at a time, and its time."""

from __future__ import annotations

import time

from hydra_tune.coordinator.failures import Failures
from hydra_tune.coordinator.settings import SearchSettings
from hydra_tune.planner.admission import is_low
from hydra_tune.strategies.base import Strategy

LOOK_AGAIN_SECONDS = 5.0
"""Seconds between checks of a search that is short of memory."""


class Limits:
    """Decides when a search may begin another trial; its time starts with `begin`."""

    def __init__(self, settings: SearchSettings, strategy: Strategy, devices: int, failures: Failures) -> None:
        self.total = settings.trials
        """Number of trials that the study is to have."""
        self.points: int | None = None
        """Number of trials after which the sampler has no more to propose; None if it always has."""
        self.candidates_seen = False
        """True once `build` is known to return candidates."""
        self._settings = settings
        self._strategy = strategy
        self._devices = devices
        self._failures = failures
        self._deadline: float | None = None

    def begin(self) -> None:
        """Start the time limit: the first trial is about to begin."""
        if self._settings.timeout is not None:
            self._deadline = time.monotonic() + self._settings.timeout

    @property
    def trials(self) -> int:
        """Number of trials that the study can have: the total, or the sampler's points if these are fewer."""
        return min(self.total, self.points or self.total)

    @property
    def at_once(self) -> int:
        """Most trials in flight."""
        if self._settings.concurrency is not None:
            return self._settings.concurrency
        return self.at_once_on(self.devices)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self._devices

    def at_once_on(self, devices: int) -> int:
        """Return how many trials keep so many devices of one machine busy."""
        # One more than devices if trials move: while one is cut or saved in the builder, every device has another.
        if self._strategy.plans and not self._strategy.builds_apart and not self.candidates_seen:
            return devices  # an objective takes one device each, and candidates are not yet known to come
        return self._strategy.trials_at_once(devices)

    def counted(self, elsewhere: int) -> int:
        """Return how many trials that ended elsewhere count: all for a total, none for `n_trials`, which run here."""
        return elsewhere if self._settings.n_trials is None else 0

    def may_ask(self, trials: int) -> bool:
        """True if a study that has this many trials, ended and in flight, may get one more."""
        return trials < self.trials and not self.out_of_time() and not self._failures.gave_up

    def has_room(self, running: int, ended: int) -> bool:
        """True if one more trial may begin; while the machine is short of memory, only when none runs."""
        # Else the last trial would be alone on one device, while the others are idle.
        among_the_last = self._takes_turns and self.trials - ended - running <= self.devices
        return (running < self.at_once or among_the_last) and not (running and is_low())

    @property
    def _takes_turns(self) -> bool:
        """True if trials take turns on devices, so that more of them than usual cost no more memory."""
        strategy, chosen = self._strategy, self._settings.concurrency is not None
        return strategy.builds_apart and not (strategy.spans_devices or strategy.gangs or chosen)

    def look_again(self, finished: int, running: int) -> float | None:
        """Return the seconds until the next check for free memory; None if no trial is held back."""
        held_back = running < self.at_once and self.may_ask(finished + running)
        return LOOK_AGAIN_SECONDS if held_back else None

    def rivals(self, finished: int, running: int) -> int:
        """Return the number of trials that compete for devices: those in flight, and new ones for the free places."""
        to_come = max(0, self.trials - finished - running) if self.may_ask(0) else 0
        return min(max(self.at_once, running), running + to_come)

    def left(self, finished: int) -> int:
        """Return the number of trials that have not ended, including those to come."""
        return max(0, self.trials - finished)

    def refusal(self, total: int) -> str:
        """Return the reason why the study cannot have `total` trials; empty if it can."""
        return f"the grid has {self.points} points" if self.points is not None and total > self.points else ""

    def out_of_time(self) -> bool:
        """True after the timeout, when no trial may begin."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def ends_trials(self) -> bool:
        """True if running trials are to end with the epochs they have."""
        return self._settings.stop_at_timeout and self.out_of_time()
