"""Deleting the folder of a run in steps, so that a deletion that failed or was killed is seen and can be continued.

The folder keeps its name, its plan and a mark until everything else is gone, so the run stays in every list.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from backend.runs import DELETING, LOCK, LOG, PLAN, files, replace_text

LAST = (LOCK, PLAN, DELETING)


def is_begun(folder: Path) -> bool:
    """Whether someone has begun to delete the run."""
    return os.path.lexists(folder / DELETING)


def problem(folder: Path) -> str:
    """What could not be deleted and why; '' if the deletion continues or was killed."""
    try:
        return files.read_text(folder / DELETING, errors="replace").strip()
    except OSError:
        return ""


def delete(folder: Path) -> None:
    """Delete as much as possible. Raises OSError for the first file or folder that cannot be deleted."""
    _mark(folder)
    errors: list[OSError] = []

    def note(_function: Any, path: str, info: Any) -> None:
        if not isinstance(info[1], FileNotFoundError):  # rmtree's own errors have the name without its folder
            errors.append(OSError(info[1].errno, info[1].strerror, path))

    for path in [folder / name for name in os.listdir(folder) if name not in LAST]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, onerror=note)
        else:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                errors.append(error)
    if errors:
        name = os.path.relpath(str(errors[0].filename or folder), folder)
        _mark(folder, f"{name} cannot be deleted ({errors[0].strerror}).")
        raise errors[0]
    for name in LAST:
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def delete_names(folder: Path, names: Iterable[str]) -> None:
    """Delete these files and folders in `folder`, as far as they exist and can be deleted."""
    for path in (folder / name for name in names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def remove_irregular(path: Path) -> None:
    """Delete what is in the place of a file, such as a named pipe; no program of Footplate has made it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path) and not (path.is_file() and not path.is_symlink()):
        path.unlink()


def _mark(folder: Path, text: str = "") -> None:
    """Write why the deletion has not ended. On a full disk, the log is deleted first to make room."""
    try:
        replace_text(folder / DELETING, text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        (folder / LOG).unlink(missing_ok=True)
        (folder / DELETING).touch()


def unfinished(root: Path) -> list[Path]:
    """The folders of runs whose deletion has not ended."""
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    return [root / name for name in names if name[0] != "." and is_begun(root / name)]
