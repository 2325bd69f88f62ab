"""Where Footplate's own files lie, and where it may keep what it made once.

Floor 0. Standard library only; imports nothing of ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
ASSETS = HOME / "assets"
PRESETS = HOME / "presets"


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where converted models are kept: FOOTPLATE_CACHE, else the user's cache folder."""
    own = environment.get("FOOTPLATE_CACHE")
    base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "footplate"


def model_folder(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Where the built-in model `name` is kept once it has been made."""
    return cache_folder(environment) / "models" / name
