"""Frames of the line between coordinator and agent: bytes in, checked payloads out. Pure; nothing is unpickled here.

Both ends know a secret. Each sends a nonce and proves that it knows the secret; from the nonces and the secret both
derive one key for each direction of this connection. A frame is the payload's length, a code (HMAC-SHA256) and the
payload. The code covers the frame's number in its direction, which is not sent: a frame that is repeated, left out,
reordered, changed, or taken from another connection or direction has a wrong code, and the line is closed.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass

GREETING = b"hydra-tune line 1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
LARGEST = 1 << 30
"""Bytes of the largest frame: a trial's candidate parcels stay in its node, but a record may be long."""
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")


class Refused(Exception):
    """The other end does not know the secret, or sent what it should not; the line is closed."""


@dataclass(frozen=True)
class Keys:
    """Keys of one connection."""

    to_agent: bytes
    to_coordinator: bytes


def new_secret() -> bytes:
    """Return a secret for one search."""
    return secrets.token_bytes(32)


def new_nonce() -> bytes:
    """Return a value that no other connection has used."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, who: str, coordinator_nonce: bytes, agent_nonce: bytes) -> bytes:
    """Return the proof of `who`, coordinator or agent, that it knows the secret."""
    return _code(secret, b"proof of " + who.encode() + coordinator_nonce + agent_nonce)


def check_proof(given: bytes, secret: bytes, who: str, coordinator_nonce: bytes, agent_nonce: bytes) -> None:
    """Raise Refused unless `given` is the proof of `who`."""
    if not hmac.compare_digest(given, proof(secret, who, coordinator_nonce, agent_nonce)):
        raise Refused(f"the {who} does not know the secret of this search")


def session_keys(secret: bytes, coordinator_nonce: bytes, agent_nonce: bytes) -> Keys:
    """Return the keys of the connection with these nonces."""
    nonces = coordinator_nonce + agent_nonce
    return Keys(_code(secret, b"to agent" + nonces), _code(secret, b"to coordinator" + nonces))


class Sealer:
    """Makes the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def seal(self, payload: bytes) -> bytes:
        """Return the next frame."""
        if len(payload) > LARGEST:
            raise ValueError(f"a message of {len(payload)} bytes is larger than {LARGEST}")
        code = _code(self._key, _NUMBER.pack(self._count) + payload)
        self._count += 1
        return _LENGTH.pack(len(payload)) + code + payload


class Opener:
    """Checks the frames of one direction."""

    def __init__(self, key: bytes, largest: int = LARGEST) -> None:
        self._key = key
        self._count = 0
        self._largest = largest
        self._arrived = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that are complete with these bytes; raise Refused at the first wrong frame."""
        self._arrived += data
        found = []
        while (payload := self._take()) is not None:
            found.append(payload)
        return found

    def _take(self) -> bytes | None:
        begin = _LENGTH.size + PROOF_BYTES
        if len(self._arrived) < _LENGTH.size:
            return None
        length = _LENGTH.unpack_from(self._arrived)[0]
        if length > self._largest:
            raise Refused(f"a frame of {length} bytes is larger than {self._largest}")
        if len(self._arrived) < begin + length:
            return None
        given = bytes(self._arrived[_LENGTH.size : begin])
        payload = bytes(self._arrived[begin : begin + length])
        if not hmac.compare_digest(given, _code(self._key, _NUMBER.pack(self._count) + payload)):
            raise Refused(f"frame {self._count} has a wrong code: it is changed, repeated or out of order")
        del self._arrived[: begin + length]
        self._count += 1
        return payload


def _code(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")
