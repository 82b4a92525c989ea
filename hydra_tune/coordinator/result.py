"""Result of a search: the study, its trials, and the best model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from hydra_tune.coordinator.files import StudyFiles
from hydra_tune.core.errors import InputError
from hydra_tune.core.seeds import seed_everything
from hydra_tune.storage import open_storage
from hydra_tune.storage.queries import TrialRecord, study_summary, trial_records
from hydra_tune.training.kept_files import kept_files
from hydra_tune.training.remote_trial import StoredTrial
from hydra_tune.training.source import Build

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from hydra_tune.training.candidate import Candidate

NO_MODEL = (
    "an objective that returns a number has no model",
    "return a Candidate from build, or keep the model's file with trial.keep(path); `best` shows the parameters",
)


class SearchResult:
    """A finished or paused study. The study of `ht.search` can also be written: enqueue, ask, tell, optimize."""

    def __init__(
        self,
        storage: str,
        study: str,
        load_build: Callable[[], Build] | None = None,
        *,
        read_only: bool = True,
        sampler: BaseSampler | None = None,
        pruner: BasePruner | None = None,
    ) -> None:
        """Open a study; unless `read_only`, the user's own code may ask for trials by `sampler` and `pruner`."""
        self._url = storage
        self._load_build = load_build
        self._storage = open_storage(storage, read_only=read_only)
        weakref.finalize(self, self._storage.close)
        self.study = optuna.load_study(study_name=study, storage=self._storage, sampler=sampler, pruner=pruner)

    def __repr__(self) -> str:
        return f"SearchResult(study={self.study.study_name!r}, trials={len(self.trials)})"

    @property
    def completed(self) -> int:
        """Number of completed trials."""
        return self._storage.get_n_trials(self.study._study_id, state=TrialState.COMPLETE)

    @property
    def trials(self) -> list[TrialRecord]:
        """Records of all trials, by number."""
        return trial_records(self._storage, self.study.study_name)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the values of a trial."""
        return study_summary(self._storage, self.study.study_name).metrics

    @property
    def best_trial(self) -> TrialRecord:
        """The best completed trial; with several objectives, one of the Pareto front."""
        return self.trials[self._best_number()]

    @property
    def best_params(self) -> dict[str, Any]:
        if len(self.study.directions) > 1:
            raise InputError("a search with several objectives has no single best parameters", "use best_trial.params")
        return self.best_trial.params

    @property
    def best_value(self) -> float:
        value = self.best_trial.value
        if value is None:
            raise InputError("a search with several objectives has no single best value", "use best_trial.values")
        return value

    def _best_number(self) -> int:
        if len(self.study.directions) > 1:
            front = self.study.best_trials
            if not front:
                raise InputError("no trial has completed", "look at trials for the reasons")
            return front[0].number
        try:
            return self.study.best_trial.number
        except ValueError as error:
            if self.completed:
                raise InputError("no completed trial satisfies its constraints", "look at trials") from error
            raise InputError("no trial has completed", "look at trials for the reasons") from error

    @property
    def has_best(self) -> bool:
        """True if a trial has completed and satisfies its constraints, if it has any."""
        try:
            return self._best_number() >= 0
        except InputError:
            return False

    @property
    def can_build(self) -> bool:
        """True if the build function is available."""
        return self._load_build is not None

    def best_model(self) -> nn.Module:
        """Return the best trial's model with its trained weights."""
        return self.model(self._best_number())

    def model(self, number: int) -> nn.Module:
        """Return a trial's model with its trained weights: `build` runs again here, with the trial's parameters."""
        from hydra_tune.core.weights import load_weights

        candidate = self.candidate(number)
        load_weights(candidate.model, self.weights(number))
        # A LightningModule whose steps could not be separated was trained inside a wrapper module.
        model: nn.Module = getattr(candidate.model, "lightning_module", candidate.model)
        return model

    def candidate(self, number: int) -> Candidate:
        """Return a trial's untrained candidate, built from the trial's parameters and seed."""
        from hydra_tune.core.random_state import RandomState
        from hydra_tune.training.candidate import Candidate

        if self._load_build is None:
            raise InputError(
                f"study {self.study.study_name!r} was started from a Python script",
                "use the result of ht.search(..., resume=True) there",
            )
        record = self._record(number)
        callers = RandomState.capture()
        try:
            if record.seed is not None:
                seed_everything(record.seed)
            made = self._load_build()(StoredTrial(record.params, number=number))
        finally:
            callers.restore()
        if not isinstance(made, Candidate):
            raise InputError(*NO_MODEL)
        return made

    def weights(self, number: int) -> Path:
        """Return the file with a trial's trained weights."""
        record = self._record(number)
        path = self._files.weights(number)
        if not path.is_file():
            if record.state == "COMPLETE" and not record.strategy:
                raise InputError(*NO_MODEL)
            raise InputError(
                f"there are no weights of trial {number}",
                "only the best trials keep theirs; search with a larger keep_weights",
            )
        return path

    def files(self, number: int | None = None) -> dict[str, Path]:
        """Return what a trial, by default the best, has kept with `trial.keep`: its paths by name."""
        record = self._record(self._best_number() if number is None else number)
        return {path.name: path for path in kept_files(self._files.kept(record.number))}

    def has_weights(self, number: int) -> bool:
        """True if a trial's trained weights are on disk."""
        return self._files.weights(number).is_file()

    @property
    def _files(self) -> StudyFiles:
        summary = study_summary(self._storage, self.study.study_name)
        return StudyFiles.of(self._url, summary.study_id, summary.settings)

    def _record(self, number: int) -> TrialRecord:
        trials = self.trials
        if not 0 <= number < len(trials):
            raise InputError(f"there is no trial {number}", f"the study has trials 0 to {len(trials) - 1}")
        return trials[number]

    def dataframe(self) -> pandas.DataFrame:
        """Return the trials as a table, one row each, parameters as `params_NAME`. Needs pandas."""
        import pandas

        rows = []
        for record in self.trials:
            row = {name: value for name, value in vars(record).items() if name not in ("params", "user_attrs")}
            row |= {f"params_{name}": value for name, value in record.params.items()}
            rows.append(row)
        return pandas.DataFrame(rows)

    def close(self) -> None:
        """Close the database; it is also closed when the result is no longer used."""
        self._storage.close()
