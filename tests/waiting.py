"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for(
    condition: Callable[[], Any], seconds: float = 60, about: Callable[[], object] = lambda: "timed out"
) -> Any:
    """Wait until `condition` returns a true value, and return that; the test fails after `seconds`, with `about`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, about()
        time.sleep(0.02)
    return found
