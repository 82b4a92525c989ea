"""The study that this process owns: Optuna's side of a search, and its records.

Plain synchronous code; `study_thread` runs it beside the event loop.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.study import StudyDirection
from optuna.trial import TrialState

from hydra_tune.coordinator.files import StudyFiles
from hydra_tune.coordinator.hosted import HostedStudy, call_storage
from hydra_tune.coordinator.kept import KeptWeights
from hydra_tune.coordinator.ledger import Ledger
from hydra_tune.coordinator.repeatable import RepeatableSampler
from hydra_tune.coordinator.resuming import ALLOW, check_objectives, check_source
from hydra_tune.coordinator.sampling import draws_by_number, make_pruner, make_sampler
from hydra_tune.coordinator.settings import SearchSettings
from hydra_tune.coordinator.work_records import WorkRecords
from hydra_tune.core.errors import SpecError, StorageError
from hydra_tune.core.seeds import new_study_seed, trial_seed
from hydra_tune.core.states import OPTUNA_STATE, Outcome, Status
from hydra_tune.storage import open_storage
from hydra_tune.storage.database import check_same_file
from hydra_tune.storage.leases import HeldLease
from hydra_tune.storage.queries import study_summary, trial_attempts, trial_records
from hydra_tune.storage.records import StudyRecords
from hydra_tune.training.remote_trial import TrialInfo
from hydra_tune.training.source import Source

logger = logging.getLogger(__name__)

VALUE_OF_OBJECTIVE = ("value",)
"""Name of what an objective returns, if the user gives none."""


def _exists(name: str) -> SpecError:
    return SpecError(f"study {name!r} exists already", "use resume to go on with it, or another name")


@dataclass(frozen=True)
class Asked:
    """A trial to run; `attempts` is the number of earlier attempts."""

    number: int
    seed: int
    attempts: int = 0


@dataclass
class _Running:
    """A trial in flight: Optuna's object, and the current attempt."""

    trial: optuna.Trial
    attempt: str = ""


