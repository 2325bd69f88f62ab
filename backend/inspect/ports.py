"""A look at the port where the ranks of a run would meet. Floor 2. Imports nothing of ours."""

from __future__ import annotations

import socket
from typing import Any

FAR = 200  # ports to try


def look_at_port(port: int) -> dict[str, Any]:
    """The fields of a Glance that speak of the port; 0 is any free one."""
    if not port or _free(port):
        return {}
    return {"taken": port, "spare": next((p for p in range(port + 1, min(port + FAR, 65536)) if _free(p)), 0)}


def _free(port: int) -> bool:
    """Whether it can be listened at, as torch's store does."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was just left is free
            probe.bind(("", port))
            probe.listen()
        except OSError:
            return False
    return True
