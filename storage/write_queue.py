"""Rows waiting to be written to the database in one transaction.

Rows with the same key merge while they wait, so a trial that starts, reports and ends between two flushes costs one row
per table. A new trial has no id before the database assigns one: its rows carry a negative provisional id, which
`write` replaces with the real id.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Insert, Table, Update, bindparam, insert, select, update
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import DataError

from hydra_tune.core.errors import StorageError, UnstorableError, quoted
from hydra_tune.storage.tables import STUDIES, TRIALS, key_columns

RowValues = dict[str, Any]
UNSTORABLE = (UnstorableError, DataError, OverflowError, UnicodeError)
"""Errors of a row that no later attempt could write: drivers raise several kinds."""
Key = tuple[Any, ...]


# Statements are built once, since building one costs as much as running it.
_INSERT_TRIALS = insert(TRIALS).returning(TRIALS.c.trial_id, sort_by_parameter_order=True)
_LOCK_STUDY = select(STUDIES.c.study_id).where(STUDIES.c.study_id == bindparam("study_id")).with_for_update()
_FOREIGN_TRIALS = (
    select(TRIALS.c.trial_id)
    .where(TRIALS.c.study_id == bindparam("study_id"), TRIALS.c.trial_id > bindparam("last_id"))
    .order_by(TRIALS.c.trial_id)
)


@dataclass(frozen=True)
class RefusedRow:
    """A row that the database cannot hold, and why."""

    table: Table
    row: RowValues
    reason: str

    def __str__(self) -> str:
        return f"a row of {self.table.name} cannot be stored ({self.reason}): {quoted(self.row, 200)}"


_NEWER_TRIALS = select(TRIALS.c.number, TRIALS.c.trial_id).where(
    TRIALS.c.study_id == bindparam("study_id"), TRIALS.c.trial_id > bindparam("last_id")
)


class WriteQueue:
    """Rows to insert, upsert or update. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._new_trials: dict[int, RowValues] = {}
        self._committed: dict[int, int] = {}
        """Real ids of new trials that were found in the database, by provisional id."""
        self._added: defaultdict[Table, list[RowValues]] = defaultdict(list)
        self._upserted: defaultdict[Table, dict[Key, RowValues]] = defaultdict(dict)
        self._updated: defaultdict[Table, dict[Key, RowValues]] = defaultdict(dict)
        self.foreign: dict[int, list[int]] = {}
        """Row ids of trials that `write` found to be added by other processes, by study."""

    def __len__(self) -> int:
        rows = sum(map(len, self._added.values()))
        rows += sum(map(len, self._upserted.values())) + sum(map(len, self._updated.values()))
        return rows + len(self._new_trials)

    def new_trial(self, trial_id: int, row: Mapping[str, Any]) -> None:
        """Insert a trial under the provisional `trial_id`."""
        self._new_trials[trial_id] = dict(row)

    def update_trial(self, trial_id: int, row: Mapping[str, Any]) -> None:
        """Change columns of a trial, new or already stored."""
        if trial_id in self._new_trials:
            self._new_trials[trial_id].update(row)
        else:
            self._updated[TRIALS].setdefault((trial_id,), {"trial_id": trial_id}).update(row)

    def add(self, table: Table, row: Mapping[str, Any]) -> None:
        """Insert a row without a key."""
        self._added[table].append(dict(row))

    def upsert(self, table: Table, row: Mapping[str, Any]) -> None:
        """Insert a row, or change the given columns of the row with the same key."""
        self._upserted[table].setdefault(_key(table, row), {}).update(row)

    def update(self, table: Table, row: Mapping[str, Any]) -> None:
        """Change the given columns of the row with this primary key, stored or queued."""
        key = tuple(row[column.name] for column in table.primary_key)
        waiting = self._upserted[table].get(key)
        if waiting is None:
            waiting = self._updated[table].setdefault(key, {})
        waiting.update(row)

    def extend(self, newer: WriteQueue) -> None:
        """Append the rows of a queue that was filled after this one."""
        self._new_trials.update(newer._new_trials)
        self._committed.update(newer._committed)
        for table, rows in newer._added.items():
            self._added[table].extend(rows)
        for table, keyed in newer._upserted.items():
            for row in keyed.values():
                self.upsert(table, row)
        for table, keyed in newer._updated.items():
            for row in keyed.values():
                if table is TRIALS:
                    self.update_trial(row["trial_id"], {name: row[name] for name in row if name != "trial_id"})
                else:
                    self.update(table, row)

    def find_committed(self, connection: Connection, last_ids: Mapping[int, int]) -> None:
        """Find new trials that are in the database already, as the answer to an earlier commit was lost.

        For the holder of the study's lease only: the trials could be another's otherwise.
        """
        for study_id in self.studies_of_new_trials():
            found = connection.execute(_NEWER_TRIALS, {"study_id": study_id, "last_id": last_ids[study_id]})
            ids: dict[int, int] = {row.number: row.trial_id for row in found}
            for provisional, row in list(self._new_trials.items()):
                if row["study_id"] == study_id and row["number"] in ids:
                    del self._new_trials[provisional]
                    self._committed[provisional] = ids[row["number"]]
                    changed = {name: value for name, value in row.items() if name not in ("study_id", "number")}
                    self.update_trial(provisional, changed)

    def studies_of_new_trials(self) -> list[int]:
        """Return the ids of the studies that get new trials."""
        return sorted({row["study_id"] for row in self._new_trials.values()})

    def write(self, connection: Connection, row_ids: Mapping[int, int], last_ids: Mapping[int, int]) -> dict[int, int]:
        """Write all rows in the connection's transaction; return the new trials' real ids by provisional id.

        `row_ids` holds the real ids of earlier trials, `last_ids` the largest known trial id of each study that gets
        new trials. The queue itself is not changed, since the transaction may still fail.
        """
        new_ids = self._insert_trials(connection, last_ids)
        for table, statement, rows in self._statements(connection.dialect.name, new_ids, row_ids):
            _execute(connection, table, statement, rows)
        return new_ids

    def write_singly(
        self, connection: Connection, row_ids: Mapping[int, int], last_ids: Mapping[int, int]
    ) -> tuple[dict[int, int], list[RefusedRow]]:
        """Write as `write` does, but row by row; also return the rows that cannot be stored and are left out."""
        new_ids, refused = self._insert_trials(connection, last_ids), []
        for table, statement, rows in self._statements(connection.dialect.name, new_ids, row_ids):
            for row in rows:
                try:
                    with connection.begin_nested():
                        _execute(connection, table, statement, [row])
                except UNSTORABLE as error:
                    reason = getattr(error, "orig", None) or error
                    refused.append(RefusedRow(table, row, str(reason).strip().splitlines()[0]))
        return new_ids, refused

    def _statements(
        self, dialect: str, new_ids: Mapping[int, int], row_ids: Mapping[int, int]
    ) -> Iterator[tuple[Table, Insert | Update, list[RowValues]]]:
        """Yield each statement with its rows, in the order of writing; not those of new trials."""

        def real(row: RowValues) -> RowValues:
            trial_id = row.get("trial_id", 0)
            if trial_id >= 0:
                return row
            return {**row, "trial_id": new_ids.get(trial_id) or row_ids[trial_id]}

        for table, keyed in self._upserted.items():
            for columns, rows in _alike(map(real, keyed.values())):
                yield table, _upsert_statement(dialect, table, columns), rows
        for table, added in self._added.items():
            for _, rows in _alike(added):
                yield table, insert(table), rows
        for table, keyed in self._updated.items():
            for columns, rows in _alike(map(real, keyed.values())):
                yield table, _update_statement(table, columns), rows

    def _insert_trials(self, connection: Connection, last_ids: Mapping[int, int]) -> dict[int, int]:
        if not self._new_trials:
            return dict(self._committed)
        for study_id in self.studies_of_new_trials():
            numbers = [row["number"] for row in self._new_trials.values() if row["study_id"] == study_id]
            known = max([last_ids[study_id], *self._committed.values()])
            self.foreign[study_id] = _make_room(connection, study_id, known, max(numbers))
        if connection.dialect.name == "mysql":
            return {
                **self._committed,
                **{id: _insert_by_itself(connection, row) for id, row in self._new_trials.items()},
            }
        ids = connection.execute(_INSERT_TRIALS, list(self._new_trials.values())).scalars()
        return {**self._committed, **dict(zip(self._new_trials, ids, strict=True))}


