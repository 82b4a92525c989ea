"""The size of the spill store during a search: each change is recorded once, and zero at the end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from hydra_tune.coordinator import spill_watch
from hydra_tune.coordinator.spill_watch import SpillWatch

Told = list[tuple[float, int, int]]


def watching(*places: Path) -> tuple[SpillWatch, Told, dict[int, int]]:
    told: Told = []
    of_trials: dict[int, int] = {}
    watch = SpillWatch([str(place) for place in places], lambda *row: told.append(row), of_trials.__setitem__)
    return watch, told, of_trials


def write(place: Path, trial: int, size: int) -> None:
    (place / f"trial-{trial}-a").mkdir(exist_ok=True)
    (place / f"trial-{trial}-a" / "w-0.0").write_bytes(bytes(size))


def test_changes_are_told_once(tmp_path: Path) -> None:
    watch, told, of_trials = watching(tmp_path)
    began = time.time()

    async def looks() -> None:
        await watch.look()
        write(tmp_path, 1, 100)
        write(tmp_path, 2, 40)
        await watch.look()
        await watch.look()
        write(tmp_path, 2, 50)
        await watch.look()

    asyncio.run(looks())
    watch.ended()
    watch.ended()
    assert [disk for _, _, disk in told] == [0, 140, 150, 0]
    assert {host for _, host, _ in told} == {0}
    assert began <= told[0][0] <= told[-1][0] <= time.time()
    assert of_trials == {1: 100, 2: 50}


def test_it_looks_until_it_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_watch, "LOOK_SECONDS", 0.01)
    watch, told, _ = watching(tmp_path)

    async def search() -> None:
        task = asyncio.create_task(watch.until_cancelled())
        for size in (10, 20, 30):
            write(tmp_path, 0, size)
            async with asyncio.timeout(30):
                while not told or told[-1][2] != size:
                    await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(search())
    assert [disk for _, _, disk in told] == [10, 20, 30]
