"""Greedy selection, scores, and pruning by share: pure functions."""

from __future__ import annotations

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.automl.ensemble import average, select
from hydra_tune.automl.scores import SCORES, score_for
from hydra_tune.automl.state import parse_seconds
from hydra_tune.coordinator.pruning import SharePruner, best_until, passes, steps_at
from hydra_tune.coordinator.sampling import make_pruner
from hydra_tune.core.errors import SpecError

RMSE, R2 = score_for("regression"), score_for("regression", "r2")


@pytest.mark.smoke
def test_two_models_with_opposite_errors_are_averaged():
    truth = np.linspace(0, 1, 50)
    wrong = {0: truth + 0.3, 1: truth - 0.3, 2: truth + 2.0}
    weights = select(truth, wrong, RMSE, RMSE)
    assert weights == {0: 0.5, 1: 0.5}
    assert average(wrong, weights) == pytest.approx(truth)


def test_one_model_stays_alone_where_others_do_not_help():
    truth = np.linspace(0, 1, 50)
    assert select(truth, {7: truth, 8: truth + 1}, RMSE, RMSE) == {7: 1.0}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["binary", "multiclass", "regression"]), st.integers(0, 2))
def test_an_ensemble_is_never_worse_than_its_best_model(seed, task, metric):
    random = np.random.default_rng(seed)
    score = SCORES[task][metric]
    if task == "regression":
        truth = random.normal(size=30)
        predictions = {i: truth + random.normal(size=30) for i in range(6)}
    else:
        classes = 2 if task == "binary" else 3
        truth = np.arange(30) % classes
        predictions = {i: random.dirichlet(np.ones(classes), size=30) for i in range(6)}
    weights = select(truth, predictions, score, SCORES[task][0 if task == "regression" else -3])
    assert sum(weights.values()) == pytest.approx(1)
    best = min(score.loss(truth, predicted) for predicted in predictions.values())
    assert score.loss(truth, average(predictions, weights)) <= best + 1e-9


def test_scores_are_those_of_scikit_learn():
    from sklearn import metrics

    random = np.random.default_rng(0)
    truth, predicted = np.arange(60) % 3, random.dirichlet(np.ones(3), size=60)
    found = {score.name: score(truth, predicted) for score in SCORES["multiclass"]}
    assert found == pytest.approx({
        "accuracy": metrics.accuracy_score(truth, predicted.argmax(1)),
        "log_loss": metrics.log_loss(truth, predicted),
        "balanced_accuracy": metrics.balanced_accuracy_score(truth, predicted.argmax(1)),
        "f1": metrics.f1_score(truth, predicted.argmax(1), average="macro"),
    })  # fmt: skip
    numbers, guesses = random.normal(size=(2, 60))
    assert R2(numbers, guesses) == pytest.approx(metrics.r2_score(numbers, guesses))
    with pytest.raises(SpecError, match="did you mean 'r2'"):
        score_for("regression", "r_2")
    with pytest.raises(SpecError, match="both classes"):
        score_for("binary")(np.zeros(3, dtype=int), np.full((3, 2), 0.5))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("1h30m", 5400), ("2 min", 120), (45, 45), ("60", 60), ("1.5m", 90)],
)
def test_times(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "10x", "-5m", "1", 0, float("nan"), True, "10m later"])
def test_no_times(text):
    with pytest.raises(SpecError, match="time cannot be"):
        parse_seconds(text)


class TestSharePruner:
    def test_a_third_passes_and_the_first_three_always(self):
        assert passes(9.0, [])
        assert passes(9.0, [1.0, 2.0])
        assert not passes(9.0, [1.0, 2.0, 3.0])
        assert passes(2.5, [float(i) for i in range(12)])
        assert not passes(3.5, [float(i) for i in range(12)])

    def test_trials_are_compared_after_equal_shares_of_their_own_epochs(self):
        study = optuna.create_study(pruner=make_pruner("share"))
        for value in (1.0, 2.0, 3.0):
            trial = study.ask()
            trial.set_user_attr("epochs", 80)
            for epoch in range(80):
                # Bad until three eighths of its training; good in the end.
                trial.report(value if epoch >= 30 else 10.0 + value, epoch)
            study.tell(trial, value)
        short = study.ask()
        short.set_user_attr("epochs", 8)
        short.report(12.5, 0)  # at an eighth: the others stood at 11, 12 and 13 there
        assert not short.should_prune()
        short.report(12.4, 1)  # at a quarter
        assert not short.should_prune()
        short.report(12.4, 2)  # at no rung
        assert not short.should_prune()
        short.report(12.4, 3)  # at a half: the others stood at 1, 2 and 3
        assert short.should_prune()

    def test_a_trial_without_a_number_of_epochs_or_exempt_goes_on(self):
        study = optuna.create_study(pruner=SharePruner())
        trial = study.ask()
        trial.report(1.0, 0)
        assert not trial.should_prune()
        assert steps_at(1 / 8, 4) == 1
        assert best_until({0: 3.0, 1: 2.0, 2: 1.0}, 2, 1.0) == 2.0
        assert best_until({0: 3.0}, 2, 1.0) is None
