"""Runs attempts on the devices of one machine, and keeps measurements that serve later attempts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from hydra_tune.coordinator.attempt import Attempt
from hydra_tune.coordinator.building import Building
from hydra_tune.coordinator.deadlines import Deadlines
from hydra_tune.coordinator.files import StudyFiles
from hydra_tune.coordinator.settings import SearchSettings
from hydra_tune.coordinator.trial_facts import TrialFacts
from hydra_tune.coordinator.trial_study import TrialStudy
from hydra_tune.core.states import Outcome
from hydra_tune.engine.engine import Engine
from hydra_tune.engine.remaining import Survival
from hydra_tune.planner.admission import Admission
from hydra_tune.strategies.base import Strategy
from hydra_tune.training.builds import Blueprint
from hydra_tune.training.progress import Progress
from hydra_tune.training.remote_trial import TrialInfo


@dataclass
class AttemptRunner:
    """Runs attempts of trials on one engine."""

    settings: SearchSettings
    source_file: str
    strategy: Strategy
    engine: Engine
    study: TrialStudy
    files: StudyFiles
    """Places of checkpoints and weights on this machine."""
    profiles: Path
    """Directory of the measured costs of models."""
    admission: Admission
    stopping: Callable[[], bool]
    out_of_time: Callable[[], bool]
    """True if running trials are to end with the epochs they have."""
    on_candidates: Callable[[], None]
    """Called when `build` is known to return candidates."""
    on_progress: Callable[[int, Blueprint, Progress], None]
    show: Callable[[str], None]
    directory_losses: Callable[[], int]
    """Times that a directory of this run was found to be removed, and was made again."""
    on_room: Callable[[], None] = lambda: None
    """Called when more trials than before may be in flight."""
    look_at_spill: Callable[[], Awaitable[None]] | None = None
    """Counts the bytes in the spill store now."""
    at_once: int = 1
    """Most trials on the devices at the same time."""

    def __post_init__(self) -> None:
        self.deadlines = Deadlines(self.settings.deadline)
        self.survival = Survival(
            pruner=self.settings.pruner not in (None, "none"), maximize=self.settings.directions[0] == "maximize"
        )
        self.building = Building(self.engine, self.strategy, self.source_file, self.deadlines, self.on_candidates)

    @property
    def objective_seen(self) -> bool:
        """True once `build` is known to be an ordinary objective."""
        return self.building.objective_seen

    def measured(self, peak: int) -> None:
        """Note the memory that an objective was measured to take."""
        self.building.measured(peak)

    async def run(self, info: TrialInfo, facts: TrialFacts) -> Outcome:
        """Run one attempt to its end; raise Interrupted, or NoRoom if the search cannot go on."""
        try:
            outcome = await self._attempt(info, facts).run()
            if facts.written_bytes and facts.spilled_bytes is None and self.look_at_spill is not None:
                await self.look_at_spill()  # a short trial ends between two checks
            return outcome
        finally:
            self.engine.drop(info.attempt)
            self.admission.release(info.number)

    def _attempt(self, info: TrialInfo, facts: TrialFacts) -> Attempt:
        return Attempt(
            number=info.number, seed=info.seed, attempt=info.attempt, info=info, facts=facts,
            metric=self.settings.metrics[0], maximize=self.settings.directions[0] == "maximize",
            weights=self.files.weights(info.number), checkpoints=self.files.checkpoints(info.number),
            profiles=self.profiles, engine=self.engine, at_once=self.at_once, strategy=self.strategy,
            settings=self.settings, study=self.study, building=self.building, deadlines=self.deadlines,
            survival=self.survival, stopping=self.stopping, ends_now=self.out_of_time, on_progress=self.on_progress,
            show=self.show, directory_losses=self.directory_losses, on_room=self.on_room, retried=facts.retried,
        )  # fmt: skip
