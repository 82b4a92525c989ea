"""Optuna's storage contract over Optuna's own tables, fast enough for many short trials.

`optuna.load_study(storage=url)` and optuna-dashboard can open the same database. `HydraStorage` is no subclass of
Optuna's RDBStorage, because Optuna wraps those in a cache that calls private methods past any override.
"""

from __future__ import annotations

import copy
import json
import logging
import uuid
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.exceptions import DuplicatedStudyError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy import Table, delete, insert, select
from sqlalchemy.exc import IntegrityError

from hydra_tune.core.errors import quoted
from hydra_tune.storage import rows
from hydra_tune.storage.cache import CachedStudy, replaced
from hydra_tune.storage.database import reading, writing
from hydra_tune.storage.queued_database import QueuedDatabase
from hydra_tune.storage.records import description
from hydra_tune.storage.tables import (
    HYDRA_STUDIES,
    OF_STUDIES,
    OF_TRIALS,
    STUDIES,
    STUDY_DIRECTIONS,
    STUDY_SYSTEM_ATTRS,
    STUDY_USER_ATTRS,
    TRIAL_PARAMS,
    TRIAL_REPORTS,
    TRIAL_SYSTEM_ATTRS,
    TRIAL_USER_ATTRS,
    TRIALS,
)
from hydra_tune.storage.write_queue import lock_study

_log = logging.getLogger(__name__)


def open_storage(url: str, read_only: bool = False) -> HydraStorage:
    """Open the database at `url` as an Optuna storage; create missing tables unless `read_only`."""
    return HydraStorage(url, read_only=read_only)


