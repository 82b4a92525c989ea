"""A LightningModule as a candidate: the losses and weights of Lightning's own Trainer, by every exact strategy."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import hydra_tune as ht
from hydra_tune.training.loop import Training
from tests.candidates import rows
from tests.lightning.modules import BOTH, lightning, loaders, net, trainer

pl = lightning(BOTH[0])
OneCycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1)


class Losses(pl.Callback):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())


def by_trainer(module: Any, data: Any, **options: Any) -> tuple[list[float], dict[str, float]]:
    torch.manual_seed(5)
    seen = Losses()
    # Without the sanity check, which would draw from the validation loader's generator.
    fitted = trainer(pl, callbacks=[seen], num_sanity_val_steps=0, **options)
    fitted.fit(module, *data)
    return seen.losses, {name: float(value) for name, value in fitted.callback_metrics.items()}


def by_loop(candidate: ht.Candidate) -> tuple[list[float], dict[str, float]]:
    """The project's plain loop, which the strategies are tested against."""
    training = Training(candidate, candidate.train, candidate.valid, 5, torch.device("cpu"))
    losses = []
    for _ in range(candidate.epochs):
        before = 0.0
        while training.batch < len(training.batches):
            training.train_for(0)
            losses.append((training.loss_sum - before) / training.batches.rows_at(training.batch - 1))
            before = training.loss_sum
        judged = training.end_epoch()
    return losses, judged


def made(change: Any = None, **options: Any) -> Any:
    torch.manual_seed(1)
    kind = type(net(pl, **options))
    torch.manual_seed(1)
    return (change(kind) if change else kind)().double()


def groups(kind: Any) -> Any:
    class Groups(kind):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            weights = [p for p in self.parameters() if p.ndim > 1]
            biases = [p for p in self.parameters() if p.ndim == 1]
            unlike = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.02}]
            return torch.optim.AdamW(unlike, lr=0.05)

    return Groups


def stepped(kind: Any) -> Any:
    class Stepped(kind):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            schedule = OneCycle(optimizer, total_steps=self.trainer.estimated_stepping_batches)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Stepped


def chained(kind: Any) -> Any:
    class Chained(kind):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            rates = torch.optim.lr_scheduler
            parts = [rates.LinearLR(optimizer, 0.1, total_iters=2), rates.CosineAnnealingLR(optimizer, 3)]
            return [optimizer], [rates.SequentialLR(optimizer, parts, milestones=[2])]

    return Chained


def plateau(kind: Any) -> Any:
    class Plateau(kind):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.5)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    return Plateau


def tangled(kind: Any) -> Any:
    """A step that uses its parameters beside forward."""

    class Tangled(kind):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) + 0.01 * self.layers[0].weight.square().sum()

    return Tangled


FORMS = {
    "optimizer and schedule": (None, {}), "groups": (groups, {}), "by step": (stepped, {}), "chained": (chained, {}),
    "plateau": (plateau, {}), "tangled": (tangled, {}),
    "clipped and accumulated": (stepped, {"accumulate": 4, "clip_grad_norm": 0.5}),
}  # fmt: skip
NAMES = {"accumulate": "accumulate_grad_batches", "clip_grad_norm": "gradient_clip_val"}


@pytest.mark.parametrize(("change", "options"), FORMS.values(), ids=FORMS.keys())
def test_losses_and_metrics_are_those_of_a_trainer(change: Any, options: Any) -> None:
    data = partial(loaders, dtype=torch.float64, seed=3)
    mine, theirs = made(change, dropout=0.3), made(change, dropout=0.3)
    renamed = {NAMES[name]: value for name, value in options.items()}
    expected, metrics = by_trainer(theirs, data(), max_epochs=4, **renamed)
    train, valid = data()
    candidate = ht.Candidate.from_lightning(
        mine, epochs=4, train_dataloaders=train, val_dataloaders=valid, **options
    )  # fmt: skip
    assert bool(candidate.whole_because) == (change is tangled)
    losses, judged = by_loop(candidate)
    # A Trainer shows the loss as it is added up.
    assert losses == pytest.approx([loss * options.get("accumulate", 1) for loss in expected], rel=1e-9)
    for name in ("val_loss", "val_acc"):
        assert judged[name] == pytest.approx(metrics[name], rel=1e-6), "Lightning keeps metrics in float32"
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def build(trial: Any, *, module: Any = None, change: Any = None) -> ht.Candidate:
    train, valid = loaders(dtype=torch.float64, seed=3)
    made_module = made(change) if module is None else module
    return ht.Candidate.from_lightning(made_module, epochs=3, train_dataloaders=train, val_dataloaders=valid)


