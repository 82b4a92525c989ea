"""Fits a table: prepares it, searches the families within the time limit, and makes a predictor of the results.

The study is an ordinary one; the directory of the fit holds the prepared table, so that an interrupted fit can be
resumed without the original file.
"""

from __future__ import annotations

import sys
import time as clock
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra_tune.automl.build import FitPlan, FitSource
from hydra_tune.automl.finishing import finish
from hydra_tune.automl.portfolio import families_for, first_trials
from hydra_tune.automl.predictor import Predictor
from hydra_tune.automl.prepared import Prepared, prepare
from hydra_tune.automl.reading import TableLike, read_table
from hydra_tune.automl.refitting import refit_members
from hydra_tune.automl.scores import Score, score_for
from hydra_tune.automl.state import FitState, check_free, free_directory, make_directory, parse_seconds
from hydra_tune.coordinator.result import SearchResult
from hydra_tune.coordinator.search import run_search
from hydra_tune.coordinator.settings import ENDLESS, SearchSettings, made_up_name, make_settings
from hydra_tune.core.devices import parse_devices
from hydra_tune.core.errors import SearchFailed
from hydra_tune.core.seeds import new_study_seed

DEFAULT_SECONDS = 300.0
TRIALS_IN_TIME = 12
"""A trial gets the devices' time divided by this number, and most are pruned earlier. With thirty, networks on one core
had four epochs, and lost to linear models with forty."""
SHORTEST_TRIAL = 0.5
FINISH_SHARE, MOST_FINISH_SECONDS = 0.06, 20.0
"""Share of the time, and maximum seconds, for the ensemble and the files."""
REFIT_SHARE = 0.2
WEIGHTS_KEPT = 1000
"""More than the trials of a fit: no weights are removed, so the baseline's stay."""


def fit(
    table: TableLike,
    target: str,
    *,
    time: str | float | None = None,
    trials: int | None = None,
    to: str | Path | None = None,
    task: str | None = None,
    metric: str | None = None,
    folds: int | None = None,
    families: Sequence[str] | None = None,
    refit: bool = False,
    seed: int | None = None,
    study: str | None = None,
    storage: str | None = None,
    devices: str = "auto",
    device_memory: str | int | None = None,
    resume: bool = False,
    progress: bool = True,
    spent: float = 0.0,
) -> Predictor:
    """Fit a table and return a predictor; after Ctrl-C the directory has one of the models found so far.

    `table` is a .csv or .parquet path, a pandas frame, or an .npz file of images. `time` such as "10m" is held to
    within a tenth; the default is five minutes unless `trials` is given. The task is inferred from the target and
    printed. `spent` is the time in seconds used before the call.
    """
    began = clock.monotonic() - spent
    directory = Path(to) if to is not None else free_directory(table)
    seconds = None if time is None else parse_seconds(time)
    settings = {"storage": storage, "devices": devices, "device_memory": device_memory, "progress": progress}
    if resume:
        state = FitState.load(directory)
        if seconds is not None or trials is not None:
            state = replace(state, seconds=seconds, trials=trials)
        return FitRun(directory, state, settings, began, table).go_on(resume=True)
    check_free(directory)
    seconds = DEFAULT_SECONDS if seconds is None and trials is None else seconds
    seed = new_study_seed() if seed is None else seed
    prepared, notes = prepare(read_table(table), target, task=task, folds=folds, seed=seed)
    score = score_for(prepared.task, metric)
    trial_seconds = None if seconds is None else seconds * len(parse_devices(devices)) / TRIALS_IN_TIME
    plan = FitPlan(
        families=families_for(prepared, families),
        objective=score.objective,
        trial_seconds=None if trial_seconds is None else max(SHORTEST_TRIAL, trial_seconds),
    )
    state = FitState(
        study=made_up_name() if study is None else study, metric=score.name, seed=seed, plan=plan.as_json(),
        seconds=seconds, trials=trials, refit=refit, notes=tuple(notes),
    )  # fmt: skip
    run = FitRun(directory, state, settings, began, table)
    run.search_settings(resume=False)  # invalid settings are reported before anything is created
    make_directory(directory)
    prepared.save(directory)
    state.save(directory)
    for line in describe(prepared, score, notes):
        run.say(line)
    return run.go_on(resume=False)


