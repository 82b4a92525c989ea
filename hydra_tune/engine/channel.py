"""Messages over a socket between the coordinator and a worker: pickles with their length before them.

Both ends send from several threads and read from one. The coordinator's event loop takes whatever has arrived without
waiting; a worker waits for the next message.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from typing import Any

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 16


class Closed(Exception):
    """The other end is gone."""


class Channel:
    """One end of the line."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._sending = threading.Lock()
        self._arrived = bytearray()

    def fileno(self) -> int:
        return self._line.fileno()

    def send(self, message: object) -> None:
        """Send a message; what cannot be pickled raises before anything is sent."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending:
            try:
                self._line.sendall(_LENGTH.pack(len(data)) + data)
            except OSError as error:
                raise Closed from error

    def receive(self) -> Any:
        """Wait for the next message."""
        while (message := self._take()) is None:
            self._read(0)
        return pickle.loads(message)

    def receive_ready(self) -> list[bytes]:
        """All messages that have arrived, still pickled, without waiting."""
        try:
            self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        messages = []
        while (message := self._take()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        self._line.close()

    def _read(self, flags: int) -> None:
        try:
            data = self._line.recv(_CHUNK, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise Closed from error
        if not data:
            raise Closed
        self._arrived += data

    def _take(self) -> bytes | None:
        """The next whole message in the buffer, taken out of it."""
        if len(self._arrived) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._arrived)[0]
        if len(self._arrived) < end:
            return None
        message = bytes(self._arrived[_LENGTH.size : end])
        del self._arrived[:end]
        return message
