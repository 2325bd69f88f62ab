"""Rehearsals: runs in a scratch folder, one that trains two steps with a crash between them, and one that loads the
model that the first one saved; before them one that measures several GPUs, or, for a run that is planned for another
machine, one that builds a small model.

A rehearsal is a folder in `.rehearsals` of the runs folder; its state is computed from the files of its runs. `python
-m backend.runs.rehearsals FOLDER` is the detached process that starts one run after the other; it holds the lock of the
folder, writes the outcome and deletes the runs. What it leaves behind when it is killed is deleted before the next
rehearsal.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from backend.runs import (
    LOG,
    REHEARSED,
    STOP,
    Plan,
    files,
    json_values,
    processes,
    replace_text,
    scratch,
)
from backend.runs.folder import ALIVE, Run, RunError
from backend.runs.scratch import OUTCOME, POLL_SECONDS, TIMEOUTS, discard_runs
from backend.runs.warm_process import WarmProcess, warmed

FOLDER = ".rehearsals"  # in the runs folder
ABOUT = "rehearsal.json"  # written once: the ids of the runs, and notes
KEPT = 5  # rehearsals that have ended, without their runs
CLEAN_UP = "Delete the runs"
BEFORE = ("shrink", "devices")
RUNS = (*BEFORE, "train", "load")  # the names of the runs, in their order
LABELS: Mapping[str, str] = {
    "shrink": "Build a small model",
    "devices": "Measure every device and link",
    "starting": "Start the processes and import the libraries",
    "building kernels": "Build kernels",
    "preparing model": "Locate the model",
    "preparing data": "Prepare the longest examples",
    "loading model": "Load the model",
    "preparing engine": "Prepare the engine",
    "generating before": "Generate",
    "evaluating": "Evaluate",
    "generating during": "Generate",
    "checkpoint": "Save a checkpoint",
    "killed": "Kill rank 0 (SIGKILL)",
    "resume": "Resume from the checkpoint",
    "generating after": "Generate",
    "saving": "Save the model",
    "load": "Load the saved model and use it",
}


class Rehearsal:
    """A rehearsal's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name

    @classmethod
    def create(
        cls, folder: Path, name: str, plans: Mapping[str, Plan], about: Mapping[str, str],
        estimate: Mapping[str, Any] | None = None, notes: Sequence[str] = (), warm: bool = False,
    ) -> Rehearsal:  # fmt: skip
        """A new rehearsal in `folder`, of the runs `plans`, whose names are those in RUNS. The command of the last one
        gets the folder of the training as its argument. `warm`: one process imports the libraries for all of them.
        Raises RunError."""
        now, self = datetime.now(), cls(folder)
        kept: dict[str, Any] = {"name": name, "notes": list(notes), "warm": warm}
        for part in filter(plans.get, RUNS):
            plan = warmed(plans[part]) if warm else plans[part]
            if part == "load":
                plan = replace(plan, argv=(*plan.argv, str(folder / kept["train"])))
            title, expected = (name, estimate) if part == "train" else (f"{name} {part}", None)
            kept[part] = Run.create(folder, title, plan, now, about, expected).id
        try:
            replace_text(self.path / ABOUT, json.dumps(kept))
        except OSError as error:
            advice = "Check the permissions and the free disk space of the runs folder, then try again."
            raise RunError(f"The rehearsal could not be written: {error.strerror}. {advice}") from error
        return self

    def start(self) -> None:
        """Start the process that runs it. Raises RunError."""
        scratch.start("backend.runs.rehearsals", self.path, "The rehearsal's process")

    def stop(self) -> None:
        """Request a stop."""
        scratch.request_stop(self.path)

    def status(self) -> dict[str, Any]:
        """id, name, state (running, done, failed, stopped, lost), the `phases` that have ended, the phase `now` with a
        `text`, the failure, and the peak memory next to its estimate, in bytes."""
        alive = processes.is_locked(self.path)
        with contextlib.suppress(OSError, ValueError):
            found = dict(json_values.read(self.path / OUTCOME))
            return found if alive or found["state"] != "running" else {**found, "state": "lost"}
        return self._status("running" if alive else "lost")

    # -- helpers -------------------------------------------------------------------------------------------------------

    def runs(self) -> dict[str, Run]:
        """The runs by their names in RUNS, in this order."""
        kept = self._about()
        return {part: Run(self.path / kept[part]) for part in RUNS if kept.get(part)}

    def _about(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json_values.read(self.path / ABOUT))
        return {}

    def _status(self, state: str) -> dict[str, Any]:
        kept, found = self._about(), self.runs()
        train, notes = found.get("train"), list(kept.get("notes", []))
        trained = list(completed(recorded(train))) if train else []
        before: list[dict[str, Any]] = []
        after: list[dict[str, Any]] = []
        for part, run in found.items():
            if part != "train" and (result := run.result()):
                line = {"phase": part, "seconds": result["seconds"], "peak_bytes": result["peak_bytes"]}
                (before if part in BEFORE else after).append(line)
                notes[:0] = filter(None, [result.get("text")])
        phases = [*before, *trained, *after]
        peaks = [phase["peak_bytes"] for phase in trained]
        peaks += train.result().get("peak_bytes", []) if train else []
        started = [part for part, run in found.items() if run.state != "new"]
        current = started[-1] if started else next(iter(found), "")
        return {
            "id": self.id,
            "name": kept.get("name", ""),
            "state": state,
            "phases": [{**phase, "label": label(phase["phase"])} for phase in phases],
            "now": label(self.current_phase(current)) if current else "",
            "text": found[current].summary()["sentence"] if current else "",
            "seconds": round(time.time() - (train.summary()["created"] or 0), 1) if train else 0,
            "peak_bytes": max(peaks, default=None),
            "estimated_bytes": train.estimate().get("measured_bytes") if train else None,
            "notes": notes,
            "failure": None,
        }

    def current_phase(self, part: str) -> str:
        """The phase that this run is in, or in which it ended."""
        if part != "train":
            return part
        run = self.runs()[part]
        phase = str(run.progress().get("phase") or "starting")
        lines = recorded(run)
        last = lines[-1]["phase"] if lines else ""
        if phase != "training":
            return phase
        if last == "evaluating" or (last.startswith("step") and run.progress().get("step") == _step(last)):
            return "checkpoint"
        return f"step {1 + max([_step(line['phase']) for line in lines], default=0)}"


