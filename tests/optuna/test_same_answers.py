"""The same objectives under plain Optuna and under a search: values, parameters, states and answers are the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna import pruners, samplers
from optuna.trial import FrozenTrial

import hydra_tune as ht
from tests.optuna.cases import CASES, SEVERAL, run_case, run_several

Two = tuple[list[FrozenTrial], list[FrozenTrial]]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    optuna.logging.set_verbosity(before)


def both(objective: Callable[[optuna.Trial], Any], folder: Path, count: int | None, **options: Any) -> Two:
    """The trials of Optuna's database and of a search's, one trial at a time; options that are functions are called."""
    directions = options.pop("directions", ["minimize"])
    first, second = ({name: value() for name, value in options.items()} for _ in range(2))
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder}/optuna.db")
    plain = optuna.create_study(storage=storage, directions=directions, **{"pruner": pruners.NopPruner(), **first})
    plain.optimize(objective, n_trials=count, catch=(Exception,))
    expected = plain.trials
    storage.remove_session()
    storage.engine.dispose()
    storage = f"sqlite:///{folder}/search.db"
    result = ht.search(
        objective, n_trials=count, directions=directions, storage=storage, devices="1xcpu", progress=False, **second
    )
    found = result.study.trials
    result.close()
    return expected, found


@pytest.fixture(scope="module")
def one_value(tmp_path_factory: pytest.TempPathFactory) -> Two:
    return both(run_case, tmp_path_factory.mktemp("one"), len(CASES), sampler=lambda: samplers.TPESampler(seed=7))


@pytest.fixture(scope="module")
def two_values(tmp_path_factory: pytest.TempPathFactory) -> Two:
    return both(
        run_several, tmp_path_factory.mktemp("two"), len(SEVERAL), directions=["minimize", "maximize"],
        sampler=lambda: samplers.NSGAIISampler(seed=7, population_size=4),
    )  # fmt: skip


def shown(trial: FrozenTrial) -> dict[str, Any]:
    """Return a trial without ids and times, as text, because NaN does not equal itself."""
    said = {
        "state": trial.state.name, "values": trial.values, "params": trial.params,
        "attrs": sorted(trial.user_attrs.items()), "reports": trial.intermediate_values,
        "system": {name: value for name, value in trial.system_attrs.items() if not name.startswith("tpe:")},
        "distributions": {name: str(each) for name, each in trial.distributions.items()},
    }  # fmt: skip
    return {name: repr(value) for name, value in said.items()}


@pytest.mark.parametrize("number", range(len(CASES)), ids=[each.__name__ for each in CASES])
def test_one_objective(one_value: Two, number: int) -> None:
    expected, found = one_value
    assert shown(found[number]) == shown(expected[number])


@pytest.mark.parametrize("number", range(len(SEVERAL)), ids=[each.__name__ for each in SEVERAL])
def test_two_objectives(two_values: Two, number: int) -> None:
    expected, found = two_values
    assert shown(found[number]) == shown(expected[number])


def bowl(trial: optuna.Trial) -> float:
    x, y = trial.suggest_float("x", 0, 3, step=1), trial.suggest_int("y", 0, 2)
    for step in range(4):
        trial.report((x - 2) ** 2 + y + 1 / (step + 1) + (trial.number % 3), step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return (x - 2) ** 2 + y


GRID = {"x": [0.0, 1.0, 2.0], "y": [0, 1]}
SAMPLERS: dict[str, Callable[[], samplers.BaseSampler]] = {
    "random": lambda: samplers.RandomSampler(seed=3),
    "multivariate_tpe": lambda: samplers.TPESampler(seed=3, multivariate=True, group=True, n_startup_trials=4),
    "cmaes": lambda: samplers.CmaEsSampler(seed=3, n_startup_trials=2),
    "nsgaii": lambda: samplers.NSGAIISampler(seed=3, population_size=4),
    "nsgaiii": lambda: samplers.NSGAIIISampler(seed=3, population_size=4),
    "qmc": lambda: samplers.QMCSampler(seed=3, scramble=True),
    "grid": lambda: samplers.GridSampler(GRID, seed=3),
    "brute_force": lambda: samplers.BruteForceSampler(seed=3),
    "partial_fixed": lambda: samplers.PartialFixedSampler({"y": 1}, samplers.RandomSampler(seed=3)),
}
PRUNERS: dict[str, Callable[[], pruners.BasePruner]] = {
    "median": lambda: pruners.MedianPruner(n_startup_trials=2),
    "percentile": lambda: pruners.PercentilePruner(40.0, n_startup_trials=2),
    "successive_halving": lambda: pruners.SuccessiveHalvingPruner(),
    "hyperband": lambda: pruners.HyperbandPruner(max_resource=4),
    "threshold": lambda: pruners.ThresholdPruner(upper=5.0),
    "patient": lambda: pruners.PatientPruner(pruners.MedianPruner(n_startup_trials=2), patience=1),
    "wilcoxon": lambda: pruners.WilcoxonPruner(),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler(name: str, tmp_path: Path) -> None:
    count = None if name in ("grid", "brute_force") else 9
    expected, found = both(bowl, tmp_path, count, sampler=SAMPLERS[name])
    assert [(trial.params, trial.values) for trial in found] == [(trial.params, trial.values) for trial in expected]


@pytest.mark.parametrize("name", PRUNERS)
def test_every_pruner(name: str, tmp_path: Path) -> None:
    def objective(trial: optuna.Trial) -> float:
        return bowl(trial)

    # A study identifies Hyperband's brackets by its name.
    expected, found = both(objective, tmp_path, 12, sampler=SAMPLERS["random"], pruner=PRUNERS[name],
                           study_name=lambda: "s")  # fmt: skip
    assert [shown(trial) for trial in found] == [shown(trial) for trial in expected]
