"""The build function of a fit: candidates of the families for tables on a prepared table.

If time is limited, a trial's number of epochs follows from the measured speed of its first steps, so that all trials
take about the same time; the number is recorded with the trial, which keeps it when it is resumed.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hydra_tune.automl.portfolio import BASELINE
from hydra_tune.automl.prepared import Prepared
from hydra_tune.coordinator.pruning import EPOCHS, NEVER
from hydra_tune.core.clock import work_seconds
from hydra_tune.search_spaces.bagged import PerFold
from hydra_tune.search_spaces.bagged_objectives import BaggedLoss, bagged_metrics
from hydra_tune.search_spaces.dataset import Data
from hydra_tune.search_spaces.families import Family, family
from hydra_tune.search_spaces.space import Space
from hydra_tune.search_spaces.training import optimizer
from hydra_tune.training.candidate import Candidate

LEAST_STEPS = 16
"""Minimum steps per epoch: a small table is repeated, since evaluating after every few steps would take most of the
time."""
STEPS, LEAST_EPOCHS, MOST_EPOCHS = 2_000, 12, 40
"""Steps and epochs of a full training without a time limit. More steps overfit small tables."""
FEWEST_EPOCHS = 4
"""A model that cannot have this many epochs in its time is not started."""
WARM_UP = 0.05
LONG_STEP = 0.3
"""Seconds after which a step is not measured again."""
EVALUATION = 0.4
"""Cost of evaluating an epoch, relative to training it."""


@dataclass(frozen=True)
class FitPlan:
    """The options of a fit that its trials need; part of the study's source."""

    families: tuple[str, ...]
    objective: str
    trial_seconds: float | None = None
    """Approximate seconds per trial; None if time is not limited."""
    epochs: tuple[tuple[int, int], ...] = ()
    """For a refit, per trial: the epoch after which it ends, and the epochs its schedule was made for."""

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "families": list(self.families), "epochs": [list(pair) for pair in self.epochs]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> FitPlan:
        epochs = tuple((ends, planned) for ends, planned in plain["epochs"])
        return cls(**{**plain, "families": tuple(plain["families"]), "epochs": epochs})


