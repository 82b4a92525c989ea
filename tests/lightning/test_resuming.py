"""A Trainer that goes on from the project's checkpoints ends with the weights of an unbroken one, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn

from hydra_tune.lightning import HydraTuneCallback
from hydra_tune.lightning.end_reasons import Unusable
from tests.lightning.modules import lightning, loaders, net, trainer

pl = lightning("pytorch_lightning")


@pytest.fixture(autouse=True)
def checkpoint_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydra_tune.lightning.resuming.CHECKPOINT_SHARE", math.inf)


LOADING: dict[str, Any] = {
    "plain": {},
    "own generator": {"seed": 3},
    "sampler's generator": {"seed": 3, "sampled": True},
    "workers": {"workers": 1},
}


class Crash(pl.Callback):  # type: ignore[misc, name-defined]
    """Ends a training in the middle of an epoch, as a crash would."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 3 and batch_idx == 4:
            raise RuntimeError("crash")


class Seen(pl.Callback):  # type: ignore[misc, name-defined]
    """The batches of each epoch, in order."""

    def __init__(self) -> None:
        self.first: dict[int, list[float]] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.first.setdefault(trainer.current_epoch, []).append(batch[0][0, 0].item())


def fit(module: Any, data: Any, directory: Path, *callbacks: Any, **options: Any) -> tuple[Any, Seen]:
    torch.manual_seed(5)
    callback = HydraTuneCallback(optuna.create_study().ask(), "val_loss")
    callback._port.checkpoints, callback._port.checkpoint_seconds = directory, 0.0
    seen = Seen()
    fitted = trainer(pl, max_epochs=6, callbacks=[seen, callback, *callbacks], **options)
    fitted.fit(module, *data)
    assert len(callback.history) == 6
    return fitted, seen


def module() -> Any:
    torch.manual_seed(1)
    return net(pl, dropout=0.3)


@pytest.mark.parametrize("loading", LOADING.values(), ids=LOADING)
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5}], ids=["", "more"])
def test_the_weights_are_those_of_an_unbroken_run(tmp_path: Path, loading: Any, options: Any) -> None:
    whole, broken, resumed = module(), module(), module()
    expected, all_batches = fit(whole, loaders(**loading), tmp_path / "whole", **options)
    with pytest.raises(RuntimeError, match="crash"):
        fit(broken, loaders(**loading), tmp_path / "broken", Crash(), **options)
    found, batches = fit(resumed, loaders(**loading), tmp_path / "broken", **options)
    assert batches.first == {epoch: all_batches.first[epoch] for epoch in (3, 4, 5)}
    assert found.global_step == expected.global_step
    assert found.current_epoch == expected.current_epoch == 6
    for one, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_it_can_crash_again(tmp_path: Path) -> None:
    whole, second = module(), module()
    fit(whole, loaders(), tmp_path / "whole")
    for crash in (Crash(), Crash(), None):
        if crash is None:
            fit(second, loaders(), tmp_path / "broken")
        else:
            with pytest.raises(RuntimeError, match="crash"):
                fit(module(), loaders(), tmp_path / "broken", crash)
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), whole.parameters(), strict=True))


def test_a_checkpoint_of_another_module_is_removed_and_the_attempt_lost(tmp_path: Path) -> None:
    fit(module(), loaders(), tmp_path)

    class Wider(type(net(pl))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(6, 6)

    with pytest.raises(Unusable, match=r"cannot be used \(.*more.weight.*; the trial starts again") as lost:
        fit(Wider(), loaders(), tmp_path)
    assert lost.value.status == "LOST"
    assert not (tmp_path / "fit-0").exists()


def test_a_users_own_checkpoint_comes_first(tmp_path: Path) -> None:
    first = trainer(pl, max_epochs=2)
    first.fit(module(), *loaders())
    first.save_checkpoint(tmp_path / "mine.ckpt")
    callback = HydraTuneCallback(optuna.create_study().ask(), "val_loss")
    callback._port.checkpoints, callback._port.checkpoint_seconds = tmp_path / "ours", 0.0
    going_on = trainer(pl, max_epochs=5, callbacks=[callback])
    going_on.fit(module(), *loaders(), ckpt_path=tmp_path / "mine.ckpt")
    assert len(callback.history) == 3
    assert not (tmp_path / "ours").exists()


def test_nothing_is_pickled(tmp_path: Path) -> None:
    fit(module(), loaders(), tmp_path)
    files = sorted(file.suffix for file in (tmp_path / "fit-0").iterdir())
    assert files == [".json", ".json", ".safetensors", ".safetensors"], "the last two checkpoints"


def test_what_cannot_be_stored_costs_the_checkpoint_not_the_training(tmp_path: Path) -> None:
    class Odd(type(net(pl))):  # type: ignore[misc]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = nn.Linear(1, 1)

    fit(Odd(), loaders(), tmp_path)
    assert not (tmp_path / "fit-0").exists()


def test_fits_of_one_trial_have_checkpoints_of_their_own(tmp_path: Path) -> None:
    trial = optuna.create_study().ask()
    for _fold in range(2):
        callback = HydraTuneCallback(trial, "val_loss")
        callback._port.checkpoints, callback._port.checkpoint_seconds = tmp_path, 0.0
        fitted = trainer(pl, callbacks=[callback])
        fitted.fit(module(), *loaders())
        assert fitted.global_step == 33, "the second one starts afresh"
    assert list(trial.study.trials[0].intermediate_values) == [0, 1, 2, 3, 4, 5]
    assert {folder.name for folder in tmp_path.iterdir()} == {"fit-0", "fit-1"}
