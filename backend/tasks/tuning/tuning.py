"""A tuning: its scratch folder in `.tunings` of the runs folder, and the earlier results that are kept there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend.config import RunSpec
from backend.config.options import by_name, edit, effective, get, shown
from backend.inspect import predecessor
from backend.machine import Machine
from backend.preflight import Report, preflight
from backend.presets import dump, load
from backend.runs import json_values, processes, replace_text, scratch
from backend.runs.folder import RunError
from backend.runs.scratch import OUTCOME
from backend.tasks.tuning.trial import STEPS

FOLDER = ".tunings"  # in the runs folder
REQUEST = "tuning.json"  # written once: the spec of the trials, and what the user allows
NO_WAIT_SECONDS = 0.01
KEPT = 20  # tunings that have ended, with their results
MINUTES = 10.0  # the default limit
MOST_MINUTES = 24 * 60.0
EXAMPLES_PER_SEQUENCE = 16  # examples that packing may need


class Tuning:
    """A tuning's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name

    @classmethod
    def create(cls, root: Path, request: Mapping[str, Any]) -> Tuning:
        """A new tuning below the runs folder `root`. Raises RunError."""
        try:
            self = cls(scratch.new_folder(root / FOLDER, KEPT))
            root.mkdir(mode=0o700, parents=True, exist_ok=True)  # parents get the mode of the umask
            (root / FOLDER).mkdir(mode=0o700, exist_ok=True)
            self.path.mkdir(mode=0o700)
            replace_text(self.path / REQUEST, json.dumps(request), mode=0o600)
        except OSError as error:
            advice = "Check the permissions and the free disk space of the runs folder, then try again."
            raise RunError(f"The folder {root / FOLDER} could not be written: {error.strerror}. {advice}") from error
        return self

    def start(self) -> None:
        """Start the process that measures. Raises RunError."""
        scratch.start("backend.tasks.tuning.runner", self.path, "The process that measures the settings")

    def stop(self) -> None:
        """Request a stop."""
        scratch.request_stop(self.path)

    def request(self) -> dict[str, Any]:
        """What `create` has written; empty if it cannot be read."""
        return self._read(REQUEST)

    def status(self) -> dict[str, Any]:
        """id, name, key, created; state (running, done, failed, stopped, lost), the `rows` so far (search.Row), the
        number of the `fastest`, `notes`, what is measured `now`, why it waits (`text`), seconds spent and left."""
        request, is_alive = self.request(), processes.is_locked(self.path)
        kept = ("name", "key", "created", "minutes", "changes_result")
        found = {"id": self.id, **{name: request.get(name) for name in kept}, **EMPTY, **self._read(OUTCOME)}
        if found["state"] == "running" and not is_alive:
            found |= {"state": "lost", "now": "", "text": ""}
        return found

    def settings(self, patches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Each patch, completed with the values of all options that any of the patches changes, and of those that it
        makes visible. So adopting it gives the measured settings whatever a form has, also after another patch was
        adopted."""
        base = load(self.request().get("spec") or "")
        specs = [effective(edit(base, patch)) for patch in patches]
        changed = {name for patch in patches for name in patch}
        hidden = [option for option in by_name().values() if not shown(base, option)]
        found = []
        for spec, patch in zip(specs, patches, strict=True):
            names = changed | {option.name for option in hidden if shown(spec, option)}
            found.append({name: get(spec, name) for name in sorted(names)} | dict(patch))
        return found

    def _read(self, name: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return dict(json_values.read(self.path / name))
        return {}


EMPTY: Mapping[str, Any] = {
    "state": "running", "rows": [], "fastest": None, "notes": [], "now": "", "text": "", "seconds": 0, "left": None,
    "failure": None, "trial": 0, "planned": 0, "late": False,
}  # fmt: skip


def find_tuning(root: Path, name: str) -> Tuning:
    """The tuning with this id. Raises RunError."""
    path = root / FOLDER / name
    if not name.isdigit() or not (path / REQUEST).is_file():
        raise RunError("This measurement no longer exists.")
    return Tuning(path)


def earlier(root: Path, report: Report, changes_result: bool, minutes: float = 0) -> Tuning | None:
    """The newest tuning of the same spec on the same machine with the same versions that has finished or is running;
    None without one. One that reached its time limit is passed over if `minutes` allow more."""
    wanted = key(report, changes_result)
    for path in sorted((root / FOLDER).glob("*"), reverse=True):
        status = Tuning(path).status()
        is_enough = not status["late"] or status["minutes"] >= minutes
        if status["key"] == wanted and (status["state"] == "running" or (status["state"] == "done" and is_enough)):
            return Tuning(path)
    return None


def tune(
    root: Path, report: Report, base: Path, here: Machine, minutes: float = MINUTES, changes_result: bool = False
) -> tuple[Report, Tuning | None]:
    """Start to measure which settings of a checked spec are fastest on this machine, `here`. Returns the report of the
    spec of the trials, and None if that has errors. Raises RunError."""
    if not 0 < minutes <= MOST_MINUTES:
        raise RunError(f"Not started: the minutes must be above 0 and at most {MOST_MINUTES:g}; they are {minutes:g}.")
    if reason := _unsupported(report, base):
        raise RunError(f"Not started: {reason}")
    running = earlier(root, report, changes_result, MOST_MINUTES)
    if running and running.status()["state"] == "running":
        raise RunError(
            "Not started: the settings of this spec are being measured already. Find fastest settings on the page, or "
            "footplate tune without --again, shows that measurement, and can stop it."
        )
    # No time to measure this CPU: the process that measures it would disturb the first trial.
    trial = preflight(trial_spec(report, changes_result), here, base, NO_WAIT_SECONDS)
    if not trial.can_run:
        return trial, None
    request = {
        "name": report.title, "created": time.time(), "spec": dump(trial.spec), "total_steps": report.run.total_steps,
        "minutes": minutes, "changes_result": changes_result, "key": key(report, changes_result),
    }  # fmt: skip
    tuning = Tuning.create(root, request)
    tuning.start()
    return trial, tuning


def _unsupported(report: Report, base: Path) -> str:
    """Why the settings of a spec cannot be measured, as a sentence; '' if they can."""
    spec = report.spec
    if report.machine.name:
        return (
            f"the options are checked for another machine ({report.machine.name}), and speed can only be measured on "
            "this one. Select This machine."
        )
    if spec.launch.trainer != "footplate":
        return "only Footplate's own trainer can measure its settings. Set launch.trainer to footplate."
    if spec.launch.place != "local":
        return "the settings of a cluster's job cannot be measured here. Set launch.place to local."
    if report.run.nnodes > 1:
        return "the settings of a run on several nodes cannot be measured. Set launch.rendezvous to standalone."
    if found := predecessor(spec, base, None):
        return f"this spec uses the model of {found.id}, a run that has not ended."
    return ""


def trial_spec(report: Report, changes_result: bool = False) -> RunSpec:
    """The spec of `report` as its trials train it: a few steps, without evaluation, checkpoints and generation, with
    enough examples for packing if that is tried. What decides the time of a step stays as it is."""
    spec = effective(report.spec)
    patch: dict[str, Any] = {
        "train.duration": "steps",
        "train.max_steps": STEPS,
        "train.stop_on_spike": False,
        "train.half_lr_retries": 0,
        "train.max_hours": 0.0,
        "eval.strategy": "no",
        "eval.num_generations": 0,
        "save.strategy": "no",
        "save.final_model": False,
        "save.resume_from": "latest",
        "logging.steps": 1,
        "logging.report_to": "none",
        "logging.run_name": "",
        **{name: by_name()[name].default for name in ("logging.level", "save.stop_timeout")},
    }
    if spec.train.warmup_steps >= 1:  # a fraction of all steps fits any number of them
        patch["train.warmup_steps"] = 0.1
    if not spec.data.streaming and not spec.data.sources:  # fewer examples are quicker to prepare
        sequences = STEPS * report.run.global_batch_size
        needed = sequences * (EXAMPLES_PER_SEQUENCE if spec.data.packing or changes_result else 1)
        patch["data.max_samples"] = min(needed, spec.data.max_samples or needed)
    return effective(edit(spec, patch))


def key(report: Report, changes_result: bool) -> str:
    """Identifies what a result holds for: machine, versions, model, number and mean length of the examples, all options
    of a trial, and the number of steps of the run, over which the warm-up of torch.compile pays off."""
    machine = report.machine
    lengths = report.facts.token_lengths
    data = [report.facts.num_examples, round(sum(lengths) / max(1, len(lengths)))]
    gpus = [(gpu.name, gpu.total_bytes) for gpu in machine.gpus]
    hardware = [machine.device, gpus, machine.cores, machine.ram_bytes, dict(machine.versions), machine.driver_version]
    model = asdict(report.facts.shape) if report.facts.shape else report.facts.model_type
    parts = [
        hardware,
        dump(trial_spec(report, changes_result)),
        data,
        report.run.total_steps,
        repr(model),
        changes_result,
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()
