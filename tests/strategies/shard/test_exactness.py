"""A trial in shards is the plain loop: metrics, weights, optimizer state, buffers and random streams, in float64 to
1e-9, whatever the model, the optimizer, the budget and the cut; and the device's budget is never exceeded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import hydra_tune as ht
from tests.strategies.shard.models import (
    CLASSES,
    MODELS,
    assert_same,
    candidate,
    finish,
    finish_in_shards,
    in_shards,
    rows,
    start,
)  # fmt: skip


def in_groups(params: Any) -> torch.optim.Optimizer:
    """Two groups with options of their own."""
    params = list(params)
    matrices, others = [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "groups": in_groups,
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
}
SCHEDULES: dict[str, tuple[Any, str]] = {
    "none": (None, "epoch"),
    "exponential": (partial(lr_scheduler.ExponentialLR, gamma=0.5), "epoch"),
    "plateau": (partial(lr_scheduler.ReduceLROnPlateau, factor=0.3, patience=0), "epoch"),
    "step": (partial(lr_scheduler.StepLR, step_size=2, gamma=0.7), "step"),
    "milestones": (partial(lr_scheduler.MultiStepLR, milestones=[1, 3], gamma=0.5), "step"),
    "one cycle": (partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=12), "step"),
}

candidates = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(sorted(MODELS)),
        "width": st.sampled_from([4, 8]),
        "depth": st.integers(1, 3),
        "dropout": st.sampled_from([0.0, 0.3]),
        "count": st.sampled_from([12, 15, 18]),
        "frozen": st.booleans(),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "schedule": st.sampled_from(sorted(SCHEDULES)),
        "clip_grad_norm": st.sampled_from([None, 0.3]),
        "accumulate": st.sampled_from([1, 1, 2]),
        "drop_last": st.booleans(),
    }
)


def build(choice: dict[str, Any]) -> ht.Candidate:
    fields = dict(choice)
    scheduler, every = SCHEDULES[fields.pop("schedule")]
    if every == "step" and fields["optimizer"] in ("sgd", "adagrad", "adadelta") and "one cycle" in choice.values():
        scheduler = partial(scheduler, cycle_momentum=False)
    optimizer = OPTIMIZERS[fields.pop("optimizer")]
    return candidate(**fields, optimizer=optimizer, scheduler=scheduler, schedule_every=every)


exact = settings(
    max_examples=60, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip


@exact
@given(
    choice=candidates,
    share=st.sampled_from([0.0, 0.0, 0.1, 0.4, 1.0]),
    anew=st.booleans(),
    prefetch=st.booleans(),
)
def test_any_candidate_in_any_cut_equals_the_plain_loop(
    choice: dict[str, Any], share: float, anew: bool, prefetch: bool
) -> None:
    expected = finish(start(build(choice))).state()
    with (
        TemporaryDirectory() as folder,
        in_shards(start(build(choice)), share, Path(folder), prefetch) as sharded,
    ):
        finish_in_shards(sharded, anew=anew, seconds=0.0)
        assert_same(sharded.state(), expected)
        assert 0 < sharded.memory.peak <= sharded.memory.budget


def equal_in_shards(
    build: Callable[[], ht.Candidate],
    folder: Path,
    share: float = 0.0,
    but: str = "",
    rebuilt: bool = False,
) -> int:
    """Train both ways and compare everything but that; returns the number of shards."""
    expected = finish(start(build())).state()
    with in_shards(start(build()), share, folder) as sharded:
        sharded.rebuild = build if rebuilt else None
        finish_in_shards(sharded, seconds=0.0)
        assert_same(sharded.state() | {but: None}, expected | {but: None})
        return len(sharded.kit.plan.shards)


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_every_kind_of_model_in_the_smallest_shards(kind: str, tmp_path: Path) -> None:
    assert equal_in_shards(partial(candidate, kind), tmp_path) > 3


def test_a_trial_that_fits_reads_its_state_once_and_writes_it_at_commits_only(tmp_path: Path) -> None:
    with in_shards(start(candidate("mlp", dropout=0.0)), 1.0, tmp_path) as sharded:
        trial = sharded.worker()
        trial.train_for(0.0)
        read, written = trial.files.read_bytes, trial.files.written_bytes
        assert read > 0
        while not trial.train_for(0.0).epoch_done:
            assert (trial.files.read_bytes, trial.files.written_bytes) == (read, written)
        trial.commit()
        assert trial.files.written_bytes > written
        trial.close()


# Models that are hard to cut


class Renormed(nn.Module):
    """Embeddings that their own forward makes shorter, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 16, max_norm=0.5)
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding((x.abs() * 3).long().clamp(max=8)).mean(1)
        return self.out(torch.tanh(self.layers(h)))


