"""The estimate of a pack: measured once per shape, from the second trial on, and refused with a reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hydra_tune.strategies.estimate import Epoch, Rehearsal
from hydra_tune.strategies.pack.estimate import NOT_YET, estimate
from hydra_tune.strategies.pool import Pool
from hydra_tune.training.prepared import Prepared
from tests.strategies.pack.members import candidate

POOL = Pool(devices=2, memory=2**20, host_bytes=2**30)
PLAIN = Rehearsal(batch_seconds=0.001, judge_seconds=0.0005, peak_bytes=2**15, state_bytes=2**14)


class Look:
    """What a survey knows of trial `number`."""

    def __init__(self, folder: Path, number: int, rehearsal: Rehearsal | None = PLAIN, **fields: Any) -> None:
        self.profiles, self.rehearsal, self.failed = folder, rehearsal, "" if rehearsal else "it raised"
        self.epoch = Epoch(batches=6, valid_batches=3)
        self.training = SimpleNamespace(device=torch.device("cpu"))
        self.made = lambda: candidate("dense", "adamw", 0, **fields)
        origin: Any = SimpleNamespace(info=SimpleNamespace(seed=number))
        self.prepared = Prepared(self.made(), self.made().train, self.made().valid, origin)
        self.copied = 0

    def copies(self, count: int) -> list[Prepared]:
        self.copied += count
        return [Prepared(self.made(), self.prepared.train, self.prepared.valid) for _ in range(count)]


def of(look: Any, pool: Pool = POOL) -> Any:
    return estimate(look, pool)


def test_the_second_trial_of_a_shape_is_rehearsed_and_later_ones_read_that(tmp_path: Path) -> None:
    first = Look(tmp_path, 0)
    assert of(first).refused == NOT_YET
    assert of(first).refused == NOT_YET  # asked twice, as for two pools
    second = Look(tmp_path, 1)
    found = of(second)
    assert not found.refused
    assert second.copied == 8
    assert found.members == found.parts == 32
    assert found.seconds == pytest.approx(32 * found.work)
    assert found.device_bytes == 32 * PLAIN.peak_bytes
    assert found.signature
    third = Look(tmp_path, 2)
    assert of(third) == found
    assert not third.copied


def test_a_pack_is_as_large_as_a_device_holds(tmp_path: Path) -> None:
    of(Look(tmp_path, 0), Pool(devices=1, memory=5 * PLAIN.peak_bytes, host_bytes=2**30))
    found = of(Look(tmp_path, 1), Pool(devices=1, memory=5 * PLAIN.peak_bytes, host_bytes=2**30))
    assert found.members == 5
    assert of(Look(tmp_path, 1), Pool(devices=1, memory=PLAIN.peak_bytes, host_bytes=2**30)).refused == (
        "a device holds only one of it"
    )


def test_what_cannot_gain_or_be_packed_says_so(tmp_path: Path) -> None:
    slow = Rehearsal(batch_seconds=0.5, judge_seconds=0.1, peak_bytes=1, state_bytes=1)
    assert "a batch takes 500 ms" in of(Look(tmp_path, 0, slow)).refused
    assert "its rehearsal failed (it raised)" in of(Look(tmp_path, 0, None)).refused
    assert "Adagrad has no batched form" in of(Look(tmp_path, 0, optimizer=torch.optim.Adagrad)).refused