def lock_study(connection: Connection, study_id: int) -> None:
    """Lock the study's row, as Optuna does before it counts trials; raise a KeyError if there is none.

    SQLite ignores FOR UPDATE and does not need it: its write transactions are serial.
    """
    if connection.execute(_LOCK_STUDY, {"study_id": study_id}).scalar() is None:
        raise KeyError(f"no study has the id {study_id}")


def _make_room(connection: Connection, study_id: int, last_id: int, last_number: int) -> list[int]:
    """Lock the study, renumber the new trials of other processes to follow ours, and return their row ids.

    Both sides counted on from the same trial, so their numbers collide. Ours stay: our trials already run under them.
    """
    try:
        lock_study(connection, study_id)
    except KeyError as error:
        raise StorageError(
            f"study {study_id} was deleted while its trials ran", "start the search again under another name"
        ) from error
    foreign = connection.execute(_FOREIGN_TRIALS, {"study_id": study_id, "last_id": last_id}).scalars().all()
    rows = [{"trial_id": id, "number": last_number + place} for place, id in enumerate(foreign, start=1)]
    if rows:
        _execute(connection, TRIALS, _update_statement(TRIALS, ("number", "trial_id")), rows)
    return list(foreign)


def _key(table: Table, row: Mapping[str, Any]) -> Key:
    return _key_of(table)(row)


