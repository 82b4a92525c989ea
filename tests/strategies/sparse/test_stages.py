"""A pruned network in stages is the pruned network on one device: to 1e-9 in float64, with its bytes by the formula."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import lr_scheduler

from hydra_tune.graph.program import HALF
from hydra_tune.strategies.sparse.masks import prunable, survivors
from hydra_tune.strategies.sparse.sizes import counted_bytes
from hydra_tune.strategies.sparse.strategy import Sparse
from tests.strategies.shard.models import assert_same
from tests.strategies.sparse.cut import Cut, candidate, cut, plain

FULL: dict[str, Any] = {"sparsity": 0.8, "precision": "full"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "magnitude": ({}, {"mask": "magnitude", "microbatches": 2}),
    "one micro-batch": ({"kind": "positions"}, {"mask": "random", "microbatches": 1}),
    "used twice": ({"kind": "positions"}, {"mask": "magnitude", "microbatches": 3}),
    "at both ends": ({"kind": "shared"}, {"mask": "magnitude", "microbatches": 2}),
    "clipped": ({"clip_grad_norm": 0.3}, {"mask": "random", "microbatches": 2}),
    "accumulated": (
        {"accumulate": 2, "scheduler": partial(lr_scheduler.StepLR, step_size=2, gamma=0.5), "schedule_every": "step"},
        {"mask": "magnitude", "microbatches": 2},
    ),
    "momentum": (
        {"optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01), "keep": "best"},
        {"mask": "magnitude", "microbatches": 2},
    ),
    "early-bird": ({"keep": "best"}, {"mask": "early-bird", "dense_epochs": 2, "microbatches": 2}),
    "rewound": ({}, {"mask": "early-bird", "dense_epochs": 1, "rewind": True, "microbatches": 2}),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(CASES))
def test_two_stages_equal_one_device_with_the_same_mask(case: str, tmp_path: Path) -> None:
    fields, options = CASES[case]
    strategy = Sparse(stages=2, **FULL, **options)
    expected = plain(candidate(**fields), strategy, tmp_path)
    with cut(candidate(**fields), strategy, tmp_path) as run:
        assert_same(run.state(), expected.state())
        assert len({stage.device for stage in run.parts()[0].kit.stages}) == 2
        saved = load_file(tmp_path / "weights")
    expected.save(tmp_path / "expected")
    assert_same(saved, load_file(tmp_path / "expected"))


def test_mixed_precision_gives_what_one_device_gives(tmp_path: Path) -> None:
    strategy = Sparse(stages=2, mask="magnitude", sparsity=0.8, microbatches=1)
    fields: dict[str, Any] = {"kind": "positions", "dtype": torch.float32, "keep": "best", "accumulate": 2}
    expected = plain(candidate(**fields), strategy, tmp_path)
    with cut(candidate(**fields), strategy, tmp_path) as run:
        assert_same(run.state(), expected.state())
        kinds = {p.dtype for part in run.parts() for p in part.share.parameters.named.values()}
        assert kinds == {HALF, torch.float32}


@pytest.mark.parametrize("precision", ["mixed", "full"])
def test_each_device_has_the_bytes_of_the_formula_for_its_own_parameters(precision: str, tmp_path: Path) -> None:
    strategy = Sparse(stages=2, mask="magnitude", precision=precision, microbatches=2, least=1)
    fields: dict[str, Any] = {"dtype": torch.float32, "epochs": 1}
    with cut(candidate(**fields), strategy, tmp_path) as run:
        whole = candidate(**fields).model
        pruned = {name: w.numel() for name, w in prunable(whole).items()}
        seen: list[str] = []
        for part, told in zip(run.parts(), run.plan["state_bytes"], strict=True):
            named = part.share.parameters.named
            seen += named
            own = [n for n in named if n in pruned]
            weights, kept = sum(pruned[n] for n in own), sum(survivors(pruned[n], 0.9, 1) for n in own)
            others = sum(p.numel() for n, p in whole.named_parameters() if n in named and n not in pruned)
            assert own
            assert told == counted_bytes(weights, kept, others, mixed=precision == "mixed")
            assert told == part.share.parameters.weights.state_bytes()
        assert sorted(seen) == sorted(name for name, _ in whole.named_parameters()), "each is on one device"
        assert run.plan["survivors"] == sum(survivors(n, 0.9, 1) for n in pruned.values())


def test_gradients_of_micro_batches_add_up_compressed(tmp_path: Path) -> None:
    """Between a micro-batch's backward and the step no dense gradient of a pruned weight exists."""
    waiting: list[int] = []

    def watch(run: Cut, kind: str) -> None:
        if kind == "backward":
            layers = [layer for part in run.parts() for layer in part.share.parameters.weights.layers]
            assert all(layer.weight.grad is None for layer in layers)
            waiting.append(sum(layer.pending for layer in layers))

    strategy = Sparse(stages=2, mask="magnitude", microbatches=4, **FULL)
    with cut(candidate(epochs=1), strategy, tmp_path, watch=watch):
        assert len(waiting) == 4 * 4 + 4, "the last batch has 5 rows"
        assert min(waiting) > 0


def test_a_trial_goes_on_from_a_checkpoint_whatever_it_was_cut_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun dense, pruned in stages, then in shards, then in stages, each in the middle of an epoch."""
    for module in ("pipeline", "shard"):  # training pauses, and a checkpoint is written, as often as may be
        monkeypatch.setattr(f"hydra_tune.strategies.{module}.strategy.SLICE_SECONDS", 0.0)
    fields: dict[str, Any] = {"epochs": 6, "keep": "best", "accumulate": 3}  # of 5 batches
    options: dict[str, Any] = {"mask": "early-bird", "dense_epochs": 2, **FULL}
    staged, sharded = Sparse(stages=2, microbatches=2, **options), Sparse(shards=True, **options)
    expected = plain(candidate(**fields), staged, tmp_path)
    for strategy, most, behind in ((sharded, 2, 0), (staged, 4, 1), (sharded, 5, 3), (staged, 99, 4)):
        with cut(candidate(**fields), strategy, tmp_path, every_time=True, most=most) as run:
            assert run.behind == behind
            assert ("checkpoint", 0) in run.ran
            if most == 99:
                assert_same(run.state(), expected.state())
