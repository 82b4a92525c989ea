"""Samplers and pruners by name; parameters that depend on the seed and the trial's number alone."""

import importlib.util
import pickle
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from hydra_tune.coordinator.sampling import PRUNERS, SAMPLERS, make_pruner, make_sampler, trial_limit
from hydra_tune.core.errors import SpecError
from hydra_tune.search_spaces import Above, Param, Space

SPACE = Space(
    (
        Param("depth", IntDistribution(1, 3)),
        Param("width_0", IntDistribution(8, 32, step=8)),
        Param("width_1", IntDistribution(8, 32, step=8), when=Above("depth", 1)),
        Param("width_2", IntDistribution(8, 32, step=8), when=Above("depth", 2)),
        Param("activation", CategoricalDistribution(("relu", "gelu"))),
    )
)
WITH_RATE = Space((*SPACE.params, Param("lr", FloatDistribution(1e-4, 1e-1, log=True))))


def space_for(name):
    return SPACE if name == "grid" else WITH_RATE


def asked_in_turn(sampler, space, trials=20):
    study = optuna.create_study(sampler=sampler)
    return {trial.number: space.suggest(trial) for trial in (study.ask() for _ in range(trials))}


def asked_interleaved(sampler, space, trials=20):
    """All trials at once, the last one first, and the parameters of each backwards."""
    study = optuna.create_study(sampler=sampler)
    running = [study.ask() for _ in range(trials)]
    in_turn = asked_in_turn(sampler, space, trials)
    for param in reversed(space.params):
        for trial in reversed(running):
            if param.name in in_turn[trial.number]:
                Space((Param(param.name, param.distribution),)).suggest(trial)
    return {trial.number: trial.params for trial in running}


@pytest.mark.parametrize("name", ["random", "grid", "qmc"])
def test_parameters_depend_on_seed_and_number_alone(name):
    space = space_for(name)
    first = asked_in_turn(make_sampler(name, seed=7, space=space), space)
    assert asked_in_turn(make_sampler(name, seed=7, space=space), space) == first
    assert asked_interleaved(make_sampler(name, seed=7, space=space), space) == first
    assert asked_in_turn(make_sampler(name, seed=8, space=space), space) != first


@pytest.mark.parametrize("name", ["random", "grid", "qmc"])
def test_two_processes_agree(name):
    """A sampler that was asked before, pickled and unpickled, still gives the same."""
    space = space_for(name)
    sampler = make_sampler(name, seed=7, space=space)
    everything = asked_in_turn(sampler, space)
    assert asked_in_turn(pickle.loads(pickle.dumps(sampler)), space) == everything


def test_random_draws_are_uniform_and_independent():
    sampler = make_sampler("random", seed=0)
    unit = FloatDistribution(0.0, 1.0)
    draws = np.array(
        [
            [sampler.sample_independent(None, SimpleNamespace(number=n), name, unit) for name in "xy"]
            for n in range(4000)
        ]
    )
    assert abs(draws.mean() - 0.5) < 0.02
    assert abs(draws.var() - 1 / 12) < 0.01
    assert abs(np.corrcoef(draws.T)[0, 1]) < 0.05
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.05


def test_a_random_draw_is_cheap():
    sampler, trial = make_sampler("random", seed=0), SimpleNamespace(number=3)
    rate = FloatDistribution(1e-4, 1e-1, log=True)
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(event) if event in ("call", "c_call") else None)
    try:
        sampler.sample_independent(None, trial, "lr", rate)
    finally:
        sys.setprofile(None)
    assert len(calls) < 30, "a generator of NumPy for each draw takes hundreds"


def test_grid_gives_each_assignment_once_and_says_how_many():
    sampler = make_sampler("grid", seed=1, space=SPACE)
    limit = trial_limit(sampler)
    assert limit == SPACE.size() == 2 * (4 + 16 + 64)
    seen = asked_in_turn(sampler, SPACE, limit)
    leaves = {tuple(sorted(params.items())) for params in SPACE.grid()}
    assert {tuple(sorted(params.items())) for params in seen.values()} == leaves


def test_only_a_grid_has_an_end():
    assert trial_limit(make_sampler("random", seed=0)) is None
    assert trial_limit(make_sampler("qmc", seed=0, space=SPACE)) is None


