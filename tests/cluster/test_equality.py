"""A search on nodes has the values and the weights of a search on one machine, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hydra_tune as ht
from hydra_tune.core.seeds import trial_seed
from tests.candidates import rows, small_candidate
from tests.cluster.conftest import Started
from tests.cluster.slow_candidates import build_large

pytestmark = pytest.mark.slow

EXACT: dict[str, Any] = {"whole": "whole", "shard": "shard", "pipeline": {"name": "pipeline", "microbatches": 2}}
ARGUMENTS: dict[str, Any] = {"trials": 4, "sampler": "random", "seed": 5, "progress": False}


def build(trial: Any) -> ht.Candidate:
    """Batches of ten, with no smaller last one: batch-norm needs two rows in each micro-batch."""
    return small_candidate(lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True), train=rows(60), valid=rows(40))


def searched(strategy: Any, **where: Any) -> tuple[list[float | None], dict[int, dict[str, torch.Tensor]]]:
    """Run a search; return the values and the weights of its trials."""
    result = ht.search(build, strategy=strategy, **where, **ARGUMENTS)
    records = result.trials
    assert [record.seed for record in records] == [trial_seed(5, number) for number in range(4)]
    values = [record.value for record in records]
    return values, {record.number: load_file(result.weights(record.number)) for record in records}


@pytest.mark.parametrize(
    ("strategy", "nodes"),
    [("whole", [1]), ("whole", [1, 1]), ("shard", [1, 1]), ("pipeline", [2, 2])],
    ids=["whole on one", "whole on two", "shard on two", "pipeline on two"],
)
def test_values_and_weights_are_the_same(strategy: str, nodes: Sequence[int], machines: Started) -> None:
    # Two devices of one thread each, here and there.
    values, weights = searched(EXACT[strategy], devices="2xcpu")
    machines(nodes)
    found_values, found_weights = searched(EXACT[strategy], cluster="auto")
    assert found_values == values
    for number, state in weights.items():
        for name, tensor in state.items():
            assert torch.equal(found_weights[number][name], tensor), f"trial {number}: {name}"


@pytest.mark.parametrize("strategy", ["auto", "sparse", "ist", "elastic"])
def test_other_strategies_run(strategy: str, machines: Started) -> None:
    machines([2, 1])
    result = ht.search(build, strategy=strategy, cluster="auto", trials=2, seed=5, progress=False)
    assert [record.state for record in result.trials] == ["COMPLETE"] * 2


def test_a_trial_that_is_too_large_for_its_node_goes_to_a_larger_one(machines: Started) -> None:
    machines([2, 1]).memory = (80 * 2**20, 2**30)
    result = ht.search(build_large, strategy="auto", cluster="auto", trials=2, seed=5, progress=False)
    assert [(record.state, record.device) for record in result.trials] == [("COMPLETE", "n1/cpu:0")] * 2
