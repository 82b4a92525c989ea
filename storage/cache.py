"""In-memory cache of studies: each trial once, with indexes that keep reads fast.

Trials are replaced, never changed in place, so a reader's copy stays valid. Finished trials never change in the
database either, so only unfinished and new trials are read again, and only when another process may have written.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from datetime import datetime
from typing import Any

from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection

from hydra_tune.storage.rows import StudyRow, load_study, load_trials


class CachedStudy:
    """A study's trials by number and by state, the best trial, and each parameter's distribution."""

    def __init__(self, row: StudyRow) -> None:
        self.study_id = row.study_id
        self.name = row.name
        self.directions = row.directions
        self.user_attrs = row.user_attrs
        self.system_attrs = row.system_attrs
        self.generation = -1
        self.last_row_id = 0
        self.best: FrozenTrial | None = None
        self._trials: dict[int, FrozenTrial] = {}
        self._by_state: dict[TrialState, dict[int, FrozenTrial]] = {state: {} for state in TrialState}
        self._distributions: dict[str, BaseDistribution] = {}

    def __getitem__(self, number: int) -> FrozenTrial:
        return self._trials[number]

    @property
    def next_number(self) -> int:
        return len(self._trials)

    @property
    def last_finished(self) -> FrozenTrial | None:
        """A recently cached finished trial; None if there is none."""
        finished = [trials for state, trials in self._by_state.items() if state.is_finished() and trials]
        return next(reversed(finished[0].values())) if finished else None

    def put(self, trial: FrozenTrial) -> None:
        """Store a new trial, or a newer version of a known trial."""
        before = self._trials.get(trial.number)
        if before is not None:
            del self._by_state[before.state][trial.number]
        self._trials[trial.number] = trial
        self._by_state[trial.state][trial.number] = trial
        if trial.state == TrialState.COMPLETE and self._is_better(trial):
            self.best = trial

    def trials(self, states: Container[TrialState] | None = None) -> list[FrozenTrial]:
        """Return the trials in these states, or all trials, ordered by number; samplers rely on the order."""
        if states is None:
            chosen = list(self._trials.values())
        else:
            chosen = [t for state, trials in self._by_state.items() if state in states for t in trials.values()]
        # The list is nearly sorted already, so this takes a single pass.
        return sorted(chosen, key=_number)

    def unfinished(self) -> list[FrozenTrial]:
        """Return the trials that may still change."""
        return [t for state, trials in self._by_state.items() if not state.is_finished() for t in trials.values()]

    def count(self, states: Iterable[TrialState]) -> int:
        """Return the number of trials in any of these states."""
        return sum(len(self._by_state[state]) for state in states)

    def check_distribution(self, name: str, distribution: BaseDistribution) -> None:
        """Raise a ValueError if the parameter had an incompatible distribution earlier in this study."""
        known = self._distributions.get(name)
        if known is not None:
            check_distribution_compatibility(known, distribution)

    def learn_distributions(self, trial: FrozenTrial) -> None:
        """Remember the first distribution of each parameter."""
        for name, distribution in trial.distributions.items():
            self._distributions.setdefault(name, distribution)

    def _is_better(self, trial: FrozenTrial) -> bool:
        if len(self.directions) != 1 or trial.value is None:
            return False
        if self.best is None or self.best.value is None:
            return True
        if trial.value == self.best.value:  # the same answer in whichever order trials ended and were read
            return trial.number < self.best.number
        if self.directions[0] == StudyDirection.MAXIMIZE:
            return trial.value > self.best.value
        return trial.value < self.best.value


class Cache:
    """All studies read or written so far, an index of their trials, and the generation of the cached data.

    A trial created while writes are queued has a provisional id, which stays its id for the life of the cache. The id
    of its database row, once known, leads to the same trial.
    """

    def __init__(self) -> None:
        self.row_ids: dict[int, int] = {}
        self._provisional: dict[int, int] = {}
        self._places: dict[int, tuple[CachedStudy, int]] = {}
        self._studies: dict[int, CachedStudy] = {}
        self._owned: set[int] = set()
        self._generation = 0

    def owned(self, study_id: int) -> CachedStudy | None:
        """Return the study if only this process writes it, so that the cache is authoritative; else None."""
        return self._studies[study_id] if study_id in self._owned else None

    def own(self, study: CachedStudy) -> None:
        """Treat the study as written only by this process from now on."""
        self._owned.add(study.study_id)

    def share_all(self) -> None:
        """Treat all studies as writable by other processes again."""
        self._owned.clear()
        self._generation += 1

    def find(self, trial_id: int) -> tuple[CachedStudy, FrozenTrial] | None:
        """Return a cached trial and its study, possibly out of date."""
        place = self._places.get(trial_id)
        return None if place is None else (place[0], place[0][place[1]])

    def put(self, study: CachedStudy, trial: FrozenTrial) -> None:
        """Store a trial under its provisional id if it had one, else under its own id."""
        trial._trial_id = self._provisional.get(trial._trial_id, trial._trial_id)
        self._places[trial._trial_id] = (study, trial.number)
        study.put(trial)

    def learn_row_ids(self, ids: dict[int, int]) -> None:
        """Record the row ids of new trials; `ids` maps provisional id to row id."""
        for provisional, row_id in ids.items():
            self.row_ids[provisional] = row_id
            self._provisional[row_id] = provisional
            self._places[row_id] = self._places[provisional]
            study = self._places[row_id][0]
            study.last_row_id = max(study.last_row_id, row_id)

    def last_row_ids(self, study_ids: Iterable[int]) -> dict[int, int]:
        """Return the largest known trial row id of each study."""
        return {study_id: self._studies[study_id].last_row_id for study_id in study_ids}

    def forget(self, study_id: int) -> None:
        """Drop a study that no longer exists."""
        study = self._studies.pop(study_id, None)
        self._owned.discard(study_id)
        if study is not None:
            self._places = {key: place for key, place in self._places.items() if place[0] is not study}

    def refresh(self, connection: Connection, study_id: int) -> CachedStudy:
        """Return the study as seen by the connection's transaction; raise a KeyError if there is none."""
        generation = self._generation_of(connection)
        study = self._studies.get(study_id)
        if study is not None and (study_id in self._owned or study.generation == generation):
            return study
        try:
            row = load_study(connection, study_id)
        except KeyError:
            self.forget(study_id)
            raise
        if study is None or not self._read_changes(connection, study, row):
            study = self._read_whole(connection, row)
        study.generation = generation
        return study

    def take_in(self, connection: Connection, study: CachedStudy, ids: Iterable[int] = ()) -> list[FrozenTrial]:
        """Read what other processes wrote to an owned study since the last time; return the trials that they changed.

        `ids` are row ids of other processes' trials below the last known id. The write queue must be empty.
        """
        unfinished = {row_id for trial in study.unfinished() if (row_id := self._row_id(trial)) >= 0}
        changed = []
        for theirs in load_trials(connection, study.study_id, study.last_row_id, {*unfinished, *ids}):
            known = self._places.get(theirs._trial_id)
            if known is None:
                changed.append(theirs)
            else:
                ours, made_here = study[known[1]], theirs._trial_id in self._provisional
                if not ours.state.is_finished() and (theirs.state != ours.state or not (made_here or theirs == ours)):
                    changed.append(theirs)
        self._take_in(study, changed)
        row = load_study(connection, study.study_id)
        study.user_attrs, study.system_attrs = row.user_attrs, row.system_attrs
        return changed

    def _read_changes(self, connection: Connection, study: CachedStudy, row: StudyRow) -> bool:
        """Read new and unfinished trials; False if another study now has this id.

        SQLite reuses the ids of a deleted study and its trials. So one finished trial is read again as a check: if it
        differs, the whole cached study is invalid.
        """
        witness = study.last_finished
        again = study.unfinished() + ([witness] if witness else [])
        expected = {self._row_id(trial) for trial in again}
        found = {t._trial_id: t for t in load_trials(connection, study.study_id, study.last_row_id, expected)}
        if not expected <= found.keys():
            return False
        if witness is not None and _ended(found.pop(self._row_id(witness))) != _ended(witness):
            return False
        study.name, study.directions = row.name, row.directions
        study.user_attrs, study.system_attrs = row.user_attrs, row.system_attrs
        self._take_in(study, found.values())
        return True

    def _read_whole(self, connection: Connection, row: StudyRow) -> CachedStudy:
        self.forget(row.study_id)
        study = self._studies[row.study_id] = CachedStudy(row)
        self._take_in(study, load_trials(connection, row.study_id, after=0))
        return study

    def _take_in(self, study: CachedStudy, trials: Iterable[FrozenTrial]) -> None:
        for trial in trials:
            study.last_row_id = max(study.last_row_id, trial._trial_id)
            self.put(study, trial)
            study.learn_distributions(trial)

    def _row_id(self, trial: FrozenTrial) -> int:
        return self.row_ids.get(trial._trial_id, trial._trial_id)

    def _generation_of(self, connection: Connection) -> int:
        """Return a number that grows whenever another connection may have written.

        SQLite reports per connection if any other connection has committed since, so the last answer is kept with the
        connection. PostgreSQL has no such report: every call counts as a change.
        """
        if connection.dialect.name == "sqlite":
            version = connection.exec_driver_sql("PRAGMA data_version").scalar()
            if connection.info.get("data_version") == version:
                return self._generation
            connection.info["data_version"] = version
        self._generation += 1
        return self._generation


def replaced(trial: FrozenTrial, **fields: Any) -> FrozenTrial:
    """Return a copy of the trial with changed fields; readers keep the original."""
    newer = FrozenTrial.__new__(FrozenTrial)  # copy.copy takes four times as long
    newer.__dict__.update(trial.__dict__)
    for name, value in fields.items():
        setattr(newer, name, value)
    return newer


def _number(trial: FrozenTrial) -> int:
    return trial.number


def _ended(trial: FrozenTrial) -> tuple[int, TrialState, datetime | None]:
    return trial.number, trial.state, trial.datetime_complete
