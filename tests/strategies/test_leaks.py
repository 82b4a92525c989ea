"""A device worker frees everything it holds for a trial when the trial has ended.

A tensor's hooks are out of the garbage collector's sight: one that leads back to its trial keeps it for ever.
"""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hydra_tune as ht
from tests.candidates import small_candidate

TRIALS = 6


def counting(kind: str, number: int, log: str) -> Any:
    """A loss that notes, at a trial's first batch, how many objects of a kind its worker has."""
    seen: list[int] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not seen:
            gc.collect()
            seen.append(sum(type(each).__name__ == kind for each in gc.get_objects()))
            with open(log, "a") as file:
                file.write(f"{number} {seen[0]}\n")
        return nn.functional.cross_entropy(outputs, targets)

    return loss


def test_a_trial_in_shards_that_has_ended_is_freed(tmp_path: Path) -> None:
    log = str(tmp_path / "counts")

    def build(trial: Any) -> ht.Candidate:
        optimizer = partial(torch.optim.AdamW, lr=1e-3)
        return small_candidate(loss=counting("ShardedTrial", trial.number, log), optimizer=optimizer, epochs=3)

    result = ht.search(build, trials=TRIALS, devices="1xcpu", strategy="shard", concurrency=1, progress=False)
    assert result.completed == TRIALS
    result.close()
    counts = [int(line.split()[1]) for line in Path(log).read_text().splitlines()]
    assert len(counts) >= TRIALS
    assert max(counts) <= 2, "of the trial itself, and of one that is just ending"
