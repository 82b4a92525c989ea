"""Messages over a socket between the coordinator and a worker: length-prefixed pickles.

Both ends send from several threads and read from one. The coordinator's event loop reads available messages without
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
    """The other end of the channel is closed."""


class Channel:
    """One end of a socket for pickled messages."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._sending = threading.Lock()
        self._arrived = bytearray()

    def fileno(self) -> int:
        return self._line.fileno()

    def send(self, message: object) -> None:
        """Send a message; raise before sending anything if it cannot be pickled."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending:
            try:
                self._line.sendall(_LENGTH.pack(len(data)) + data)
            except OSError as error:
                raise Closed from error

    def receive(self) -> Any:
        """Wait for the next message and return it."""
        while (message := self._take()) is None:
            self._read(0)
        return pickle.loads(message)

    def receive_ready(self) -> list[bytes]:
        """Return all messages that have arrived, still pickled, without waiting."""
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
        """Remove and return the next complete message in the buffer; None if there is none."""
        if len(self._arrived) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._arrived)[0]
        if len(self._arrived) < end:
            return None
        message = bytes(self._arrived[_LENGTH.size : end])
        del self._arrived[:end]
        return message
