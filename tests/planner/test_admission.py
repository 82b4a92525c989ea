"""Trials wait for host memory, and begin in time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hydra_tune.planner.admission import Admission, Room, Taken, TooMuch
from hydra_tune.spill.places import in_memory


def test_room_counts_devices_once_and_spills_to_disk() -> None:
    room = Room(host=100, disk=50, on_devices=60)
    assert room.holds([Taken(60), Taken(60)])  # they take turns on the same devices
    assert room.holds([Taken(60, 40), Taken(60, 50)])
    assert not room.holds([Taken(60, 40), Taken(60, 51)])
    assert not Room(host=50, disk=1000, on_devices=60).holds([Taken(60)])


def test_a_spill_directory_on_disk_is_room_by_itself(tmp_path: Path) -> None:
    """`--spill` names one place; what is spilled there needs no memory."""
    room = Room.here((str(tmp_path),), on_devices=0)
    if in_memory(tmp_path):
        pytest.skip("the temporary directory is host memory here")
    assert room.disk > 0
    assert room.holds([Taken(0, room.host + 1)])


def test_a_trial_waits_until_another_has_ended() -> None:
    said: list[str] = []

    async def scenario() -> list[str]:
        events: list[str] = []
        admission = Admission(Room(host=100, disk=0, on_devices=1000), said.append)
        await admission.admit(0, Taken(70))

        async def second() -> None:
            await admission.admit(1, Taken(50))
            events.append("begun")

        task = asyncio.create_task(second())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not events
        events.append("ended")
        admission.release(0)
        await task
        admission.release(1)
        return events

    assert asyncio.run(scenario()) == ["ended", "begun"]
    assert "trial 1 waits" in said[0]


def test_what_would_never_fit_is_refused() -> None:
    async def scenario() -> None:
        await Admission(Room(host=100, disk=20, on_devices=1000), print).admit(0, Taken(90, 40))

    with pytest.raises(TooMuch, match="90 B of host memory and 40 B"):
        asyncio.run(scenario())


def test_a_trial_that_moves_on_is_counted_once() -> None:
    async def scenario() -> None:
        admission = Admission(Room(host=100, disk=0, on_devices=1000), print)
        await admission.admit(0, Taken(70))
        await admission.admit(0, Taken(90))  # and does not wait for itself

    asyncio.run(scenario())
