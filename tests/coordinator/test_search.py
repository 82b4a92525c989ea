"""Searches end to end through `ht.search`, with real workers and a real database."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

import hydra_tune as ht
from hydra_tune.coordinator.attempts import TrialRunner
from hydra_tune.core.errors import HydraTuneError
from hydra_tune.storage import open_storage
from tests.candidates import build_small, small_candidate
from tests.fault.searches import wait_for


def objective(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", -5, 5)
    kind = trial.suggest_categorical("kind", ["a", "b"])
    n = trial.suggest_int("n", 1, 8, log=True)
    trial.set_user_attr("kind", kind)
    for step in range(3):
        trial.report(x * x + step, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    assert trial.params == {"x": x, "kind": kind, "n": n}
    assert set(trial.distributions) == {"x", "kind", "n"}
    assert trial.user_attrs == {"kind": kind}
    return x * x


@pytest.mark.smoke
def test_an_optuna_objective_runs_unchanged_and_optuna_reads_the_database() -> None:
    result = ht.search(objective, trials=12, study="plain", seed=1, devices="2xcpu", pruner="median", progress=False)
    assert len(result.trials) == 12
    assert result.best_value == min(r.value for r in result.trials if r.state == "COMPLETE")
    assert {r.device for r in result.trials} == {"cpu:0", "cpu:1"}

    study = optuna.load_study(study_name="plain", storage="sqlite:///hydra_tune.db")
    assert study.best_value == result.best_value
    assert study.best_params == result.best_params
    trial = study.best_trial
    assert trial.user_attrs == {"kind": trial.params["kind"]}
    assert trial.intermediate_values == {step: trial.value + step for step in range(3)}
    assert study.metric_names is None
    study._storage.remove_session()
    study._storage._backend.engine.dispose()  # type: ignore[attr-defined]

    frame = result.dataframe()
    assert len(frame) == 12
    assert frame["params_n"].between(1, 8).all()


def run(objective: Any, **options: Any) -> ht.SearchResult:
    return ht.search(objective, devices="2xcpu", progress=False, **options)


def test_trials_is_the_total_and_resuming_goes_on() -> None:
    first = run(objective, trials=4, study="s", seed=3, sampler="random").trials
    with pytest.raises(ht.SpecError, match="study 's' exists already"):
        run(objective, trials=4, study="s")
    again = run(objective, trials=4, study="s", resume=True, sampler="random")
    assert len(again.trials) == 4
    more = run(objective, trials=7, study="s", resume=True, sampler="random")
    assert [r.number for r in more.trials] == list(range(7))
    assert more.trials[:4] == first
    whole = run(objective, trials=7, study="unbroken", seed=3, sampler="random")
    assert [r.params for r in whole.trials] == [r.params for r in more.trials], "the seed is remembered"
    with pytest.raises(ht.InputError, match=r"no study is named 'S' .known: s, unbroken"):
        run(objective, trials=1, study="S", resume=True)


def test_random_parameters_and_training_do_not_depend_on_the_devices() -> None:
    def seen(devices: str, **options: Any) -> list[Any]:
        result = ht.search(build_small, trials=4, seed=9, sampler="random", devices=devices, progress=False, **options)
        return [(r.number, r.params, r.seed, r.value) for r in result.trials]

    assert seen("2xcpu") == seen("2xcpu", concurrency=1) == seen("2xcpu", concurrency=4)


def test_two_objectives() -> None:
    def two(trial: Any) -> tuple[float, float]:
        x = trial.suggest_float("x", 0, 2)
        return x, (x - 1) ** 2

    result = run(two, trials=6, metric=["size", "error"], direction=["minimize", "minimize"], sampler="nsgaii")
    assert all(r.values is not None and len(r.values) == 2 for r in result.trials)
    assert result.best_trial.number in {t.number for t in result.study.best_trials}
    with pytest.raises(ht.InputError, match="several objectives"):
        _ = result.best_value

    candidates = run(build_small, trials=2, metric=["loss", "accuracy"], direction=["minimize", "maximize"])
    assert all(len(r.values) == 2 for r in candidates.trials)


def test_pruning_takes_effect_at_the_next_report_and_frees_the_worker() -> None:
    class EveryOther(optuna.pruners.BasePruner):
        def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
            return trial.number % 2 == 1

    def build(trial: Any) -> ht.Candidate:
        trial.suggest_float("x", 0, 1)
        return small_candidate(epochs=5)

    result = run(build, trials=4, pruner=EveryOther())
    assert [r.state for r in result.trials] == ["COMPLETE", "PRUNED", "COMPLETE", "PRUNED"]
    reports = [len(t.intermediate_values) for t in result.study.trials]
    assert reports == [5, 1, 5, 1]
    for number in (1, 3):
        with pytest.raises(ht.InputError, match="no weights"):
            result.weights(number)


def test_a_timeout_starts_no_more_trials() -> None:
    def slow(trial: Any) -> float:
        import time

        time.sleep(0.2)
        return trial.suggest_float("x", 0, 1)

    result = run(slow, trials=10_000, timeout=3.0)
    assert 0 < len(result.trials) < 100
    assert all(r.state == "COMPLETE" for r in result.trials)


def test_a_search_that_was_short_of_memory_begins_its_next_trial_though_none_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first trial ends only when the second has begun, which is held back once."""
    looks: list[bool] = []

    def is_low() -> bool:
        looks.append(not looks)
        return looks[-1]

    def meeting(trial: optuna.Trial) -> float:
        if trial.number == 1:
            Path("second").touch()
        wait_for(Path("second").exists, "the second trial")
        return float(trial.number)

    monkeypatch.setattr("hydra_tune.coordinator.limits.is_low", is_low)
    monkeypatch.setattr("hydra_tune.coordinator.limits.LOOK_AGAIN_SECONDS", 0.01)
    result = run(meeting, trials=2, strategy="whole")
    assert [(record.state, record.value) for record in result.trials] == [("COMPLETE", 0.0), ("COMPLETE", 1.0)]
    assert looks[:2] == [True, False]


