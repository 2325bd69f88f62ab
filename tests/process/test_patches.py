"""A patch of a library must go once the library no longer needs it."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil

import pytest

from backend.train import patches

NAMES = [module.name for module in pkgutil.iter_modules(patches.__path__)]


@pytest.mark.filterwarnings("ignore")  # of libraries, while they are imported
@pytest.mark.parametrize("name", NAMES)
def test_patch_is_still_needed(name: str) -> None:
    """Fails when the installed version no longer has the defect."""
    patch = importlib.import_module(f"{patches.__name__}.{name}")
    try:
        installed = importlib.metadata.version(patch.LIBRARY)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{patch.LIBRARY} is not installed")
    assert not patch.obsolete(), (
        f"{patch.LIBRARY} {installed} no longer has the defect that was seen in {patch.SEEN_IN}: "
        f"remove backend/train/patches/{name}.py and its calls"
    )


@pytest.mark.parametrize("name", NAMES)
def test_patch_names_its_source(name: str) -> None:
    patch = importlib.import_module(f"{patches.__name__}.{name}")
    assert patch.SEEN_IN[0].isdigit()
    assert "Without" in (patch.__doc__ or ""), "what happens without the patch"
