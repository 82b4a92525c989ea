"""A pruned network in shards is the pruned network on one device, and a device's budget holds: even one that its dense
16-bit weights alone exceed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hydra_tune.strategies.shard.trial import ShardedTrial
from hydra_tune.strategies.shard.units import ShardsTooLarge
from hydra_tune.strategies.sparse.strategy import Sparse
from tests.strategies.shard.models import assert_same
from tests.strategies.sparse.cut import candidate, cut, plain
from tests.strategies.sparse.test_stages import CASES, FULL

KIB = 1024


def options_of(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    fields, options = CASES[case]
    return fields, {name: value for name, value in options.items() if name != "microbatches"}


@pytest.mark.parametrize("case", sorted(CASES))
def test_shards_equal_one_device_with_the_same_mask(case: str, tmp_path: Path) -> None:
    fields, options = options_of(case)
    strategy = Sparse(shards=True, **FULL, **options)
    expected = plain(candidate(**fields), strategy, tmp_path)
    room = (450 if fields.get("kind") == "positions" else 80) * KIB
    with cut(candidate(**fields), strategy, tmp_path, devices=1, room=room) as run:
        held = run.contexts[0].resident["a"]
        assert len(held.kit.plan.shards) > 1
        if case == "at both ends":
            assert any(bundle.pruned and len(bundle.users) > 1 for bundle in held.kit.plan.bundles)
        assert_same(held.form.checkpoint(held.state()), expected.state())
        assert 0 < run.peak <= room
        saved = load_file(tmp_path / "weights")
    expected.save(tmp_path / "expected")
    assert_same(saved, load_file(tmp_path / "expected"))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_budget_below_the_dense_weights_holds_in_mixed_precision(accumulate: int, tmp_path: Path) -> None:
    strategy = Sparse(shards=True, mask="magnitude", sparsity=0.9)
    fields: dict[str, Any] = {
        "kind": "wide",
        "dtype": torch.float32,
        "keep": "best",
        "accumulate": accumulate,
    }
    expected = plain(candidate(**fields), strategy, tmp_path)
    room = 700 * KIB
    with cut(candidate(**fields), strategy, tmp_path, devices=1, room=room) as run:
        assert run.plan["weight_bytes"] > room, "16-bit weights alone are more"
        assert 0 < run.peak <= room
        held = run.contexts[0].resident["a"]
        assert_same(held.form.checkpoint(held.state()), expected.state())
        kept = run.plan["survivors"]
        # The index and a master, two moments, of 4 bytes each; 12 bytes for what is not pruned.
        others = sum(p.numel() for p in candidate(**fields).model.parameters()) - run.plan["pruned_weights"]
        assert run.plan["state_bytes"] == pytest.approx(
            2 * run.plan["pruned_weights"] + 16 * kept + 12 * others, rel=0.01
        )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_dense_gradients_go_one_by_one(accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a pruned weight's gradient arrives, no other one is there, whether steps are made at once or wait."""
    arrived, there = ShardedTrial._on_gradient, []

    def watched(trial: ShardedTrial, name: str, parameter: nn.Parameter) -> None:
        steps = trial.steps
        there.append([other for other, p in steps.parameters.items() if p.grad is not None and other != name])
        arrived(trial, name, parameter)

    monkeypatch.setattr(ShardedTrial, "_on_gradient", watched)
    strategy = Sparse(shards=True, mask="magnitude", **FULL)
    with cut(candidate(epochs=1, accumulate=accumulate), strategy, tmp_path, 1, 80 * KIB):
        assert len(there) >= 5 * 16
        assert not any(there)


def test_a_device_too_small_for_dense_epochs_is_told_of_masks_without_any(tmp_path: Path) -> None:
    strategy = Sparse(shards=True)
    fields: dict[str, Any] = {"kind": "wide", "dtype": torch.float32}
    said = r"in the dense epochs of mask early-bird, node '.*' needs .* on a device.*mask: magnitude has none"
    with pytest.raises(ShardsTooLarge, match=said), cut(candidate(**fields), strategy, tmp_path, 1, 700 * KIB):
        raise AssertionError("it fits")
