"""What tests that train share. Every file has its own folder and cache of models; the host is one for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from host import Host, a_host
from trainings import nothing

from backend.train import builtin_models


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(request.module.__name__.removeprefix("test_"))


@pytest.fixture(scope="module")
def cache(root: Path) -> Iterator[Path]:
    """A cache with the tiny model, which this process uses too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOOTPLATE_CACHE", str(root / "cache"))
        builtin_models.prepare("tiny-llama", nothing)
        yield root / "cache"


@pytest.fixture(scope="module")
def tiny(cache: Path) -> Path:
    """The tiny model's folder."""
    return cache / "models/tiny-llama"


@pytest.fixture(scope="session")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Started before any file sets up its own things, so that it inherits nothing of them."""
    with a_host(tmp_path_factory.mktemp("host")) as found:
        yield found


@pytest.fixture(scope="module")
def host(one_host: Host, cache: Path) -> Iterator[Host]:
    """With the file's own cache; at the file's end nothing of its trainings is left."""
    yield replace(one_host, cache=cache)
    assert not one_host.left()
