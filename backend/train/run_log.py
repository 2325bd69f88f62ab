"""What a run reports: log lines, metrics.jsonl, progress.json, and the errors that end it.

Only rank 0 writes; any rank may raise an error.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.runs import EVENTS, METRICS, PROGRESS, STOP, files, sweeps
from backend.runs.events import RESUMED
from backend.runs.files import write_json
from backend.runs.lost_weights import ALL_WEIGHTS
from backend.runs.metrics import ALL_TOKENS

PROGRESS_INTERVAL_SECONDS = 0.25  # between two writes of progress.json within a phase
KEPT_BETWEEN_PHASES = (
    "step", "max_steps", "first_step", "first_step_time", "step_seconds", "router_loss_weight", "evaluations_left",
    "evaluation_seconds",
)  # fmt: skip


class TrainError(Exception):
    """Why the run cannot continue and how to fix it, in one or two sentences: the last line of the log."""


class Stopped(Exception):
    """The user stopped the run before its first or after its last step, when there is nothing to save."""


class RunLog:
    """Writes the log, the metrics and the progress of the run in `folder`. On ranks other than 0 every method but
    `stop_requested` does nothing."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder, self.rank = folder, rank
        self.end_phase: Callable[[str], None] | None = None  # called with the phase that has ended
        self._progress: dict[str, Any] = {}
        self._written, self._day = 0.0, ""
        self._began, self.earlier_seconds = time.monotonic(), 0.0  # the seconds of earlier processes of this start
        self._unwritten: list[Mapping[str, Any]] = []  # metrics for which the disk had no room

    @property
    def elapsed(self) -> float:
        """Seconds since this process, or the first one of this start, began."""
        return self.earlier_seconds + time.monotonic() - self._began

    @property
    def phase(self) -> str:
        """What the run is doing now; '' before it has reported anything."""
        return str(self._progress.get("phase", ""))

    def info(self, line: str) -> None:
        """Print a line of the log with the local time, and with the date if it has changed: the supervisor writes the
        first date."""
        if self.rank:
            return
        now = time.localtime()
        before, self._day = self._day, time.strftime("%F", now)
        new_day = f"---- {self._day} ----\n" if before not in ("", self._day) else ""
        with contextlib.suppress(OSError):  # a full disk
            print(f"{new_day}{time.strftime('%T', now)} {line}", flush=True)

    def start_phase(self, phase: str, text: str, **more: Any) -> None:
        """Start a phase, with a line in the log."""
        self.info(text)
        self.progress(phase, text, **more)

    def progress(self, phase: str, text: str = "", fraction: float | None = None, **more: Any) -> None:
        """Write what the run is doing now to progress.json; `fraction` is the completed part of the phase. `more` may
        have the number of parts that are done (`done`, `total`, `unit`); `since` is when the phase began."""
        if self.rank:
            return
        before, now = self._progress.get("phase", ""), time.time()
        new = phase != before
        if new and before and self.end_phase:
            self.end_phase(before)
        kept = {key: self._progress[key] for key in KEPT_BETWEEN_PHASES if key in self._progress}
        since = now if new else self._progress["since"]
        self._progress = {
            **kept,
            "phase": phase,
            "text": text,
            "fraction": fraction,
            **more,
            "since": since,
            "elapsed": round(self.elapsed, 1),
            "time": now,
        }
        if new or fraction == 1 or now - self._written >= PROGRESS_INTERVAL_SECONDS:
            self._write_progress(now)

    def write_progress(self) -> None:
        """Write the last progress if it was left out, before an error ends the run: the page names its step."""
        if self._progress.get("time", 0.0) > self._written:
            self._write_progress(time.time())

    def _write_progress(self, now: float) -> None:
        with contextlib.suppress(OSError):  # a full disk: the next one replaces it
            write_json(self.folder / PROGRESS, self._progress)
        self._written = now

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl, or keep it until the disk has room. JSON has no NaN and no infinity: they
        become null, with a note."""
        if self.rank:
            return
        not_finite = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        point = {key: None if key in not_finite else value for key, value in values.items()}
        if not_finite:
            point["note"] = ", ".join(f"{key} is {values[key]}" for key in not_finite)
        waiting = bool(self._unwritten)
        self._unwritten.append(point)
        try:
            self.flush()
        except OSError as error:
            if not waiting:
                self.info(f"{METRICS} cannot be written ({error.strerror}). Training continues, and tries again.")

    def flush(self) -> None:
        """Write the metrics for which the disk had no room. Raises OSError."""
        if self._unwritten:
            _append(self.folder / METRICS, *self._unwritten)
            self._unwritten = []

    def event(self, kind: str, step: int, text: str) -> None:
        """Append one line to events.jsonl. The log has the event too, so a full disk does not end the run here."""
        if self.rank == 0:
            with contextlib.suppress(OSError):
                _append(self.folder / EVENTS, {"kind": kind, "step": step, "time": time.time(), "text": text})

    def mark_resumed(self, step: int, lost: Sequence[Mapping[str, Any]] = ()) -> None:
        """Tell readers of the metrics that points after `step` are outdated, and that all weights are loaded; write
        nothing at step 0 if there are no points. `lost`: points until `step` that the metrics lack; they are written
        first."""
        if self.rank:
            return
        if lost:
            steps = f"{lost[0]['step']} to {lost[-1]['step']}"
            self.info(f"{METRICS} has no points for steps {steps}: they are restored from the checkpoint.")
            self._resumed(lost[0]["step"] - 1)
            for point in lost:
                self.metrics(point)
        if step or (self.folder / METRICS).exists():
            self._resumed(step)
        if (self.folder / METRICS).exists() or (self.folder / EVENTS).exists():
            self.event(RESUMED, step, f"Resumed after step {step}." if step else "Restarted at step 0.")

    def _resumed(self, step: int) -> None:
        self.metrics({"event": "resumed", "step": step, "time": time.time(), ALL_WEIGHTS: True, ALL_TOKENS: True})

    def stop_requested(self) -> int:
        """0: no; 1: stop without saving; 2: save a checkpoint and stop."""
        try:
            word = files.read_text(self.folder / STOP).strip()
        except OSError:
            return 0
        return 1 if word == "discard" else 2

    def compare_with_sweep(self, step: int) -> None:
        """After an evaluation: stop this run if it is behind the others of its sweep."""
        if self.rank == 0:
            with contextlib.suppress(OSError):  # a full disk, on which no checkpoint can be saved either
                if reason := sweeps.stop_if_behind(self.folder.resolve(), step):
                    self.info(f"Stopping early. {reason}")


def _append(path: Path, *values: Mapping[str, Any]) -> None:
    """Append all lines of JSON, or raise OSError and append none. A line that was cut off when a process was killed
    must not swallow the next one."""
    truncated = path.exists() and not _ends_with_newline(path)
    text = "\n" * truncated + "".join(json.dumps(value, allow_nan=False) + "\n" for value in values)
    with files.open_to_append(path, buffering=0) as file:
        size, data = file.seek(0, os.SEEK_END), text.encode()
        try:
            while data:  # a disk that is nearly full takes a part of it
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise


def _ends_with_newline(path: Path) -> bool:
    with files.open_to_read(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"\n", b"")