class OwnedStudy:
    """An Optuna study with its records and its lease; every method runs on the study's thread."""

    def __init__(self, settings: SearchSettings, space: Any, source: Source) -> None:
        self.settings = settings
        self._space_change = ""
        """Difference of the search space from earlier runs, once a trial has shown it."""
        self.stopped: set[int] = set()
        """Running trials that were asked to stop."""
        self._running: dict[int, _Running] = {}
        self._unstorable: dict[int, str] = {}
        """Trials of which something could not be stored, and why: they fail."""
        with ExitStack() as opened:
            self.storage = open_storage(settings.storage)
            opened.callback(self.storage.close)
            self.study = self._create_or_load(space, source)
            self._lease = HeldLease(self.storage, self.study_id, settings.study)
            opened.callback(self._lease.release)
            self._lease.keep()
            if settings.n_trials is not None:
                self.settings = replace(settings, trials=self.finished() + settings.n_trials)
            self._describe(source)
            earlier = self.study.get_trials(deepcopy=False) if self._before is not None else []
            self._kept = KeptWeights(settings.keep_weights, settings.directions, earlier)
            self._distributions = {name: each for trial in earlier for name, each in trial.distributions.items()}
            self._finished_before, self._told, self.elsewhere = self.finished(), 0, 0
            self.storage.begin_batching()
            opened.callback(self._end_batching)
            self._open = opened.pop_all()

    def _create_or_load(self, space: Any, source: Source) -> HostedStudy:
        settings = self.settings
        exists = settings.study in optuna.get_all_study_names(self.storage)
        if exists and not (settings.resume or settings.load_if_exists):
            raise _exists(settings.study)
        self._before = study_summary(self.storage, settings.study) if settings.resume or exists else None
        if self._before is not None:
            check_source(self._before, settings, source)
        recorded = self._before.seed if self._before is not None else None
        self.seed = next(s for s in (settings.seed, recorded, new_study_seed()) if s is not None)
        self.sampler = make_sampler(settings.sampler, seed=self.seed, space=space)
        if isinstance(settings.sampler, str) and not draws_by_number(settings.sampler):
            self.sampler = RepeatableSampler(self.sampler, self.seed)
        parts: dict[str, Any] = {"storage": self.storage, "sampler": self.sampler}
        parts["pruner"] = make_pruner(settings.pruner)
        if not exists:
            directions = [StudyDirection[direction.upper()] for direction in settings.directions]
            try:
                optuna.create_study(study_name=settings.study, directions=directions, **parts)
            except optuna.exceptions.DuplicatedStudyError as error:  # made by another search at this moment
                raise _exists(settings.study) from error
        else:
            assert self._before is not None
            check_objectives(self._before, settings)
        study = HostedStudy(study_name=settings.study, **parts)
        if not exists:
            for params in settings.enqueue:
                study.enqueue_trial(dict(params))
        return study

    def _describe(self, source: Source) -> None:
        earlier = self._before.metrics if self._before is not None and self.settings.metric is None else ()
        self._name_metrics(earlier if len(earlier) == len(self.settings.directions) else self.settings.metrics)
        self.records = StudyRecords(self.storage, self.study_id)
        self.ledger = Ledger(self.records)
        self.work = WorkRecords(self.records)
        self.files = self._find_files()
        self.stored = {**self.settings.stored(), **self.files.record(self.settings.storage)}
        self._source = source
        self._record_settings()

    def _name_metrics(self, names: Sequence[str]) -> None:
        self.metrics = tuple(names)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self.study.set_metric_names(list(names))

    def _record_settings(self) -> None:
        source = self._source
        self.records.describe(self.seed, list(self.metrics), self.stored, source.describe(), source.text())

    def _is_objective(self) -> None:
        """Note that `build` is an ordinary objective: its single value is no loss, unless the user calls it so."""
        if self.settings.metric is None and self.metrics == ("loss",):
            self._name_metrics(VALUE_OF_OBJECTIVE)
            self._record_settings()

    def _find_files(self) -> StudyFiles:
        """Return the study's files; log if those of earlier runs are out of reach."""
        before = self._before.settings if self._before is not None else {}
        files = StudyFiles.of(self.settings.storage, self.study_id, before)
        recorded = files.record(self.settings.storage)
        if "files" in before and before["files"] != recorded.get("files"):
            lack = (
                f"the files of the study were in {before['files']}, which is not there: interrupted trials start again"
            )
            logger.warning("%s", lack)
            self.records.event(None, "files", lack)
        return files

    @property
    def study_id(self) -> int:
        return int(self.study._study_id)

    def flush(self) -> None:
        """Write the queued changes, if this process still has the lease."""
        check_same_file(self.storage.engine)
        self._lease.check()
        self.storage.flush()
        for refused in self.storage.take_refused():
            number = refused.row.get("number")
            if number is None and "trial_id" in refused.row:
                number = self.storage.number_of(refused.row["trial_id"])
            self._cannot_store(number, str(refused))

    def _cannot_store(self, number: int | None, reason: str) -> None:
        logger.warning("%s", reason)
        self.records.event(number, "refused", reason)
        if number in self._running:
            self._unstorable.setdefault(number, reason)

    def close(self) -> None:
        """Write the remaining changes and release the study."""
        self._open.close()

    def _end_batching(self) -> None:
        try:
            self._lease.check()
        finally:
            if self._lease.lost:
                self.storage.discard()
            self.storage.end_batching()

    # Trials

    def finished(self) -> int:
        """Return the number of the study's trials that have ended, in this run or before."""
        ends = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        return self.storage.get_n_trials(self.study_id, state=ends)

    def interrupted(self) -> list[Asked]:
        """Return the trials that an earlier run left unfinished; they continue under their own numbers."""
        left = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        seeds = {record.number: record.seed for record in trial_records(self.storage, self.settings.study)}
        # A trial without a record is one that another process asked for, and may still run.
        ours = [(trial, seed) for trial in left if (seed := seeds[trial.number]) is not None]
        return [self._take_up(optuna.Trial(self.study, trial._trial_id), seed) for trial, seed in ours]

    def _take_up(self, trial: optuna.Trial, seed: int) -> Asked:
        """Continue a trial with its original seed, on which its checkpoints depend."""
        attempts = trial_attempts(self.storage, self.settings.study, trial.number)
        self.ledger.trial_taken_up(trial.number, seed, attempts)
        self._running[trial.number] = _Running(trial)
        return Asked(trial.number, seed, len(attempts))

    def ask(self) -> Asked:
        """Return a new trial from the sampler."""
        self._lease.check()  # a trial that other processes can see is written at once
        trial = self.study.ask()
        asked = Asked(trial.number, trial_seed(self.seed, trial.number))
        self.ledger.trial_started(asked.number, asked.seed)
        if self.storage.shared:
            self.storage.flush()  # the trial itself is in the database already
        self._running[trial.number] = _Running(trial)
        return asked

    def begin_attempt(self, asked: Asked, attempt: int, failed: tuple[str, Outcome] | None = None) -> TrialInfo:
        """Record an attempt, and the end of a failed one before it; return the trial's data for the worker.

        Raises SpecError if a trial has shown another search space than that of earlier runs.
        """
        self._check_space()
        if failed is not None:
            self.end_attempt(*failed)
        running = self._running[asked.number]
        running.attempt = self.ledger.attempt_started(asked.number, attempt)
        return TrialInfo(
            number=asked.number,
            seed=asked.seed,
            attempt=running.attempt,
            objectives=len(self.settings.metrics),
            user_attrs=running.trial.user_attrs,
            datetime_start=running.trial.datetime_start,
            checkpoints=self.files.checkpoints(asked.number),
            checkpoint_seconds=self.settings.checkpoint_seconds,
            trial_id=running.trial._trial_id,
            study_id=self.study_id,
            study=self.study.study_name,
            directions=self.settings.directions,
        )

    def end_attempt(self, attempt: str, outcome: Outcome) -> None:
        self.ledger.attempt_ended(attempt, outcome)

    def stop_trial(self, number: int) -> bool:
        """End a trial as pruned at its next call; return True if it is running."""
        if number in self._running:
            self.stopped.add(number)
        return number in self._running

    def answer(self, number: int, attempt: str, name: str, args: tuple[Any, ...]) -> Any:
        """Answer a call of user code in a worker; calls of an earlier attempt are refused."""
        running = self._running.get(number)
        if running is None or running.attempt != attempt:
            self.records.event(number, "refused", f"a late {name} of attempt {attempt}")
            raise ValueError(f"trial {number} is no longer run by this attempt")
        if number in self._unstorable:
            raise ValueError(self._unstorable[number])
        trial = running.trial
        match name:
            case "suggest":
                return self._suggest(trial, *args)
            case "report":
                self._is_objective()
                self._report(trial, *args)
            case "should_prune":
                return number in self.stopped or trial.should_prune()
            case "set_user_attr":
                trial.set_user_attr(*args)
            case "metrics":
                self.records.metrics(number, *args)
            case "checkpointed":
                self.records.checkpoint(number, *args)
            case "note":
                self.records.event(number, *args)
            case "caught_up":
                return None
            case "relative_params":
                return trial.relative_params, trial.relative_search_space
            case "storage":
                return call_storage(self.storage, self.study_id, *args)
            case "part":
                return self.study.part(*args)
            case "stop_study":
                self.study.stop()
            case _:
                raise ValueError(f"a trial has no {name!r}")
        return None

    def _suggest(self, trial: optuna.Trial, parameter: str, distribution: BaseDistribution) -> Any:
        """Return the sampler's value, or for a categorical parameter the index of its choice."""
        self._compare(parameter, distribution)
        value = trial._suggest(parameter, distribution)
        return int(distribution.to_internal_repr(value)) if isinstance(distribution, CategoricalDistribution) else value

    def _compare(self, parameter: str, distribution: BaseDistribution) -> None:
        before = self._distributions.setdefault(parameter, distribution)
        if before != distribution and self._before is not None and not self.settings.allow_changes:
            self._space_change = f"parameter {parameter!r} was {before} and is now {distribution}"
            raise ValueError(self._space_change)

    def _check_space(self) -> None:
        if self._space_change:
            raise SpecError(self._space_change, ALLOW)

    def _report(self, trial: optuna.Trial, value: float, step: int) -> None:
        # A retried trial reports its first epochs again; Optuna keeps the first report and warns.
        if self.storage.may_report(trial._trial_id, step):
            trial.report(value, step)

    def epoch(self, number: int, epoch: int, metrics: dict[str, float]) -> bool:
        """Record an epoch's metrics; return True if the trial is to be pruned."""
        if number in self._unstorable:
            raise StorageError(self._unstorable[number])
        self.records.metrics(number, epoch, metrics)
        if len(self.settings.metrics) > 1:
            return False
        trial = self._running[number].trial
        self._report(trial, metrics[self.settings.metrics[0]], epoch)
        return trial.should_prune()

    def tell(self, number: int, attempt: str, outcome: Outcome, **facts: Any) -> tuple[Outcome, list[int]]:
        """End a trial by its current attempt; return its outcome and the trials whose weights are no longer kept.

        A trial that another process has told meanwhile keeps that outcome.

        Raises SpecError if a trial has shown another search space than that of earlier runs.
        """
        self._check_space()
        if number not in self._running:
            self.ledger.trial_ended(number, outcome, **facts)  # raises: it has ended already
        trial = self._running.pop(number).trial
        if number in self._unstorable:
            outcome = Outcome(Status.FAILED, error=self._unstorable.pop(number))
        told = self._told_elsewhere(trial)
        outcome = told or outcome
        if outcome.status is Status.COMPLETE and not facts["strategy"]:
            self._is_objective()
        self.ledger.trial_ended(number, outcome, **facts)
        self.ledger.attempt_ended(attempt, outcome)
        state = OPTUNA_STATE[outcome.status]
        values = list(outcome.values) if state is TrialState.COMPLETE and outcome.values else None
        if told is None:
            self.study.tell(trial, values, state)
        self._told += 1
        self._count_elsewhere()
        self.study.call_back(self.settings.callbacks, trial._trial_id)
        return outcome, self._kept.add(number, outcome)

    def _told_elsewhere(self, trial: optuna.Trial) -> Outcome | None:
        """Return the outcome of a trial that another process, or its own code, has told Optuna; None if none has."""
        found = self.storage.get_trial(trial._trial_id)
        if not found.state.is_finished():
            return None
        status = {TrialState.COMPLETE: Status.COMPLETE, TrialState.PRUNED: Status.PRUNED}.get(
            found.state, Status.FAILED
        )
        values = tuple(found.values) if status is Status.COMPLETE and found.values else None
        return Outcome(status, values, "" if values else "told by another process")

    def look_outside(self) -> None:
        """Take in what other processes have changed of the study; a running trial that they told is ended."""
        self._lease.check()  # taking in writes what is queued
        for trial in self.storage.take_in(self.study_id):
            self._distributions = trial.distributions | self._distributions
            if trial.number in self._running and trial.state.is_finished():
                self.stopped.add(trial.number)
                self.records.event(trial.number, "outside", f"another process has told {trial.state.name} while it ran")
        self._count_elsewhere()

    def _count_elsewhere(self) -> None:
        self.elsewhere = self.finished() - self._finished_before - self._told
