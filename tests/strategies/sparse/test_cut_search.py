"""Searches over pruned networks in stages and in shards, from Python, YAML and the command line, on real devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_tune as ht
from tests.fault.searches import run
from tests.strategies.pruned_candidates import build, deep
from tests.strategies.searches import events

SPEC = Path(__file__).parents[1] / "pruned_candidates.py"
BUDGET = 1600
"""KiB of each device: the network below needs two such devices pruned, and more than two dense."""


YAML = f"""
space: {SPEC}:build
study: y
trials: 1
devices: 2xcpu
device_memory: {BUDGET}KiB
seed: 11
strategy: {{name: sparse, stages: auto, mask: magnitude, microbatches: 4}}
"""


def test_a_pruned_network_needs_fewer_stages_than_a_dense_one_and_show_says_how_many(tmp_path: Path) -> None:
    (tmp_path / "y.yaml").write_text(YAML)
    done = run("search", "y.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads(run("show", "y", "0", "--json", folder=tmp_path).stdout)
    plan = record["plan"]
    assert (record["strategy"], plan["way"], plan["devices"], record["shards"]) == ("sparse", "stages", 2, 2)
    assert plan["dense_stages"] > 2
    assert record["peak_device_bytes"] <= BUDGET * 1024
    assert {stage["device"] for stage in plan["stages"]} == {"cpu:0", "cpu:1"}
    shown = run("show", "y", "0", folder=tmp_path).stdout
    assert f"2 stages; dense would need {plan['dense_stages']}, {plan['survivors']} of " in shown
    assert "placed by balanced, 4 micro-batches, 1f1b" in shown
    dense = run("search", "y.yaml", "--strategy", "pipeline", "--study", "d", "--concurrency", "1", folder=tmp_path)
    assert dense.returncode != 0
    assert "OUT_OF_MEMORY" in run("trials", "d", folder=tmp_path).stdout


def test_stages_give_the_weights_of_one_device_however_many_trials_there_are() -> None:
    """Early-bird: dense in shards at first, then pruned and in stages; two trials take turns on two devices."""

    def made(trial: Any) -> ht.Candidate:
        trial.suggest_float("x", 0, 1)
        return deep(torch.float64, epochs=4, clip_grad_norm=0.5, accumulate=2)

    options = {"name": "sparse", "precision": "full", "sparsity": 0.8, "dense_epochs": 2}
    common: dict[str, Any] = {"trials": 2, "devices": "2xcpu", "seed": 3, "progress": False}
    one = ht.search(made, study="one", strategy={**options, "replicas": 1}, **common)
    two = ht.search(
        made, study="two", strategy={**options, "stages": 2, "microbatches": 2}, concurrency=2, device_memory="64MiB",
        **common,
    )  # fmt: skip
    assert [record.values for record in two.trials] == [pytest.approx(r.values, abs=1e-9) for r in one.trials]
    weights = one.best_model().state_dict()
    for name, tensor in two.best_model().state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_shards_train_where_the_dense_16_bit_weights_are_more_than_a_device_has() -> None:
    budget = 900
    result = ht.search(
        build, trials=1, devices="2xcpu", device_memory=f"{budget}KiB", seed=3, progress=False, study="shards",
        strategy={"name": "sparse", "shards": True, "mask": "magnitude"},
    )  # fmt: skip
    (record,) = result.trials
    plan = record.plan
    assert plan is not None
    assert (record.state, plan["way"]) == ("COMPLETE", "shards")
    assert plan["weight_bytes"] > budget * 1024
    assert plan["shards"] == record.shards > 1
    assert 0 < (record.peak_device_bytes or 0) <= budget * 1024
    assert record.spill_read_bytes > plan["weight_bytes"]
    assert not [message for kind, message in events(Path.cwd()) if kind == "out of memory"]
    kept = sum(int((p != 0).sum()) for p in result.best_model().parameters() if p.dim() > 1)
    assert kept == plan["survivors"]
    shown = run("show", "shards", "0", folder=Path.cwd()).stdout
    assert f"{record.shards} shards of " in shown
    assert "of it dense weights" in shown
