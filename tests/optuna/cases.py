"""Small objectives, one for each trial, that run under plain Optuna and under a search.

Each says in the attribute `saw` what its trial answered, so that answers are compared too.
"""

from __future__ import annotations

import decimal
import fractions
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
import optuna.terminator
from optuna.trial import TrialState

CASES: list[Callable[[optuna.Trial], Any]] = []
SEVERAL: list[Callable[[optuna.Trial], Any]] = []
"""Those for two objectives."""


def case(function: Callable[[optuna.Trial], Any]) -> Callable[[optuna.Trial], Any]:
    CASES.append(function)
    return function


def returns(name: str, value: Any) -> None:
    def objective(trial: optuna.Trial) -> Any:
        trial.suggest_float("x", 0, 1)
        return value

    objective.__name__ = f"returns_{name}"
    CASES.append(objective)


for name, value in {
    "int": 3, "float": 2.5, "bool": True, "numpy_float": np.float32(0.5), "numpy_int": np.int64(7),
    "numpy_scalar_array": np.array(1.5), "fraction": fractions.Fraction(1, 4), "decimal": decimal.Decimal("0.75"),
    "tuple": (1.0,), "list": [1.25], "range": range(4, 5), "infinity": math.inf, "minus_infinity": -math.inf,
    "nan": math.nan, "nan_in_tuple": (math.nan,), "none": None, "text": "good", "dict": {"a": 1},
    "two": (1.0, 2.0), "empty": [], "object": object(), "complex": 1j, "none_in_tuple": (None,), "nested": ((1.0,),),
}.items():  # fmt: skip
    returns(name, value)


@case
def suggests_every_kind(trial: optuna.Trial) -> float:
    x = trial.suggest_float("kinds_x", -2, 2)
    trial.suggest_float("kinds_log", 1e-5, 1e-1, log=True)
    trial.suggest_float("kinds_step", 0, 1, step=0.25)
    trial.suggest_int("kinds_int", 1, 9)
    trial.suggest_int("kinds_int_log", 1, 1000, log=True)
    trial.suggest_int("kinds_int_step", 2, 10, step=4)
    trial.suggest_categorical("kinds_choice", ["a", None, True, 3, 0.5])
    trial.set_user_attr("saw", [trial.params, sorted(trial.distributions), str(trial.distributions["kinds_int_step"])])
    return x


@case
def suggests_by_old_names(trial: optuna.Trial) -> float:
    trial.suggest_uniform("old_uniform", 0, 1)
    trial.suggest_loguniform("old_log", 1e-3, 1)
    return trial.suggest_discrete_uniform("old_discrete", 0, 1, 0.1)


@case
def suggests_the_same_twice(trial: optuna.Trial) -> float:
    assert trial.suggest_float("twice", 0, 1) == trial.suggest_float("twice", 0, 1)
    trial.set_user_attr("saw", trial.suggest_float("twice", 5, 6) == trial.params["twice"])
    return 0.0


@case
def suggests_another_kind_under_the_same_name(trial: optuna.Trial) -> float:
    trial.suggest_float("kind", 0, 1)
    return trial.suggest_int("kind", 0, 1)


@case
def suggests_other_choices_than_before(trial: optuna.Trial) -> float:
    return float(trial.suggest_categorical("kinds_choice", ["other"]) == "other")


@case
def suggests_one_value(trial: optuna.Trial) -> float:
    trial.suggest_categorical("only", ["this"])
    trial.suggest_int("only_int", 3, 3)
    return trial.suggest_float("only_float", 0.5, 0.5)


@case
def suggests_a_step_that_does_not_divide(trial: optuna.Trial) -> float:
    return trial.suggest_float("odd_step", 0.0, 1.0, step=0.3)


def fails(name: str, call: Callable[[optuna.Trial], Any]) -> None:
    """A call that raises: the error's class and text are what user code sees."""

    def objective(trial: optuna.Trial) -> float:
        try:
            call(trial)
        except Exception as error:
            trial.set_user_attr("saw", type(error).__name__)
            raise
        return 0.0

    objective.__name__ = f"fails_{name}"
    CASES.append(objective)


fails("low_above_high", lambda trial: trial.suggest_float("bad", 1, 0))
fails("log_of_zero", lambda trial: trial.suggest_float("bad", 0, 1, log=True))
fails("log_and_step", lambda trial: trial.suggest_float("bad", 1, 2, log=True, step=0.1))
fails("step_of_zero", lambda trial: trial.suggest_int("bad", 1, 2, step=0))
fails("no_choices", lambda trial: trial.suggest_categorical("bad", []))
fails("low_is_infinite", lambda trial: trial.suggest_float("bad_infinite", 0, math.inf))
fails("report_of_nothing", lambda trial: trial.report(None, 0))
fails("report_of_text", lambda trial: trial.report("high", 0))
fails("report_before_zero", lambda trial: trial.report(1.0, -1))
fails("report_at_no_step", lambda trial: trial.report(1.0, None))
fails("attribute_not_json", lambda trial: trial.set_user_attr("bad", object()))
fails("constraint_nan", lambda trial: trial.set_constraint("bad", math.nan))
fails("constraint_text", lambda trial: trial.set_constraint("bad", "much"))
fails("unknown_method", lambda trial: trial.suggest_everything("bad"))
fails("nested_optimize", lambda trial: trial.study.optimize(lambda _: 0.0, n_trials=1))
fails("own_error", lambda trial: (_ for _ in ()).throw(KeyError("own")))
fails("pruned_with_text", lambda trial: (_ for _ in ()).throw(optuna.TrialPruned("enough")))


