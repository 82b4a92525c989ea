"""The callback with real Trainers, outside of a search: any Optuna trial, both names of Lightning."""

from __future__ import annotations

import math
from typing import Any

import optuna
import pytest
import torch

from hydra_tune.core.errors import HydraTuneError, InputError
from hydra_tune.lightning import HydraTuneCallback
from hydra_tune.lightning.callback import STEP_HOOKS
from hydra_tune.lightning.end_reasons import DivergedTrial
from tests.lightning.modules import BOTH, lightning, loaders, net, trainer


@pytest.fixture(params=BOTH)
def pl(request: pytest.FixtureRequest) -> Any:
    return lightning(request.param)


def study(**options: Any) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(**options)


class AfterReport(optuna.pruners.BasePruner):
    """Prunes at a given report."""

    def __init__(self, report: int) -> None:
        self.report = report

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.last_step == self.report


@pytest.mark.smoke
def test_every_validation_is_reported_and_the_sanity_check_is_not(pl: Any) -> None:
    trial = study().ask()
    callback = HydraTuneCallback(trial, monitor="val_loss")
    assert isinstance(callback, pl.Callback)
    fitted = trainer(pl, callbacks=[callback], val_check_interval=0.5, max_epochs=2, num_sanity_val_steps=2)
    fitted.fit(net(pl), *loaders())
    seen = trial.study.trials[0].intermediate_values
    assert list(seen) == [0, 1, 2, 3]
    assert seen[3] == pytest.approx(fitted.callback_metrics["val_loss"].item())
    facts = trial.user_attrs["lightning"]
    assert facts["strategy"] == "SingleDeviceStrategy"
    assert facts["device"] == "cpu"
    assert facts["batches"] == 22
    assert facts["rows_per_second"] == pytest.approx(10 * facts["batches_per_second"])
    parameters = 6 * 16 + 16 + 16 * 3 + 3
    assert 3 * 4 * parameters < facts["peak_bytes"] < 100_000, "parameters and Adam's two moments at least"


def test_a_pruned_trial_ends_at_its_report(pl: Any) -> None:
    epochs = []

    def objective(trial: optuna.Trial) -> float:
        fitted = trainer(pl, callbacks=[HydraTuneCallback(trial, "val_loss")], max_epochs=5)
        try:
            fitted.fit(net(pl), *loaders())
        finally:
            epochs.append(fitted.current_epoch)
        return float(fitted.callback_metrics["val_loss"])

    made = study(pruner=AfterReport(1))
    made.optimize(objective, n_trials=1)
    (trial,) = made.trials
    assert trial.state is optuna.trial.TrialState.PRUNED
    assert list(trial.intermediate_values) == [0, 1]
    assert epochs == [1], "the second epoch was its last"


@pytest.mark.smoke
def test_a_missing_metric_is_an_error_that_lists_those_there_are(pl: Any) -> None:
    callback = HydraTuneCallback(study().ask(), monitor="val_accuracy")
    with pytest.raises(HydraTuneError) as failed:
        trainer(pl, callbacks=[callback]).fit(net(pl), *loaders())
    assert str(failed.value) == (
        "the metric 'val_accuracy' was not logged (did you mean 'val_acc'? known: train_loss, val_acc, val_loss)"
    )


def test_several_metrics_the_first_is_reported() -> None:
    pl = lightning(BOTH[0])
    trial = study().ask()
    fitted = trainer(pl, callbacks=[HydraTuneCallback(trial, ["val_acc", "val_loss"])])
    fitted.fit(net(pl), *loaders())
    frozen = trial.study.trials[0]
    assert len(frozen.intermediate_values) == 3
    assert frozen.intermediate_values[2] == pytest.approx(float(fitted.callback_metrics["val_acc"]))
    assert frozen.user_attrs["val_loss"] == pytest.approx(float(fitted.callback_metrics["val_loss"]))


def test_with_several_objectives_nothing_is_pruned() -> None:
    pl = lightning(BOTH[0])
    trial = study(directions=["minimize", "maximize"]).ask()
    trainer(pl, callbacks=[HydraTuneCallback(trial, ["val_loss", "val_acc"])]).fit(net(pl), *loaders())
    assert set(trial.user_attrs) == {"val_acc", "lightning"}


