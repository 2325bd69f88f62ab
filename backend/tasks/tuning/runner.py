"""`python -m backend.tasks.tuning.runner FOLDER`: the detached process of a tuning, which runs the trials of its search
one after the other.

Each trial is a run in the folder. It waits in the queue like any other run, so a run that waits already comes first;
the time that a trial waits, or that DeepSpeed compiles its operators, does not count. A trial is deleted once it was
measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from backend import presets
from backend.config.options import by_name, edit, effective, get, shown
from backend.machine import probe
from backend.preflight import Report, preflight, report_on
from backend.rules import Case, Fix
from backend.runs import LOG, METRICS, MONITOR, STOP, files, json_values, replace_text, scratch
from backend.runs.folder import ALIVE, Run, RunError
from backend.runs.metrics import since_points
from backend.runs.scratch import OUTCOME, POLL_SECONDS, TIMEOUTS, discard_runs
from backend.runs.warm_process import WarmProcess, warmed
from backend.tasks.tuning import candidates
from backend.tasks.tuning.search import BASE, Axis, Search
from backend.tasks.tuning.trial import (
    STEPS,
    SURE_AFTER,
    WARM_UP,
    End,
    Step,
    Trial,
    is_clearly_slower,
    is_enough,
    read_steps,
)
from backend.tasks.tuning.tuning import Tuning
from backend.wording import data_size

INSPECTION_SECONDS, SHOW_SECONDS = 600.0, 1.0
STOPPING_SECONDS = 3.0  # how long the end of a trial takes
BUILDING = "building kernels"  # the phase of DeepSpeed's compiled operators, which takes minutes once on a machine
# How far losses may differ if settings change only the order of operations, as in the tests of strategies and
# precisions: in fp32, in 16 bits, and with state or weights of fewer bits.
TOLERANCES = {"fp32": 1e-4, "16 bits": 0.02, "coarse": 0.05}


class _Stopped(Exception):
    """A stop was requested before the first trial."""


class Runner:
    """The `search.Workbench` of a tuning, in the process that holds its lock."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning, request = tuning, tuning.request()
        self.minutes, self.changes_result = float(request["minutes"]), bool(request["changes_result"])
        self.total_steps: int | None = request["total_steps"]
        self.spec = presets.load(request["spec"])
        self.spent = 0.0  # seconds of trials, without waiting
        self.now = self.text = ""
        self.shown = 0.0  # when the status was written
        self.planned = 0  # trials, without the repeated one
        self.search = Search(self, ())
        self.warm_process, self.warm_env = WarmProcess(tuning.path), ""

    def run(self) -> None:
        """Run all of it, and write the outcome."""
        failure = None
        try:
            self.show()
            self._run()
        except _Stopped:
            pass
        except RunError as error:
            failure = str(error)
        except Exception as error:  # a status that says running for ever would help nobody
            self._end_processes()
            self._write("failed", f"The measurement ended with an internal error: {error!r}. See {LOG} in its folder.")
            raise
        self._end_processes()
        base = self.search.rows[0] if self.search.rows else None
        if base and base.state == "failed":
            failure = base.reason
        self.now = self.text = ""
        self._write("stopped" if self.is_stopped() else "failed" if failure else "done", failure)

    def _end_processes(self) -> None:
        self.warm_process.end()
        discard_runs(self.tuning.path)

    def _run(self) -> None:
        self._check()
        self.search.run()

    def _check(self) -> None:
        """Check the spec of the trials, and find the axes. Raises RunError if the spec cannot run."""
        report = preflight(self.spec, probe(self.tuning.path), Path.cwd(), INSPECTION_SECONDS, self._show_check)
        if errors := [f.title for f in report.findings if f.level == "error"]:
            raise RunError(f"The settings cannot run on this machine: {'; '.join(errors)}.")
        self.case = Case(report.spec, report.machine, report.facts)
        if self.total_steps is None:
            self.search.notes.append(
                "The number of steps of the run is not known before it starts, so the time of the first steps, such as "
                "that of torch.compile, is not counted."
            )
        self.search.axes = candidates.axes(self.case, self.changes_result)
        fixes = [fix for axis in self.search.axes for fix in self.propose(axis, {})]
        self._show_check("")
        self.planned = 2 + sum(not self.refusal(fix.patch) for fix in fixes)  # the settings of the spec run twice

    def _show_check(self, _: str) -> None:
        """End the check, which may read all examples, at a stop. Raises _Stopped."""
        if self.is_stopped():
            raise _Stopped

    # -- what the search asks for --------------------------------------------------------------------------------------

    def propose(self, axis: Axis, patch: Mapping[str, Any]) -> Sequence[Fix]:
        """The candidates of an axis, as changes of the spec with `patch`."""
        return candidates.propose(axis, self._patched(patch))

    def changes(self, patch: Mapping[str, Any]) -> dict[str, Any]:
        """The part of `patch` that changes the effective options of the spec, and what was hidden in it: the form may
        have other values there."""
        before, after, known = self.case.spec, self._patched(patch).spec, by_name()

        def matters(name: str) -> bool:
            is_revealed = shown(after, known[name]) and not shown(before, known[name])
            return is_revealed or get(after, name) != get(before, name)

        return {name: value for name, value in patch.items() if matters(name)}

    def tolerance(self, patch: Mapping[str, Any]) -> float:
        """How far losses that should be equal may differ, with the precision of the spec with `patch`."""
        return tolerance(self._patched(patch))

    def refusal(self, patch: Mapping[str, Any]) -> str:
        """Why the spec with `patch` cannot run, or does not train on the same number of examples per step."""
        case = self._patched(patch)
        if case.run.global_batch_size != self.case.run.global_batch_size:
            return (
                f"Not tried: its global batch size would be {case.run.global_batch_size} instead of "
                f"{self.case.run.global_batch_size}."
            )
        if errors := [finding.title for finding in report_on(case).findings if finding.level == "error"]:
            return f"Not tried: {errors[0]}."
        if case.estimate.fits is False:
            needed, free = data_size(case.estimate.device_bytes), data_size(case.estimate.capacity_bytes)
            return f"Not tried: it does not fit; it needs about {needed} per device, and {free} are free."
        return ""

    def measure(self, label: str, patch: Mapping[str, Any], other: Trial | None, reserve: float) -> Trial:
        """Run a trial of the spec with `patch`."""
        if self.is_stopped():
            return Trial((), "stopped")
        self.now = label
        self.show()
        report = report_on(self._patched(patch))
        run = self._create(report)
        try:
            trial = self._follow(run, report, other, reserve)
        finally:
            self._discard(run)
        if label == BASE:  # other programs may have used the devices while it waited in the queue
            self.case = replace(self.case, machine=probe(self.tuning.path))
        return trial

    def left(self) -> float:
        """Seconds of the allowed time that are left."""
        return max(0.0, 60 * self.minutes - self.spent)

    def is_stopped(self) -> bool:
        """Whether a stop is requested."""
        return (self.tuning.path / STOP).exists()

    def show(self) -> None:
        """Write the status."""
        self.shown = time.monotonic()
        with contextlib.suppress(OSError):  # a full disk: the next one may be written
            self._write("running", None)

    # -- trials --------------------------------------------------------------------------------------------------------

    def _patched(self, patch: Mapping[str, Any]) -> Case:
        return replace(self.case, spec=effective(edit(self.case.spec, patch)))

    def _create(self, report: Report) -> Run:
        """A trial's run. CPU trials with the same environment share a process that has imported the libraries; CUDA
        cannot be used in a forked process."""
        plan = replace(report.plan, then=())
        if report.run.device == "cpu" and hasattr(os, "pidfd_open"):
            env = json.dumps([dict(plan.env), dict(plan.defaults)])
            if env != self.warm_env:
                self.warm_process.end()
            self.warm_env, plan = env, warmed(plan)
        return Run.create(self.tuning.path, "trial", plan, datetime.now(), report.about)

    def _follow(self, run: Run, report: Report, other: Trial | None, reserve: float) -> Trial:
        """Start a trial, and wait until it has ended or was stopped, because enough steps are measured for example."""
        begun = self.spent
        end: End | Literal[""] = ""
        run.start(timeouts=TIMEOUTS)
        last = time.monotonic()
        while (state := run.state) in ALIVE:
            now = time.monotonic()
            self.spent += now - last if counts(state, run.progress()) else 0
            last = now
            if state != "queued" and report.run.device == "cpu" and not end:
                self.warm_process.start(run)
                if state == "starting":  # the libraries are imported, which later trials need not wait for
                    begun = self.spent
            if not end and (end := self._reason_to_stop(read(run), other, reserve)):
                with contextlib.suppress(RunError):  # the run has just ended
                    run.stop(save=False)
                if end == "stopped":  # so that a stop does not wait until the libraries are imported
                    self.warm_process.end()
            self._show_progress(run.summary()["sentence"] if state == "queued" else "")
            time.sleep(POLL_SECONDS)
        steps = read(run)
        seconds = self.spent - begun
        if end in ("stopped", "late"):
            return Trial(steps, end, wall_seconds=seconds)
        if not end and (state != "done" or len(steps) < WARM_UP + SURE_AFTER):
            return Trial(steps, "failed", failure(run), wall_seconds=seconds)
        return Trial(steps, end or "measured", "", peak_bytes(run), seconds)

    def _reason_to_stop(self, steps: tuple[Step, ...], other: Trial | None, reserve: float) -> End | Literal[""]:
        """Why a trial with these steps is stopped; '' if it is not."""
        if self.is_stopped():
            return "stopped"
        if len(steps) < STEPS and is_enough(steps):
            return "measured"
        if self.left() <= reserve + STOPPING_SECONDS:
            return "late"
        if other and len(steps) < STEPS and is_clearly_slower(steps, other):
            return "slow"
        return ""

    def _show_progress(self, text: str) -> None:
        """Write the status if the reason to wait has changed, and now and then for the time that is left."""
        if text != self.text or time.monotonic() - self.shown > SHOW_SECONDS:
            self.text = text
            self.show()

    def _discard(self, run: Run) -> None:
        """Keep the log of a trial, and delete the trial."""
        with contextlib.suppress(OSError), files.open_to_append(self.tuning.path / LOG) as log:
            log.write(f"---- {self.now} ----\n".encode() + files.read_bytes(run.path / LOG))
        with contextlib.suppress(RunError):  # the end deletes what is left
            run.delete()

    def _write(self, state: str, failure: str | None) -> None:
        rows, fastest = self.search.rows, self.search.fastest
        number = 1 + sum(row.state != "skipped" for row in rows)  # of the current trial
        status = {
            "state": state,
            "rows": [row.as_json() for row in rows],
            "fastest": rows.index(fastest) if fastest else None,
            "notes": self.search.notes,
            "now": self.now,
            "text": self.text,
            "trial": number,
            "planned": max(number, self.planned),
            "seconds": round(self.spent, 1),
            "left": round(self.left(), 1),
            "late": self.search.is_late,
            "failure": failure,
        }
        replace_text(self.tuning.path / OUTCOME, json.dumps(status), mode=0o600)


