"""Overrides: what they may narrow and widen, and the message for each mistake."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from hydra_tune.core.errors import SpecError
from hydra_tune.search_spaces import Above, FamilyBuild, Param, Space
from hydra_tune.search_spaces.distributions import contains, value_at

SPACE = Space(
    (
        Param("depth", IntDistribution(1, 3)),
        *(
            Param(f"width_{i}", IntDistribution(32, 256, step=32), when=Above("depth", i), limits=(1, 4096))
            for i in range(3)
        ),
        Param("activation", CategoricalDistribution(("relu", "gelu"))),
        Param("lr", FloatDistribution(1e-3, 1e-1, log=True), limits=(1e-6, 1.0)),
        Param("dropout", FloatDistribution(0.0, 0.5)),
        Param("batch", CategoricalDistribution((16, 32)), limits=(1, 1000)),
    )
)


def narrowed(**changes):
    return {param.name: param.distribution for param in SPACE.narrowed(changes).params}


def test_a_fixed_value_a_list_and_a_range():
    got = narrowed(activation="gelu", lr=0.01, dropout=[0.0, 0.25], depth={"high": 2})
    assert got["activation"] == CategoricalDistribution(("gelu",))
    assert got["lr"] == FloatDistribution(0.01, 0.01)
    assert got["dropout"] == CategoricalDistribution((0.0, 0.25))
    assert got["depth"] == IntDistribution(1, 2)


def test_parameters_that_can_no_longer_exist_are_left_out():
    assert "width_2" not in narrowed(depth=[1, 2])
    assert "width_1" not in narrowed(depth=1)


def test_a_stem_stands_for_all_its_numbers_and_the_exact_name_wins():
    got = narrowed(width=64, width_1=[32, 128])
    assert got["width_0"] == got["width_2"] == IntDistribution(64, 64)
    assert got["width_1"] == CategoricalDistribution((32, 128))


def test_limits_may_be_reached_beyond_the_declared_range():
    got = narrowed(width=4096, lr={"low": 1e-5}, batch=[100, 200])
    assert got["width_0"] == IntDistribution(4096, 4096)
    assert got["lr"] == FloatDistribution(1e-5, 1e-1, log=True)
    assert got["batch"] == CategoricalDistribution((100, 200))


def test_log_and_step_replace_each_other():
    assert narrowed(width={"low": 16, "high": 64, "log": True})["width_0"] == IntDistribution(16, 64, log=True)
    assert narrowed(lr={"low": 0.1, "high": 0.5, "step": 0.1})["lr"] == FloatDistribution(0.1, 0.5, step=0.1)
    assert narrowed(lr={"log": False})["lr"] == FloatDistribution(1e-3, 1e-1)


def test_high_is_lowered_to_a_step_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert narrowed(width={"low": 32, "high": 100})["width_0"] == IntDistribution(32, 96, step=32)
        assert narrowed(dropout={"low": 0.1, "high": 0.35, "step": 0.1})["dropout"].high == 0.3


def test_numbers_that_yaml_reads_as_text_count():
    assert narrowed(lr="1e-3")["lr"] == FloatDistribution(0.001, 0.001)
    assert narrowed(width="64")["width_0"] == IntDistribution(64, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widht": 3}, "override 'widht' is no parameter of this space (did you mean 'width'?"),
        ({3: 3}, "override 3 is no parameter of this space"),
        ({"lr": 2.0}, "override 'lr' cannot be 2 (give a value from 1e-06 to 1)"),
        ({"dropout": 0.9}, "override 'dropout' cannot be 0.9 (give a value from 0 to 0.5)"),
        ({"dropout": [0.1, 0.9]}, "override 'dropout' cannot be 0.9"),
        ({"depth": 2.5}, "override 'depth' cannot be 2.5 (give a whole number"),
        ({"depth": True}, "override 'depth' cannot be True"),
        ({"lr": "fast"}, "override 'lr' cannot be 'fast' (give a number"),
        ({"lr": None}, "override 'lr' cannot be None"),
        ({"lr": float("nan")}, "override 'lr' cannot be nan"),
        ({"lr": "inf"}, "override 'lr' cannot be 'inf'"),
        ({"lr": [[0.1]]}, "override 'lr' cannot be [0.1]"),
        ({"lr": []}, "override 'lr' is an empty list (list values of 0.001 .. 0.1 (log))"),
        ({"lr": [0.1, 0.1]}, "override 'lr' lists 0.1 twice"),
        ({"activation": "rleu"}, "override 'activation' cannot be 'rleu' (did you mean 'relu'?"),
        ({"activation": 1}, "override 'activation' cannot be 1 (known: gelu, relu)"),
        ({"activation": {"low": 1}}, "override 'activation' gives a range for a choice of relu | gelu"),
        ({"depth": {"low": 3, "high": 2}}, "override 'depth' has low 3 above high 2"),
        ({"lr": {"hihg": 1}}, "override 'lr' has the unknown key 'hihg' (did you mean 'high'?"),
        ({"lr": {"log": "yes"}}, "override 'lr' has log 'yes' (give true or false)"),
        ({"lr": {"log": True, "step": 0.1}}, "override 'lr' has both log and step"),
        ({"lr": {"step": 0}}, "override 'lr' has step 0"),
        ({"dropout": {"log": True}}, "override 'dropout' is a log range from 0"),
        ({"width_1": 9000}, "override 'width_1' cannot be 9000"),
        (["lr"], "overrides must map names to values, not ['lr']"),
    ],
)
def test_mistakes(changes, message):
    with pytest.raises(SpecError) as refused:
        SPACE.narrowed(changes)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_in_a_choice_of_families_a_bare_name_stands_for_all():
    space = FamilyBuild(("mlp", "resnet"), overrides={"lr": 0.001, "mlp.lr": 0.002, "family": ["mlp", "resnet"]}).space
    got = {param.name: param.distribution for param in space.params}
    assert got["mlp.lr"] == FloatDistribution(0.002, 0.002)
    assert got["resnet.lr"] == FloatDistribution(0.001, 0.001)


def test_fixing_the_family_leaves_the_others_out():
    space = FamilyBuild(("mlp", "resnet"), overrides={"family": "resnet"}).space
    assert not [param.name for param in space.params if param.name.startswith("mlp.")]


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0), st.floats(0, 1))
def test_a_narrowed_range_gives_only_its_own_values(one, other, u):
    low, high = sorted((one, other))
    distribution = narrowed(lr={"low": low, "high": high})["lr"]
    assert low <= value_at(distribution, u) <= high
    assert contains(distribution, value_at(distribution, u))


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=6, unique=True), st.floats(0, 1))
def test_a_list_gives_only_its_members(widths, u):
    assert value_at(narrowed(width=widths)["width_0"], u) in widths
