"""The arguments of `create_study` and `optimize` in a search: each does what it does in Optuna, or says why not."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import optuna.terminator
import pytest
from optuna.study import MaxTrialsCallback, StudyDirection
from optuna.trial import FrozenTrial, TrialState

import hydra_tune as ht
from hydra_tune.coordinator.auto_sampler import MANY, AutoSampler
from hydra_tune.coordinator.sampling import make_pruner, make_sampler
from hydra_tune.storage import open_storage
from tests.fault.searches import wait_for


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)


def square(trial: optuna.Trial) -> float:
    return trial.suggest_float("x", -1, 1) ** 2


def run(objective: Any, **options: Any) -> ht.SearchResult:
    return ht.search(objective, devices="1xcpu", progress=False, **options)


def test_names_of_optuna_and_callbacks_with_the_study_and_the_trial(tmp_path: Path) -> None:
    """One changed line: `study.optimize` and `create_study` become one call with the same arguments."""
    seen: list[tuple[int, str, float, bool]] = []

    def note(study: optuna.Study, trial: FrozenTrial) -> None:
        seen.append((trial.number, trial.state.name, study.best_value, study.trials[-1].number == trial.number))
        study.set_user_attr("last", trial.number)
        with pytest.raises(RuntimeError, match="Nested"):
            study.optimize(square, n_trials=1)

    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/x.db")
    arguments: dict[str, Any] = {
        "study_name": "s", "storage": storage, "load_if_exists": True, "direction": StudyDirection.MAXIMIZE,
        "n_trials": 3, "n_jobs": 1, "show_progress_bar": False,
    }  # fmt: skip
    first = run(square, callbacks=[note], **arguments)
    more = run(square, callbacks=[note, MaxTrialsCallback(5, states=(TrialState.COMPLETE,))], **arguments)
    assert [number for number, *_ in seen] == [0, 1, 2, 3, 4], "n_trials more each time, until the callback stopped it"
    assert all(last and state == "COMPLETE" for _, state, _, last in seen)
    assert more.study.direction is StudyDirection.MAXIMIZE
    assert more.study.user_attrs == {"last": 4}
    assert more.best_value == max(record.value for record in more.trials)
    storage.remove_session()
    storage.engine.dispose()
    first.close()


def test_what_stops_a_study_ends_the_search_with_its_result() -> None:
    def stops(trial: optuna.Trial) -> float:
        if trial.number == 2:
            trial.study.stop()
        return square(trial)

    assert len(run(stops, trials=1000).trials) == 3
    # Another study, so that this one does not count the trials of the first.
    endless = run(square, trials=None, callbacks=[lambda study, trial: study.stop() if trial.number == 1 else None])
    assert len(endless.trials) == 2
    for never_stops in ("tpe", "TPESampler", {"name": "random"}, optuna.samplers.RandomSampler()):
        with pytest.raises(ht.SpecError, match="the number of trials is missing"):
            run(square, sampler=never_stops)


def test_a_terminator_stops_a_search() -> None:
    class AfterFour(optuna.terminator.BaseTerminator):
        def should_terminate(self, study: optuna.Study) -> bool:
            scores = [trial.system_attrs["terminator:cv_scores"] for trial in study.trials]
            return len(scores) == 4

    def scored(trial: optuna.Trial) -> float:
        optuna.terminator.report_cross_validation_scores(trial, [0.1, 0.2])
        return square(trial)

    with pytest.warns(FutureWarning):
        callback = optuna.terminator.TerminatorCallback(AfterFour())
    assert len(run(scored, n_trials=50, callbacks=[callback]).trials) == 4


def test_catch_survives_the_errors_that_it_names_and_no_others() -> None:
    class Own(ValueError):
        pass

    def fails(trial: optuna.Trial) -> float:
        if trial.number == 1:
            raise Own("odd")
        if trial.number == 3:
            raise ZeroDivisionError("nothing left")
        return square(trial)

    with pytest.raises(ZeroDivisionError, match="trial 3 failed: ZeroDivisionError: nothing left"):
        run(fails, n_trials=6, catch=(ValueError,), study="s")
    with open_storage("sqlite:///hydra_tune.db", read_only=True) as storage:
        states = [trial.state.name for trial in storage.get_all_trials(1)]
    assert states == ["COMPLETE", "FAIL", "COMPLETE", "FAIL"]
    with pytest.raises(ht.SearchFailed, match=r"trial 1 failed: Own: odd \(name the error in catch"):
        run(fails, n_trials=6, catch=())
    assert [record.state for record in run(fails, n_trials=5).trials].count("FAILED") == 2, "all are caught by default"


def test_a_callback_that_fails_ends_the_search_with_its_error() -> None:
    def fails(study: optuna.Study, trial: FrozenTrial) -> None:
        raise LookupError("no such callback")

    with pytest.raises(LookupError, match="no such callback"):
        run(square, n_trials=3, callbacks=[fails])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"storage": optuna.storages.InMemoryStorage()}, "'InMemoryStorage', which is gone with this process"),
        ({"n_trials": 3, "trials": 3}, "trials and n_trials are both given"),
        ({"directions": ["minimize"], "direction": "maximize"}, "direction and directions are both given"),
        ({"gc_after_trial": True}, r"gc_after_trial cannot be done.*call gc.collect\(\)"),
        ({"callbacks": print}, "callbacks cannot be"),
        ({"catch": ("ValueError",)}, "catch cannot be"),
        ({"sampler": {"multivariate": True}}, "sampler cannot be .*give a name, or a mapping"),
        ({"sampler": "TPESampler2"}, "there is no sampler 'TPESampler2' .did you mean 'TPESampler'"),
        ({"sampler": {"name": "tpe", "multivariat": True}}, "TPESampler has no option 'multivariat' .did you mean"),
        ({"sampler": {"name": "GridSampler"}}, "the sampler GridSampler cannot be made"),
        ({"sampler": "BaseSampler"}, "there is no sampler 'BaseSampler'"),
        ({"pruner": {"name": "percentile", "percentile": 500}}, "the pruner PercentilePruner cannot be made"),
        ({"sampler": "nowhere.py:S"}, "there is no file 'nowhere.py'"),
    ],
)
def test_what_is_refused_is_said_in_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ht.SpecError, match=said):
        run(square, **{"n_trials": 1, **given})
    assert not Path("hydra_tune.db").exists()


def test_samplers_and_pruners_by_name_with_options(tmp_path: Path) -> None:
    classes = [each for each in optuna.samplers.__all__ if each.endswith("Sampler") and not each.startswith("Base")]
    options: dict[str, dict[str, Any]] = {
        "GridSampler": {"search_space": {"x": [0, 1]}},
        "PartialFixedSampler": {"fixed_params": {"x": 1}, "base_sampler": {"name": "tpe", "n_startup_trials": 3}},
    }
    for name in classes:
        assert type(make_sampler({"name": name, **options.get(name, {})}, seed=1)).__name__ == name
    needs: dict[str, dict[str, Any]] = {
        "PercentilePruner": {"percentile": 10.0}, "ThresholdPruner": {"upper": 1.0},
        "PatientPruner": {"wrapped_pruner": "median", "patience": 2},
    }  # fmt: skip
    for name in optuna.pruners.__all__[1:]:
        assert type(make_pruner({"name": name, **needs.get(name, {})})).__name__ == name
    tuned = make_sampler({"name": "tpe", "multivariate": True, "n_startup_trials": 2}, seed=5)
    assert isinstance(tuned, optuna.samplers.TPESampler)
    assert (tuned._multivariate, tuned._n_startup_trials) == (True, 2)
    (tmp_path / "mine.py").write_text(
        "import optuna\nclass Mine(optuna.samplers.RandomSampler):\n"
        "    def __init__(self, bias, seed=None):\n        super().__init__(seed)\n        self.bias = (bias, seed)\n"
    )
    assert make_sampler({"name": f"{tmp_path}/mine.py:Mine", "bias": 2}, seed=7).bias == (2, 7)  # type: ignore[attr-defined]
    with pytest.raises(ht.SpecError, match="give a subclass of optuna's BasePruner"):
        make_pruner({"name": f"{tmp_path}/mine.py:Mine", "bias": 2})


def test_auto_changes_its_method_with_the_trials() -> None:
    sampler = AutoSampler(seed=0)
    numbers = {"x": optuna.distributions.FloatDistribution(0, 1), "y": optuna.distributions.FloatDistribution(0, 1)}
    for directions, expected in ((["minimize"], "CmaEsSampler"), (["minimize"] * 2, "NSGAIISampler")):
        study = optuna.create_study(directions=directions, sampler=sampler)
        trial = optuna.create_trial(
            params={"x": 0.5, "y": 0.5}, distributions=numbers, values=[1.0] * len(directions)
        )  # fmt: skip
        assert type(sampler.choose(study)).__name__ == "TPESampler"
        study.add_trials([trial] * MANY)
        assert type(sampler.choose(study)).__name__ == expected
        asked = study.ask(numbers)
        study.tell(asked, [0.0] * len(directions))


def test_a_resumed_study_without_names_of_metrics_goes_on(tmp_path: Path) -> None:
    """The study is plain Optuna's; only the number of its objectives is known."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/x.db")
    study = optuna.create_study(study_name="s", storage=storage, directions=["minimize", "maximize"])
    study.optimize(lambda trial: (square(trial), 1.0), n_trials=2)
    storage.remove_session()
    storage.engine.dispose()
    options: dict[str, Any] = {"study": "s", "storage": f"sqlite:///{tmp_path}/x.db", "trials": 3}
    with pytest.raises(ht.SpecError, match="to minimize value_0, maximize value_1, not to minimize value_0"):
        run(square, resume=True, **options)
    more = run(lambda trial: (square(trial), 2.0), directions=["minimize", "maximize"], load_if_exists=True, **options)
    assert [record.values[1] for record in more.trials] == [1.0, 1.0, 2.0]
    with pytest.raises(ht.InputError, match="several objectives has no single best parameters"):
        _ = more.best_params
    assert more.best_trial.values is not None


