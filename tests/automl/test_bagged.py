"""The families for tables: folds are trained side by side and never learn from each other's rows."""

from __future__ import annotations

import copy

import numpy as np
import optuna
import pytest
import torch

from hydra_tune.automl.build import FitBuild, FitPlan, make_model, params_of, scheduled, step_seconds
from hydra_tune.automl.portfolio import families_for, first_trials
from hydra_tune.automl.prepared import prepare
from hydra_tune.automl.reading import Table, read_table
from hydra_tune.coordinator.sampling import make_sampler
from hydra_tune.core.errors import SpecError
from hydra_tune.search_spaces.bagged import BaggedDropout
from hydra_tune.search_spaces.bagged_objectives import BaggedLoss, answers, bagged_metrics, own_answers, taught
from hydra_tune.search_spaces.distributions import contains
from hydra_tune.search_spaces.families import FAMILIES, family
from hydra_tune.search_spaces.table import TargetScale
from tests.automl.tables import line, mixed

TABULAR = ("linear", "tabular_mlp", "tabular_resnet", "ft_transformer")


def build_for(source, target, tmp_path, objective, families=TABULAR, **options):
    ready = prepare(read_table(source), target, **options)[0]
    ready.save(tmp_path)
    return FitBuild(str(tmp_path), FitPlan(families, objective))


def some_params(build, name, number=0):
    """A random assignment of one family."""
    study = optuna.create_study(sampler=make_sampler("random", seed=5))
    for _ in range(number + 1):
        trial = study.ask(fixed_distributions=None)
    space = build._family_space(name)
    return space.suggest(trial)


def test_every_family_for_tables_is_listed_as_one():
    assert tuple(name for name, each in FAMILIES.items() if "table" in each.kinds) == TABULAR


@pytest.mark.parametrize("name", TABULAR)
def test_a_fold_learns_nothing_from_its_own_rows(name, tmp_path):
    """The gradient of a fold's weights is the same whatever the targets of its own rows are."""
    build = build_for(mixed(60), "bought", tmp_path, "log_loss", folds=3)
    torch.manual_seed(0)
    model = make_model(family(name), some_params(build, name), build.data).eval()
    loss = BaggedLoss("classification", build.prepared.scale)
    inputs, targets = build.prepared.training_rows().tensors
    changed = targets.clone()
    own = targets[:, 2] == 1
    changed[own, 0] = 1 - changed[own, 0]

    def gradients(wanted):
        model.zero_grad()
        loss(model(inputs), wanted).backward()
        return [p.grad.clone() for p in model.parameters()]

    folds_differ = [False, False, False]
    for one, other in zip(gradients(targets), gradients(changed), strict=True):
        per_fold = one.shape[0] // 3
        for fold in range(3):
            same = torch.allclose(one[fold * per_fold :][:per_fold], other[fold * per_fold :][:per_fold], atol=1e-7)
            folds_differ[fold] |= not same
    assert folds_differ == [True, False, True]


@pytest.mark.parametrize("name", TABULAR)
@pytest.mark.parametrize("target", ["bought", "y"])
def test_each_family_learns(name, target, tmp_path):
    frame = mixed(80) if target == "bought" else line()
    build = build_for(frame, target, tmp_path, "log_loss" if target == "bought" else "mse", folds=4)
    for number in range(2):
        torch.manual_seed(0)
        made = scheduled(build.candidate(family(name), some_params(build, name, number)), 20)
        inputs, targets = (tensor[: len(frame)] for tensor in made.train.tensors)
        optimizer = made.optimizer(made.model.parameters())
        before = made.loss(made.model(inputs), targets).item()
        for _ in range(25):
            optimizer.zero_grad()
            made.loss(made.model(inputs), targets).backward()
            optimizer.step()
        assert made.loss(made.model(inputs), targets).item() < before
        outputs = made.model.eval()(made.valid.tensors[0])
        assert outputs.shape[:2] == (len(frame), 4)
        assert all(isinstance(metric(outputs, made.valid.tensors[1]), float) for metric in made.metrics.values())
        assert step_seconds(made) > 0


@pytest.mark.parametrize("name", TABULAR)
def test_models_can_be_captured(name, tmp_path):
    build = build_for(mixed(40), "bought", tmp_path, "log_loss", folds=2)
    model = make_model(family(name), some_params(build, name), build.data).eval()
    inputs = build.data.train.tensors[0][:4]
    batch = torch.export.Dim("batch", min=2, max=4096)
    exported = torch.export.export(model, (inputs,), dynamic_shapes=({0: batch},)).module()
    more = build.data.train.tensors[0][:9]
    assert torch.allclose(exported(more), model(more), atol=1e-5)


