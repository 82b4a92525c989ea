"""Files of an attempt arrive whole or not at all, and nowhere but in their directory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hydra_tune.cluster.framing import Refused
from hydra_tune.cluster.messages import Piece, Whole
from hydra_tune.cluster.shipping import (
    CHECKPOINTS,
    WEIGHTS,
    Arriving,
    Sent,
    for_trial,
    send_directory,
    send_weights,
    trial_of,
)


class Wire:
    """A line that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: object) -> None:
        self.messages.append(message)

    async def drained(self) -> None:
        return

    def taken(self) -> list[Any]:
        messages, self.messages = self.messages, []
        return messages


def receive(arriving: Arriving, messages: list[Any]) -> None:
    for message in messages:
        arriving.take(message)


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


@pytest.fixture
def arriving(there: Path) -> Arriving:
    return Arriving(lambda attempt, kind: there if attempt == "a" else None)


def test_a_directory_arrives_and_only_changes_follow(tmp_path: Path, there: Path, arriving: Arriving,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("hydra_tune.cluster.shipping.PIECE_BYTES", 1000)
    here, wire, sent = tmp_path / "here", Wire(), Sent()
    (here / "fit-0").mkdir(parents=True)
    for name, data in {"step-1.safetensors": b"x" * 2500, "step-1.json": b"{}", "fit-0/last.ckpt": b""}.items():
        (here / name).write_bytes(data)
    (here / "step-2.safetensors.tmp").write_bytes(b"unfinished")
    asyncio.run(send_directory(wire, "a", here, sent))
    receive(arriving, wire.taken())
    assert contents(there) == {"step-1.safetensors": b"x" * 2500, "step-1.json": b"{}", "fit-0/last.ckpt": b""}
    assert sent.bytes == 2502
    (here / "step-1.json").unlink()
    (here / "step-1.safetensors").unlink()
    (here / "step-9.json").write_bytes(b"[]")
    asyncio.run(send_directory(wire, "a", here, sent))
    messages = wire.taken()
    assert [message.name for message in messages if isinstance(message, Piece)] == ["step-9.json"]
    receive(arriving, messages)
    assert contents(there) == {"step-9.json": b"[]", "fit-0/last.ckpt": b""}


def test_nothing_is_in_place_before_all_has_arrived(there: Path, arriving: Arriving) -> None:
    there.mkdir()
    (there / "step-1.json").write_bytes(b"before")
    arriving.take(Piece("a", CHECKPOINTS, "step-1.json", 0, b"after"))
    assert (there / "step-1.json").read_bytes() == b"before"
    arriving.take(Whole("a", CHECKPOINTS, ("step-1.json",), (5,)))
    assert contents(there) == {"step-1.json": b"after"}


def test_a_file_of_another_size_is_refused(there: Path, arriving: Arriving) -> None:
    arriving.take(Piece("a", CHECKPOINTS, "step-1.json", 0, b"short"))
    with pytest.raises(Refused, match="5 bytes and should have 6"):
        arriving.take(Whole("a", CHECKPOINTS, ("step-1.json",), (6,)))


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside", ""])
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path, arriving: Arriving) -> None:
    with pytest.raises(Refused, match="leads out"):
        arriving.take(Piece("a", CHECKPOINTS, name, 0, b"x"))
    assert not (tmp_path / "outside").exists()


def test_files_of_an_attempt_that_is_over_are_dropped(there: Path, arriving: Arriving) -> None:
    receive(arriving, [Piece("b", CHECKPOINTS, "x", 0, b"x"), Whole("b", CHECKPOINTS, ("x",), (1,))])
    assert not there.exists()


def test_weights_arrive_and_trials_without_any_send_none(tmp_path: Path) -> None:
    wire, target = Wire(), tmp_path / "arrived.safetensors"
    assert asyncio.run(send_weights(wire, "a", tmp_path / "none")) == 0
    assert wire.taken() == []
    (tmp_path / "w").write_bytes(b"weights")
    assert asyncio.run(send_weights(wire, "a", tmp_path / "w")) == 7
    receive(Arriving(lambda attempt, kind: target if kind == WEIGHTS else None), wire.taken())
    assert target.read_bytes() == b"weights"


def test_checkpoints_travel_to_a_node_under_their_trial() -> None:
    assert trial_of(for_trial(12)) == 12
    assert trial_of("an-attempt") is None
