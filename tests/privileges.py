"""What tests need from the system beyond a user's rights. An ordinary user skips such a test; root does not, so that a
container without a capability or a missing tool does not look like a passed test."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user, which needs root")


def refuse(reason: str) -> NoReturn:
    """Skip the test, or fail it for root on Linux, who is expected to have what it needs."""
    if os.geteuid() == 0 and sys.platform == "linux":
        pytest.fail(f"{reason}. Root runs this test; run the tests as another user to skip it.", pytrace=False)
    pytest.skip(reason)
