"""Objectives that train with a library and Optuna's callback for it; the trial's number selects the library."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
import optuna

ROUNDS = 4
KINDS = ("lightgbm", "xgboost", "sklearn", "lightning", "ignite", "skorch")


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(120, 4)).astype(np.float32)
    return rows, (rows[:, 0] + 0.1 * generator.normal(size=120) > 0).astype(np.int64)


def lightgbm(trial: optuna.Trial) -> float:
    import lightgbm
    from optuna_integration import LightGBMPruningCallback

    rows, labels = data()
    train = lightgbm.Dataset(rows[:80], labels[:80])
    valid = lightgbm.Dataset(rows[80:], labels[80:], reference=train)
    params = {"objective": "binary", "metric": "auc", "verbosity": -1, "num_threads": 1, "min_data_in_leaf": 5}
    params["num_leaves"] = trial.suggest_int("num_leaves", 2, 8)
    callback = LightGBMPruningCallback(trial, "auc", valid_name="valid")
    model = lightgbm.train(params, train, ROUNDS, valid_sets=[valid], valid_names=["valid"], callbacks=[callback])
    return float(model.best_score["valid"]["auc"])


def xgboost(trial: optuna.Trial) -> float:
    import xgboost
    from optuna_integration import XGBoostPruningCallback

    rows, labels = data()
    train, valid = xgboost.DMatrix(rows[:80], labels[:80]), xgboost.DMatrix(rows[80:], labels[80:])
    params = {"objective": "binary:logistic", "eval_metric": "auc", "nthread": 1}
    params["max_depth"] = trial.suggest_int("max_depth", 1, 4)
    callback = XGBoostPruningCallback(trial, "valid-auc")
    found: dict[str, Any] = {}
    xgboost.train(params, train, ROUNDS, evals=[(valid, "valid")], callbacks=[callback], evals_result=found,
                  verbose_eval=False)  # fmt: skip
    return float(found["valid"]["auc"][-1])


def sklearn(trial: optuna.Trial) -> float:
    """A search within the trial, with a study of its own."""
    from optuna_integration import OptunaSearchCV
    from sklearn.linear_model import SGDClassifier

    rows, labels = data()
    space = {"alpha": optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True)}
    inner = OptunaSearchCV(
        SGDClassifier(random_state=0), space, cv=2, n_trials=3, random_state=trial.number, verbose=0,
        enable_pruning=True, max_iter=ROUNDS,
    )  # fmt: skip
    inner.fit(rows, labels)
    for step, inner_trial in enumerate(inner.trials_):
        trial.report(inner_trial.value, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return float(inner.best_score_)


def lightning(trial: optuna.Trial, strategy: str = "auto", devices: int = 1) -> float:
    import lightning.pytorch as pl
    import torch
    from optuna_integration import PyTorchLightningPruningCallback

    from tests.optuna.lightning_net import Net

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    rows, labels = (torch.tensor(each) for each in data())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, labels), batch_size=40)
    callback = PyTorchLightningPruningCallback(trial, monitor="acc")
    trainer = pl.Trainer(
        max_epochs=ROUNDS, accelerator="cpu", devices=devices, strategy=strategy, logger=False, callbacks=[callback],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(trial.suggest_float("lr", 0.01, 0.1)), loader, loader)
    callback.check_pruned()
    return float(trainer.callback_metrics["acc"].item())


def ignite(trial: optuna.Trial) -> float:
    import torch
    from ignite.engine import Engine, Events
    from optuna_integration import PyTorchIgnitePruningHandler

    rate = trial.suggest_float("lr", 0.01, 0.1)
    rows, labels = (torch.tensor(each) for each in data())
    layer = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate)

    def step(engine: Any, batch: Any) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(layer(rows), labels).backward()
        optimizer.step()

    def judge(engine: Any, batch: Any) -> None:
        engine.state.metrics["accuracy"] = (layer(rows).argmax(1) == labels).float().mean().item()

    trainer, evaluator = Engine(step), Engine(judge)
    evaluator.add_event_handler(Events.COMPLETED, PyTorchIgnitePruningHandler(trial, "accuracy", trainer))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run([0]))
    trainer.run([0], max_epochs=ROUNDS)
    return float(evaluator.state.metrics["accuracy"])


def skorch(trial: optuna.Trial) -> float:
    import torch
    from optuna_integration import SkorchPruningCallback
    from skorch import NeuralNetClassifier

    rows, labels = data()
    net = NeuralNetClassifier(
        torch.nn.Linear(4, 2), criterion=torch.nn.CrossEntropyLoss, max_epochs=ROUNDS, verbose=0,
        lr=trial.suggest_float("lr", 0.01, 0.1), callbacks=[SkorchPruningCallback(trial, "valid_acc")],
    )  # fmt: skip
    net.fit(rows, labels)
    return float(net.history[-1, "valid_acc"])


class Later(optuna.pruners.BasePruner):
    """Prunes the second trial of each library, and the one on two processes, after two reports."""

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.number >= len(KINDS) and len(trial.intermediate_values) >= 2


def objective(trial: optuna.Trial) -> float:
    warnings.simplefilter("ignore")
    if trial.number == 2 * len(KINDS):
        return lightning(trial, "ddp_spawn", 2)
    value: float = globals()[KINDS[trial.number % len(KINDS)]](trial)
    return value
