"""The large GPT example has the training state that its comment states."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from hydra_tune.coordinator.spec import read_spec

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("depth", [6, 12])
def test_the_large_gpts_have_200_to_500_mb_of_training_state(depth: int) -> None:
    spec = read_spec(str(EXAMPLES / "gpt_large.yaml"), {"devices": "2xcpu", "device_memory": "96MiB"})
    assert spec.settings.strategy == "shard"
    assert spec.settings.device_memory == "96MiB"
    build = spec.source.load()
    params = {"depth": depth, "heads": 8, "head_dim": 64, "expansion": 4, "batch_size": 8, "lr": 3e-4}
    drawn = optuna.trial.FixedTrial({**params, "dropout": 0.1, "optimizer": "adamw", "weight_decay": 1e-4})
    made = build(drawn)
    weights = sum(parameter.nbytes for parameter in made.model.parameters())
    assert 200e6 < 3 * weights < 500e6, "weights and both moments"