@pytest.mark.parametrize("with_validation", [True, False])
def test_metrics_of_training_are_reported_at_the_end_of_each_epoch(with_validation: bool) -> None:
    pl = lightning(BOTH[0])
    losses: list[float] = []

    class Watch(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            losses.append(float(trainer.callback_metrics["train_loss"]))

    trial = study().ask()
    train, valid = loaders()
    callbacks = [HydraTuneCallback(trial, "train_loss"), Watch()]
    trainer(pl, callbacks=callbacks).fit(net(pl), train, valid if with_validation else None)
    assert list(trial.study.trials[0].intermediate_values.values()) == pytest.approx(losses)
    assert len(losses) == 3


def test_metrics_that_a_module_logs_at_the_end_of_an_epoch_are_found() -> None:
    pl = lightning(BOTH[0])

    class Late(type(net(pl))):  # type: ignore[misc]
        def on_train_epoch_end(self) -> None:
            self.log("late", float(self.current_epoch))

    trial = study().ask()
    trainer(pl, callbacks=[HydraTuneCallback(trial, "late")]).fit(Late(), *loaders())
    assert trial.study.trials[0].intermediate_values == {0: 0.0, 1: 1.0, 2: 2.0}


def test_a_nan_loss_ends_the_trial_before_the_update() -> None:
    pl = lightning(BOTH[0])

    class Bad(type(net(pl))):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * math.nan if self.global_step == 7 else loss

    module = Bad()
    trial = study().ask()
    with pytest.raises(DivergedTrial, match="the training loss became nan at step 7"):
        trainer(pl, callbacks=[HydraTuneCallback(trial, "val_loss")]).fit(module, *loaders())
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_a_nan_metric_is_told_optuna_as_pruned() -> None:
    pl = lightning(BOTH[0])

    class Bad(type(net(pl))):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", torch.tensor(math.inf))

    def objective(trial: optuna.Trial) -> float:
        trainer(pl, callbacks=[HydraTuneCallback(trial, "val_loss")]).fit(Bad(), *loaders())
        return 0.0

    made = study()
    made.optimize(objective, n_trials=1)
    assert made.trials[0].state is optuna.trial.TrialState.PRUNED
    assert made.trials[0].intermediate_values == {}


@pytest.mark.parametrize(("arguments", "message"), [
    (("no trial", "val_loss"), "trial cannot be 'no trial'"),
    ((optuna.trial.FixedTrial({}), ""), "monitor cannot be ''"),
    ((optuna.trial.FixedTrial({}), []), r"monitor cannot be \[\]"),
])  # fmt: skip
def test_bad_arguments_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        HydraTuneCallback(*arguments)


def test_lightning_calls_only_the_hooks_that_do_something(pl: Any) -> None:
    called: list[str] = []

    class Watching(pl.profilers.PassThroughProfiler):  # type: ignore[misc, name-defined]
        def start(self, action_name: str) -> None:
            if action_name.startswith("[Callback]HydraTuneCallback."):
                called.append(action_name.rpartition(".")[2])

    callback = HydraTuneCallback(study().ask(), monitor="val_loss")
    fitted = trainer(pl, callbacks=[callback], max_epochs=2, profiler=Watching())
    fitted.fit(net(pl), *loaders())
    steps = fitted.global_step
    assert steps == 22
    seen = {name: called.count(name) for name in STEP_HOOKS}
    assert seen == {
        "on_train_batch_start": 3, "on_before_zero_grad": 0, "on_before_backward": steps, "on_after_backward": 0,
        "on_before_optimizer_step": 0, "on_train_batch_end": steps,
    }  # fmt: skip
    assert all(callable(getattr(callback, name)) for name in STEP_HOOKS), "after the fit they are there again"


def test_hooks_of_a_subclass_are_called_in_every_step(pl: Any) -> None:
    called: list[str] = []

    class Mine(HydraTuneCallback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            called.append("start")
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            called.append("after")
            super().on_after_backward(trainer, pl_module)  # type: ignore[misc]

    trial = study().ask()
    fitted = trainer(pl, callbacks=[Mine(trial, monitor="val_loss")], max_epochs=1)
    fitted.fit(net(pl), *loaders())
    assert called.count("start") == called.count("after") == fitted.global_step == 11
    assert trial.user_attrs["lightning"]["batches"] == 11


def test_a_callback_within_another_one_is_called_as_any(pl: Any) -> None:
    trial = study().ask()
    inner = HydraTuneCallback(trial, monitor="val_loss")

    def passed_on(name: str) -> Any:
        return lambda _, *args, **options: getattr(inner, name)(*args, **options)

    hooks = [name for name in dir(pl.Callback) if name == "setup" or name.startswith("on_")]
    outer = type("Outer", (pl.Callback,), {name: passed_on(name) for name in hooks})()
    trainer(pl, callbacks=[outer], max_epochs=2).fit(net(pl), *loaders())
    assert list(trial.study.trials[0].intermediate_values) == [0, 1]
    assert trial.user_attrs["lightning"]["batches"] == 22