def test_weights_that_a_forward_changes_in_place(tmp_path: Path) -> None:
    def build() -> ht.Candidate:
        torch.manual_seed(2)
        return candidate(model=Renormed().double())

    assert equal_in_shards(build, tmp_path) > 2


class ChangedLater(nn.Module):
    """A tensor that one layer makes, a later one changes in place, and yet a later one uses; and the same of a view."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.out, self.view = nn.Linear(6, CLASSES), view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        part = h[:, :3] if self.view else h
        y = self.b(torch.tanh(h))
        part.add_(self.c(torch.sin(y))[:, : part.size(1)])
        y = self.d(y)
        part.mul_(0.5)
        return self.out(y + h)


@pytest.mark.parametrize("view", [False, True], ids=["itself", "a view"])
def test_tensors_that_a_later_layer_changes_in_place(view: bool, tmp_path: Path) -> None:
    def build() -> ht.Candidate:
        torch.manual_seed(1)
        return candidate(model=ChangedLater(view).double())

    equal_in_shards(build, tmp_path)


class Detached(nn.Module):
    """Uses a weight twice, once where no gradient flows to it: that use must see the weight of before the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(torch.tanh(self.first(x)), self.second.weight.detach())
        return self.out(self.second(h) + F.linear(h, self.out.weight.detach().repeat(2, 1)))


def test_weights_that_are_used_without_a_gradient(tmp_path: Path) -> None:
    def build() -> ht.Candidate:
        torch.manual_seed(1)
        return candidate(model=Detached().double(), optimizer=partial(torch.optim.SGD, lr=0.1))

    equal_in_shards(build, tmp_path)
    equal_in_shards(build, tmp_path, share=1.0)


class Rebinds(nn.Module):
    """Assigns its buffer anew, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.ones(6, dtype=torch.float64))
        self.count: torch.Tensor
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + (1 if self.training else 100)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.layer(x - self.mean) / self.count


@pytest.mark.parametrize("last", [False, True])
def test_buffers_that_are_assigned_anew_and_that_evaluation_changes(last: bool, tmp_path: Path) -> None:
    def build() -> ht.Candidate:
        torch.manual_seed(1)
        layers: list[nn.Module] = [nn.Linear(6, 6), Rebinds(), nn.Tanh(), nn.Linear(6, 6), Rebinds()]
        layers = layers if last else [*layers, nn.Linear(6, CLASSES)]
        return candidate(model=nn.Sequential(*layers).double())

    assert equal_in_shards(build, tmp_path) > 1


def test_parameters_that_the_optimizer_does_not_get_count_for_clipping(tmp_path: Path) -> None:
    def last_layers(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(params)[4:], lr=0.1)

    # Without clipping, gradients that nothing uses are not kept.
    assert equal_in_shards(partial(candidate, optimizer=last_layers), tmp_path, but="gradients") > 1
    assert equal_in_shards(partial(candidate, optimizer=last_layers, clip_grad_norm=0.3), tmp_path) > 1
    accumulating = partial(candidate, optimizer=last_layers, clip_grad_norm=0.3, accumulate=3)
    assert equal_in_shards(accumulating, tmp_path) > 1


class Branches(nn.Module):
    """Outputs of which the loss uses one alone: the other branch has no gradient, not even zero."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.used, self.idle = nn.Linear(6, 6), nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.stem(x))
        return {"idle": self.idle(h), "used": self.used(h)}


