"""Unit tests see no models, and no results of inspections, that this user's runs have left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOOTPLATE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