@dataclass(frozen=True)
class FitRun:
    """One run of a fit: until its time is up, its trials are done, or it is interrupted."""

    directory: Path
    state: FitState
    settings: dict[str, Any]
    began: float
    table: TableLike | None = None

    def go_on(self, *, resume: bool) -> Predictor:
        """Search, then make the predictor. Raises KeyboardInterrupt if interrupted, after writing a predictor."""
        prepared = Prepared.load(self.directory)
        source = FitSource(str(self.directory.resolve()), FitPlan.from_json(self.state.plan))
        build = source.load()
        search = self.search_settings(resume=resume)
        if not resume:
            search = replace(search, enqueue=first_trials(build.plan.families, build.space))
        interrupted = False
        try:
            result = run_search(source, search, space=build.space, load_build=lambda: build)
        except KeyboardInterrupt:
            interrupted = True
            result = SearchResult(search.storage, search.study, lambda: build)
        except SearchFailed as error:
            raise SearchFailed(f"no model was fitted: {error.message}", error.hint or "give more --time") from error
        try:
            if not result.completed:
                raise KeyboardInterrupt("the fit was interrupted before a model was done")
            score = score_for(prepared.task, self.state.metric)
            finish(
                result, prepared, self.directory, score, notes=self.state.notes,
                out_of_time=lambda: interrupted or self._left() < self._refit_seconds(),
            )  # fmt: skip
        finally:
            result.close()
            replace(self.state, spent=self.state.spent + clock.monotonic() - self.began).save(self.directory)
        if interrupted:
            raise KeyboardInterrupt(f"the fit was interrupted; the best so far is in {self.directory}")
        if self.state.refit:
            left = None if self.state.seconds is None else max(1.0, self._left())
            refit_members(self.directory, self.table, prepared, build.plan, replace(search, timeout=left))
        return Predictor(self.directory)

    def search_settings(self, *, resume: bool) -> SearchSettings:
        """Return the settings of the search for models, with the time left for it."""
        state = self.state
        reserved = min(MOST_FINISH_SECONDS, FINISH_SHARE * (state.seconds or 0.0)) + 0.5 + self._refit_seconds()
        timeout = None if state.seconds is None else max(0.1, self._left() - reserved)
        return make_settings(
            trials=ENDLESS if state.trials is None else state.trials, metric=state.plan["objective"], resume=resume,
            direction="minimize", study=state.study, seed=state.seed, timeout=timeout,
            stop_at_timeout=timeout is not None, sampler="tpe", pruner="share", keep_weights=WEIGHTS_KEPT,
            # One more than devices: while one is built, every device has another.
            concurrency=len(parse_devices(self.settings["devices"])) + 1, **self.settings,
        )  # fmt: skip

    def say(self, line: str) -> None:
        if self.settings["progress"]:
            print(line, file=sys.stderr, flush=True)

    def _left(self) -> float:
        if self.state.seconds is None:
            return float("inf")
        return self.began + self.state.seconds - self.state.spent - clock.monotonic()

    def _refit_seconds(self) -> float:
        return REFIT_SHARE * self.state.seconds if self.state.refit and self.state.seconds is not None else 0.0


def describe(prepared: Prepared, score: Score, notes: Sequence[str]) -> list[str]:
    """Return the lines that announce a fit."""
    classes = f", {len(prepared.labels)} classes" if prepared.task == "multiclass" else ""
    columns = "images" if prepared.schema is None else f"{len(prepared.schema.columns)} columns"
    folds = prepared.layout.folds
    held = f"{folds} folds" if folds > 1 else f"{len(prepared.judged_rows())} rows held out"
    direction = "more" if score.greater_is_better else "less"
    return [
        f"{prepared.task} of {prepared.target!r}{classes} from {columns}, {len(prepared.targets)} rows, {held}; "
        f"judged by {score.name} ({direction} is better)",
        *(f"note: {note}" for note in notes),
    ]