def test_images_go_to_convolutions_and_tables_of_categories_alone_work(tmp_path):
    random = np.random.default_rng(0)
    arrays = {"images": random.random((40, 8, 8)), "y": np.arange(40) % 4}
    pictures = build_for(Table("t", arrays=arrays), "y", tmp_path, "log_loss", families=("linear", "resnet"))
    assert families_for(pictures.prepared) == ("linear", "resnet", "tabular_mlp")
    for trial in first_trials(pictures.plan.families, pictures.space):
        kind, params = params_of(pictures.space.suggest(asked(trial)))
        model = make_model(kind, params, pictures.data)
        assert model(pictures.data.train.tensors[0]).shape == (len(pictures.data.train), 1, 1, 4)
    only = mixed(60)[["city", "bought"]].fillna("?")
    build = build_for(only, "bought", tmp_path, "log_loss")
    assert build.prepared.layout.numbers == 0
    for name in TABULAR:
        model = make_model(family(name), some_params(build, name), build.data)
        assert torch.isfinite(model(build.data.train.tensors[0])).all()


def asked(params):
    """A trial with these parameters, the others random."""
    study = optuna.create_study(sampler=make_sampler("random", seed=0))
    study.enqueue_trial(params)
    return study.ask()


def test_the_portfolio_fits_the_space(tmp_path):
    build = build_for(line(), "y", tmp_path, "mse")
    trials = first_trials(build.plan.families, build.space)
    assert trials[0]["family"] == "linear"
    assert {trial["family"] for trial in trials} == set(TABULAR)
    distributions = {param.name: param.distribution for param in build.space.params}
    for trial in trials:
        for name, value in trial.items():
            assert contains(distributions[name], value)
        build(asked(trial))
    with pytest.raises(SpecError, match="no use for the family 'gpt'"):
        families_for(build.prepared, ["gpt"])
    assert families_for(build.prepared, ["ft_transformer"]) == ("linear", "ft_transformer")


def test_losses_and_metrics_are_means_over_rows(tmp_path):
    """Of any split into batches, weighted by rows."""
    torch.manual_seed(0)
    outputs = torch.randn(12, 3, 2, 4)
    targets = torch.stack([torch.arange(12) % 4, torch.zeros(12), torch.arange(12) % 3, torch.zeros(12)], dim=1)
    for judged in (0.0, 1.0):
        targets[:, 3] = judged
        functions = [BaggedLoss("classification", TargetScale(), 0.1)]
        functions += bagged_metrics("classification", TargetScale()).values()
        for function in functions:
            whole = float(function(outputs, targets))
            parts = 5 * float(function(outputs[:5], targets[:5])) + 7 * float(function(outputs[5:], targets[5:]))
            assert parts / 12 == pytest.approx(whole, abs=1e-6)
    assert taught(targets[:3], 3).tolist() == np.eye(3).tolist()
    said = answers(outputs, "classification", TargetScale())
    assert torch.equal(own_answers(said, targets)[4], said[4, 1])


def test_folds_drop_the_same_and_keep_their_mean():
    torch.manual_seed(0)
    dropout, x = BaggedDropout(0.25), torch.rand(3, 2, 500, 40) + 1
    dropped = dropout(x)
    gone = dropped == 0
    assert torch.equal(gone[0], gone[1])
    assert torch.equal(gone[0], gone[2])
    assert float(gone[0].float().mean()) == pytest.approx(0.25, abs=0.01)
    assert torch.allclose(dropped[~gone], x[~gone] / 0.75)
    assert not torch.equal(dropout(x) == 0, gone), "each step has a mask of its own"
    assert torch.equal(dropout.eval()(x), x)
    assert torch.equal(BaggedDropout(0.0)(x), x)


def test_epochs_follow_the_time_of_a_trial(tmp_path):
    build = build_for(line(), "y", tmp_path, "mse")
    trial = asked({"family": "tabular_mlp"})
    whole = build(trial).epochs
    assert trial.user_attrs == {"epochs": whole}
    short = copy.copy(build)
    short.plan = FitPlan(TABULAR, "mse", trial_seconds=1e-9)
    with pytest.raises(optuna.TrialPruned):
        short(asked({"family": "tabular_mlp"}))
    ended = copy.copy(build)
    ended.plan = FitPlan(TABULAR, "mse", epochs=((3, 10),))
    assert ended(asked({"family": "tabular_mlp"})).epochs == 3
