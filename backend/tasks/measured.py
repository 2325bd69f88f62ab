"""Measured peaks of earlier runs next to their estimates, which say how far the next estimate may be off.

A run that ended has the peak of each rank in result.json; of one that ran out of memory, torch's error says how much it
needed at least. Only the newest runs of a folder are read, and each of them once.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.preflight import Report
from backend.runs import ESTIMATE, LOCK, RESULT, STATE, device_memory, files, ownership
from backend.runs.failure import DEVICE_MEMORY
from backend.runs.folder import Run

MAX_RUNS = 400  # of the folder, the newest first
MAX_CANDIDATES = 20  # comparable runs whose result is looked for: those that were stopped have none
LISTED_SECONDS = 5.0


@dataclass(frozen=True)
class Measurement:
    """The peak of a run on its fullest device, as far as `estimated` covers it. `at_least`: the run ran out of memory,
    so its peak would have been larger."""

    run: str
    measured: int
    estimated: int
    at_least: bool = False

    @property
    def ratio(self) -> float:
        """The measured peak as a multiple of the estimate."""
        return self.measured / self.estimated

    @property
    def sentence(self) -> str:
        """Such as "The last similar run (2026-11-22_101500_first-run) peaked at 1.08x its estimate.\""""
        verb = "needed at least" if self.at_least else "peaked at"
        return f"The last similar run ({self.run}) {verb} {self.ratio:.2f}x its estimate."

    def corrected(self, report: Report) -> int:
        """What the peak per device of `report` would be, in bytes, if its estimate is off by the same factor."""
        expected = int((report.expected or {}).get("measured_bytes", 0))
        return round(expected * self.ratio) + report.estimate.device_bytes - expected

    def as_json(self, report: Report) -> dict[str, Any]:
        """The run, the ratio, and what the peak of `report` would be with it."""
        return {
            "run": self.run, "ratio": self.ratio, "at_least": self.at_least, "sentence": self.sentence,
            "measured_bytes": self.measured, "estimated_bytes": self.estimated,
            "corrected_bytes": self.corrected(report),
        }  # fmt: skip


def measure(run: Run) -> Measurement | None:
    """The measured peak of a run next to its estimate; None if one of them is not known, or the run ran out of memory
    although it needed no more than estimated."""
    estimate = run.estimate()
    estimated = estimate.get("measured_bytes")
    if not isinstance(estimated, int) or estimated <= 0 or estimate.get("unknown"):
        return None
    peaks = [peak for peak in run.result().get("peak_bytes", ()) if isinstance(peak, int)]
    if peaks:
        return Measurement(run.id, max(peaks), estimated)
    failure = run.failure() if run.state == "failed" else None
    if not failure or failure["kind"] != DEVICE_MEMORY:
        return None
    needed = least_needed(failure["traceback"], estimate)
    return Measurement(run.id, needed, estimated, True) if needed > estimated else None


def least_needed(text: str, estimate: dict[str, Any]) -> int:
    """What torch's allocator needed at least in a run that ran out of device memory: what the error says, otherwise all
    memory that was free at its start. 0 if neither is known, as when a limit of the process (ulimit) was reached."""
    error = device_memory.parse(text)
    if error and error.needed:
        return error.needed
    if "DefaultCPUAllocator" in text:
        return 0
    overhead = int(estimate.get("device_bytes", 0)) - int(estimate.get("measured_bytes", 0))
    return max(0, int(estimate.get("capacity_bytes", 0)) - overhead)


class MeasuredPeaks:
    """The measured peaks in a folder of runs. Cheap enough for every check: names are listed every few seconds, and a
    run is read again only after it was started or has ended."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._names: list[str] = []
        self._listed = 0.0
        self._compared: dict[str, tuple[str, ...]] = {}
        self._measured: dict[str, tuple[tuple[int, ...], Measurement | None]] = {}
        self._lock = threading.Lock()

    def latest(self, report: Report, without: str = "") -> Measurement | None:
        """The newest measurement of a comparable run, except of the run `without`."""
        if report.estimate.unknown:
            return None
        with self._lock:
            names = [name for name in self._newest() if name != without]
            comparable = (name for name in names if self._settings(name) == report.compared)
            for _, name in zip(range(MAX_CANDIDATES), comparable, strict=False):
                if found := self._measurement(name):
                    return found
        return None

    def _newest(self) -> list[str]:
        if not self._names or time.monotonic() - self._listed > LISTED_SECONDS:
            try:
                names = [name for name in os.listdir(self.root) if name[0] != "."]
            except OSError:
                names = []
            self._names = sorted(names, reverse=True)[:MAX_RUNS]
            self._listed = time.monotonic()
            for kept in (self._compared, self._measured):
                for name in set(kept) - set(self._names):
                    kept.pop(name, None)
        return self._names

    def _settings(self, name: str) -> tuple[str, ...]:
        """What the run can be compared by; () without an estimate. Written once, when a run is created."""
        if name not in self._compared:
            try:
                estimate = json.loads(files.read_text(self.root / name / ESTIMATE))
                self._compared[name] = tuple(map(str, estimate.get("compared", ())))
            except (OSError, ValueError, AttributeError, TypeError):
                self._compared[name] = ()
        return self._compared[name]

    def _measurement(self, name: str) -> Measurement | None:
        folder = self.root / name
        stamp = tuple(_modified_ns(folder / file) for file in (LOCK, STATE, RESULT))
        if name not in self._measured or self._measured[name][0] != stamp:
            usable = not ownership.problem(folder)
            self._measured[name] = stamp, measure(Run(folder)) if usable else None
        return self._measured[name][1]


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
