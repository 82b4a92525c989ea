"""The declared space: conditions, suggestions, grids, points of the unit cube."""

import pickle

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from hydra_tune.core.errors import SpecError
from hydra_tune.search_spaces import Above, FamilyBuild, OneOf, Param, Space
from hydra_tune.search_spaces.distributions import contains, describe, value_at, values

WIDTH = IntDistribution(8, 16, step=8)
LAYERS = Space(
    (
        Param("depth", IntDistribution(1, 3)),
        Param("width_0", WIDTH),
        Param("width_1", WIDTH, when=Above("depth", 1)),
        Param("width_2", WIDTH, when=Above("depth", 2)),
    )
)
OPTIMIZERS = Space(
    (
        Param("optimizer", CategoricalDistribution(("adam", "sgd"))),
        Param("momentum", CategoricalDistribution((0.5, 0.9)), when=OneOf("optimizer", ("sgd",))),
    )
)
BOTH = Space.choice("family", {"mlp": LAYERS, "linear": OPTIMIZERS})


def test_a_grid_has_each_leaf_of_the_conditional_tree_once():
    grid = LAYERS.grid()
    assert len(grid) == LAYERS.size() == 2 + 4 + 8
    assert len({tuple(sorted(params.items())) for params in grid}) == len(grid)
    for params in grid:
        assert len(params) == 1 + params["depth"]


def test_a_choice_of_spaces_prefixes_names_and_nests_conditions():
    assert BOTH.size() == 14 + 3
    for params in BOTH.grid():
        prefixes = {name.partition(".")[0] for name in params if name != "family"}
        assert prefixes == {params["family"]}
    momentum = {params.get("linear.momentum") for params in BOTH.grid() if params["family"] == "linear"}
    assert momentum == {None, 0.5, 0.9}


def test_suggest_asks_only_for_what_exists():
    trial = optuna.trial.FixedTrial({"depth": 2, "width_0": 8, "width_1": 16, "width_2": 8})
    assert LAYERS.suggest(trial) == {"depth": 2, "width_0": 8, "width_1": 16}


def test_suggest_records_the_declared_distributions():
    trial = optuna.create_study().ask()
    space = Space(
        (
            Param("a", FloatDistribution(0.1, 0.5, step=0.1)),
            Param("b", FloatDistribution(1e-4, 1.0, log=True)),
            Param("c", IntDistribution(1, 100, log=True)),
            Param("d", CategoricalDistribution(("x", None, True))),
        )
    )
    params = space.suggest(trial)
    assert trial.params == params
    assert trial.distributions == {param.name: param.distribution for param in space.params}


@given(st.lists(st.floats(0, 1), min_size=7, max_size=7))
def test_a_point_of_the_unit_cube_is_a_leaf_of_the_grid(point):
    assert BOTH.at(point) in BOTH.grid()


@given(st.data())
def test_a_point_of_a_family_lies_in_its_distributions(data):
    space = FamilyBuild(("mlp", "resnet", "transformer", "lstm")).space
    point = data.draw(st.lists(st.floats(0, 1), min_size=len(space.params), max_size=len(space.params)))
    params = space.at(point)
    declared = {param.name: param for param in space.params}
    assert all(contains(declared[name].distribution, value) for name, value in params.items())
    assert params == space.suggest(optuna.trial.FixedTrial(params))


def test_at_refuses_a_point_of_another_dimension():
    with pytest.raises(ValueError, match="4 coordinates, not 1"):
        LAYERS.at([0.5])


@pytest.mark.parametrize(
    "distribution",
    [
        IntDistribution(3, 11, step=4),
        IntDistribution(1, 9, log=True),
        FloatDistribution(0.1, 0.7, step=0.1),
        FloatDistribution(0.5, 0.5),
        CategoricalDistribution(("a", 1, None, False)),
    ],
)
def test_fractions_reach_every_value_and_no_other(distribution):
    reached = [value_at(distribution, i / 1000) for i in range(1001)]
    listed = values(distribution)
    assert list(dict.fromkeys(reached)) == listed
    assert all(contains(distribution, value) for value in listed)
    assert not contains(distribution, "no such value")


def test_stepped_floats_are_as_one_would_write_them():
    assert values(FloatDistribution(0.1, 0.5, step=0.1)) == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_descriptions_are_short():
    assert describe(FloatDistribution(1e-4, 0.1, log=True)) == "0.0001 .. 0.1 (log)"
    assert describe(IntDistribution(8, 64, step=8)) == "8 .. 64 (step 8)"
    assert describe(IntDistribution(1, 3)) == "1 .. 3"
    assert describe(CategoricalDistribution(("relu", "gelu"))) == "relu | gelu"


def test_a_grid_names_all_endless_ranges_and_the_fix():
    space = Space((Param("lr", FloatDistribution(0.001, 0.1, log=True)), Param("units", IntDistribution(1, 1000))))
    with pytest.raises(SpecError) as refused:
        space.grid()
    assert "'lr' (0.001 .. 0.1 (log)), 'units' (1 .. 1000)" in refused.value.message
    assert "lr: [0.001, 0.01, 0.1]" in refused.value.hint
    narrowed = space.narrowed({"lr": [0.001, 0.1], "units": [1, 10, 100]})
    assert narrowed.size() == 6


def test_a_huge_grid_is_counted_but_not_listed():
    space = Space(tuple(Param(f"x_{i}", IntDistribution(0, 9)) for i in range(12)))
    assert space.size() == 10**12
    with pytest.raises(SpecError, match="1,000,000,000,000 assignments"):
        space.grid()


def test_declaration_mistakes():
    with pytest.raises(SpecError, match="'a' is declared twice"):
        Space((Param("a", WIDTH), Param("a", WIDTH)))
    with pytest.raises(SpecError, match="'b', which is not declared yet"):
        Space((Param("a", WIDTH, when=Above("b", 1)), Param("b", WIDTH)))


def test_a_space_survives_pickling():
    assert pickle.loads(pickle.dumps(BOTH)) == BOTH