@pytest.mark.parametrize("strategy", ["whole", "shard", {"name": "pipeline", "microbatches": 2}])
def test_every_exact_strategy_gives_the_trainers_weights(strategy: Any) -> None:
    theirs = made()
    by_trainer(theirs, loaders(dtype=torch.float64, seed=3))
    result = ht.search(
        build, trials=1, metric="val_acc", direction="maximize", devices="2xcpu", strategy=strategy, progress=False
    )  # fmt: skip
    assert result.trials[0].strategy == (strategy if isinstance(strategy, str) else strategy["name"])
    best = result.best_model()
    assert type(best).__name__ == "Net"
    for one, other in zip(best.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-9)
    result.close()


def test_what_cannot_be_cut_is_trained_as_a_whole_where_the_choice_is_free() -> None:
    theirs = made(tangled)
    by_trainer(theirs, loaders(dtype=torch.float64, seed=3))
    uncut = partial(build, change=tangled)
    result = ht.search(uncut, trials=1, devices="1xcpu", device_memory="512MiB", progress=False, study="auto")
    (record,) = result.trials
    assert record.strategy == "whole"
    reason = "training_step uses parameters or buffers of the module outside of its forward"
    assert record.plan is not None
    assert record.plan["whole_because"] == reason
    options = {option["strategy"]: option["refused"] for option in record.plan["choice"]["options"]}
    assert options == {"whole": "", **dict.fromkeys(("shard", "pipeline", "pack"), f"it cannot be cut: {reason}")}
    for one, other in zip(result.best_model().parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-9)
    result.close()
    with pytest.raises(ht.SearchFailed, match=r"the candidate cannot be cut: training_step uses .*'whole' or 'auto'"):
        ht.search(uncut, trials=1, devices="1xcpu", strategy="shard", progress=False, study="shard")


def test_a_sampler_with_its_own_generator_gives_the_trainers_order() -> None:
    mine, theirs = made(), made()
    data = partial(loaders, dtype=torch.float64, seed=3, sampled=True)
    expected, _ = by_trainer(theirs, data())
    train, valid = data()
    candidate = ht.Candidate.from_lightning(mine, epochs=3, train_dataloaders=train, val_dataloaders=valid)
    assert by_loop(candidate)[0] == pytest.approx(expected, rel=1e-9)


