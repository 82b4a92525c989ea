"""The storage under plain Optuna: it sees everything, names are inert, costs do not grow."""

from pathlib import Path

import optuna
import pytest
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hydra_tune.core.errors import StorageError
from hydra_tune.storage import HydraStorage, open_storage

MINIMIZE = [StudyDirection.MINIMIZE]
HOSTILE = [
    "'; DROP TABLE studies; --",
    "🐍 ünï",
    "two\nlines",
    "../../etc/passwd",
    "<script>alert(1)</script>",
    "\x1b[31mred",
    "%s {0} %(x)s :name",
    " ",
]


def objective(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", -1, 1)
    trial.suggest_int("n", 1, 1000, log=True)
    trial.suggest_categorical("c", ["a", None, 3, True])
    for step in range(3):
        trial.report(float("nan") if step == 1 else x, step)
    trial.set_user_attr("attr", {"nested": [1, "two"]})
    if trial.number == 3:
        raise optuna.TrialPruned
    if trial.number == 4:
        return float("inf")
    return x


def comparable(trial: FrozenTrial) -> dict[str, object]:
    fields = {name.lstrip("_"): value for name, value in vars(trial).items()}
    del fields["trial_id"]
    return {**fields, "intermediate_values": repr(fields["intermediate_values"])}


@pytest.mark.parametrize("batching", [False, True])
def test_plain_optuna_sees_everything(sqlite_storage: HydraStorage, batching: bool):
    study = optuna.create_study(study_name="s", storage=sqlite_storage, sampler=optuna.samplers.TPESampler(seed=0))
    study.set_user_attr("note", "hello")
    if batching:
        sqlite_storage.begin_batching()
    study.enqueue_trial({"x": 0.125}, user_attrs={"asked": True})
    study.optimize(objective, n_trials=6)
    failed = study.ask()
    study.tell(failed, state=TrialState.FAIL)
    study.ask()
    if batching:
        sqlite_storage.end_batching()

    plain = optuna.storages.RDBStorage(sqlite_storage.url)
    other = optuna.load_study(study_name="s", storage=plain)
    assert [comparable(t) for t in other.trials] == [comparable(t) for t in study.trials]
    assert other.best_params == study.best_params
    assert other.user_attrs == {"note": "hello"}
    assert [t.state.name for t in other.trials] == ["COMPLETE"] * 3 + ["PRUNED"] + ["COMPLETE"] * 2 + [
        "FAIL",
        "RUNNING",
    ]
    plain.remove_session()
    plain.engine.dispose()


def test_what_plain_optuna_wrote_is_read(sqlite_storage: HydraStorage):
    plain = optuna.storages.RDBStorage(sqlite_storage.url)
    other = optuna.create_study(study_name="s", storage=plain, sampler=optuna.samplers.RandomSampler(seed=0))
    other.optimize(objective, n_trials=5)
    study = optuna.load_study(study_name="s", storage=sqlite_storage)
    assert [comparable(t) for t in study.trials] == [comparable(t) for t in other.trials]
    other.optimize(objective, n_trials=2)
    assert [comparable(t) for t in study.trials] == [comparable(t) for t in other.trials]
    plain.remove_session()
    plain.engine.dispose()


def check_hostile_names(storage: HydraStorage) -> None:
    for name in HOSTILE:
        study_id = storage.create_new_study(MINIMIZE, name)
        storage.set_study_user_attr(study_id, name, name)
        trial_id = storage.create_new_trial(study_id)
        storage.set_trial_param(trial_id, name, 0, optuna.distributions.CategoricalDistribution([name]))
        storage.set_trial_user_attr(trial_id, name, name)
    with open_storage(storage.url, read_only=True) as reader:
        assert [study.study_name for study in reader.get_all_studies()] == HOSTILE
        for name in HOSTILE:
            study_id = reader.get_study_id_from_name(name)
            (trial,) = reader.get_all_trials(study_id)
            assert trial.params == trial.user_attrs == reader.get_study_user_attrs(study_id) == {name: name}


def test_hostile_names_are_inert(sqlite_storage: HydraStorage):
    check_hostile_names(sqlite_storage)


def test_hostile_names_are_inert_on_postgresql(postgresql_storage: HydraStorage):
    check_hostile_names(postgresql_storage)


@pytest.mark.parametrize("name", ["x" * 10_000, "a\0b", "half \ud83d"])
def test_names_that_not_every_database_holds_are_refused(sqlite_storage: HydraStorage, name: str):
    study_id = sqlite_storage.create_new_study(MINIMIZE, "s")
    trial_id = sqlite_storage.create_new_trial(study_id)
    for write in (
        lambda: sqlite_storage.create_new_study(MINIMIZE, name),
        lambda: sqlite_storage.set_study_user_attr(study_id, name, 1),
        lambda: sqlite_storage.set_trial_user_attr(trial_id, name, 1),
        lambda: sqlite_storage.set_trial_param(trial_id, name, 0.5, optuna.distributions.FloatDistribution(0, 1)),
    ):
        with pytest.raises(StorageError) as caught:
            write()
        assert len(str(caught.value)) < 200
        assert str(caught.value).isprintable()
    assert len(sqlite_storage.get_all_studies()) == 1


def test_a_waiting_trial_is_started_once(sqlite_storage: HydraStorage):
    study = optuna.create_study(study_name="s", storage=sqlite_storage)
    study.enqueue_trial({"x": 0.5})
    with open_storage(sqlite_storage.url) as second:
        other = optuna.load_study(study_name="s", storage=second)
        numbers = sorted([study.ask().number, other.ask().number])
    assert numbers == [0, 1]


def test_the_work_of_a_trial_does_not_grow_with_the_trials_before(sqlite_storage: HydraStorage):
    """Counted in function calls, which no busy machine can spoil."""
    study = optuna.create_study(storage=sqlite_storage, sampler=optuna.samplers.RandomSampler(seed=0))

    def calls() -> int:
        import cProfile
        import pstats

        with cProfile.Profile() as profile:
            trial = study.ask()
            trial.report(trial.suggest_float("x", 0, 1), 0)
            study.tell(trial, 1.0)
            sqlite_storage.flush()
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    with sqlite_storage.batching():
        for _ in range(20):
            early = calls()
        for _ in range(400):
            study.tell(study.ask(), 1.0)
        calls()
        late = calls()
    assert late < 1.1 * early


def test_the_package_gives_its_names():
    import hydra_tune.storage as package

    assert dir(package) == ["HydraStorage", "StudyRecords", "open_storage"]
    assert all(getattr(package, name) for name in package.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = package.nothing


def test_a_storage_used_after_closing_connects_again(tmp_path: Path):
    storage = open_storage(f"sqlite:///{tmp_path}/studies.db")
    storage.close()
    storage.close()
    study_id = storage.create_new_study(MINIMIZE, "s")
    assert storage.get_study_id_from_name("s") == study_id
    storage.close()
