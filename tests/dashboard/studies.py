"""Searches for the dashboard's tests: some trials complete, some are pruned, some fail, some names are hostile."""

from __future__ import annotations

from functools import partial

import optuna
import torch
from torch import nn

import hydra_tune as ht

HOSTILE = "<img src=x onerror=alert(1)>'\"; DROP TABLE studies;-- ../../etc/passwd \U0001f600"
ROWS = 60


def _candidate(trial: optuna.Trial, epochs: int) -> ht.Candidate:
    inputs = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
    width = trial.suggest_int("width", 4, 64, log=True)
    activation = {"relu": nn.ReLU, "tanh": nn.Tanh}[trial.suggest_categorical("activation", ["relu", "tanh"])]
    return ht.Candidate(
        model=nn.Sequential(nn.Linear(8, width), activation(), nn.Linear(width, 2)),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=trial.suggest_float("lr", 1e-3, 1.0, log=True)),
        train=data,
        valid=data,
        batch_size=20,
        epochs=epochs,
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()},
    )


def build_troubled(trial: optuna.Trial) -> ht.Candidate:
    candidate = _candidate(trial, epochs=3)
    if trial.number == 2:
        raise ValueError("<script>alert('from a traceback')</script>")
    return candidate


def build_two_objectives(trial: optuna.Trial) -> ht.Candidate:
    return _candidate(trial, epochs=2)


def slow_objective(trial: optuna.Trial) -> float:
    """Takes a few seconds, and may be stopped after each tenth."""
    import time

    x = trial.suggest_float("x", -1, 1)
    for step in range(40):
        trial.report(x + step, step)
        if trial.should_prune():
            raise optuna.TrialPruned
        time.sleep(0.05)
    return x


def build_slow(trial: optuna.Trial) -> ht.Candidate:
    """Trains for minutes unless it is stopped; the third one fails at once."""
    candidate = _candidate(trial, epochs=20_000)
    if trial.number == 2:
        raise ValueError("this one fails")
    return candidate


def hostile_objective(trial: optuna.Trial) -> float:
    x = trial.suggest_float("<b>x</b>", -1, 1)
    trial.suggest_categorical("javascript:alert(2)", ["<i>one</i>", "=HYPERLINK(1)"])
    trial.set_user_attr("<svg onload=alert(3)>", "</script><script>alert(4)</script>")
    for step in range(3):
        trial.report(x * step, step)
    if trial.number == 1:
        raise RuntimeError("no")
    return float("inf") if trial.number == 2 else x
