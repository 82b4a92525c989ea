"""Frames: what was sealed is opened, in order; anything else is refused before it is read as a message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_tune.cluster.framing import (
    Opener,
    Refused,
    Sealer,
    check_proof,
    new_nonce,
    new_secret,
    proof,
    session_keys,
)

KEY = b"k" * 32
PAYLOADS = st.lists(st.binary(max_size=200), min_size=1, max_size=5)


@given(PAYLOADS, st.integers(1, 50))
def test_payloads_arrive_in_order_however_they_are_cut(payloads: list[bytes], piece: int) -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    data = b"".join(map(sealer.seal, payloads))
    found = [each for at in range(0, len(data), piece) for each in opener.feed(data[at : at + piece])]
    assert found == payloads


@given(st.binary(min_size=36, max_size=300))
def test_garbage_yields_nothing(data: bytes) -> None:
    opener = Opener(KEY, largest=64)
    try:
        found = opener.feed(data)
    except Refused:
        return
    assert found == []


@given(PAYLOADS, st.data())
def test_a_changed_byte_is_refused(payloads: list[bytes], data: st.DataObject) -> None:
    sealer = Sealer(KEY)
    frames = bytearray(b"".join(map(sealer.seal, payloads)))
    at = data.draw(st.integers(0, len(frames) - 1))
    frames[at] ^= data.draw(st.integers(1, 255))
    found: list[bytes] = []
    try:
        found = Opener(KEY, largest=1000).feed(bytes(frames))
    except Refused:
        return
    assert found == payloads[: len(found)], "no more than the untouched frames"
    assert len(found) < len(payloads)


def test_a_frame_that_is_repeated_left_out_or_from_elsewhere_is_refused() -> None:
    sealer = Sealer(KEY)
    first, second = sealer.seal(b"one"), sealer.seal(b"two")
    opener = Opener(KEY)
    assert opener.feed(first) == [b"one"]
    with pytest.raises(Refused, match="repeated"):
        opener.feed(first)
    with pytest.raises(Refused):
        Opener(KEY).feed(second)
    with pytest.raises(Refused):
        Opener(b"j" * 32).feed(first)


def test_a_frame_that_is_too_long_is_refused_before_it_arrives() -> None:
    with pytest.raises(Refused, match="larger than 64"):
        Opener(KEY, largest=64).feed(b"\xff\xff\xff\xff")


def test_keys_differ_by_direction_connection_and_secret() -> None:
    secret, ours, theirs = new_secret(), new_nonce(), new_nonce()
    keys = session_keys(secret, ours, theirs)
    others = [session_keys(secret, theirs, ours), session_keys(new_secret(), ours, theirs)]
    every = [keys.to_agent, keys.to_coordinator, *(key for each in others for key in vars(each).values())]
    assert len(set(every)) == len(every)


def test_a_proof_is_of_one_end_and_one_connection() -> None:
    secret, ours, theirs = new_secret(), new_nonce(), new_nonce()
    given = proof(secret, "agent", ours, theirs)
    check_proof(given, secret, "agent", ours, theirs)
    wrongs = [
        (given, secret, "coordinator", ours, theirs),
        (given, secret, "agent", new_nonce(), theirs),
        (given, new_secret(), "agent", ours, theirs),
        (b"\0" * 32, secret, "agent", ours, theirs),
    ]
    for wrong in wrongs:
        with pytest.raises(Refused, match="does not know the secret"):
            check_proof(*wrong)
