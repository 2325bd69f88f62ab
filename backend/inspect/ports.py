"""Inspection of the master port, on which the ranks of a run rendezvous."""

from __future__ import annotations

import socket
from typing import Any

PORTS_TO_TRY = 200
FIRST_PORT = 1024  # that every user may listen on


def inspect_port(port: int) -> dict[str, Any]:
    """The InputFacts about the master port; port 0 is any free port."""
    if not port or is_free(port):
        return {}
    start = max(port + 1, FIRST_PORT)
    candidates = range(start, min(start + PORTS_TO_TRY, 65536))
    return {"port_in_use": port, "free_port": next((p for p in candidates if is_free(p)), 0)}


def is_free(port: int) -> bool:
    """Whether a server can listen on the port, tested as torch's TCPStore binds it."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT counts as free
            probe.bind(("", port))
            probe.listen()
        except OSError:
            return False
    return True
