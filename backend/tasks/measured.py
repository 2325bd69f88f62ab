"""Measured peaks of earlier runs next to their estimates, which say how far the next estimate may be off.

A run that ended has the peak of each rank in result.json; if a run ran out of memory, torch's error says how much it
needed at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.preflight import Report
from backend.runs import device_memory
from backend.runs.failure import DEVICE_MEMORY
from backend.runs.folder import Run
from backend.tasks.earlier_runs import EarlierRuns


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
        """Such as "The last similar run (2026-11-22_101500_first-run) used 1.08 times the estimated memory.\""""
        verb = "needed at least" if self.at_least else "used"
        return f"The last similar run ({self.run}) {verb} {self.ratio:.2f} times the estimated memory."

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


class MeasuredPeaks(EarlierRuns[Measurement]):
    """The measured peaks in a folder of runs."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "compared", measure)

    def latest(self, report: Report, without: str = "") -> Measurement | None:
        """The newest measurement of a comparable run, except of the run `without`."""
        return None if report.estimate.unknown else self.newest(report.compared, without)