@case
def reports(trial: optuna.Trial) -> float:
    for step, value in ((0, 1), (1, "0.5"), (3, np.float64(0.25)), (2.0, math.inf), ("5", -1.0), (6, math.nan)):
        trial.report(value, step)
    trial.report(99.0, 0)
    trial.set_user_attr("saw", trial.should_prune())
    return 1.0


@case
def is_pruned_with_a_value(trial: optuna.Trial) -> float:
    trial.report(4.0, 1)
    trial.report(3.0, 0)
    raise optuna.TrialPruned


@case
def is_pruned_with_nan(trial: optuna.Trial) -> float:
    trial.report(4.0, 0)
    trial.report(math.nan, 1)
    raise optuna.TrialPruned


@case
def is_pruned_without_a_report(trial: optuna.Trial) -> float:
    raise optuna.TrialPruned


@case
def has_attributes(trial: optuna.Trial) -> float:
    trial.set_user_attr("tuple", (1, 2))
    trial.set_user_attr("nested", {"a": [1, None, {"b": 0.5}], "nan": "x"})
    trial.set_user_attr("again", 1)
    trial.set_user_attr("again", 2)
    trial.set_user_attr("", "empty")
    trial.set_user_attr("saw", [trial.user_attrs["again"], trial.user_attrs["nested"], sorted(trial.user_attrs)])
    return 1.0


@case
def has_constraints(trial: optuna.Trial) -> float:
    trial.set_constraint("c", 1)
    trial.set_constraint("d", "-2.5")
    trial.set_constraint("c", 7.0)
    trial.set_user_attr("saw", trial.constraints)
    return -100.0


@case
def sees_itself(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", 0, 1)
    frozen = trial.storage.get_trial(trial._trial_id)
    saw = [isinstance(trial, optuna.Trial), trial.number, frozen.number, frozen.params == {"x": x}, frozen.state.name]
    trial.set_user_attr("saw", [*saw, trial.datetime_start == frozen.datetime_start, sorted(trial.relative_params)])
    return x


@case
def sees_its_study(trial: optuna.Trial) -> float:
    study = trial.study
    saw = [study.direction.name, [each.name for each in study.directions], len(study.trials), study.best_trial.number]
    saw += [study.best_value, study.best_params, len(study.get_trials(states=(TrialState.FAIL,)))]
    saw += [[each.number for each in study.best_trials], list(study.trials_dataframe()), study.user_attrs]
    saw += [study.metric_names]
    trial.set_user_attr("saw", saw)
    return 3.0


@case
def writes_to_its_study(trial: optuna.Trial) -> float:
    trial.study.set_user_attr("written", [trial.number])
    trial.set_user_attr("saw", trial.study.user_attrs)
    trial.study.enqueue_trial({"queued": 0.125}, user_attrs={"queued_by": trial.number})
    return 3.0


@case
def takes_what_was_enqueued(trial: optuna.Trial) -> float:
    trial.set_user_attr("saw", trial.user_attrs)
    return trial.suggest_float("queued", 0, 1)


@case
def ties_with_the_best(trial: optuna.Trial) -> float:
    return -math.inf


@case
def chooses_a_tuple(trial: optuna.Trial) -> float:
    chosen = trial.suggest_categorical("layers", [(8,), (8, 4), [1]])
    trial.set_user_attr("saw", [type(chosen).__name__, chosen == trial.params["layers"], len(chosen)])
    return float(len(chosen))


@case
def scores_folds(trial: optuna.Trial) -> float:
    optuna.terminator.report_cross_validation_scores(trial, [0.5, 0.75])
    return 0.625


def several(name: str, value: Any) -> None:
    def objective(trial: optuna.Trial) -> Any:
        trial.suggest_float("x", 0, 1)
        return value(trial) if callable(value) else value

    objective.__name__ = f"returns_{name}"
    SEVERAL.append(objective)


def pruned(trial: optuna.Trial) -> Any:
    trial.set_user_attr("saw", [each.name for each in trial.study.directions])
    raise optuna.TrialPruned


for name, value in {
    "two": (1.0, 2.0), "list": [0.5, 3.0], "ints": (2, 1), "infinity": (math.inf, 0.0), "nan": (1.0, math.nan),
    "one": 1.0, "one_in_tuple": (1.0,), "three": (1.0, 2.0, 3.0), "none": None, "none_in_tuple": (1.0, None),
    "array": np.array([1.0, 2.0]), "text": "ab", "report": lambda trial: trial.report(1.0, 0),
    "should_prune": lambda trial: trial.should_prune(), "pruned": pruned, "better": (0.0, 9.0),
    "best_trial": lambda trial: trial.study.best_trial, "front": lambda trial: (len(trial.study.best_trials), 5.0),
}.items():  # fmt: skip
    several(name, value)


def run_case(trial: optuna.Trial) -> Any:
    """Run the case of the trial's number."""
    return CASES[trial.number](trial)


def run_several(trial: optuna.Trial) -> Any:
    """Run the case of the trial's number, with two objectives."""
    return SEVERAL[trial.number](trial)