def tolerance(case: Case) -> float:
    """How far losses that should be equal may differ."""
    precision = case.spec.precision.compute
    is_coarse = precision in ("fp8", "pure_bf16") or case.spec.method.quantization != "none"
    if is_coarse or case.optimizer.bits in (4, 8):
        return TOLERANCES["coarse"]
    return TOLERANCES["fp32" if case.run.compute_dtype == "fp32" and precision != "tf32" else "16 bits"]


def counts(state: str, progress: Mapping[str, Any]) -> bool:
    """Whether the time in which a trial has this state and progress counts towards the allowed minutes."""
    return state != "queued" and progress.get("phase") != BUILDING


def read(run: Run) -> tuple[Step, ...]:
    """The steps of a trial so far."""
    return tuple(read_steps(since_points(run.path / METRICS, 0)[0]))


def peak_bytes(run: Run) -> int | None:
    """The peak memory of a trial's fullest rank: from its result, or from the last measurement of one that was
    stopped."""
    peaks = list(run.result().get("peak_bytes", ()))
    if not peaks:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            peaks = [rank["peak"] for rank in json_values.read(run.path / MONITOR)["ranks"]]
    return max((int(peak) for peak in peaks if peak), default=None)


def failure(run: Run) -> str:
    """Why a trial failed, in the words of a failed run."""
    found = run.failure()
    return f"{found['sentence']} {found['help']}".strip() if found else run.summary()["sentence"]


def main(arguments: Sequence[str]) -> int:
    """Detach, and run the tuning whose folder is given."""
    tuning = Tuning(Path(arguments[0]).resolve())
    return scratch.run_detached(tuning.path, Runner(tuning).run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
