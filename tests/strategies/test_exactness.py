"""A search of one trial ends with the weights of a plain PyTorch loop: float64, 1e-9.

The contract test of every exact strategy: to add one, add its name to STRATEGIES.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hydra_tune as ht
from hydra_tune.core.devices import cores
from tests.candidates import plain_loop, small_candidate

STRATEGIES: dict[str, str | dict[str, Any]] = {
    "whole": "whole",
    "shard": "shard",
    "pack": "pack",
    "one subnet": {"name": "ist", "subnets": 1, "local_steps": 3},
}
# Workers with as many threads as the plain loop here: another number adds in another order, and Adam turns the rounding
# of a zero gradient (a bias before batch-norm) into steps of 1e-9.
ONE_THREAD = f"{cores()}xcpu"

FIELDS: dict[str, dict[str, Any]] = {
    "everything": {
        "accumulate": 4,  # 11 batches: three steps an epoch, the last of three batches, one of them small
        "clip_grad_norm": 0.5,
        "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.7),
        "schedule_every": "step",
        "epochs": 3,
    },
    "epoch schedule": {"scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5), "epochs": 3},
    "sgd": {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)},
    "rmsprop": {"optimizer": partial(torch.optim.RMSprop, lr=0.01)},
    "groups": {
        "optimizer": lambda params: torch.optim.AdamW(
            [
                {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0, "lr": 0.02},
            ],
            lr=0.01,
        )
    },
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
def test_the_weights_are_those_of_a_plain_loop(strategy: Any, fields: dict[str, Any]) -> None:
    def build(trial: Any) -> ht.Candidate:
        return small_candidate(**fields)

    result = ht.search(build, trials=1, devices=ONE_THREAD, strategy=strategy, seed=11, progress=False)
    seed = result.best_trial.seed
    assert seed == ht.trial_seed(11, 0)
    torch.manual_seed(seed)
    expected, _losses = plain_loop(build(None), seed)
    found = result.best_model()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(
            found.state_dict()[name], tensor, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )
    expected.eval()
    inputs, targets = build(None).valid.tensors
    assert result.best_value == pytest.approx(nn.functional.cross_entropy(expected(inputs), targets).item(), abs=1e-9)


def test_taking_turns_changes_nothing() -> None:
    """Three trials in flight on one device, each slice a few batches, end as if each had run alone."""

    def build(trial: Any) -> ht.Candidate:
        return small_candidate(lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True), epochs=4)

    def values(**options: Any) -> list[float | None]:
        result = ht.search(build, trials=3, sampler="random", seed=5, progress=False, devices=ONE_THREAD, **options)
        return [record.value for record in result.trials]

    together = values(concurrency=3)
    alone = values(concurrency=1)
    assert together == alone
    assert len(set(alone)) == 3


def test_a_trial_built_by_the_builder_equals_one_built_on_its_device() -> None:
    """Only the first trial is built on a device; trial 1 of one search is trial 1 of another all the same."""

    def build(trial: Any) -> ht.Candidate:
        trial.suggest_float("lr", 0.01, 0.02)
        return small_candidate(lr=0.01)

    result = ht.search(build, trials=3, devices=ONE_THREAD, seed=3, progress=False)
    for record in result.trials:
        torch.manual_seed(record.seed)
        expected, _ = plain_loop(build(optuna_trial()), record.seed)
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(result.model(record.number).state_dict()[name], tensor, rtol=0, atol=1e-9)


def optuna_trial() -> Any:
    from optuna.trial import FixedTrial

    return FixedTrial({"lr": 0.015})


def test_keep_best_gives_the_best_epochs_value_and_weights() -> None:
    def build(trial: Any) -> ht.Candidate:
        return small_candidate(lr=0.3, epochs=6, keep="best")

    result = ht.search(
        build, trials=1, devices=ONE_THREAD, seed=2, progress=False, metric="accuracy", direction="maximize"
    )
    from hydra_tune.storage import open_storage
    from hydra_tune.storage.queries import trial_metrics

    with open_storage("sqlite:///hydra_tune.db", read_only=True) as storage:
        curve = [m["accuracy"] for m in trial_metrics(storage, result.study.study_name, 0).values()]
    assert result.best_value == max(curve)
    model = result.best_model().eval()
    inputs, targets = build(None).valid.tensors
    found = (model(inputs).argmax(1) == targets).double().mean().item()
    assert found == pytest.approx(max(curve), abs=1e-12)
    result.close()
