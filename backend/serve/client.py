"""Requests of the job to the server that it has started."""

from __future__ import annotations

import json
import socket
import urllib.request
from typing import Any

from backend.environments.server_process import ServerProcess

REQUEST_SECONDS = 60.0  # for the first request, which needs no generation


class ServeError(Exception):
    """Why the model cannot be served, and how to fix it, in one or two sentences."""


def ask(server: ServerProcess, token: str, path: str) -> Any:
    """The JSON of a route. Raises ServeError."""
    request = urllib.request.Request(server.address + path, headers={"Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=REQUEST_SECONDS) as response:
            return json.load(response)
    except (OSError, ValueError) as error:
        raise ServeError(f"The server does not answer ({error}). Its last message: {server.last_line()}") from error


def port_in_use(port: int) -> ServeError:
    """The error that another program has taken the port."""
    return ServeError(f"Port {port} of 127.0.0.1 is used by another program. Choose another port, or 0 for a free one.")


def free_port(wanted: int = 0) -> int:
    """A port of 127.0.0.1 that no program uses now: `wanted` unless it is 0. Raises OSError if `wanted` is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore old connections of an ended server
        probe.bind(("127.0.0.1", wanted))
        return int(probe.getsockname()[1])
