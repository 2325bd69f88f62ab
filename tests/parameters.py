"""Which parameters of a test run in `make test`; all of them run in `make soak`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def soak_except(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Test parameters: those in `quick` run in `make test`, all of them in `make soak`. A tuple is one case."""
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak)
        for case in cases
    ]