def test_qmc_fills_a_range_more_evenly_than_chance():
    space = Space((Param("x", FloatDistribution(0.0, 1.0)), Param("y", FloatDistribution(0.0, 1.0))))
    sampler = make_sampler("qmc", seed=0, space=space)
    xs = sorted(sampler.assignment(n)["x"] for n in range(64))
    assert all(i / 64 <= x <= (i + 1) / 64 for i, x in enumerate(xs))


def test_qmc_goes_on_beyond_its_first_points():
    short, long = (make_sampler("qmc", seed=2, space=WITH_RATE) for _ in range(2))
    assert long.assignment(5000)
    assert [short.assignment(n) for n in range(300)] == [long.assignment(n) for n in range(300)]


def test_qmc_without_a_declared_space_is_optunas():
    assert isinstance(make_sampler("qmc", seed=0), optuna.samplers.QMCSampler)


def test_a_space_without_parameters_can_be_sampled():
    for name in ("grid", "qmc"):
        assert asked_in_turn(make_sampler(name, seed=0, space=Space(())), Space(()), 3) == {
            0: {},
            1: {},
            2: {},
        }


@pytest.mark.parametrize("name", ["grid", "qmc"])
def test_a_parameter_that_is_not_declared_is_drawn_at_random(name):
    extra = Space((*SPACE.params, Param("strategy", CategoricalDistribution(("whole", "shard")))))
    got = asked_in_turn(make_sampler(name, seed=7, space=SPACE), extra)
    assert {params["strategy"] for params in got.values()} == {"whole", "shard"}
    again = asked_in_turn(make_sampler(name, seed=7, space=SPACE), extra)
    assert got == again


def test_every_name_makes_a_sampler_that_works_without_warnings():
    for name in SAMPLERS:
        if name == "cmaes" and importlib.util.find_spec("cmaes") is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sampler = make_sampler(name, seed=1, space=space_for(name))
        study = optuna.create_study(sampler=sampler)
        for _ in range(3):
            trial = study.ask()
            study.tell(trial, len(space_for(name).suggest(trial)))


def test_every_name_makes_a_pruner():
    for name in PRUNERS:
        assert isinstance(make_pruner(name), optuna.pruners.BasePruner)
    study = optuna.create_study(pruner=make_pruner("asha"))
    trial = study.ask()
    trial.report(1.0, 1)
    assert not trial.should_prune()


def test_none_is_the_default_and_objects_pass_through():
    assert isinstance(make_sampler(None, seed=1), optuna.samplers.TPESampler)
    assert isinstance(make_pruner(None), optuna.pruners.NopPruner)
    sampler, pruner = optuna.samplers.RandomSampler(), optuna.pruners.MedianPruner()
    assert make_sampler(sampler) is sampler
    assert make_pruner(pruner) is pruner


def test_without_a_seed_studies_differ():
    draws = [asked_in_turn(make_sampler("random"), WITH_RATE, 3) for _ in range(2)]
    assert draws[0] != draws[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_sampler("tpee"), "there is no sampler 'tpee' (did you mean 'tpe'?"),
        (
            lambda: make_sampler(3),
            "there is no sampler 3 (known: BruteForceSampler, CmaEsSampler, GPSampler, GridSampler, NSGAIIISampler, "
            "NSGAIISampler, PartialFixedSampler, QMCSampler, RandomSampler, TPESampler, auto, cmaes, gp, grid, nsgaii, "
            "qmc, random, tpe)",
        ),
        (lambda: make_sampler(optuna.samplers.TPESampler), "there is no sampler <class"),
        (lambda: make_sampler("grid"), "the sampler 'grid' needs a declared space"),
        (lambda: make_sampler("grid", space=WITH_RATE), "a grid cannot go through all values of 'lr'"),
        (lambda: make_pruner("ahsa"), "there is no pruner 'ahsa' (did you mean 'asha'?"),
        (lambda: make_pruner(0.5), "there is no pruner 0.5"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(SpecError) as refused:
        make()
    assert str(refused.value).startswith(message)


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpecError, match="the sampler 'cmaes' needs the package cmaes"):
        make_sampler("cmaes")
    with pytest.raises(SpecError, match="the sampler 'gp' needs the package scipy"):
        make_sampler("gp")
