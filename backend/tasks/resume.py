"""Resuming a run whose input files still exist."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from backend import presets
from backend.config import RunSpec
from backend.config.options import SpecError, effective
from backend.data import DataFileError, expand, file_patterns
from backend.runs import SPEC, files
from backend.runs.folder import ALIVE, UNREADABLE, Run, RunError


def resume(run: Run, from_scratch: bool = False) -> None:
    """Same as `Run.resume`, but also raises RunError if the model's folder or a data file is missing: the run would
    start and fail, and a stopped or finished run would become a failed one."""
    if run.state not in ALIVE and (problem := _missing_input(run)):
        raise RunError(f"Not resumed: {problem}. Put it back, or start a new run with other options.")
    run.resume(from_scratch)


def _missing_input(run: Run) -> str:
    """The first file or folder that the run would not find; '' for none, and for a job, which has no spec."""
    with suppress(*UNREADABLE, SpecError):  # a damaged spec is not why a run cannot resume
        return next(_missing(effective(presets.load(files.read_text(run.path / SPEC)))), "")
    return ""


def _missing(spec: RunSpec) -> Iterator[str]:
    """What the run reads and this machine does not have; nothing for a cluster's own paths. A relative path is not
    looked for, since the run may have started elsewhere."""
    if spec.launch.place != "local":
        return
    patterns = (pattern for dataset in spec.data.datasets for files in file_patterns(dataset) for pattern in files)
    for pattern in filter(os.path.isabs, patterns):
        try:
            expand([pattern])
        except DataFileError as error:
            yield str(error)
    if spec.model.source == "path" and os.path.isabs(spec.model.path) and not os.path.exists(spec.model.path):
        yield f"model.path is {spec.model.path}, which does not exist"
