"""Bytes and stages of a pruned network, computed before training and compared with training."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from hydra_tune.strategies.pipeline.prepare import fewest_devices
from hydra_tune.strategies.pipeline.units import DoesNotFit
from hydra_tune.strategies.shard.prepare import Prospect, examine
from hydra_tune.strategies.sparse.sizes import (
    compressed,
    counted_bytes,
    dense_state_bytes,
    layers_of,
    stages_needed,
    state_bytes,
    survivor_bytes,
    wire_bytes,
)
from hydra_tune.strategies.sparse.strategy import Sparse
from tests.strategies.shard.models import start
from tests.strategies.sparse.cut import candidate, cut

FIELDS: dict[str, Any] = {"kind": "wide", "dtype": torch.float32, "epochs": 1}
ROWS, MICROBATCHES = 2, 4


@cache
def prospect() -> Prospect:
    with TemporaryDirectory() as folder:
        return examine(start(candidate(**FIELDS)), Path(folder), ROWS)


def needed(room: int, sparsity: float = 0.9, *, mixed: bool = True) -> tuple[int | None, int | None]:
    layers = layers_of(candidate(**FIELDS).model, sparsity)
    found = stages_needed(prospect(), layers, room, mixed=mixed, microbatches=MICROBATCHES)
    return found.pruned, found.dense


@pytest.mark.smoke
def test_bytes_are_those_of_the_paper():
    weights, others = 64 * 512 + 512 * 512 + 512 * 10, 512 + 512 + 10
    assert state_bytes(weights, others, 0.9) == 2 * weights + 24 * round(0.1 * weights) + 16 * others
    assert state_bytes(weights, others, 0.9, mixed=False) == 4 * weights + 16 * round(0.1 * weights) + 16 * others
    assert dense_state_bytes(weights + others) == 20 * (weights + others)
    assert dense_state_bytes(weights, mixed=False) == 16 * weights
    assert 1 - state_bytes(weights, 0, 0.9) / dense_state_bytes(weights) == pytest.approx(0.78, abs=0.001)
    assert 1 - state_bytes(weights, 0, 0.8) / dense_state_bytes(weights) == pytest.approx(0.66, abs=0.001)
    assert state_bytes(10**6, 0, 0.25) == dense_state_bytes(10**6), "where pruning begins to pay"
    assert survivor_bytes(mixed=False, moments=1, number=8) == 4 + 8 + 8
    assert wire_bytes(weights, others, 0.9, replicas=2) == 2 * (2 * round(0.1 * weights) + 4 * others)
    assert wire_bytes(weights, others, 0.9, replicas=1) == 0


def test_more_room_or_fewer_survivors_never_need_more_stages():
    rooms = [2**16 * k for k in range(4, 60, 4)]
    for one, other in itertools.pairwise(rooms):
        for fewer, more in zip(needed(other), needed(one), strict=True):
            assert more is None or (fewer is not None and fewer <= more)
    for room in rooms:
        pruned, dense = needed(room)
        assert dense is None or (pruned is not None and pruned <= dense)
        assert (needed(room, 0.99)[0] or 99) <= (needed(room, 0.5)[0] or 99)
    assert needed(2**40) == (1, 1)
    assert needed(2**10) == (None, None)


@pytest.mark.parametrize("precision", ["mixed", "full"])
def test_a_trial_takes_as_few_devices_as_fit_and_no_more_memory_than_they_have(precision: str, tmp_path: Path) -> None:
    mixed = precision == "mixed"
    rooms = ((room, *needed(room, mixed=mixed)) for room in range(2**19, 2**22, 2**15))
    room, _, dense = min((room, pruned, dense) for room, pruned, dense in rooms if pruned == 2 and (dense or 0) > 3)
    strategy = Sparse(stages="auto", mask="magnitude", least=1, precision=precision, microbatches=MICROBATCHES)
    with cut(candidate(**FIELDS), strategy, tmp_path, devices=3, room=room) as run:
        assert run.plan["devices"] == run.plan["needed_stages"] == len(run.parts()) == 2
        assert run.plan["dense_stages"] == dense
        assert room / 2 < run.peak <= room
    said = r"the pruned network needs 2 stages of .*, and there are 1 devices \(give more device_memory"
    with pytest.raises(DoesNotFit, match=said), cut(candidate(**FIELDS), strategy, tmp_path, devices=1, room=room):
        raise AssertionError("it fits")


@pytest.mark.parametrize("mixed", [True, False])
def test_costs_of_a_pruned_layer_are_those_of_the_formula(mixed: bool):
    layers = layers_of(candidate(**FIELDS).model, 0.9)
    pruned = compressed(prospect(), layers, mixed=mixed, resident=True)
    (cost,) = [node for node in pruned.profile.nodes if node.name == "4"]
    kept, bias, padding = layers["4.weight"].survivors, 256, 64 * 8
    expected = counted_bytes(256 * 256, kept, bias, mixed=mixed)
    assert expected <= cost.state_bytes <= expected + padding
    in_shards = compressed(prospect(), layers, mixed=mixed, resident=False)
    (cost,) = [node for node in in_shards.profile.nodes if node.name == "4"]
    blocks = (2 * 256 * 256 + 16 * kept if mixed else 4 * 256 * 256 + 12 * kept) + 12 * bias
    assert blocks <= cost.state_bytes - cost.gradient_bytes <= blocks + padding
    assert 4 * (kept + bias) <= cost.gradient_bytes <= 4 * (kept + bias) + padding


def test_costs_of_a_pruned_network_keep_what_is_not_pruned():
    layers = layers_of(candidate(**FIELDS).model, 0.9)
    del layers["2.weight"]
    before, after = prospect().profile, compressed(prospect(), layers, mixed=False, resident=True).profile
    (same,) = [pair for pair in zip(before.nodes, after.nodes, strict=True) if pair[0].name == "2"]
    assert same[0] == same[1]
    assert before.state["2.weight"] == after.state["2.weight"]
    assert after.state["4.weight"]["exp_avg"] == (torch.float32, (layers["4.weight"].survivors,))
    assert fewest_devices(compressed(prospect(), {}, mixed=False, resident=True), 2**40, 1, "1f1b") == 1
