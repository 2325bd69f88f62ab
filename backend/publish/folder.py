"""Publishing to a folder: the same files as on the Hub."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from backend.publish.contents import Contents
from backend.runs.folder import RunError

BLOCK = 2**23


def check(folder: Path) -> None:
    """Raise RunError unless `folder` can become the published folder: it must not exist, or be empty."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise RunError(f"{folder} is not an empty folder. Choose another folder, or empty this one first.")
    if not folder.parent.is_dir():
        raise RunError(f"The folder {folder.parent} does not exist. Create it, or choose another one.")


def publish(contents: Contents, folder: Path, report: Callable[[str, float], None]) -> dict[str, Any]:
    """Copy the files; `folder` appears when it is complete. Raises RunError, OSError."""
    check(folder)
    temporary = folder.with_name(f".{folder.name}.footplate-tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left behind by a copy that was killed
    try:
        done = 0
        for number, file in enumerate(contents.files, 1):
            target = temporary / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as copy:
                for block in _blocks(file.source, file.text):
                    copy.write(block)
                    done += len(block)
                    report(f"Copying {file.name}, file {number} of {len(contents.files)}.", done / contents.bytes)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {"folder": str(folder)}


def _blocks(source: Path, text: str | None) -> Iterator[bytes]:
    if text is not None:
        yield text.encode()
        return
    with source.open("rb") as file:
        while block := file.read(BLOCK):
            yield block
