"""What a run tells: lines of the log, points of the curves, what it is doing now, and what came out.

Beside the floors. Imports run. Only rank 0 speaks and writes; an error may come from any rank.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.runs import METRICS, PROGRESS, STOP

PAUSE_SECONDS = 0.25  # between two writings of progress within a phase


class TrainError(Exception):
    """Why the run cannot go on, in one sentence with the way out: the last line of the log."""


class Stopped(Exception):
    """The run was asked to stop before its first step, or after its last: nothing is to be saved."""


class RunLog:
    """Rank 0's pen over the files of the run in `folder`; on other ranks everything but `stop_asked` does nothing."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder, self.rank = folder, rank
        self._progress: dict[str, Any] = {}
        self._written = 0.0

    def say(self, line: str) -> None:
        """A line of the log."""
        if self.rank == 0:
            print(line, flush=True)

    def begin(self, phase: str, text: str, **more: Any) -> None:
        """A new phase, which is also a line of the log."""
        self.say(text)
        self.phase(phase, text, **more)

    def phase(self, phase: str, text: str = "", fraction: float | None = None, **more: Any) -> None:
        """What the run is doing now."""
        if self.rank:
            return
        new, now = phase != self._progress.get("phase"), time.time()
        kept = {key: self._progress[key] for key in KEPT if key in self._progress}
        self._progress = {**kept, "phase": phase, "text": text, "fraction": fraction, **more, "time": now}
        if new or fraction == 1 or now - self._written >= PAUSE_SECONDS:
            write_json(self.folder / PROGRESS, self._progress)
            self._written = now

    def point(self, values: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl. What is no number becomes null, with a note: JSON has no NaN."""
        if self.rank:
            return
        odd = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        point = {key: None if key in odd else value for key, value in values.items()}
        if odd:
            point["note"] = ", ".join(f"{key} is {values[key]}" for key in odd)
        path = self.folder / METRICS
        torn = path.exists() and not _ends_line(path)  # killed while writing: the torn line must not eat this one
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * torn + json.dumps(point, allow_nan=False) + "\n")

    def resumed(self, step: int) -> None:
        """Tell readers that points after `step` are outdated. Says nothing where there are no points."""
        if self.rank == 0 and (self.folder / METRICS).exists():
            self.point({"event": "resumed", "step": step, "time": time.time()})

    def stop_asked(self) -> int:
        """0: no; 1: stop without saving; 2: save and stop."""
        try:
            word = (self.folder / STOP).read_text(encoding="utf-8").strip()
        except OSError:
            return 0
        return 1 if word == "discard" else 2


KEPT = ("step", "max_steps", "first_step", "first_step_time")


def write_json(path: Path, value: Any) -> None:
    """Replace `path` atomically by `value` as strict JSON."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, allow_nan=False, ensure_ascii=False), encoding="utf-8")
    temporary.replace(path)


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"\n", b"")