def test_only_the_best_keep_their_weights() -> None:
    result = run(build_small, trials=4, keep_weights=2)
    ranked = sorted(result.trials, key=lambda r: r.value)
    assert all(result.weights(r.number).is_file() for r in ranked[:2])
    for record in ranked[2:]:
        with pytest.raises(ht.InputError, match="keep_weights"):
            result.weights(record.number)
    model = result.best_model()
    assert isinstance(model, torch.nn.Module)
    with pytest.raises(ht.InputError, match="there is no trial 99"):
        result.model(99)


def test_a_search_inside_a_running_event_loop_as_in_a_notebook() -> None:
    async def cell() -> float:
        return run(lambda trial: trial.suggest_float("x", 0, 1), trials=2).best_value

    assert 0 <= asyncio.run(cell()) <= 1


def test_functions_of_a_script_without_a_main_guard(tmp_path: Path) -> None:
    """Workers must not import the script again, and what it defines travels by value."""
    script = tmp_path / "tune me.py"
    script.write_text(
        textwrap.dedent(
            """
            import hydra_tune as ht

            OFFSET = 3

            class Shift:
                def __call__(self, x):
                    return x + OFFSET

            def objective(trial):
                print("a line from the worker")
                return Shift()(trial.suggest_float("x", 0, 1))

            result = ht.search(objective, trials=2, devices="2xcpu")
            print(3 <= result.best_value <= 4)
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "True\n", done.stderr
    assert "a line from the worker" in done.stderr


def test_what_cannot_be_sent_is_built_on_the_device() -> None:
    """A candidate with a lock in its data cannot leave the process that made it: both trials train all the same."""

    def build(trial: Any) -> ht.Candidate:
        import threading

        trial.suggest_float("x", 0, 1)
        candidate = small_candidate()
        candidate.train.lock = threading.Lock()
        return candidate

    result = ht.search(build, trials=3, devices="cpu", progress=False)
    assert [r.state for r in result.trials] == ["COMPLETE"] * 3


def test_memory_seconds_and_strategy_are_recorded() -> None:
    result = run(build_small, trials=1)
    record = result.best_trial
    parameters = sum(p.numel() for p in small_candidate().model.parameters()) * 8
    assert record.strategy == "whole"
    assert record.shards == 1
    # parameters, gradients, two moments, and a batch's activations
    assert 4 * parameters < record.peak_device_bytes < 40 * parameters
    assert 0 < record.seconds < 60


def test_a_budget_too_small_is_said_with_the_bytes_needed() -> None:
    with pytest.raises(ht.SearchFailed):
        run(build_small, trials=1, device_memory="4KB", study="tiny")
    result = ht.SearchResult("sqlite:///hydra_tune.db", "tiny")
    assert result.trials[0].state == "OUT_OF_MEMORY"
    assert "needs" in result.trials[0].error
    assert "3.9 KiB" in result.trials[0].error


NOTEBOOK = """
import asyncio, signal, threading, time, os
import hydra_tune as ht
from hydra_tune.coordinator import search as coordinator, trial_loop

def objective(trial):
    open("on", "w")
    time.sleep(ASLEEP)
    return trial.suggest_float("x", 0, 1)

taken = threading.Event()

class Search(coordinator.Search):
    def _interrupt(self):
        super()._interrupt()
        taken.set()

coordinator.Search = Search
trial_loop.STOP_SECONDS = 10**6  # who waits for the objective waits in vain

def interrupt():
    while not os.path.exists("on"):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
    if TWICE:
        taken.wait()
        os.kill(os.getpid(), signal.SIGINT)

async def cell():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in IPython
    threading.Thread(target=interrupt).start()
    try:
        ht.search(objective, trials=1000, devices="2xcpu", study="n", progress=False)
    except KeyboardInterrupt as error:
        print(error)
        print([t.name for t in threading.enumerate() if "hydra" in t.name])

asyncio.run(cell())
"""


@pytest.mark.parametrize("twice", [False, True])
def test_interrupting_a_notebook_stops_the_search_and_keeps_it_resumable(twice: bool) -> None:
    """Ctrl-C reaches the thread that waits, not the one that searches; the second one does not wait for objectives."""
    program = NOTEBOOK.replace("ASLEEP", "10**6" if twice else "0.3").replace("TWICE", str(twice))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "the search was interrupted; nothing is lost. Go on with ht.search(..., study='n', resume=True)", "[]"
    ], done.stderr  # fmt: skip
    with open_storage("sqlite:///hydra_tune.db", read_only=True) as storage:
        states = {trial.state for trial in storage.get_all_trials(1)}
    assert optuna.trial.TrialState.FAIL not in states


def test_tpe_goes_on_after_a_resume_instead_of_starting_over() -> None:
    def objective(trial: Any) -> float:
        return trial.suggest_float("x", 0, 1)

    run(objective, trials=3, study="t", seed=1)
    result = run(objective, trials=6, study="t", resume=True)
    assert len({record.params["x"] for record in result.trials}) == 6


def test_a_random_validation_set_draws_the_trials_own_numbers() -> None:
    class Noisy(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 20

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            return torch.randn(6, dtype=torch.float64), 0

    def build(trial: Any) -> ht.Candidate:
        trial.suggest_float("x", 0, 1)
        return small_candidate(valid=Noisy())

    def values(concurrency: int) -> list[Any]:
        result = run(build, trials=3, seed=1, sampler="random", concurrency=concurrency)
        return [record.value for record in result.trials]

    assert values(1) == values(3)


def test_checkpoints_of_a_deleted_study_are_not_used() -> None:
    from hydra_tune.training.checkpoint import Checkpoints

    left = Checkpoints(Path("hydra_tune_files/study-1/trial-0.checkpoints"))
    left.save(5, {"nonsense": 1})
    result = run(build_small, trials=1)
    assert result.best_trial.state == "COMPLETE"
    assert not left.directory.exists()


def test_a_database_that_was_moved_keeps_its_files(tmp_path: Path) -> None:
    options: dict[str, Any] = {"study": "m", "devices": "1xcpu", "progress": False}
    (tmp_path / "old").mkdir()
    ht.search(build_small, trials=1, storage="sqlite:///old/x.db", **options).close()
    (tmp_path / "old").rename(tmp_path / "new")
    moved = ht.search(build_small, trials=2, storage="sqlite:///new/x.db", resume=True, **options)
    assert moved.model(0) is not None
    assert len(list((tmp_path / "new" / "x_files").rglob("trial-*.safetensors"))) == 2
    moved.close()


@pytest.mark.usefixtures("own_template")
def test_a_search_within_an_objective() -> None:
    """It starts the program that the worker itself was started with, as a launcher does which is refused."""

    def inner(trial: Any) -> float:
        return float(trial.suggest_float("y", 0, 1))

    def outer(trial: Any) -> float:
        trial.suggest_float("x", 0, 1)
        database = f"sqlite:///inner-{trial.number}.db"
        found = ht.search(inner, trials=2, storage=database, devices="1xcpu", progress=False)
        found.close()
        return float(found.best_value)

    result = ht.search(outer, trials=2, devices="1xcpu", progress=False)
    assert [record.error for record in result.trials] == ["", ""]
    result.close()


def test_a_current_folder_that_is_gone_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = f"sqlite:///{tmp_path}/x.db"
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(HydraTuneError, match="the current folder has been removed"):
        ht.search(build_small, trials=1, storage=storage, progress=False)


def test_files_that_cannot_be_removed_do_not_end_the_search(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(TrialRunner, "tidy", refuse)
    found = ht.search(objective, trials=2, devices="1xcpu")
    assert [trial.state for trial in found.trials] == ["COMPLETE"] * 2
    assert "files of trial 0 could not be removed ([Errno 13] Permission denied)" in capfd.readouterr().err


def test_a_worker_that_is_killed_while_it_imports_the_build_function_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "spec.py").write_text(
        "import os, pathlib\n"
        "if not pathlib.Path('imported').exists():\n"
        "    pathlib.Path('imported').touch()\n"
        "    os.kill(os.getpid(), 9)\n"
        "def build(trial):\n"
        "    return trial.suggest_float('x', 0, 1)\n"
    )
    command = [sys.executable, "-m", "hydra_tune", "search", "spec.py:build", "--trials", "1", "--devices", "1xcpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "COMPLETE" in done.stdout
