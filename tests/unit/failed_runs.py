"""Run folders of failed runs, planted without starting a process."""

import json
import os
from datetime import datetime
from pathlib import Path

from backend.preflight import preflight
from backend.runs import LOCK, LOG, RESULT, STATE
from backend.runs.folder import Run

NOW = datetime(2026, 11, 23, 9, 0, 0)
# As torch 2.13 writes it.
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {requested} GiB. GPU 0 has a total capacity of "
    "79.15 GiB of which 1.27 GiB is free. Including non-PyTorch memory, this process has {process} GiB memory in use. "
    "Of the allocated memory {allocated} GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)


def out_of_memory(requested=2.0, allocated=76.0, process=77.87):
    return OUT_OF_MEMORY.format(requested=requested, allocated=allocated, process=process)


def failed_run(root, spec, machine, error, name="", base=None, **state):
    """A run of `spec` whose log ends with `error`, the last line of a traceback."""
    run = planted_run(root, spec, machine, name, base)
    text = f'Traceback (most recent call last):\n  File "x.py", line 1\n{error}\n' if error else ""
    (run.path / LOG).write_text(text)
    return ended(run, **{"end": "failed", "exit_code": 1, **state})


def done_run(root, spec, machine, ratio, name=""):
    """A run of `spec` whose measured peak is `ratio` times the estimate."""
    run = planted_run(root, spec, machine, name)
    ended(run, end="done", exit_code=0)
    peak = round(run.estimate()["measured_bytes"] * ratio)
    (run.path / RESULT).write_text(json.dumps({"peak_bytes": [peak, peak - 1]}))
    return run


def planted_run(root, spec, machine, name="", base=None):
    report = preflight(spec, machine, base or Path.cwd())
    return Run.create(root, name or report.title, report.plan, NOW, report.about, report.expected)


def ended(run, **state):
    (run.path / LOCK).write_text("supervisor")
    (run.path / STATE).write_text(json.dumps({"started": 1.0, "ended": 2.0, **state}))
    since = (run.path / LOCK).stat().st_mtime_ns
    if (run.path / LOG).exists():
        os.utime(run.path / LOG, ns=(since, since))
    return run