def loss_of_one(outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs["used"], targets)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_branch_that_the_loss_does_not_use(clip: float | None, tmp_path: Path) -> None:
    def build() -> ht.Candidate:
        torch.manual_seed(1)
        return candidate(
            model=Branches().double(), loss=loss_of_one, metrics={}, clip_grad_norm=clip,
            optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        )  # fmt: skip

    assert equal_in_shards(build, tmp_path) > 1


class Decides(nn.Module):
    """Which of its layers gets a gradient depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calm, self.wild = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wild(x) if x.sum() > 0 else self.calm(x)


@pytest.mark.parametrize("fields", [{}, {"accumulate": 2}, {"clip_grad_norm": 0.1}], ids=str)
def test_layers_that_some_batches_do_not_use(fields: dict[str, Any], tmp_path: Path) -> None:
    def build() -> ht.Candidate:
        torch.manual_seed(1)
        layers = [nn.Linear(6, 6), Decides(), nn.Tanh(), Decides(), nn.Linear(6, CLASSES)]
        return candidate(model=nn.Sequential(*layers).double(), count=40, **fields)

    assert equal_in_shards(build, tmp_path) > 1


class Counting(nn.Module):
    """Counts its calls in plain attributes and in extra state, and computes with both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.mean, self.kept = nn.Linear(6, 6), 0, torch.zeros(6, dtype=torch.float64), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.kept = self.kept * 0.9 + 0.2
        return self.layer(x - self.mean) * self.kept / (1 + self.calls)

    def get_extra_state(self) -> Any:
        return {"kept": self.kept}

    def set_extra_state(self, state: Any) -> None:
        self.kept = state["kept"]


def test_what_modules_keep_besides_tensors_moves_with_the_trial(tmp_path: Path) -> None:
    def build() -> ht.Candidate:
        torch.manual_seed(1)
        layers = [nn.Linear(6, 6), Counting(), nn.Tanh(), Counting(), nn.Linear(6, CLASSES)]
        return candidate(model=nn.Sequential(*layers).double())

    expected = finish(start(build())).state()
    with in_shards(start(build()), 0.0, tmp_path) as sharded:
        finish_in_shards(sharded, anew=True, seconds=0.0)
        assert_same(sharded.state(), expected)


def test_no_validation_set(tmp_path: Path) -> None:
    assert equal_in_shards(partial(candidate, valid=None), tmp_path) > 1


# Going over from one form to the other


@pytest.mark.parametrize("accumulate", [1, 3], ids=["between steps", "with gradients pending"])
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_a_checkpoint_goes_on_in_either_form(kind: str, accumulate: int, tmp_path: Path) -> None:
    """Whole, then in shards, then whole: each in the middle of an epoch."""
    build = partial(candidate, kind, accumulate=accumulate, scheduler=SCHEDULES["plateau"][0], keep="best")
    expected = start(build())
    expected.train_for(1e9)
    expected.end_epoch()
    expected.keep_weights()
    expected = finish(expected)

    first = start(build())
    for _ in range(2):
        first.train_for(0.0)
    with in_shards(first, 0.0, tmp_path) as sharded:
        trial = sharded.worker()
        while not trial.train_for(0.0).epoch_done:
            pass
        trial.end_epoch()
        trial.keep_weights()
        trial.train_for(0.0)
        trial.commit()
        state = sharded.state()
    last = start(build())
    last.restore(state)
    assert last.batch == 1
    assert_same(finish(last).state(), expected.state())