_key_columns = cache(key_columns)


@cache
def _key_of(table: Table) -> Callable[[Mapping[str, Any]], Key]:
    names = _key_columns(table)
    return itemgetter(*names) if len(names) > 1 else lambda row: (row[names[0]],)


def _alike(rows: Iterable[RowValues]) -> list[tuple[tuple[str, ...], list[RowValues]]]:
    """Group the rows by their set of columns, since each statement covers one set."""
    groups: defaultdict[tuple[str, ...], list[RowValues]] = defaultdict(list)
    for row in rows:
        groups[tuple(sorted(row))].append(row)
    return list(groups.items())


def _insert_by_itself(connection: Connection, row: RowValues) -> int:
    """Insert a trial and return its id; MySQL returns no ids of several rows."""
    key = connection.execute(insert(TRIALS), row).inserted_primary_key
    assert key is not None
    return int(key[0])


def _mysql_upsert(table: Table, columns: tuple[str, ...]) -> Insert:
    statement, key = mysql.insert(table), _key_columns(table)
    # Without a column to change, one of the key is set to what it is.
    changed = [name for name in columns if name not in key] or [key[0]]
    return statement.on_duplicate_key_update({name: statement.inserted[name] for name in changed})


@cache
def _upsert_statement(dialect: str, table: Table, columns: tuple[str, ...]) -> Insert:
    if dialect == "mysql":
        return _mysql_upsert(table, columns)
    statement = sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)
    key = _key_columns(table)
    changed = {name: statement.excluded[name] for name in columns if name not in key}
    if not changed:
        return statement.on_conflict_do_nothing(index_elements=key)
    return statement.on_conflict_do_update(index_elements=key, set_=changed)


@cache
def _update_statement(table: Table, columns: tuple[str, ...]) -> Update:
    keys = {column.name for column in table.primary_key}
    statement = update(table).values({name: bindparam(name) for name in columns if name not in keys})
    for name in keys:
        # A bound parameter may not share the name of a column of the table.
        statement = statement.where(table.c[name] == bindparam(f"key_{name}"))
    return statement


def _execute(connection: Connection, table: Table, statement: Insert | Update, rows: list[RowValues]) -> None:
    if isinstance(statement, Update):
        keys = {column.name for column in table.primary_key}
        rows = [{f"key_{name}" if name in keys else name: value for name, value in row.items()} for row in rows]
    connection.execute(statement, rows)