class FitBuild:
    """Builds candidates from the directory of a fit."""

    def __init__(self, directory: str, plan: FitPlan) -> None:
        self.directory, self.plan = directory, plan
        self.prepared = Prepared.load(Path(directory))
        self.space = Space.choice("family", {name: self._family_space(name) for name in plan.families})
        self._passes: dict[int, TensorDataset] = {}

    @functools.cached_property
    def data(self) -> Data:
        """The table as data of the model families."""
        return self.prepared.data()

    def _family_space(self, name: str) -> Space:
        return family(name).space(self.data if _sees_tables(family(name)) else pictures(self.data))

    def __call__(self, trial: Any) -> Candidate:
        """Return the candidate for a trial's parameters."""
        kind, params = params_of(self.space.suggest(trial))
        candidate = self.candidate(kind, params)
        if self.plan.epochs:
            ends, planned = self.plan.epochs[trial.number]
            return replace(scheduled(candidate, planned), epochs=ends)
        epochs = trial.user_attrs.get(EPOCHS)
        if epochs is None:
            epochs = self._epochs(candidate)
            trial.set_user_attr(EPOCHS, epochs)
            if kind.name == BASELINE and trial.number == 0:
                trial.set_user_attr(NEVER, True)
        return scheduled(candidate, epochs)

    def candidate(self, kind: Family, params: Mapping[str, Any]) -> Candidate:
        """Return the candidate of an assignment, with the number of epochs of a full training."""
        log = params.get("target") == "log"
        task, scale = self.prepared.kind, self.prepared.scale
        loss = BaggedLoss(task, scale, params.get("smoothing", 0.0), log, self.plan.objective == "mae")
        batch_size = min(params["batch_size"], len(self.data.train))
        train = self._repeated(batch_size)
        steps = -(-len(train) // batch_size)
        return Candidate(
            model=make_model(kind, params, self.data),
            loss=loss,
            optimizer=optimizer({"optimizer": "adamw", **params}),
            train=train,
            valid=self.data.valid if self.prepared.judged else None,
            batch_size=batch_size,
            epochs=min(MOST_EPOCHS, max(LEAST_EPOCHS, -(-STEPS // steps))),
            metrics=bagged_metrics(task, scale, log),
            clip_grad_norm=kind.clip_grad_norm,
            keep="best" if self.prepared.judged else "last",
        )

    def _repeated(self, batch_size: int) -> TensorDataset:
        """Return the training rows, repeated so that an epoch has enough steps; cached for all trials."""
        rows: TensorDataset = self.data.train
        passes = max(1, -(-LEAST_STEPS * batch_size // len(rows)))
        if passes not in self._passes:
            parts = [tensor.repeat(passes, *[1] * (tensor.dim() - 1)) for tensor in rows.tensors]
            self._passes[passes] = rows if passes == 1 else TensorDataset(*parts)
        return self._passes[passes]

    def _epochs(self, candidate: Candidate) -> int:
        """Return the number of epochs that fit the time of a trial, at the speed of a few measured steps."""
        if self.plan.trial_seconds is None:
            return candidate.epochs
        steps = steps_of(candidate)
        epoch = step_seconds(candidate) * steps * (1 + EVALUATION)
        epochs = min(candidate.epochs, math.floor(self.plan.trial_seconds / epoch))
        if epochs >= FEWEST_EPOCHS:
            return epochs
        if FEWEST_EPOCHS * epoch > 4 * self.plan.trial_seconds:
            raise optuna.TrialPruned(
                f"an epoch would take {epoch:.1f} s, of {self.plan.trial_seconds:.1f} s for the trial"
            )
        return FEWEST_EPOCHS

    def __reduce__(self) -> tuple[Any, ...]:
        return FitBuild, (self.directory, self.plan)


def params_of(chosen: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Return the family of an assignment, and its parameters without the family's prefix."""
    name = chosen["family"]
    prefix = f"{name}."
    return family(name), {k.removeprefix(prefix): v for k, v in chosen.items() if k.startswith(prefix)}


def make_model(kind: Family, params: Mapping[str, Any], data: Data) -> nn.Module:
    """Return the model of one assignment, for every fold of a table."""
    if _sees_tables(kind):
        return kind.model(params, data)
    assert data.layout is not None
    return PerFold([kind.model(params, pictures(data)) for _ in range(data.layout.folds)], data.layout)


def pictures(data: Data) -> Data:
    """Return a table of images as image data, for the image families."""
    assert data.layout is not None
    assert data.layout.image is not None
    return replace(data, kind="image", input_shape=data.layout.image, layout=None)


def scheduled(candidate: Candidate, epochs: int) -> Candidate:
    """Return a candidate for this many epochs, with a learning rate that falls to zero over them."""
    schedule = functools.partial(_cosine, steps=epochs * steps_of(candidate))
    return replace(candidate, epochs=epochs, scheduler=schedule, schedule_every="step")


def steps_of(candidate: Candidate) -> int:
    """Return the number of steps per epoch."""
    rows: Any = candidate.train
    return -(-len(rows) // candidate.batch_size)


def step_seconds(candidate: Candidate) -> float:
    """Return the seconds of a training step: the fastest of a few, on a copy.

    Measured in CPU time: while a candidate is built another one trains, perhaps on the same core.
    """
    from hydra_tune.training.batches import fetch_rows

    model = copy.deepcopy(candidate.model).train()
    steps = candidate.optimizer(list(model.parameters()))
    inputs, targets = fetch_rows(candidate.train, torch.arange(candidate.batch_size), None)
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < LONG_STEP:
        began = work_seconds()
        candidate.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        steps.step()
        steps.zero_grad()
        taken.append(work_seconds() - began)
    return min(taken)


def _cosine(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(_factor, steps=steps))


def _factor(step: int, steps: int) -> float:
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _sees_tables(kind: Family) -> bool:
    return "table" in kind.kinds


@dataclass(frozen=True)
class FitSource:
    """The build function of a fit, identified by its directory."""

    directory: str
    plan: FitPlan

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> FitSource | None:
        match record:
            case {"directory": str(directory), "plan": dict(plan)}:
                return cls(directory, FitPlan.from_json(plan))
        return None

    def load(self) -> FitBuild:
        return FitBuild(self.directory, self.plan)

    def describe(self) -> dict[str, Any]:
        return {"kind": "fit", "directory": self.directory, "plan": self.plan.as_json()}

    def folder(self) -> str | None:
        return None

    def uses_torch(self) -> bool:
        return True

    def text(self) -> str | None:
        return json.dumps(self.plan.as_json(), indent=1, sort_keys=True)
