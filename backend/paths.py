"""Paths to Footplate's own files, and to the cache of models that it converts.

Standard library only. In a checkout `presets/`, `assets/` and `docs/` are next to `backend/`.
A wheel has them in `footplate_data/` (pyproject.toml, tool.setuptools), so that site-packages gets no folder with a
name as general as `assets`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent  # the checkout, or site-packages
INSTALLED_DATA = HOME / "footplate_data"
DATA = INSTALLED_DATA if INSTALLED_DATA.is_dir() else HOME
ASSETS = DATA / "assets"
PRESETS = DATA / "presets"
DOCS = DATA / "docs"
PATHS = "KUBECONFIG"  # environment variable with several paths
# Environment variables with paths that supervisors and runs read, too.
PATH_VARIABLES = (
    "FOOTPLATE_CACHE", "FOOTPLATE_QUEUE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_TOKEN_PATH",
    "RAY_AUTH_TOKEN_PATH", PATHS,
)  # fmt: skip


def settle(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make the paths in variables absolute. Supervisors, runs and jobs inherit them and have working directories of
    their own, so each would have its own cache and, worse, its own queue, and no access to a cluster."""
    for name in PATH_VARIABLES:
        given = environment.get(name, "")
        parts = given.split(os.pathsep) if name == PATHS else [given]
        if found := [os.path.abspath(os.path.expanduser(part)) for part in parts if part]:
            environment[name] = os.pathsep.join(found)


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where converted models are kept: FOOTPLATE_CACHE, or `footplate` in the user's cache folder."""
    configured = environment.get("FOOTPLATE_CACHE")
    base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(configured) if configured else Path(base) / "footplate"


def model_folder(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Where the built-in model `name` is kept after it was converted."""
    return cache_folder(environment) / "models" / name


def prepared_folder() -> Path:
    """Where tokenized datasets are kept."""
    return cache_folder() / "prepared"


def environment_folder(name: str) -> Path:
    """Where `footplate env create` keeps the Python environment `name`."""
    return cache_folder() / "environments" / name
