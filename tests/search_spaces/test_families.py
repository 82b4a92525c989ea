"""Families: each builds, learns and can be captured on every data set that suits it."""

import pickle
import subprocess
import sys

import optuna
import pytest
import torch
from torch.utils.data import TensorDataset

from hydra_tune.coordinator.sampling import make_sampler
from hydra_tune.core.errors import SpecError
from hydra_tune.search_spaces import FAMILIES, FamilyBuild, default_objective, family
from hydra_tune.search_spaces.data import Data, load

SHORT_TEXT = {"name": "text", "characters": 8000, "block": 16}


def series(task):
    """A sequence data set, which is not among the bundled ones: the sum of all numbers, or its sign."""
    steps = torch.randn(200, 6, 3, generator=torch.Generator().manual_seed(0))
    total = steps.sum(dim=(1, 2))
    targets = (total > 0).long() if task == "classification" else (total / total.std())[:, None]
    return Data(
        name=f"series of {task}",
        task=task,
        kind="sequence",
        train=TensorDataset(steps[:160], targets[:160]),
        valid=TensorDataset(steps[160:], targets[160:]),
        input_shape=(6, 3),
        outputs=2 if task == "classification" else 1,
    )


def picture_numbers():
    """A regression on images of two channels and unequal sides."""
    images = torch.randn(120, 2, 6, 10, generator=torch.Generator().manual_seed(0))
    part = TensorDataset(images, images[:, 0].mean(dim=(1, 2), keepdim=True).flatten(1) * 8)
    return Data(
        name="pictures",
        task="regression",
        kind="image",
        train=part,
        valid=part,
        input_shape=(2, 6, 10),
        outputs=1,
    )


SOURCES = [
    "digits",
    "wine",
    "breast_cancer",
    "diabetes",
    SHORT_TEXT,
    series("classification"),
    series("regression"),
    picture_numbers(),
]
PAIRS = [(name, source) for name in FAMILIES for source in SOURCES if FAMILIES[name].suits(load(source))]


def candidate(build, number=0):
    """The candidate of random trial `number`, built as a search does."""
    study = optuna.create_study(sampler=make_sampler("random", seed=0))
    trial = [study.ask() for _ in range(number + 1)][number]
    torch.manual_seed(0)
    return build(trial)


def train(made, steps):
    """A plain loop; returns the loss of the first batches before and after."""
    torch.manual_seed(0)
    inputs, targets = made.train.tensors
    optimizer = made.optimizer(made.model.parameters())
    probe = slice(0, 100)

    def loss_of_probe():
        made.model.eval()
        with torch.no_grad():
            return made.loss(made.model(inputs[probe]), targets[probe]).item()

    before = loss_of_probe()
    made.model.train()
    for _ in range(steps):
        rows = torch.randperm(len(inputs))[: made.batch_size]
        optimizer.zero_grad()
        made.loss(made.model(inputs[rows]), targets[rows]).backward()
        if made.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(made.model.parameters(), made.clip_grad_norm)
        optimizer.step()
    return before, loss_of_probe()


@pytest.mark.parametrize(("name", "source"), PAIRS, ids=[f"{name}-{load(s).name}" for name, s in PAIRS])
def test_each_family_learns_on_each_data_set_that_suits_it(name, source):
    build = FamilyBuild(name, source)
    for number in range(2):
        made = candidate(build, number)
        before, after = train(made, steps=25)
        assert after < before
        inputs, targets = made.valid.tensors
        with torch.no_grad():
            outputs = made.model(inputs)
        assert outputs.shape == (*targets.shape, load(source).outputs) or outputs.shape == targets.shape
        assert all(isinstance(metric(outputs, targets), float) for metric in made.metrics.values())


@pytest.mark.parametrize(("name", "source"), [("mlp", "digits"), ("resnet", "digits"), ("transformer", "digits")])
def test_ninety_percent_of_the_digits_after_a_short_training(name, source):
    overrides = {"optimizer": "adamw", "lr": 0.003, "batch_size": 32, "dropout": 0.1}
    overrides |= {"channels": 16, "stages": 2} if name == "resnet" else {"depth": 2}
    overrides |= {"heads": 4, "head_dim": 16} if name == "transformer" else {}
    made = candidate(FamilyBuild(name, source, overrides))
    train(made, steps=5 * len(made.train) // 32)
    inputs, targets = made.valid.tensors
    assert made.metrics["accuracy"](made.model(inputs), targets) > 0.9


@pytest.mark.filterwarnings("ignore:The tensor attributes self.layer:UserWarning")  # torch.export on nn.LSTM
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("mlp", "digits"),
        ("resnet", "digits"),
        ("transformer", "wine"),
        ("gpt", SHORT_TEXT),
        ("lstm", "digits"),
        ("lstm", SHORT_TEXT),
    ],
)
def test_models_can_be_captured_and_cut(name, source):
    made = candidate(FamilyBuild(name, source))
    model = made.model.eval()
    inputs = made.train.tensors[0][:4]
    expected = model(inputs)
    assert torch.allclose(torch.fx.symbolic_trace(model)(inputs), expected, atol=1e-5)
    batch = torch.export.Dim("batch", min=2, max=4096)
    exported = torch.export.export(model, (inputs,), dynamic_shapes=({0: batch},))
    assert torch.allclose(exported.module()(inputs), expected, atol=1e-5)
    assert torch.allclose(model[2:](model[:2](inputs)), expected, atol=1e-6)


