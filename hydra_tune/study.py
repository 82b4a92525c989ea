"""The study that this process owns: Optuna's side of a search, and its records.

Plain synchronous code; `study_thread` runs it beside the event loop.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import TrialState

from hydra_tune.engine.unit import Unit, UnitResult
from hydra_tune.errors import SpecError
from hydra_tune.remote_trial import TrialInfo
from hydra_tune.sampling import make_pruner, make_sampler
from hydra_tune.seeds import new_study_seed, trial_seed
from hydra_tune.settings import SearchSettings
from hydra_tune.states import OPTUNA_STATE, Outcome, Status
from hydra_tune.storage import open_storage
from hydra_tune.storage.queries import study_summary
from hydra_tune.storage.records import StudyRecords

_SUGGESTIONS = ("suggest_float", "suggest_int", "suggest_categorical")


@dataclass(frozen=True)
class Asked:
    """A trial that is to be run."""

    number: int
    seed: int


class OwnedStudy:
    """An Optuna study with its records; every method runs on the study's thread."""

    def __init__(self, settings: SearchSettings, space: Any, source: dict[str, Any] | None) -> None:
        self.settings = settings
        self.storage = open_storage(settings.storage)
        self._open = ExitStack()
        self._open.callback(self.storage.close)
        try:
            self.study = self._create_or_load(space, source)
        except BaseException:
            self._open.close()
            raise
        self._open.enter_context(self.storage.batching())
        self._trials: dict[int, optuna.Trial] = {}
        self._kept: dict[int, float] = {}

    def _create_or_load(self, space: Any, source: dict[str, Any] | None) -> optuna.Study:
        settings = self.settings
        exists = settings.study in optuna.get_all_study_names(self.storage)
        if exists and not settings.resume:
            raise SpecError(f"study {settings.study!r} exists already", "use resume to go on with it, or another name")
        if not exists and settings.resume:
            study_summary(self.storage, settings.study)  # raises with the nearest name
        recorded = study_summary(self.storage, settings.study).seed if exists else None
        self.seed = next(s for s in (settings.seed, recorded, new_study_seed()) if s is not None)
        self.sampler = make_sampler(settings.sampler, seed=self.seed, space=space)
        parts: dict[str, Any] = {
            "storage": self.storage,
            "sampler": self.sampler,
            "pruner": make_pruner(settings.pruner),
        }
        if exists:
            study = optuna.load_study(study_name=settings.study, **parts)
        else:
            directions = [StudyDirection[direction.upper()] for direction in settings.directions]
            study = optuna.create_study(study_name=settings.study, directions=directions, **parts)
        if len(study.directions) != len(settings.directions):
            raise SpecError(
                f"study {settings.study!r} has {len(study.directions)} objectives, not {len(settings.directions)}",
                "resume it with the metrics it was started with",
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(settings.metrics))
        self.records = StudyRecords(self.storage, study._study_id)
        self.records.describe(self.seed, list(settings.metrics), settings.stored(), source)
        return study

    @property
    def study_id(self) -> int:
        return int(self.study._study_id)

    def close(self) -> None:
        self.storage.flush()
        self._open.close()

    # Trials

    def finished(self) -> int:
        """How many trials of the study have ended, in this run or before."""
        return self.storage.get_n_trials(self.study_id, state=(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL))

    def interrupted(self) -> list[Asked]:
        """Trials that an earlier run left unfinished; they run again under their own numbers."""
        left = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [self._take(optuna.Trial(self.study, trial._trial_id)) for trial in left]

    def ask(self) -> Asked:
        """A new trial from the sampler."""
        return self._take(self.study.ask())

    def _take(self, trial: optuna.Trial) -> Asked:
        asked = Asked(trial.number, trial_seed(self.seed, trial.number))
        self._trials[trial.number] = trial
        self.records.trial(asked.number, seed=asked.seed, status=Status.RUNNING.value)
        return asked

    def begin_attempt(self, asked: Asked, attempt: int) -> TrialInfo:
        """Record an attempt at the trial; returns what a worker is told of it."""
        trial = self._trials[asked.number]
        return TrialInfo(
            number=asked.number,
            seed=asked.seed,
            attempt=self.records.attempt_started(asked.number, attempt, "", 0),
            objectives=len(self.settings.metrics),
            user_attrs=trial.user_attrs,
            datetime_start=trial.datetime_start,
        )

    def answer(self, number: int, name: str, args: tuple[Any, ...]) -> Any:
        """What user code in a worker asks its trial."""
        trial = self._trials[number]
        if name in _SUGGESTIONS:
            parameter, arguments, options = args
            return getattr(trial, name)(parameter, *arguments, **options)
        match name:
            case "report":
                self._report(trial, *args)
            case "should_prune":
                return trial.should_prune()
            case "set_user_attr":
                trial.set_user_attr(*args)
            case "set_constraint":
                trial.set_constraint(*args)
            case "distributions":
                return trial.distributions
            case "constraints":
                return trial.constraints
            case _:
                raise ValueError(f"a trial has no {name!r}")
        return None

    def _report(self, trial: optuna.Trial, value: float, step: int) -> None:
        # A trial that runs again reports its first epochs again; Optuna keeps the first report and warns.
        if step not in self.study._storage.get_trial(trial._trial_id).intermediate_values:
            trial.report(value, step)

    def epoch(self, number: int, epoch: int, metrics: dict[str, float]) -> bool:
        """Record an epoch's metrics; returns whether the trial is to be pruned."""
        self.records.metrics(number, epoch, metrics)
        if len(self.settings.metrics) > 1:
            return False
        trial = self._trials[number]
        self._report(trial, metrics[self.settings.metrics[0]], epoch)
        return trial.should_prune()

    def tell(self, number: int, outcome: Outcome, **facts: Any) -> list[int]:
        """End a trial. Returns the trials whose weights are no longer among the best."""
        trial = self._trials.pop(number)
        state = OPTUNA_STATE[outcome.status]
        values = list(outcome.values) if state is TrialState.COMPLETE and outcome.values else None
        self.study.tell(trial, values, state)
        self.records.trial(number, status=outcome.status.value, error=outcome.error, **facts)
        return self._no_longer_kept(number, outcome)

    def _no_longer_kept(self, number: int, outcome: Outcome) -> list[int]:
        if outcome.status is not Status.COMPLETE or outcome.values is None or len(outcome.values) > 1:
            return []
        sign = -1.0 if self.settings.directions[0] == "maximize" else 1.0
        self._kept[number] = sign * outcome.values[0]
        ranked = sorted(self._kept, key=lambda n: (self._kept[n], n))
        surplus = ranked[self.settings.keep_weights :]
        for old in surplus:
            del self._kept[old]
        return surplus

    # Records

    def end_attempt(self, attempt: str, outcome: Outcome) -> None:
        self.records.attempt_ended(attempt, outcome.status.value, outcome.error, outcome.traceback)

    def unit(self, unit: Unit, result: UnitResult) -> None:
        self.records.unit(
            unit.trial,
            unit.attempt,
            unit.kind,
            result.device,
            result.started,
            result.seconds,
            result.peak_bytes,
        )
