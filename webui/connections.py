"""Limits of connections that uvicorn does not have: their number, a deadline for headers and TLS handshakes, and the
number of lines that they can cause in the log.

Without the limits, connections that never send a complete request would be kept, and the server would run out of file
descriptors. When the maximum is reached, a new connection replaces one without a login: the oldest from the address
that has the most of them. So nobody can keep others out by holding connections without a login, even from the same
address, which all users of this machine share.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from webui.login import network

HEADER_SECONDS = 10.0
MAX_CONNECTIONS = 400  # at the same time; fewer if this process may open fewer than 800 files
ACCEPTED = "footplate.accepted"  # in the state of an ASGI scope: a function to call after a valid login
MAX_MESSAGES, MESSAGE_SECONDS = 20, 60.0


class Connection(socket.socket):
    """An accepted connection. Its listener keeps track of it until the connection is closed."""

    def __init__(self, listener: Listener, accepted: socket.socket, address: Any) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, accepted.detach())
        self._listener = listener
        self.address = address
        self.network = network(address[0])

    def close(self) -> None:
        self._listener.forget(self)
        super().close()


class Listener(socket.socket):
    """A listening socket whose `accept` limits the number of open connections."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.limit = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._open: dict[Any, Connection] = {}
        self._without_login: dict[str, dict[Connection, None]] = {}  # by network; the oldest connection first

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. If the limit is reached, one connection is ended and BlockingIOError is raised: the
        event loop accepts again after it has closed that connection."""
        if len(self._open) >= self.limit and self._end_oldest():
            raise BlockingIOError
        try:
            accepted, address = super().accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._end_oldest():
                raise BlockingIOError from None
            raise
        if len(self._open) >= self.limit:  # all connections have logged in
            accepted.close()
            raise BlockingIOError
        connection = Connection(self, accepted, address)
        self._open[address] = connection
        self._without_login.setdefault(connection.network, {})[connection] = None
        return connection, address

    def keep(self, address: Any) -> None:
        """Note that the connection from `address` has logged in, so that it is not ended in favor of others."""
        if connection := self._open.get(address):
            self._not_waiting(connection)

    def forget(self, connection: Connection) -> None:
        """Note that the connection is closed."""
        self._not_waiting(connection)
        if self._open.get(connection.address) is connection:
            del self._open[connection.address]

    def _not_waiting(self, connection: Connection) -> None:
        group = self._without_login.get(connection.network, {})
        group.pop(connection, None)
        if not group:
            self._without_login.pop(connection.network, None)

    def _end_oldest(self) -> bool:
        """End a connection without a login; False if there is none. The event loop notices the end, and closes the
        connection."""
        group = max(self._without_login.values(), key=len, default=None)
        if not group:
            return False
        oldest = next(iter(group))
        self._not_waiting(oldest)
        with suppress(OSError):  # the other side has already closed it
            oldest.shutdown(socket.SHUT_RDWR)
        return True


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose request headers are not complete after HEADER_SECONDS."""

    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, listener: Listener, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._listener = listener

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The deadline also applies to a connection that never sends a byte."""
        super().connection_made(transport)
        address = transport.get_extra_info("peername")
        self.app_state = {**self.app_state, ACCEPTED: functools.partial(self._listener.keep, address)}
        self._update_deadline()

    def data_received(self, data: bytes) -> None:
        """The first bytes of a further request start its deadline; complete headers cancel it."""
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


def limit_handshakes(loop: asyncio.AbstractEventLoop) -> None:
    """Servers of `loop` close TLS connections that have not finished their handshake in time. uvicorn 0.54 sets no
    timeout; asyncio's defaults are 60 s for the handshake and 30 s for the shutdown."""
    times = {"ssl_handshake_timeout": HEADER_SECONDS, "ssl_shutdown_timeout": HEADER_SECONDS}
    loop.create_server = functools.partial(loop.create_server, **times)  # type: ignore[method-assign]


class MessageLimit(logging.Filter):
    """Lets MAX_MESSAGES pass in MESSAGE_SECONDS and counts the rest, since even requests without a login cause
    messages."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._begin, self._count = clock(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the message; the first one after a pause says how many were left out."""
        if self._clock() - self._begin > MESSAGE_SECONDS:
            left_out = self._count - MAX_MESSAGES
            self._begin, self._count = self._clock(), 0
            if left_out > 0:
                record.msg = f"{record.getMessage()} ({left_out} messages before this one were left out.)"
                record.args = ()
        self._count += 1
        return self._count <= MAX_MESSAGES
