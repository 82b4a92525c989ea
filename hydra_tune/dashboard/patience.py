"""A time limit for the arrival of a request, so that half-sent requests cannot occupy the server.

The server's own time limits begin only after its first response.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

ARRIVAL_SECONDS = 10.0
"""Seconds in which a request must arrive, body included, after its connection or its first byte."""


class ImpatientProtocol(H11Protocol):
    """HTTP over a connection that is closed if a request takes too long to arrive."""

    _arrival: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self._arrival is None and self._between_requests():
            self._wait()
        super().data_received(data)
        if self._arrived():
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _arrived(self) -> bool:
        """True once the present request is complete, or was answered already."""
        return self.cycle is not None and (self.cycle.response_complete or not self.cycle.more_body)

    def _wait(self) -> None:
        self._arrival = asyncio.get_running_loop().call_later(ARRIVAL_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _give_up(self) -> None:
        self._arrival = None
        self.transport.close()