class HydraStorage(QueuedDatabase, BaseStorage):
    """Optuna storage in a SQLite file or on a server; pass it to any Optuna function."""

    # Studies

    @contextmanager
    def describing_new_studies(self, metrics: list[str], settings: dict[str, Any]) -> Iterator[None]:
        """Within the block, record metrics and settings in the transaction that creates a study."""
        self._description = description(metrics, settings)
        try:
            yield
        finally:
            self._description = None

    _description: dict[str, Any] | None = None

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        """Create a study at once, even while batching: its name must be free and its id known."""
        name = rows.storable_name("study", f"no-name-{uuid.uuid4()}" if study_name is None else study_name)
        with self._lock:
            self._refuse_if_read_only()
            with writing(self._engine) as connection:
                try:
                    result = connection.execute(insert(STUDIES).values(study_name=name))
                except IntegrityError as error:
                    raise DuplicatedStudyError(f"a study named {quoted(name)} exists already") from error
                assert result.inserted_primary_key is not None
                study_id: int = result.inserted_primary_key[0]
                wanted = [{"study_id": study_id, "objective": i, "direction": d} for i, d in enumerate(directions)]
                connection.execute(insert(STUDY_DIRECTIONS), wanted)
                if self._description is not None:
                    connection.execute(insert(HYDRA_STUDIES).values(study_id=study_id, **self._description))
            self._cache.forget(study_id)  # SQLite may have reused the id of a deleted study.
        _log.info("created study %s", quoted(name))
        return study_id

    def delete_study(self, study_id: int) -> None:
        """Delete a study and its trials; foreign keys delete its `hydra_` rows."""
        with self._flush_lock, self._lock:
            self._refuse_if_read_only()
            self.flush()
            with writing(self._engine) as connection:
                lock_study(connection, study_id)
                of_study = select(TRIALS.c.trial_id).where(TRIALS.c.study_id == study_id)
                for table in OF_TRIALS:
                    connection.execute(delete(table).where(table.c.trial_id.in_(of_study)))
                for table in (*OF_STUDIES, STUDIES):
                    connection.execute(delete(table).where(table.c.study_id == study_id))
            self._cache.forget(study_id)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        """Set a user attribute of a study."""
        row = rows.attr_row(key, value)
        with self._lock:
            study = self._save_study_attr(STUDY_USER_ATTRS, study_id, row)
            study.user_attrs = {**study.user_attrs, key: json.loads(row["value_json"])}

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        """Set a system attribute of a study, for Optuna's own use."""
        row = rows.attr_row(key, value)
        with self._lock:
            study = self._save_study_attr(STUDY_SYSTEM_ATTRS, study_id, row)
            study.system_attrs = {**study.system_attrs, key: json.loads(row["value_json"])}

    def get_study_id_from_name(self, study_name: str) -> int:
        """Return the id of the study with this name; raise a KeyError if there is none."""
        with reading(self._engine) as connection:
            query = select(STUDIES.c.study_id).where(STUDIES.c.study_name == study_name)
            study_id: int | None = connection.execute(query).scalar()
        if study_id is None:
            raise KeyError(f"no study is named {quoted(study_name)}")
        return study_id

    def get_study_name_from_id(self, study_id: int) -> str:
        """Return the name of the study with this id."""
        return self._study_row(study_id).name

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """Return minimize or maximize for each objective."""
        return list(self._study_row(study_id).directions)

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Return the study's user attributes."""
        return self._study_row(study_id).user_attrs

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Return the study's system attributes, which Optuna set."""
        return self._study_row(study_id).system_attrs

    def get_all_studies(self) -> list[FrozenStudy]:
        """Return all studies, ordered by id."""
        with self.reading() as connection:
            ids = connection.execute(select(STUDIES.c.study_id).order_by(STUDIES.c.study_id)).scalars().all()
            found = [rows.load_study(connection, study_id) for study_id in ids]
        return [
            FrozenStudy(
                study_name=row.name,
                direction=None,
                directions=row.directions,
                user_attrs=row.user_attrs,
                system_attrs=row.system_attrs,
                study_id=row.study_id,
            )
            for row in found
        ]

    # Writing trials

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Create a trial and return its id, which is provisional while batching but stays valid for this storage."""
        with self._at_once(self.shared), self._lock:
            with self._changing() as change:
                study = self._study_to_change(change, study_id)
                trial = self._new_trial(study, template_trial)
                provisional = trial._trial_id
                row = {"study_id": study_id, "number": trial.number, **rows.trial_row(trial)}
                change.rows.new_trial(provisional, row)
                for table, content in rows.content_rows(trial):
                    change.rows.upsert(table, {"trial_id": provisional, **content})
            if change.new_ids:
                trial._trial_id = study.last_row_id = change.new_ids[provisional]
            self._cache.put(study, trial)
            study.learn_distributions(trial)
            return trial._trial_id

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        """Set a parameter of a running trial; its distribution must be compatible with the study's earlier trials."""
        row = rows.param_row(param_name, param_value_internal, distribution)
        with self._editing(trial_id) as edit:
            self.check_trial_is_updatable(trial_id, edit.trial.state)
            edit.study.check_distribution(param_name, distribution)
            value = distribution.to_external_repr(param_value_internal)
            edit.upsert(TRIAL_PARAMS, row)
            edit.trial = replaced(
                edit.trial,
                params={**edit.trial.params, param_name: value},
                distributions={**edit.trial.distributions, param_name: distribution},
            )

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """Change a trial's state. If several processes start the same waiting trial, only one gets True."""
        # A waiting trial that another process may start as well must be started in the database.
        with self._at_once(state == TrialState.RUNNING), self._editing(trial_id) as edit:
            before = edit.trial
            self.check_trial_is_updatable(trial_id, before.state)
            if state == TrialState.RUNNING and before.state != TrialState.WAITING:
                return False
            now = datetime.now()
            after, of_values = replaced(before, state=state), list(rows.value_rows(values))
            if values is not None:
                after.values = [float(value) for value in values]
            if state == TrialState.RUNNING:
                after.datetime_start = now
            if state.is_finished():
                after.datetime_complete = now
            edit.rows.update_trial(before._trial_id, rows.trial_row(after))
            for table, row in of_values:
                edit.upsert(table, row)
            edit.trial = after
        return True

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        """Record an intermediate value of a running trial."""
        with self._editing(trial_id) as edit:
            self.check_trial_is_updatable(trial_id, edit.trial.state)
            edit.upsert(TRIAL_REPORTS, rows.report_row(step, intermediate_value))
            reports = edit.trial.intermediate_values
            if self._unread_reports.get(trial_id) is not reports:
                reports = {**reports}  # a reader may hold the trial
                if self._batching:
                    self._unread_reports[trial_id] = reports
            reports[step] = float(intermediate_value)
            edit.trial = replaced(edit.trial, intermediate_values=reports)

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Set a user attribute of a trial."""
        self._set_trial_attr(trial_id, TRIAL_USER_ATTRS, "user_attrs", rows.attr_row(key, value))

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Set a system attribute of a trial, for Optuna's own use."""
        self._set_trial_attr(trial_id, TRIAL_SYSTEM_ATTRS, "system_attrs", rows.attr_row(key, value))

    # Reading trials

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Return a trial by id, real or provisional."""
        with self._lock:
            self._unread_reports.clear()
            return self._trial(trial_id)[1]

    def may_report(self, trial_id: int, step: int) -> bool:
        """True if a trial is unfinished and has no report of this step; unlike `get_trial`, copies no trial."""
        with self._lock:
            trial = self._trial(trial_id)[1]
            return step not in trial.intermediate_values and not trial.state.is_finished()

    def get_trial_id_from_study_id_trial_number(self, study_id: int, trial_number: int) -> int:
        """Return the id of a study's trial by number."""
        with self._lock:
            return self._study(study_id)[trial_number]._trial_id

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the study's trials in these states, or all of them, ordered by number."""
        with self._lock:
            self._unread_reports.clear()
            trials = self._study(study_id).trials(states)
        return copy.deepcopy(trials) if deepcopy else trials

    def get_n_trials(self, study_id: int, state: tuple[TrialState, ...] | TrialState | None = None) -> int:
        """Return the number of trials in this state, in any of these states, or in total."""
        wanted = tuple(TrialState) if state is None else state
        with self._lock:
            return self._study(study_id).count((wanted,) if isinstance(wanted, TrialState) else wanted)

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """Return the completed trial with the best value; raise a ValueError if none has completed."""
        with self._lock:
            study = self._study(study_id)
        if len(study.directions) > 1:
            raise RuntimeError("a study with several objectives has no single best trial")
        if study.best is None:
            raise ValueError("no trial is completed yet")
        return study.best

    # Private helpers

    def _study_row(self, study_id: int) -> CachedStudy | rows.StudyRow:
        """Return the study without refreshing its trials, which names and attributes do not need."""
        with self._lock:
            owned = self._cache.owned(study_id)
            if owned is not None:
                return owned
            with reading(self._engine) as connection:
                return rows.load_study(connection, study_id)

    def _save_study_attr(self, table: Table, study_id: int, row: dict[str, Any]) -> CachedStudy:
        with self._changing() as change:
            study = self._study_to_change(change, study_id)
            change.rows.upsert(table, {"study_id": study_id, **row})
        return study

    def _set_trial_attr(self, trial_id: int, table: Table, attrs: str, row: dict[str, Any]) -> None:
        with self._editing(trial_id) as edit:
            self.check_trial_is_updatable(trial_id, edit.trial.state)
            edit.upsert(table, row)
            # Store the value in the form that is read back: a tuple becomes a list.
            newer = {**getattr(edit.trial, attrs), row["key"]: json.loads(row["value_json"])}
            edit.trial = replaced(edit.trial, **{attrs: newer})

    def _new_trial(self, study: CachedStudy, template: FrozenTrial | None) -> FrozenTrial:
        if template is None:
            trial = create_trial(state=TrialState.RUNNING)
            trial.datetime_start = datetime.now()
        else:
            trial = copy.deepcopy(template)
            # In the form that is read back: a tuple becomes a list.
            trial.user_attrs = {key: json.loads(json.dumps(value)) for key, value in trial.user_attrs.items()}
            trial.system_attrs = {key: json.loads(json.dumps(value)) for key, value in trial.system_attrs.items()}
            for name, distribution in trial.distributions.items():
                study.check_distribution(name, distribution)
        trial.number = study.next_number
        trial._trial_id = next(self._provisional_ids)
        return trial