def test_a_trial_is_cut_anew_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    build = partial(candidate, "transformer", accumulate=2, clip_grad_norm=0.5, keep="best")
    expected = finish(start(build())).state()
    with in_shards(start(build()), 0.8, tmp_path) as sharded:
        shards = [len(sharded.kit.plan.shards)]
        for share in (0.3, 0.0, 0.5):
            trial = sharded.worker()
            trial.train_for(0.0)
            trial.commit()
            trial.close()
            budget = int(sharded.memory.budget * (0.4 + share / 2)) if share else 0
            sharded.cut_again(budget or sharded.least)
            shards.append(len(sharded.kit.plan.shards))
        finish_in_shards(sharded)
        assert_same(sharded.state(), expected)
        assert len(set(shards)) > 2, "the cuts differ"


def test_the_weights_of_the_best_epoch_are_kept(tmp_path: Path) -> None:
    from hydra_tune.strategies.shard.exchange import kept_weights

    build = partial(candidate, "resnet", epochs=3, keep="best")
    whole = start(build())
    whole.train_for(1e9)
    whole.end_epoch()
    whole.keep_weights()
    assert whole.kept is not None
    kept = {name: tensor.clone() for name, tensor in whole.kept.items()}
    with in_shards(start(build()), 0.0, tmp_path) as sharded:
        trial = sharded.worker()
        trial.train_for(1e9)
        trial.end_epoch()
        trial.keep_weights()
        trial.close()
        finish_in_shards(sharded)
        assert_same(kept_weights(sharded.files, sharded.kit.plan), kept)
        assert_same(sharded.state(), finish(whole).state())


def test_a_trial_that_is_taken_up_again_from_its_commit_forgets_what_came_after(tmp_path: Path) -> None:
    """What a worker did after the last commit, up to the middle of a batch, leaves no trace."""
    expected = finish(start(candidate("resnet"))).state()
    calls = 0

    def failing_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ZeroDivisionError
        return F.cross_entropy(outputs, targets)

    with in_shards(start(candidate("resnet")), 0.0, tmp_path) as sharded:
        sharded.worker().train_for(0.0)
        lost = sharded.worker()
        object.__setattr__(lost.candidate, "loss", failing_loss)
        with pytest.raises(ZeroDivisionError):
            lost.train_for(1e9)
        lost.close()
        finish_in_shards(sharded)
        assert_same(sharded.state(), expected)


def test_a_loss_that_is_no_number_ends_the_trial_before_the_step(tmp_path: Path) -> None:
    from hydra_tune.training.progress import Diverged

    def build() -> ht.Candidate:
        data = rows(20)
        data.tensors[0][13:] = float("nan")
        return candidate(train=data, shuffle=False)

    whole = start(build())
    with pytest.raises(Diverged) as plain:
        whole.train_for(1e9)
    with in_shards(start(build()), 0.0, tmp_path) as sharded:
        trial = sharded.worker()
        with pytest.raises(Diverged) as found:
            trial.train_for(1e9)
        trial.close()
    assert str(found.value) == str(plain.value)


def test_an_epoch_that_was_judged_is_not_judged_again(tmp_path: Path) -> None:
    """A worker may end after its commit and before it says so: the next one finds the epoch behind it."""
    with in_shards(start(candidate("mlp")), 0.0, tmp_path) as sharded:
        trial = sharded.worker()
        trial.train_for(1e9)
        metrics = trial.end_epoch(0)
        another = sharded.worker()
        assert another.end_epoch(0) == metrics
        assert (another.logbook.epoch, another.logbook.batch) == (1, 0)
        assert len(another.logbook.history) == 1
        another.close()
        trial.close()


def test_inputs_of_another_size_take_another_way_through_the_model(tmp_path: Path) -> None:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(1, 4), nn.Linear(4, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = self.cell(x[:, :1])
            for i in range(1, x.shape[1]):
                total = total + torch.tanh(self.cell(x[:, i : i + 1]))
            return self.head(total)

    def by_contents(samples: list[Any]) -> Any:
        inputs, targets = torch.utils.data.default_collate(samples)
        return inputs[:, : 3 + len(targets) % 3 + int(inputs[0, 0] > 0)], targets

    def build() -> ht.Candidate:
        torch.manual_seed(1)
        return candidate(model=Unrolled().double(), collate=by_contents)

    assert equal_in_shards(build, tmp_path) > 1
