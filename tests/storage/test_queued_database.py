"""Batching, flushing and coherence: what is queued, what a crash loses, and other processes' writes."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
import pytest
import sqlalchemy
from optuna.distributions import FloatDistribution
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from hydra_tune.core.errors import StorageError
from hydra_tune.storage import HydraStorage, StudyRecords, open_storage
from hydra_tune.storage.tables import HYDRA_TRIALS, HYDRA_UNITS, TRIAL_PARAMS, TRIALS
from hydra_tune.storage.write_queue import WriteQueue

MINIMIZE = [StudyDirection.MINIMIZE]
UNIT = FloatDistribution(0, 1)


def rows_of(storage: HydraStorage, table: sqlalchemy.Table) -> int:
    """Return the number of rows as another process sees them."""
    with open_storage(storage.url, read_only=True) as reader, reader.reading() as connection:
        return connection.execute(sqlalchemy.select(sqlalchemy.func.count()).select_from(table)).scalar_one()


def run_trial(storage: HydraStorage, study_id: int, value: float = 1.0) -> int:
    trial_id = storage.create_new_trial(study_id)
    storage.set_trial_param(trial_id, "x", 0.5, UNIT)
    storage.set_trial_intermediate_value(trial_id, 0, 0.1)
    storage.set_trial_user_attr(trial_id, "note", ["a", 1])
    storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [value])
    return trial_id


@pytest.fixture
def study_id(sqlite_storage: HydraStorage) -> int:
    return sqlite_storage.create_new_study(MINIMIZE, "s")


@contextmanager
def counted_statements(storage: HydraStorage) -> Iterator[list[str]]:
    """Collect the statements sent to the database within the block."""
    sent: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    sqlalchemy.event.listen(storage._engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        sqlalchemy.event.remove(storage._engine, "before_cursor_execute", note)


def test_batched_writes_wait_for_the_flush(sqlite_storage: HydraStorage, study_id: int):
    with sqlite_storage.batching():
        trial_id = run_trial(sqlite_storage, study_id)
        assert sqlite_storage.pending == 5
        assert rows_of(sqlite_storage, TRIALS) == 0
        assert sqlite_storage.get_trial(trial_id).value == 1.0
        sqlite_storage.flush()
        assert sqlite_storage.pending == 0
        assert rows_of(sqlite_storage, TRIALS) == 1
        assert rows_of(sqlite_storage, TRIAL_PARAMS) == 1


def test_a_flush_is_one_transaction_with_one_statement_a_table(sqlite_storage: HydraStorage, study_id: int):
    with sqlite_storage.batching():
        for _ in range(20):
            run_trial(sqlite_storage, study_id)
        with counted_statements(sqlite_storage) as sent:
            sqlite_storage.flush()
        sqlite_storage.flush()
    tables = [statement.split()[2] for statement in sent if statement.startswith("INSERT")]
    assert sum(statement.startswith("BEGIN") for statement in sent) == 1
    assert len(set(tables) - {"trials"}) == len([table for table in tables if table != "trials"]) == 4


def test_an_owned_study_is_not_read_again(sqlite_storage: HydraStorage, study_id: int):
    with sqlite_storage.batching():
        trial_id = run_trial(sqlite_storage, study_id)
        with counted_statements(sqlite_storage) as sent:
            run_trial(sqlite_storage, study_id)
            sqlite_storage.get_all_trials(study_id, states=(TrialState.WAITING,))
            sqlite_storage.get_best_trial(study_id)
            sqlite_storage.get_trial(trial_id)
            sqlite_storage.get_study_system_attrs(study_id)
        assert sent == []


def test_unchanged_finished_trials_are_not_read_again(sqlite_storage: HydraStorage, study_id: int):
    run_trial(sqlite_storage, study_id)
    sqlite_storage.get_all_trials(study_id)
    with counted_statements(sqlite_storage) as sent:
        sqlite_storage.get_all_trials(study_id)
    assert sent == ["BEGIN", "PRAGMA data_version"]


def test_a_provisional_id_works_for_the_life_of_the_storage(sqlite_storage: HydraStorage, study_id: int):
    with sqlite_storage.batching():
        trial_id = sqlite_storage.create_new_trial(study_id)
        assert trial_id < 0
        sqlite_storage.flush()
        sqlite_storage.set_trial_param(trial_id, "x", 0.25, UNIT)
        sqlite_storage.flush()
    sqlite_storage.set_trial_user_attr(trial_id, "later", True)
    sqlite_storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [2.0])
    assert sqlite_storage.get_trial(trial_id).params == {"x": 0.25}
    assert sqlite_storage.get_trial_id_from_study_id_trial_number(study_id, 0) == trial_id

    with open_storage(sqlite_storage.url) as other:
        (seen,) = other.get_all_trials(study_id)
    assert (seen.params, seen.user_attrs, seen.value) == ({"x": 0.25}, {"later": True}, 2.0)
    assert sqlite_storage.get_trial(seen._trial_id) is sqlite_storage.get_trial(trial_id)


def test_leaving_the_block_by_an_exception_flushes(sqlite_storage: HydraStorage, study_id: int):
    def work() -> None:
        with sqlite_storage.batching():
            run_trial(sqlite_storage, study_id)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert rows_of(sqlite_storage, TRIALS) == 1


def test_a_failed_flush_loses_nothing(sqlite_storage: HydraStorage, study_id: int):
    def limit_pages(pages: int) -> None:
        with sqlite_storage._engine.connect() as connection:
            connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")

    with sqlite_storage.batching():
        trial_id = run_trial(sqlite_storage, study_id)
        sqlite_storage.set_study_user_attr(study_id, "large", "x" * 100_000)
        waiting = sqlite_storage.pending
        limit_pages(1)  # The disk is full.
        with pytest.raises(StorageError, match=r"disk is full \(free some space"):
            sqlite_storage.flush()
        assert sqlite_storage.pending == waiting
        assert sqlite_storage.get_trial(trial_id).value == 1.0
        run_trial(sqlite_storage, study_id)
        assert rows_of(sqlite_storage, TRIALS) == 0
        limit_pages(1_000_000)
        sqlite_storage.flush()
        assert sqlite_storage.pending == 0
    with open_storage(sqlite_storage.url) as other:
        assert [trial.params for trial in other.get_all_trials(study_id)] == [{"x": 0.5}] * 2


def test_what_comes_during_a_failing_flush_joins_what_waits(sqlite_storage: HydraStorage, study_id: int):
    """The trial ends while its first rows are on their way; both parts must arrive, in one piece."""
    with sqlite_storage.batching():
        trial_id = sqlite_storage.create_new_trial(study_id)
        sqlite_storage.set_trial_param(trial_id, "x", 0.5, UNIT)

        def end_trial_and_fail(*_: object) -> None:
            sqlalchemy.event.remove(sqlite_storage._engine, "commit", end_trial_and_fail)
            sqlite_storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [3.0])
            raise sqlalchemy.exc.OperationalError("COMMIT", {}, Exception("database or disk is full"))

        sqlalchemy.event.listen(sqlite_storage._engine, "commit", end_trial_and_fail)
        with pytest.raises(StorageError, match="disk is full"):
            sqlite_storage.flush()
        assert sqlite_storage.pending == 3
    with open_storage(sqlite_storage.url) as other:
        (trial,) = other.get_all_trials(study_id)
    assert (trial.state, trial.value, trial.params) == (TrialState.COMPLETE, 3.0, {"x": 0.5})


def test_a_flush_does_not_stop_readers_and_writers(sqlite_storage: HydraStorage, study_id: int):
    committing, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        committing.set()
        assert go_on.wait(30)

    with sqlite_storage.batching():
        run_trial(sqlite_storage, study_id)
        sqlalchemy.event.listen(sqlite_storage._engine, "commit", wait)
        flush = threading.Thread(target=sqlite_storage.flush)
        flush.start()
        assert committing.wait(30)
        assert sqlite_storage.pending == 5
        run_trial(sqlite_storage, study_id)
        assert sqlite_storage.get_n_trials(study_id) == 2
        go_on.set()
        flush.join()
        assert sqlite_storage.pending == 5
        sqlalchemy.event.remove(sqlite_storage._engine, "commit", wait)
    assert rows_of(sqlite_storage, TRIALS) == 2


def test_trials_of_a_second_writer_are_taken_in(sqlite_storage: HydraStorage, study_id: int):
    waiting = create_trial(state=TrialState.WAITING, user_attrs={"by": "other"})
    with sqlite_storage.batching(), open_storage(sqlite_storage.url) as other:
        run_trial(sqlite_storage, study_id)
        sqlite_storage.flush()
        other.create_new_trial(study_id, waiting)
        run_trial(sqlite_storage, study_id)
        sqlite_storage.flush()
        # Both counted to 1; ours runs under its number already, so theirs got the next.
        assert [t.user_attrs.get("by") for t in sqlite_storage.get_all_trials(study_id)][1:] == [None, "other"]
        assert [trial.number for trial in sqlite_storage.take_in(study_id)] == [2]
        # From now on numbers are given by the database, so that none is given twice.
        other.create_new_trial(study_id, waiting)
        mine = sqlite_storage.create_new_trial(study_id)
        assert sqlite_storage.get_trial(mine).number == 4
        assert other.get_trial(mine).number == 4, "seen by others at once"
        assert [trial.number for trial in sqlite_storage.take_in(study_id)] == [3]
        assert sqlite_storage.take_in(study_id) == []
    with open_storage(sqlite_storage.url) as again:
        assert [trial.number for trial in again.get_all_trials(study_id)] == [0, 1, 2, 3, 4]


def test_a_waiting_trial_is_started_once(sqlite_storage: HydraStorage, study_id: int):
    with sqlite_storage.batching(), open_storage(sqlite_storage.url) as other:
        run_trial(sqlite_storage, study_id)
        waiting = [sqlite_storage.create_new_trial(study_id, create_trial(state=TrialState.WAITING)) for _ in range(2)]
        sqlite_storage.flush()
        theirs, ours = (other.get_trial_id_from_study_id_trial_number(study_id, number) for number in (1, 2))
        assert other.set_trial_state_values(theirs, TrialState.RUNNING)
        assert not sqlite_storage.set_trial_state_values(waiting[0], TrialState.RUNNING)
        assert sqlite_storage.set_trial_state_values(waiting[1], TrialState.RUNNING)
        assert not other.set_trial_state_values(ours, TrialState.RUNNING)
        other.set_trial_state_values(ours, TrialState.COMPLETE, [3.0])
        assert [(trial.number, trial.values) for trial in sqlite_storage.take_in(study_id)] == [(1, None), (2, [3.0])]
        other.set_study_user_attr(study_id, "said", "hello")
        sqlite_storage.take_in(study_id)
        assert sqlite_storage.get_study_user_attrs(study_id) == {"said": "hello"}


def test_a_study_deleted_under_its_owner_is_noticed(sqlite_storage: HydraStorage, study_id: int):
    with sqlite_storage.batching():
        run_trial(sqlite_storage, study_id)
        with open_storage(sqlite_storage.url) as other:
            other.delete_study(study_id)
        with pytest.raises(StorageError, match="was deleted while its trials ran"):
            sqlite_storage.flush()
        drop_queue(sqlite_storage)


def drop_queue(storage: HydraStorage) -> None:
    """What waits could only fail again when the test closes the storage."""
    storage._queue = WriteQueue()


def check_coherence(storage: HydraStorage) -> None:
    study_id = storage.create_new_study(MINIMIZE, "s")
    waiting = storage.create_new_trial(study_id, create_trial(state=TrialState.WAITING))
    assert len(storage.get_all_trials(study_id)) == 1
    with open_storage(storage.url) as other:
        other.set_trial_state_values(waiting, TrialState.RUNNING)
        other.set_trial_user_attr(waiting, "by", "other")
        run_trial(other, study_id, value=-5.0)
        other.set_study_user_attr(study_id, "said", "hello")
        assert storage.get_trial(waiting).state == TrialState.RUNNING
        assert storage.get_best_trial(study_id).value == -5.0
        assert storage.get_study_user_attrs(study_id) == {"said": "hello"}
        assert storage.get_n_trials(study_id, TrialState.COMPLETE) == 1
        assert not storage.set_trial_state_values(waiting, TrialState.RUNNING)
        other.set_trial_user_attr(waiting, "again", 1)
        storage.set_trial_state_values(waiting, TrialState.COMPLETE, [0.0])
        assert storage.get_trial(waiting).user_attrs == {"by": "other", "again": 1}
        with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
            other.set_trial_user_attr(waiting, "late", 1)
        # A parameter's distribution binds all processes.
        running = other.create_new_trial(study_id)
        with pytest.raises(ValueError, match=r"[Dd]istribution"):
            other.set_trial_param(running, "x", 0, optuna.distributions.CategoricalDistribution(["a"]))
        assert [t.number for t in storage.get_all_trials(study_id)] == [0, 1, 2]


def test_what_another_process_wrote_is_seen(sqlite_storage: HydraStorage):
    check_coherence(sqlite_storage)


def test_what_another_process_wrote_is_seen_on_postgresql(postgresql_storage: HydraStorage):
    check_coherence(postgresql_storage)


def test_a_deleted_study_does_not_live_on_in_its_successor(sqlite_storage: HydraStorage, study_id: int):
    """SQLite gives the new study and its trials the ids of the old ones."""
    with open_storage(sqlite_storage.url) as other:
        old = run_trial(other, study_id, value=1.0)
        assert sqlite_storage.get_best_trial(study_id).value == 1.0
        other.delete_study(study_id)
        assert other.create_new_study(MINIMIZE, "s") == study_id
        assert run_trial(other, study_id, value=2.0) == old
        assert [trial.value for trial in sqlite_storage.get_all_trials(study_id)] == [2.0]
        assert sqlite_storage.get_best_trial(study_id).value == 2.0
        assert [trial.value for trial in other.get_all_trials(study_id)] == [2.0]


def test_threads_share_a_storage(sqlite_storage: HydraStorage, study_id: int):
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                run_trial(sqlite_storage, study_id)
                sqlite_storage.flush()
        except BaseException as error:  # noqa: BLE001 - reported by the assertion below
            errors.append(error)

    with sqlite_storage.batching():
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    with open_storage(sqlite_storage.url) as other:
        assert [trial.number for trial in other.get_all_trials(study_id)] == list(range(80))


def test_our_rows_ride_in_the_same_transaction(sqlite_storage: HydraStorage, study_id: int):
    with sqlite_storage.batching():
        records = StudyRecords(sqlite_storage, study_id)
        run_trial(sqlite_storage, study_id)
        records.trial(0, strategy="whole")
        records.trial(0, shards=1)
        records.unit(0, "a", "train", "cpu:0", 0.0, 1.0, 10)
        records.unit(0, "a", "train", "cpu:0", 1.0, 1.0, 10)
        assert sqlite_storage.pending == 5 + 1 + 2
        assert rows_of(sqlite_storage, HYDRA_TRIALS) == 0
        with counted_statements(sqlite_storage) as sent:
            sqlite_storage.flush()
        assert sum(statement.startswith("BEGIN") for statement in sent) == 1
    assert rows_of(sqlite_storage, HYDRA_TRIALS) == 1
    assert rows_of(sqlite_storage, HYDRA_UNITS) == 2


def test_a_reader_refuses_every_write(sqlite_storage: HydraStorage, study_id: int):
    trial_id = sqlite_storage.create_new_trial(study_id)
    with open_storage(sqlite_storage.url, read_only=True) as reader:
        writes = [
            lambda: reader.create_new_study(MINIMIZE, "new"),
            lambda: reader.delete_study(study_id),
            lambda: reader.set_study_user_attr(study_id, "k", 1),
            lambda: reader.set_study_system_attr(study_id, "k", 1),
            lambda: reader.create_new_trial(study_id),
            lambda: reader.set_trial_param(trial_id, "x", 0.5, UNIT),
            lambda: reader.set_trial_state_values(trial_id, TrialState.FAIL),
            lambda: reader.set_trial_intermediate_value(trial_id, 0, 0.0),
            lambda: reader.set_trial_user_attr(trial_id, "k", 1),
            lambda: reader.set_trial_system_attr(trial_id, "k", 1),
            lambda: reader.add(HYDRA_UNITS, {}),
            lambda: reader.upsert(HYDRA_TRIALS, {}),
            lambda: reader.update(HYDRA_TRIALS, {}),
            reader.begin_batching,
        ]
        for write in writes:
            with pytest.raises(StorageError, match="opened to read"):
                write()


def test_an_attribute_is_cached_as_it_will_be_read(sqlite_storage: HydraStorage, study_id: int):
    given = {"pair": (1, 2), "keys": {1: "one"}}
    with sqlite_storage.batching():
        trial_id = sqlite_storage.create_new_trial(study_id)
        sqlite_storage.set_trial_user_attr(trial_id, "given", given)
        sqlite_storage.set_study_user_attr(study_id, "given", given)
        expected = json.loads(json.dumps(given))
        assert sqlite_storage.get_trial(trial_id).user_attrs["given"] == expected
        assert sqlite_storage.get_study_user_attrs(study_id)["given"] == expected


def check_one_bad_row(storage: HydraStorage) -> None:
    """A row that no database can hold is left out and named; all others of its flush are written."""
    study_id = storage.create_new_study(MINIMIZE, "s")
    with storage.batching():
        records = StudyRecords(storage, study_id)
        trial_id = run_trial(storage, study_id)
        for seed in (1, 10**20):
            records.trial(seed % 7, seed=seed)
        storage.flush()
        assert storage.pending == 0
        (refused,) = storage.take_refused()
        assert refused.row["seed"] == 10**20
        assert "a row of hydra_trials cannot be stored (" in str(refused)
        assert storage.number_of(trial_id) == 0
        run_trial(storage, study_id)
        storage.flush()
        assert storage.take_refused() == []
    assert rows_of(storage, TRIALS) == 2
    assert rows_of(storage, HYDRA_TRIALS) == 1


def test_one_bad_row_does_not_stop_the_queue(sqlite_storage: HydraStorage):
    check_one_bad_row(sqlite_storage)


def test_one_bad_row_does_not_stop_the_queue_on_postgresql(postgresql_storage: HydraStorage):
    check_one_bad_row(postgresql_storage)


@pytest.mark.parametrize("step", [2**31, 10**20, -(2**31) - 1])
def test_a_step_that_no_database_holds_is_refused_at_the_call(sqlite_storage: HydraStorage, study_id: int, step: int):
    with sqlite_storage.batching():
        trial_id = sqlite_storage.create_new_trial(study_id)
        with pytest.raises(StorageError, match=f"step {step} of a report cannot be stored"):
            sqlite_storage.set_trial_intermediate_value(trial_id, step, 0.5)
        assert sqlite_storage.get_trial(trial_id).intermediate_values == {}
