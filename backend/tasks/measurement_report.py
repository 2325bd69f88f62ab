"""A measurement report: what a run was predicted to need and what it needed, to attach to an issue.

It has no names, paths, data or other texts: `measurement_format.py` lets only numbers, versions and known words pass.
Tests and `make gpu` read and write the same format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from backend.config import RunSpec
from backend.config.options import SpecError, changes, visible
from backend.presets import load
from backend.runs import SPEC, STATE, files, json_values
from backend.runs.folder import ALIVE, UNREADABLE, Run, RunError, damage
from backend.runs.throughput import tokens_per_second
from backend.tasks.measured import measure
from backend.tasks.measured_time import measure_time
from backend.tasks.measurement_format import NAME, OPTIONS, OTHER, VERSION, allowed

MEASURED = ("allocated_bytes", "needed_at_least_bytes", "step_seconds", "tokens_per_second")
NOTHING = "This run has measured neither memory nor the time of a step, so there is nothing to report."


def build(run: Run) -> dict[str, Any]:
    """The report on a run that has ended. Raises RunError without a measurement."""
    try:
        if run.about().get("kind"):
            raise RunError("A measurement report is about a training run, and this is a job. Name the run of the job.")
        if run.state in ALIVE:
            raise RunError("This run has not ended. Its measurement can be reported afterwards.")
        found: dict[str, Any] = allowed(_raw(run))
    except SpecError as error:
        raise RunError(f"{SPEC} of this run cannot be read: {error}") from None
    except UNREADABLE as error:
        raise RunError(damage(error)) from None
    values = (found["measured"].get(name) for name in MEASURED)
    if not any(any(each) if isinstance(each, list) else each for each in values):
        raise RunError(NOTHING)
    return found


def as_text(report: Mapping[str, Any]) -> str:
    """The content of the file: short lists and objects are on one line."""
    text = json.dumps(report, indent=1)
    return re.sub(r"[\[{][^\[\]{}]{0,160}[\]}]", lambda found: " ".join(found[0].split()), text) + "\n"


def read(path: Path) -> dict[str, Any]:
    """A report from a file. Raises ValueError for another file, or another version of the format."""
    value = json_values.read(path)
    if not isinstance(value, Mapping) or value.get("format") != NAME:
        raise ValueError(f"{path.name} is not a measurement report: its format is not {NAME}.")
    if value.get("version") != VERSION:
        raise ValueError(f"{path.name} has an unsupported format version; expected {VERSION}.")
    return dict(allowed(value))


def ratios(report: Mapping[str, Any]) -> dict[str, float]:
    """Measured over predicted: `memory` of the fullest device, `time` of a step, `run` of the whole run; without what
    was not predicted or not measured."""
    memory, time = (report.get("predicted", {}).get(name, {}) for name in ("memory", "time"))
    measured = report["measured"]
    peak = max((size for size in measured.get("allocated_bytes", ()) if size), default=None)
    pairs = {
        "memory": (peak or measured.get("needed_at_least_bytes"), memory.get("comparable_bytes")),
        "time": (measured.get("step_seconds"), time.get("step_seconds")),
        "run": (measured.get("run_seconds"), time.get("run_seconds")),
    }
    return {name: found / expected for name, (found, expected) in pairs.items() if found and expected}


def _raw(run: Run) -> dict[str, Any]:
    """The report before it is filtered: it may have texts that are not allowed."""
    estimate, resolved, spec = run.estimate(), run.resolved(), load(files.read_text(run.path / SPEC))
    known, result = estimate.get("conditions") or {}, run.result()
    machine, model = known.get("machine") or {}, known.get("model") or {}
    parameters = {name: result.get(name, model.get(name)) for name in ("parameters", "trainable_parameters")}
    examples = {
        "train_examples": resolved.get("num_train_examples"),
        "eval_examples": resolved.get("num_eval_examples"),
    }
    return {
        "format": NAME,
        "version": VERSION,
        "hardware": machine,
        "software": _software(machine, spec),
        "options": visible(spec),
        "texts_left_out": _left_out(spec),
        "resolved": resolved,
        "model": {**model, **parameters},
        "data": {**(known.get("data") or {}), **examples},
        "predicted": {"memory": _memory(estimate), "time": _time(estimate.get("time") or {})},
        "measured": _measured(run, result),
        "end": _end(run),
    }


def _software(machine: Mapping[str, Any], spec: RunSpec) -> dict[str, Any]:
    """Versions of the environment that trained; those of another trainer's are not known."""
    found = {"driver": machine.get("driver_version")}
    with suppress(metadata.PackageNotFoundError):
        found["footplate"] = metadata.version("footplate")
    if spec.launch.trainer != "footplate":
        return found
    return {**found, "python": machine.get("python"), **machine.get("versions", {})}


def _left_out(spec: RunSpec) -> dict[str, int]:
    """The number of texts in each option that accepts any text and differs from its default."""
    texts = {name: value for name, value in changes(spec).items() if name not in OPTIONS and value}
    return {name: 1 if isinstance(value, str) else len(value) for name, value in texts.items()}


def _memory(estimate: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **estimate,
        "items": [{**row, "item": row["name"]} for row in estimate.get("rows", ())],
        "phases": estimate.get("moments", ()),
        "comparable_bytes": estimate.get("measured_bytes"),
    }


def _time(time: Mapping[str, Any]) -> dict[str, Any]:
    def items(parts: Any) -> list[dict[str, Any]]:
        return [{**part, "item": part["label"]} for part in parts]

    whole = time.get("run") or {}
    several = {"items": items(time.get("items", ())), "run_items": items(whole.get("items", ()))}
    return {**time, **several, "run_seconds": whole.get("seconds")}


def _measured(run: Run, result: Mapping[str, Any]) -> dict[str, Any]:
    monitor, progress, summary = run.monitor(), run.progress(), run.summary()
    ranks, times, points = monitor.get("ranks", ()), monitor.get("step_seconds", {}), run.last_points()
    found, timed = measure(run), measure_time(run)
    is_whole = summary["state"] == "done" and summary["started"] and not summary["earlier_seconds"]
    return {
        "allocated_bytes": result.get("peak_bytes") or [rank.get("peak") for rank in ranks],
        **{name: result.get(name) for name in ("reserved_bytes", "device_bytes", "host_bytes")},
        "needed_at_least_bytes": found.measured if found and found.at_least else None,
        "steps": result.get("steps", progress.get("step")),
        "tokens": next((each["tokens"] for each in (result, *reversed(points)) if each.get("tokens")), None),
        "tokens_per_second": tokens_per_second(result, points),
        "step_seconds": progress.get("step_seconds"),
        "step_seconds_median": times.get("p50"),
        "step_seconds_p95": times.get("p95"),
        "training_seconds": result.get("seconds"),
        "run_seconds": summary["ended"] - summary["started"] if is_whole else None,
        "was_busy": timed.was_busy if timed else None,
        "load": list(ranks),
    }


def _end(run: Run) -> dict[str, Any]:
    failed, kept = run.failure(), {}
    with suppress(OSError, ValueError):
        kept = json.loads(files.read_text(run.path / STATE))
    return {"state": run.state, "failure": failed and (failed["kind"] or OTHER), "exit_code": kept.get("exit_code")}
