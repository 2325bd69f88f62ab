"""Limits of connections: which one is closed for a new one, and how many messages they cause."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Iterator

import pytest

from webui import connections
from webui.connections import Listener, MessageLimit


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    with Listener(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        yield listening


def connect(listener: Listener, address: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(listener.getsockname(), 20, source_address=(address, 0))


def accept(listener: Listener, address: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    """Both ends of a new connection."""
    client = connect(listener, address)
    return client, listener.accept()[0]


def is_ended(client: socket.socket) -> bool:
    client.settimeout(0.2)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False


def test_the_oldest_of_the_address_with_most_connections_is_ended(listener: Listener) -> None:
    pairs = [accept(listener, address) for address in ("127.0.0.2", "127.0.0.1", "127.0.0.1", "127.0.0.1")]
    new = connect(listener)
    with pytest.raises(BlockingIOError):
        listener.accept()
    assert [is_ended(client) for client, _ in pairs] == [False, True, False, False]
    pairs[1][1].close()  # as the event loop does
    accepted, address = listener.accept()
    assert address == new.getsockname()
    for each in (new, accepted, *(end for pair in pairs for end in pair)):
        each.close()
    assert not listener._open and not listener._without_login


def test_connections_with_a_login_are_kept(listener: Listener) -> None:
    pairs = [accept(listener) for _ in range(4)]
    for client, _ in pairs[:3]:
        listener.keep(client.getsockname())
    new = connect(listener)
    with pytest.raises(BlockingIOError):
        listener.accept()
    assert [is_ended(client) for client, _ in pairs] == [False, False, False, True]
    listener.keep(pairs[3][0].getsockname())
    with pytest.raises(BlockingIOError):  # nothing can be ended: the new one is
        listener.accept()
    assert is_ended(new)
    for each in (new, *(end for pair in pairs for end in pair)):
        each.close()


def test_a_process_without_free_descriptors_ends_a_connection(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, accepted = accept(listener)

    def full(_: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", full)
    with pytest.raises(BlockingIOError):
        listener.accept()
    assert is_ended(client)
    with pytest.raises(OSError, match="Too many open files"):
        listener.accept()
    client.close()
    accepted.close()


def test_the_limit_leaves_files_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (256, 4096))
    with Listener() as listening:
        assert listening.limit == 128


def test_messages_are_limited() -> None:
    now = [0.0]
    limit = MessageLimit(lambda: now[0])
    records = [logging.LogRecord("x", 30, "", 1, "Invalid %s", ("request",), None) for _ in range(1000)]
    assert sum(map(limit.filter, records)) == 20
    now[0] = 61.0
    assert limit.filter(records[0])
    assert records[0].getMessage() == "Invalid request (980 messages before this one were left out.)"
    assert limit.filter(records[1]) and records[1].getMessage() == "Invalid request"