def _step(phase: str) -> int:
    return int(phase.removeprefix("step ")) if phase.startswith("step ") else 0


def label(phase: str) -> str:
    """A phase as it is shown."""
    return LABELS.get(phase) or phase.capitalize()


def recorded(run: Run) -> list[dict[str, Any]]:
    """The phases that the trainer has recorded, of both starts."""
    lines = []
    with contextlib.suppress(OSError, ValueError):
        for line in files.read_text(run.path / REHEARSED).splitlines():
            lines.append(json_values.parse(line))
    return lines


def completed(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Phase, seconds and peak memory of each phase that has ended. What the second start does before its step is one
    phase."""
    killed, resuming = False, 0.0
    for line in lines:
        shown = {key: line[key] for key in ("phase", "seconds", "peak_bytes")}
        if killed and not _step(line["phase"]):
            resuming += line["seconds"]
            continue
        if killed:
            yield {**shown, "phase": "resume", "seconds": round(resuming, 3)}
            killed = False
        yield shown
        killed = line["phase"] == "killed"


class Driver:
    """Runs a rehearsal, in the process that holds its lock."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal
        self.failure: dict[str, Any] | None = None
        self.warm_process = WarmProcess(rehearsal.path)

    def run(self) -> None:
        """Run all of it, write the outcome, delete the runs."""
        status = {**self.rehearsal._status("lost")}
        try:
            state = self._run()
            status = {**self.rehearsal._status(state), "failure": self.failure}
        except RunError as error:
            failure = {"phase": label("starting"), "sentence": str(error), "help": "", "traceback": "", "fields": []}
            status |= {"state": "failed", "failure": failure}
        if status["state"] != "running":
            status |= {"now": "", "text": ""}
        self.warm_process.end()
        self._keep_log()
        with contextlib.suppress(OSError):  # a full disk: deleting the runs frees some of it
            self._write({**status, "state": "running", "now": CLEAN_UP, "text": ""})
        discard_runs(self.rehearsal.path)
        self._write(status)

    def _write(self, status: Mapping[str, Any]) -> None:
        replace_text(self.rehearsal.path / OUTCOME, json.dumps(status))

    def _run(self) -> str:
        """The state at the end: done, failed or stopped."""
        for part, run in self.rehearsal.runs().items():
            state = self._wait(run)
            if state == "failed" and [line["phase"] for line in recorded(run)][-1:] == ["killed"]:
                state = self._wait(run)
            if state in ("failed", "lost"):
                self.failure = _failure(self.rehearsal, part, run)
                return "failed"
            if state != "done":
                return "stopped"
        return "done"

    def _wait(self, run: Run) -> str:
        """Start or resume a run, and wait for its end."""
        if self._stop_requested():
            return "stopped"
        run.start(timeouts=TIMEOUTS)
        requested = False
        while (state := run.state) in ALIVE:
            if state != "queued" and self.rehearsal._about().get("warm"):
                self.warm_process.start(run)
            if self._stop_requested() and not requested:
                requested = True
                with contextlib.suppress(RunError):  # the run has just ended
                    run.stop(save=False)
            time.sleep(POLL_SECONDS)
        return "stopped" if requested else state

    def _stop_requested(self) -> bool:
        return (self.rehearsal.path / STOP).exists()

    def _keep_log(self) -> None:
        with contextlib.suppress(OSError), files.open_to_append(self.rehearsal.path / LOG) as log:
            for run in self.rehearsal.runs().values():
                with contextlib.suppress(OSError):
                    log.write(files.read_bytes(run.path / LOG))


def _failure(rehearsal: Rehearsal, part: str, run: Run) -> dict[str, Any]:
    """The failure of a run, with the phase in which it ended."""
    found = run.failure() or {"sentence": run.summary()["sentence"], "help": "", "traceback": "", "fields": []}
    if "killed" in [line["phase"] for line in recorded(run)][-1:]:  # killed once more, after the resume
        sentence = "The run did not resume from the checkpoint of step 1: it trained that step again."
        return found | {"phase": label("resume"), "sentence": sentence, "help": "See the log."}
    return {"phase": label(rehearsal.current_phase(part)), **found}


def new_folder(root: Path) -> Path:
    """The path of a new rehearsal below the runs folder `root`; old ones are deleted."""
    return scratch.new_folder(root / FOLDER, KEPT)


def delete_old(root: Path) -> None:
    """Delete what killed rehearsals left behind, and all but the newest of those that have ended."""
    scratch.delete_old(root / FOLDER, KEPT)


def find_rehearsal(root: Path, name: str) -> Rehearsal:
    """The rehearsal with this id. Raises RunError."""
    path = root / FOLDER / name
    if not name.isdigit() or not (path / ABOUT).is_file():
        raise RunError("This rehearsal no longer exists.")
    return Rehearsal(path)


def main(arguments: Sequence[str]) -> int:
    """Acquire the lock of the rehearsal's folder and fork: the parent returns, the child runs the rehearsal."""
    rehearsal = Rehearsal(Path(arguments[0]).resolve())
    return scratch.run_detached(rehearsal.path, Driver(rehearsal).run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
