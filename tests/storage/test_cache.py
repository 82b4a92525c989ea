"""The cache in memory: order, states, the best trial; trials handed out never change."""

import random

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from hydra_tune.storage.cache import Cache, CachedStudy, replaced
from hydra_tune.storage.rows import StudyRow


def empty_study(*directions: StudyDirection) -> CachedStudy:
    return CachedStudy(StudyRow(1, "s", list(directions or [StudyDirection.MINIMIZE]), {}, {}))


def trial(number: int, state: TrialState = TrialState.COMPLETE, value: float | None = 0.0) -> FrozenTrial:
    made = create_trial(state=state, value=value if state == TrialState.COMPLETE else None)
    made.number = made._trial_id = number
    return made


def test_trials_are_in_order_whatever_the_order_they_came_in():
    study = empty_study()
    numbers = list(range(50))
    random.Random(0).shuffle(numbers)
    for number in numbers:
        study.put(trial(number, random.Random(number).choice(list(TrialState))))
    assert [t.number for t in study.trials()] == list(range(50))
    for state in TrialState:
        assert study.trials((state,)) == [t for t in study.trials() if t.state == state]
        assert study.count((state,)) == len(study.trials((state,)))
    chosen = {TrialState.COMPLETE, TrialState.PRUNED}
    assert study.trials(chosen) == [t for t in study.trials() if t.state in chosen]
    assert study.trials(()) == []


def test_a_trial_moves_from_state_to_state():
    study = empty_study()
    study.put(trial(0, TrialState.WAITING))
    study.put(trial(0, TrialState.RUNNING))
    assert study.count(TrialState) == study.count((TrialState.RUNNING,)) == 1
    assert [t.number for t in study.unfinished()] == [0]
    study.put(trial(0))
    assert study.unfinished() == []
    assert study.last_finished is study[0]


@pytest.mark.parametrize(("direction", "best"), [(StudyDirection.MINIMIZE, -1.0), (StudyDirection.MAXIMIZE, 4.0)])
def test_the_best_is_kept(direction: StudyDirection, best: float):
    study = empty_study(direction)
    assert study.best is None
    for number, value in enumerate([3.0, -1.0, 4.0, -1.0, 2.0]):
        study.put(trial(number, value=value))
    study.put(trial(9, TrialState.PRUNED))
    assert study.best is not None
    assert study.best.value == best
    assert study.best.number in (1, 2)


def test_several_objectives_have_no_best():
    study = empty_study(StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE)
    made = create_trial(values=[1.0, 2.0])
    study.put(made)
    assert study.best is None


def test_a_copy_leaves_the_original():
    before = trial(0, TrialState.RUNNING)
    after = replaced(before, state=TrialState.FAIL, user_attrs={"a": 1})
    assert (before.state, before.user_attrs) == (TrialState.RUNNING, {})
    assert (after.state, after.user_attrs, after.number) == (TrialState.FAIL, {"a": 1}, 0)


def test_a_distribution_binds_later_trials():
    study = empty_study()
    first = create_trial(value=0.0, params={"x": 0.5}, distributions={"x": FloatDistribution(0, 1)})
    study.learn_distributions(first)
    study.check_distribution("x", FloatDistribution(0, 5))
    study.check_distribution("y", CategoricalDistribution(["a"]))
    with pytest.raises(ValueError, match="distribution"):
        study.check_distribution("x", CategoricalDistribution(["a"]))


def test_a_trial_is_found_by_both_its_ids():
    cache, study = Cache(), empty_study()
    made = trial(0, TrialState.RUNNING)
    made._trial_id = -5
    cache.put(study, made)
    cache.learn_row_ids({-5: 17})
    assert cache.find(17) == cache.find(-5) == (study, made)
    read_again = trial(0)
    read_again._trial_id = 17
    cache.put(study, read_again)
    assert read_again._trial_id == -5
    assert cache.find(17) == (study, read_again)
    assert study.last_row_id == 17