class Words(Dataset[Any]):
    """Rows of unequal length, for a collate that pads them."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(row)
        return torch.randn(1 + row % 5, 6, generator=generator, dtype=torch.float64), row % 3


def padded(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {
        "x": nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True).sum(1),
        "y": torch.tensor([y for _, y in samples]),
    }


def of_dicts(kind: Any) -> Any:
    class OfDicts(kind):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x * scale)

        def training_step(self, batch: Any) -> Any:
            return {"loss": nn.functional.cross_entropy(self(batch["x"], scale=0.5), batch["y"])}

    return OfDicts


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_with_collate_sampler_and_workers(workers: int) -> None:
    def loader() -> Any:
        generator = torch.Generator().manual_seed(2)
        sampler = WeightedRandomSampler([1.0 + i % 4 for i in range(30)], 26, generator=generator)
        return DataLoader(
            Words(), batch_size=4, sampler=sampler, collate_fn=padded, num_workers=workers, generator=generator
        )  # fmt: skip

    mine, theirs = made(of_dicts), made(of_dicts)
    expected, _ = by_trainer(theirs, [loader()])
    candidate = ht.Candidate.from_lightning(mine, epochs=3, train_dataloaders=loader())
    assert not candidate.whole_because
    losses, _ = by_loop(candidate)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert len(losses) == 21


class Data(pl.LightningDataModule):  # type: ignore[misc, name-defined]
    ready = 0

    def setup(self, stage: str) -> None:
        self.ready += 1
        self.data = rows(40, dtype=torch.float64)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        return [DataLoader(self.data, batch_size=8)]


def test_a_datamodule_is_set_up_once() -> None:
    data = Data()
    one, other = (ht.Candidate.from_lightning(made(), data, epochs=1) for _ in range(2))
    assert data.ready == 1
    assert list(one.metrics) == ["val_loss", "val_acc"]
    assert by_loop(one) == by_loop(other), "without a generator the order is that of the trial's seed"


@pytest.mark.parametrize("name", BOTH)
def test_under_both_names(name: str) -> None:
    train, valid = loaders()
    candidate = ht.Candidate.from_lightning(
        net(lightning(name)), epochs=1, train_dataloaders=train, val_dataloaders=valid
    )  # fmt: skip
    assert not candidate.whole_because
    assert by_loop(candidate)[1]["val_loss"] > 0


def with_(**members: Any) -> Any:
    return lambda kind: type("Changed", (kind,), members)


def twice(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
    return nn.functional.cross_entropy(self(batch[0]) + self(batch[0]), batch[1])


def noisy(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
    return nn.functional.cross_entropy(self(batch[0] + torch.randn_like(batch[0])), batch[1])


@pytest.mark.parametrize(("members", "reason"), [
    ({"training_step": twice}, "training_step calls forward 2 times"),
    ({"training_step": noisy}, "training_step draws random numbers outside of forward"),
    ({"training_step": lambda self, batch, i: nn.functional.cross_entropy(self.layers(batch[0]), batch[1])},
     "training_step does not call forward, self(...)"),
])  # fmt: skip
def test_arbitrary_steps_are_whole_with_the_reason(members: Any, reason: str) -> None:
    mine, theirs = made(with_(**members)), made(with_(**members))
    train, valid = loaders(dtype=torch.float64, seed=3)
    candidate = ht.Candidate.from_lightning(mine, epochs=3, train_dataloaders=train, val_dataloaders=valid)
    assert candidate.whole_because == reason
    expected, _ = by_trainer(theirs, loaders(dtype=torch.float64, seed=3))
    assert by_loop(candidate)[0] == pytest.approx(expected, rel=1e-9)


def two(self: Any) -> Any:
    return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


def by_epoch(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
    return nn.functional.cross_entropy(self(batch[0]), batch[1]) * (1 + self.current_epoch)


@pytest.mark.parametrize(("members", "message"), [
    ({"configure_optimizers": two}, "2 optimizers and 0 schedules"),
    ({"configure_optimizers": lambda self: None}, "configure_optimizers returned None"),
    ({"on_train_epoch_end": lambda self: None}, "has on_train_epoch_end, which only a Trainer calls"),
    ({"automatic_optimization": False}, "optimizes by itself"),
    ({"training_step": by_epoch}, r"uses its Trainer \('current_epoch'\)"),
    ({"training_step": lambda self, batch, i: None}, "training_step returned a NoneType"),
    ({"validation_step": lambda self, batch, i: self.log("loss", self(batch[0]).sum())}, "validation_step logs 'loss'"),
])  # fmt: skip
def test_what_only_a_trainer_can_do_is_refused_by_name(members: Any, message: str) -> None:
    train, valid = loaders(dtype=torch.float64)
    with pytest.raises(ht.CandidateError, match=message):
        ht.Candidate.from_lightning(
            made(with_(**members)), epochs=1, train_dataloaders=train, val_dataloaders=valid
        )  # fmt: skip
