"""An environment with LLaMA-Factory for tests of `make soak`: created on first use as users do, kept in their cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backend import environments
from backend.paths import environment_folder


def llamafactory_environment() -> Path:
    """The folder of the virtual environment. Tests have their own FOOTPLATE_CACHE, this has none."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "footplate-tests"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOOTPLATE_CACHE", str(base))
        if "llamafactory" not in environments.created():
            environments.create("llamafactory")
        assert environments.versions("llamafactory")["llamafactory"] == "0.9.5"
        return environment_folder("llamafactory")