def test_the_result_can_be_written() -> None:
    result = run(square, n_trials=2, sampler=optuna.samplers.RandomSampler(seed=1))
    result.study.enqueue_trial({"x": 0.5})
    result.study.set_user_attr("said", "hello")
    result.study.optimize(square, n_trials=2)
    trial = result.study.ask()
    result.study.tell(trial, trial.suggest_float("x", -1, 1))
    assert isinstance(result.study.sampler, optuna.samplers.RandomSampler)
    assert [record.state for record in result.trials] == ["COMPLETE"] * 5
    assert result.trials[2].params == {"x": 0.5}
    more = run(square, trials=6, study=result.study.study_name, resume=True)
    assert len(more.trials) == 6
    assert more.study.user_attrs == {"said": "hello"}


def test_the_best_of_equal_trials_is_the_same_live_and_reopened() -> None:
    seen: list[int] = []

    def meeting(trial: optuna.Trial) -> float:
        if trial.number == 0:
            wait_for(lambda: trial.study.trials[1].state.is_finished(), "the second trial, which ends first")
        return -math.inf

    result = ht.search(
        meeting, trials=2, devices="2xcpu", progress=False,
        callbacks=[lambda study, trial: seen.append(study.best_trial.number)],
    )  # fmt: skip
    assert seen == [1, 0]
    assert result.study.best_trial.number == result.best_trial.number == 0


