"""Limits of connections that uvicorn does not have: a deadline for the headers of a request.

Imports uvicorn. Without it, a few hundred connections that never send a complete request would be kept forever, and
the server would run out of file descriptors.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
MAX_CONNECTIONS = 400  # at once; further requests get status 503. Most systems allow 1024 open files


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose request headers are not complete after HEADER_SECONDS."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection without a single byte counts too."""
        super().connection_made(transport)
        self._update_deadline()

    def data_received(self, data: bytes) -> None:
        """The first bytes of a further request start its deadline; complete headers end it."""
        super().data_received(data)
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """No timer outlives its connection."""
        super().connection_lost(exc)
        self._cancel_deadline()

    def _update_deadline(self) -> None:
        waits = self.cycle is None or self.cycle.response_complete
        if not waits:
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._close)

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