def test_the_gpt_ties_its_output_to_its_embedding():
    model = candidate(FamilyBuild("gpt", SHORT_TEXT)).model
    assert model.head.weight is model.embed.token.weight


def test_the_gpt_does_not_see_the_future():
    made = candidate(FamilyBuild("gpt", SHORT_TEXT))
    model = made.model.eval()
    tokens = made.train.tensors[0][:1].clone()
    before = model(tokens)
    tokens[0, 10] = (tokens[0, 10] + 1) % load(SHORT_TEXT).outputs
    after = model(tokens)
    assert torch.allclose(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_overrides_reach_models_far_beyond_the_default_range():
    build = FamilyBuild("mlp", "digits", {"depth": 6, "width": 700, "optimizer": "adamw"})
    model = candidate(build).model
    assert len(model) == 1 + 6 + 1
    assert sum(parameter.numel() for parameter in model.parameters()) > 5 * 700 * 700


def test_several_families_share_one_search():
    build = FamilyBuild(("mlp", "resnet"), "digits", epochs=3)
    study = optuna.create_study(sampler=make_sampler("random", seed=3))
    seen = set()
    for _ in range(8):
        trial = study.ask()
        made = build(trial)
        chosen = trial.params["family"]
        seen.add(chosen)
        assert made.epochs == 3
        assert all(name == "family" or name.startswith(f"{chosen}.") for name in trial.params)
        assert ("stem" in dict(made.model.named_children())) == (chosen == "resnet")
    assert seen == {"mlp", "resnet"}


def test_a_build_with_the_parameters_of_a_trial_gives_the_same_model():
    build = FamilyBuild(("mlp", "lstm"))
    trial = optuna.create_study(sampler=make_sampler("random", seed=5)).ask()
    torch.manual_seed(1)
    first = build(trial).model
    torch.manual_seed(1)
    second = build(optuna.trial.FixedTrial(trial.params)).model
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_pickled_build_works_in_another_process(own_folder):
    build = FamilyBuild(("mlp", "resnet"), "digits", {"depth": 1}, epochs=2)
    (own_folder / "build.pickle").write_bytes(pickle.dumps(build))
    assert len(pickle.dumps(build)) < 1000
    code = (
        "import pickle, optuna; build = pickle.load(open('build.pickle', 'rb'));"
        "made = build(optuna.create_study().ask());"
        "print(made.epochs, len(build.space.params), len(made.train))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", str(len(build.space.params)), str(len(load("digits").train))]


def test_candidates_share_the_data():
    build = FamilyBuild("mlp")
    assert candidate(build, 0).train is candidate(build, 1).train


def test_metrics_average_over_batches_to_the_whole():
    made = candidate(FamilyBuild("mlp", "diabetes"))
    inputs, targets = made.valid.tensors
    outputs = made.model.eval()(inputs).detach()
    parts = [slice(start, start + 17) for start in range(0, len(inputs), 17)]
    for metric in made.metrics.values():
        weighted = sum(metric(outputs[p], targets[p]) * len(targets[p]) for p in parts) / len(targets)
        assert weighted == pytest.approx(metric(outputs, targets), rel=1e-4)
    residual = ((outputs - targets) ** 2).sum() / ((targets - targets.mean()) ** 2).sum()
    assert made.metrics["r2"](outputs, targets) == pytest.approx(1 - residual.item(), rel=1e-4)


def test_each_task_has_a_metric_to_search_by():
    for source in ("digits", "diabetes", SHORT_TEXT):
        build = FamilyBuild("lstm" if source is SHORT_TEXT else "mlp", source)
        metric, direction = default_objective(build.task)
        assert metric in {"loss", *candidate(build).metrics}
        assert direction in ("minimize", "maximize")
    with pytest.raises(SpecError, match="there is no task 'sorting'"):
        default_objective("sorting")


def test_listing_families_does_not_import_torch():
    code = "import sys, hydra_tune.search_spaces as s; print(len(s.FAMILIES), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(FAMILIES)), "False"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"families": "mpl"}, "there is no model family 'mpl' (did you mean 'mlp'?"),
        ({"families": ()}, "families cannot be ()"),
        ({"families": ("mlp", "mlp")}, "families cannot be ('mlp', 'mlp')"),
        (
            {"families": "gpt"},
            "the family 'gpt' does not suit the data 'digits' (classification, image) (suitable: mlp,",
        ),
        (
            {"families": ("mlp", "resnet"), "data": "wine"},
            "the family 'resnet' does not suit the data 'wine'",
        ),
        ({"data": "nothing"}, "there is no data 'nothing'"),
        ({"epochs": 0}, "epochs cannot be 0"),
        ({"epochs": True}, "epochs cannot be True"),
        ({"overrides": {"lr": -1}}, "override 'lr' cannot be -1"),
        ({"overrides": 3}, "overrides must map names to values, not 3"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(SpecError) as refused:
        FamilyBuild(**arguments)
    assert str(refused.value).startswith(message)


def test_family_by_name():
    assert family("gpt").tasks == ("language",)