class Layer:
    """A choice that no database can hold."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __repr__(self) -> str:
        return f"Layer({self.width})"


def choose(trial: optuna.Trial) -> float:
    wide, narrow = Layer(8), Layer(2)
    chosen = trial.suggest_categorical("layer", [narrow, wide])
    sizes = trial.suggest_categorical("sizes", [(1, 2), (3,)])
    assert trial.params["layer"].width == chosen.width
    assert isinstance(sizes, tuple)
    return float(chosen.width + len(sizes))


def test_choices_may_be_objects_and_tuples() -> None:
    result = run(choose, n_trials=6, enqueue=[{"sizes": (3,)}], sampler="random", seed=1)
    assert {record.params["layer"] for record in result.trials} == {"Layer(2)", "Layer(8)"}
    assert result.trials[0].params["sizes"] == [3]
    assert all(
        record.value == {"Layer(2)": 2, "Layer(8)": 8}[record.params["layer"]] + len(record.params["sizes"])
        for record in result.trials
    )


OTHERS = """
import optuna, pathlib, time
optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.load_study(study_name="s", storage="sqlite:///hydra_tune.db")
own, left = study.ask(), study.ask()
study.enqueue_trial({"x": 0.25}, user_attrs={"by": "another process"})
own.suggest_float("x", -1, 1)
study.tell(own, 7.0)
study.tell(0, 5.0)
study.set_user_attr("said", "hello")
study.enqueue_trial({"x": 0.75})
print(own.number, left.number)
"""


def written_trials(file: str) -> int:
    """Count the trials in an SQLite file; a search's own view has those too that it has not written yet."""
    with contextlib.closing(sqlite3.connect(file)) as database:
        return int(database.execute("SELECT COUNT(*) FROM trials").fetchone()[0])


def test_trials_of_another_process_are_taken_in(tmp_path: Path) -> None:
    """A script asks, tells and enqueues while a search runs; of a trial in flight it tells the result."""
    (tmp_path / "others.py").write_text(OTHERS)

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", -1, 1)
        if trial.number == 0:
            trial.report(0.0, 0)
            wait_for(lambda: written_trials("hydra_tune.db"), "the trial in the database")
            done = subprocess.run([sys.executable, "others.py"], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            wait_for(trial.should_prune, "the end that the script told")
            raise optuna.TrialPruned
        return x

    seen: list[str] = []
    result = run(objective, trials=6, study="s", callbacks=[lambda study, trial: seen.append(trial.state.name)])
    trials = result.study.trials
    assert trials[0].value == 5.0, "as told from outside"
    assert [trial.state.name for trial in trials].count("COMPLETE") == 6, "those told from outside count"
    assert [trial.params["x"] for trial in trials if "by" in trial.user_attrs] == [0.25]
    assert 0.75 in [trial.params.get("x") for trial in trials]
    assert [trial.number for trial in trials] == list(range(7))
    running = [trial for trial in trials if trial.state is TrialState.RUNNING]
    assert len(running) == 1, "the trial that the script asked for and left is the script's"
    assert result.study.user_attrs == {"said": "hello"}
    assert len(seen) == 5, "all but the one that the script asked for and told"
    assert result.trials[0].state == "COMPLETE"
    more = run(objective, trials=7, study="s", resume=True)
    assert more.study.trials[running[0].number].state is TrialState.RUNNING
