"""Records that Optuna does not keep are written, merged and read back, on both databases."""

import math
import uuid
from collections.abc import Iterator

import pytest
from optuna.study import StudyDirection

from hydra_tune.core.errors import StorageError
from hydra_tune.storage import HydraStorage, StudyRecords
from hydra_tune.storage.queries import (
    study_summary,
    trial_attempts,
    trial_metrics,
    trial_records,
    trial_units,
)


@pytest.fixture(params=["through", "batching"])
def records(storage: HydraStorage, request: pytest.FixtureRequest) -> Iterator[StudyRecords]:
    study_id = storage.create_new_study([StudyDirection.MINIMIZE], "s")
    if request.param == "through":
        yield StudyRecords(storage, study_id)
    else:
        with storage.batching():
            yield StudyRecords(storage, study_id)
    storage.close()


def test_describing_a_study_again_keeps_its_date(storage: HydraStorage, records: StudyRecords):
    records.describe(2**63 - 1, ["loss"], {"trials": 3}, None)
    first = study_summary(storage, "s")
    records.describe(7, ["loss", "accuracy"], {"trials": 9}, {"space": "mlp"})
    second = study_summary(storage, "s")
    assert (first.seed, first.metrics, first.settings, first.spec) == (2**63 - 1, ("loss",), {"trials": 3}, None)
    assert (second.seed, second.metrics, second.settings) == (7, ("loss", "accuracy"), {"trials": 9})
    assert second.spec == {"space": "mlp"}
    assert second.created == first.created
    assert first.created is not None
    assert first.created.tzinfo is not None


def test_a_trials_columns_come_one_after_another(storage: HydraStorage, records: StudyRecords):
    storage.create_new_trial(1)
    storage.create_new_trial(1)
    records.trial(0, seed=11, status="RUNNING")
    storage.flush()
    records.trial(0, strategy="shard", shards=4, peak_device_bytes=2**40)
    records.trial(0, status="DIVERGED", error="loss is nan\0 at step 3 \ud83d", seconds=1.5, device="cpu:0")
    first, second = trial_records(storage, "s")
    assert (first.seed, first.state, first.strategy, first.shards) == (11, "DIVERGED", "shard", 4)
    assert (first.peak_device_bytes, first.seconds, first.device) == (2**40, 1.5, "cpu:0")
    assert first.error == "loss is nan\\x00 at step 3 \\ud83d"
    assert (second.state, second.seed, second.strategy, second.error) == ("RUNNING", None, None, None)


def test_an_unknown_column_is_refused(records: StudyRecords):
    with pytest.raises(StorageError, match=r"no 'stratgy' \(did you mean 'strategy'"):
        records.trial(0, stratgy="whole")


@pytest.mark.parametrize("flush_between", [False, True])
def test_attempts_start_and_end(storage: HydraStorage, records: StudyRecords, flush_between: bool):
    first = records.attempt_started(3, 1, "cpu:0", 123)
    second = records.attempt_started(3, 2, "cpu:1", 124)
    if flush_between:
        storage.flush()
    records.attempt_ended(first, "LOST", "killed (signal 9)", "Traceback\0")
    attempts = trial_attempts(storage, "s", 3)
    assert [uuid.UUID(attempt.attempt_id).hex for attempt in attempts] == [first, second]
    assert [attempt.state for attempt in attempts] == ["LOST", "RUNNING"]
    assert (attempts[0].error, attempts[0].traceback) == ("killed (signal 9)", "Traceback\\x00")
    assert attempts[0].ended is not None
    assert attempts[0].ended >= attempts[0].started
    assert (attempts[1].ended, attempts[1].pid, attempts[1].device) == (None, 124, "cpu:1")
    assert trial_attempts(storage, "s", 4) == []


def test_metrics_may_be_anything_a_float_is(storage: HydraStorage, records: StudyRecords):
    records.metrics(0, 1, {"loss": 0.25, "accuracy": math.inf})
    records.metrics(0, 0, {"loss": math.nan, "accuracy": -math.inf})
    records.metrics(0, 1, {"loss": 0.125})
    found = trial_metrics(storage, "s", 0)
    assert list(found) == [0, 1]
    assert math.isnan(found[0].pop("loss"))
    assert found == {0: {"accuracy": -math.inf}, 1: {"accuracy": math.inf, "loss": 0.125}}


def test_a_metric_that_becomes_finite_is_finite(storage: HydraStorage, records: StudyRecords):
    records.metrics(0, 0, {"loss": math.nan})
    storage.flush()
    records.metrics(0, 0, {"loss": 1.0})
    assert trial_metrics(storage, "s", 0) == {0: {"loss": 1.0}}


def test_units_are_many_and_in_order(storage: HydraStorage, records: StudyRecords):
    attempt = records.attempt_started(0, 1, "cpu:0", 1)
    records.unit(0, attempt, "backward", "cpu:0", 2.5, 0.5, 10)
    records.unit(0, attempt, "forward", "cpu:0", 1.5, 0.5, None)
    records.unit(1, attempt, "forward", "cpu:1", 1.0, 0.5, 2**33)
    assert [(u.kind, u.started, u.peak_bytes) for u in trial_units(storage, "s", 0)] == [
        ("forward", 1.5, None),
        ("backward", 2.5, 10),
    ]
    assert [unit.number for unit in trial_units(storage, "s")] == [1, 0, 0]
