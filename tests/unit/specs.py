"""How tests write what is asked."""

from __future__ import annotations

from typing import Any

from backend.config import RunSpec
from backend.config.options import parse


def spec(**values: Any) -> RunSpec:
    """With `train__seed=7` for train.seed."""
    return parse({name.replace("__", "."): value for name, value in values.items()})
