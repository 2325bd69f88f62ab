"""Fixtures of tests that train. Each test file has its own folder and model cache; all files share one fork server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fork_server import ForkServer
from small_disk import mounted
from training_runs import ignore_progress

from backend.train import builtin_models

pytest.register_assert_rewrite("cluster_contract")


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(request.module.__name__.removeprefix("test_"))


@pytest.fixture(scope="module")
def cache(root: Path) -> Iterator[Path]:
    """A model cache with the tiny model, for the trainings and for this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOOTPLATE_CACHE", str(root / "cache"))
        builtin_models.prepare("tiny-llama", ignore_progress)
        yield root / "cache"


@pytest.fixture(scope="module")
def tiny(cache: Path) -> Path:
    """The folder of the tiny model."""
    return cache / "models/tiny-llama"


@pytest.fixture(scope="module")
def fork_server(session_fork_server: ForkServer, cache: Path) -> Iterator[ForkServer]:
    """The fork server with the model cache of this file; asserts at the end of the file that no process is left."""
    yield replace(session_fork_server, cache=cache)
    assert not session_fork_server.leftover_processes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    with mounted(tmp_path / "disk") as place:
        yield place
