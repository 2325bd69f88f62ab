"""Endpoints for uploaded data files: their parts as they arrive, the list with the runs that use them, and removal."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Query
from starlette.requests import Request

from backend import presets
from backend.config.options import SpecError
from backend.data import DataFileError, expand
from backend.runs import SPEC, files
from backend.runs.folder import ALIVE, UNREADABLE, Run, runs
from webui.api.requests import ApiError, State
from webui.uploads import Upload


async def _body(request: Request) -> bytes:
    return await request.body()


Count = Annotated[int, Query(ge=0, lt=2**63)]


def receive(
    state: State, name: str, size: Count, modified: Count, offset: Count, part: Annotated[bytes, Depends(_body)]
) -> dict[str, Any]:
    """Store a part of a file: the request's body, after the first `offset` bytes. An empty part asks how many bytes
    have arrived. `path` is that of the complete file, else ''."""
    arrived, path = state.uploads.receive(Upload(name, size, modified), offset, part)
    return {"arrived": arrived, "path": str(path or "")}


def list_uploads(state: State) -> dict[str, Any]:
    """The uploaded files, newest first, each with the names of the runs that use it; `uploaded` is a Unix time."""
    used = _runs_by_file(state.runs, state.uploads.folder)
    found = [
        {
            "name": path.name,
            "path": str(path),
            "bytes": stat.st_size,
            "uploaded": stat.st_mtime,
            "runs": [{"id": run.id, "name": run.summary()["name"]} for run in used.get(path.name, ())],
        }
        for path, stat in state.uploads.files()
    ]
    return {"folder": str(state.uploads.folder), "files": found}


def remove(state: State, name: str) -> None:
    """Delete an uploaded file. Raises ApiError if a run that has not ended uses it."""
    used = _runs_by_file(state.runs, state.uploads.folder).get(name, [])
    if alive := [found["name"] for found in (run.summary() for run in used) if found["state"] in ALIVE]:
        raise ApiError(409, f"{name} is in use by {', '.join(alive)}. Stop the run first, or wait until it has ended.")
    state.uploads.remove(name)


def _runs_by_file(root: Path, folder: Path) -> Mapping[str, list[Run]]:
    """The runs that use each file of a folder, by the file's name, newest first."""
    found: dict[str, list[Run]] = defaultdict(list)
    for run in runs(root):
        for name in _data_files(run, folder):
            found[name].append(run)
    return found


def _data_files(run: Run, folder: Path) -> set[str]:
    """The names of the files of a folder that a run trains on or evaluates with, also through a folder or a pattern;
    none if its spec cannot be read."""
    try:
        text = files.read_text(run.path / SPEC)
        datasets = presets.load(text).data.datasets if folder.name in text else ()  # parsing takes long
    except (*UNREADABLE, SpecError):
        return set()
    found: set[Path] = set()
    for pattern in (pattern for each in datasets for pattern in (*each.files, *each.validation_files)):
        with suppress(DataFileError):  # such as a file that was deleted
            found.update(Path(os.path.realpath(path)) for path in expand([pattern]))
    return {path.name for path in found if path.parent == Path(os.path.realpath(folder))}
