"""Endpoints that compare 2 to 20 runs: summary values, options that differ, generations, and the curves as CSV and PNG.

The curves on the page come from the series endpoint of each run.
"""

from __future__ import annotations

import csv
import importlib
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response, StreamingResponse

from backend import presets
from backend.config import RunSpec
from backend.config.options import Option, SpecError, effective, flat, masked_value, options, shown
from backend.runs import METRICS, SPEC, files, throughput, validation
from backend.runs.folder import Run, RunError, find
from backend.runs.metrics import last_points, read_points
from backend.tasks import compare_evaluations
from backend.tasks.comparable import DECIDE_EVAL_LOSS, DECIDE_SPLIT
from webui.api.app_state import AppState
from webui.api.requests import ApiError, State
from webui.curves import AXES, Curves

LEAST, MOST = 2, 20
IGNORED = ("logging.run_name",)  # run names differ on purpose, and the column headings show them
IMAGE_POINTS = 1000
FILE_NAME = "comparison"
RESOLVED_LABELS = {  # values in resolved.json that follow from the options, the machine and the data
    "device": "Device type",
    "compute_dtype": "Compute dtype",
    "world_size": "World size",
    "global_batch_size": "Global batch size",
    "num_train_examples": "Training examples",
    "num_eval_examples": "Validation examples",
    "steps_per_epoch": "Steps per epoch",
    "total_steps": "Steps in total",
}
Problem = dict[str, str]


def compare(state: State, ids: str) -> dict[str, Any]:
    """The runs `ids` (separated by commas) that can be read, the options in which they differ, the prompts that they
    share, and what could not be read."""
    runs, problems = _find_runs(state, ids)
    rows, specs, resolved, samples = [], {}, {}, {}
    for run in runs:
        try:
            rows.append(_row(run))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            problems.append(_problem(run.id, f"Its files cannot be read ({type(error).__name__}: {error})."))
            continue
        samples[run.id], resolved[run.id] = _samples(run), run.resolved()
        if steps := rows[-1]["max_steps"]:  # with packing, the number is known only once the data is prepared
            resolved[run.id] = {**resolved[run.id], "total_steps": steps}
        try:
            specs[run.id] = presets.load(files.read_text(run.path / SPEC))
        except (OSError, SpecError, UnicodeDecodeError):
            problems.append(_problem(run.id, f"Its {SPEC} cannot be read, so its options are not compared."))
    names = distinct_names((row["id"], row["name"]) for row in rows)
    return {
        "runs": [row | {"name": names[row["id"]]} for row in rows],
        "options": [*option_differences(specs), *resolved_differences(resolved)],
        "samples": shared_samples(samples),
        "problems": problems,
    }


def evaluations(state: State, ids: str) -> dict[str, Any]:
    """The table of `compare_evaluations.compare`; its problems also name the runs without an evaluation."""
    chosen, problems = compare_evaluations.choose(_find_runs(state, ids)[0])
    found = compare_evaluations.compare(chosen)
    return {**found, "problems": [*problems, *found["problems"]]}


def curves_csv(state: State, ids: str) -> Response:
    """Every point of every run, one line per point; the first column is the run."""
    runs, _ = _find_runs(state, ids)
    readers = [(run.id, state.curves(run.path / METRICS)) for run in runs]
    headers = _disposition("attachment", "csv")
    return StreamingResponse(csv_text(readers), media_type="text/csv; charset=utf-8", headers=headers)


def image(state: State, ids: str, x: str = "step") -> Response:
    """An image of the curves over the axis `x`."""
    if x not in AXES:
        raise ApiError(422, f"The x axis must be one of {', '.join(AXES)}.")
    compare_runs_image = importlib.import_module("webui.images.compare_runs_image")  # matplotlib
    runs, _ = _find_runs(state, ids)
    names = distinct_names((run.id, run.name) for run in runs)
    drawn = [(names[run.id], state.curves(run.path / METRICS).series(IMAGE_POINTS, axis=x)["series"]) for run in runs]
    png = compare_runs_image.draw(drawn, x)
    return Response(png, media_type="image/png", headers=_disposition("inline", "png"))


def _disposition(how: str, kind: str) -> dict[str, str]:
    return {"content-disposition": f'{how}; filename="{FILE_NAME}.{kind}"', "cache-control": "no-store"}


# -- the runs --------------------------------------------------------------------------------------------------------


def _find_runs(state: AppState, ids: str) -> tuple[list[Run], list[Problem]]:
    """The runs of a link, and a problem for each that does not exist. Raises ApiError."""
    names = list(dict.fromkeys(name for name in ids.split(",") if name))
    if not LEAST <= len(names) <= MOST:
        raise ApiError(422, f"Select {LEAST} to {MOST} runs to compare; the link has {len(names)}.")
    runs, problems = [], []
    for name in names:
        try:
            runs.append(find(state.runs, name))
        except RunError as error:
            problems.append(_problem(name[:200], str(error)))
        except OSError:  # a name that is too long for the file system
            problems.append(_problem(name[:200], "There is no run with this name."))
    return runs, problems


def distinct_names(runs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The name of each run (id, name). Runs with the same name are told apart by the time in their id, or else by the
    id."""
    named = dict(runs)
    names = Counter(named.values())
    timed = {id: f"{name} ({_time_of(id)})" for id, name in named.items()}
    times = Counter(timed.values())
    distinct = {id: text if times[text] == 1 else f"{named[id]} ({id})" for id, text in timed.items()}
    return {id: name if names[name] == 1 else distinct[id] for id, name in named.items()}


def _time_of(id: str) -> str:
    """2026-11-26 19:26:08 for 2026-11-26_192608_name; the id if it has no time."""
    match = re.match(r"(\d{4}-\d\d-\d\d)_(\d\d)(\d\d)(\d\d)_", id)
    return f"{match[1]} {':'.join(match.groups()[1:])}" if match else id


def _problem(id: str, sentence: str) -> Problem:
    return {"id": id, "sentence": sentence}


def _row(run: Run) -> dict[str, Any]:
    """One run's line of the summary. It does not read all metrics, which would take half a second for 100,000
    points."""
    summary, result, estimate = run.summary(), run.result(), run.estimate()
    best = validation.lowest(run.path)
    return {
        **{key: summary[key] for key in ("id", "name", "state", "sentence", "step", "max_steps", "loss")},
        "best_eval_loss": best[0] if best else result.get("eval_loss"),
        "best_eval_step": best[1] if best else None,
        "seconds": result.get("seconds"),  # of the training alone; a stopped run has not recorded it
        "tokens_per_second": throughput.tokens_per_second(result, last_points(run.path / METRICS)),
        "peak_bytes": max((p for p in result.get("peak_bytes") or () if isinstance(p, int | float)), default=None),
        "estimated_bytes": estimate.get("measured_bytes"),
    }


# -- options -----------------------------------------------------------------------------------------------------------


def option_differences(specs: Mapping[str, RunSpec]) -> list[dict[str, Any]]:
    """The options whose effective values differ: key, label, section, the value of each run (None where the option has
    no effect), and whether the difference prevents a comparison of the validation losses. An option that is hidden in
    one run and has its default in the others does not differ."""
    values = {id: flat(effective(spec)) for id, spec in specs.items()}
    splits = any(source.splits for spec in specs.values() for source in spec.data.datasets)
    decisive = DECIDE_EVAL_LOSS | (DECIDE_SPLIT if splits else set())
    found = []
    for option in options():
        if option.name in IGNORED or not _differs([known[option.name] for known in values.values()]):
            continue
        shown_values = {
            id: _shown_value(option, values[id][option.name]) if shown(spec, option) else None
            for id, spec in specs.items()
        }
        is_decisive = option.name in decisive
        found.append(
            {"key": option.name, "label": option.label, "values": shown_values, "decides_eval_loss": is_decisive}
        )
    return found


def resolved_differences(resolved: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The values that follow from the options and differ between the runs that have recorded them."""
    found = []
    for key, label in RESOLVED_LABELS.items():
        values = {id: known.get(key) for id, known in resolved.items()}
        if _differs([value for value in values.values() if value is not None]):
            found.append({"key": key, "label": label, "values": values})
    return found


def _differs(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values[1:])


def _shown_value(option: Option, value: Any) -> Any:
    """A value with its secrets masked; for a choice, the label."""
    value = masked_value(value)
    return dict(option.choices).get(value, value) if option.kind == "choice" else value


# -- generations -------------------------------------------------------------------------------------------------------


def _samples(run: Run) -> list[dict[str, Any]]:
    found = run.result().get("samples")
    return [sample for sample in found if isinstance(sample, dict)] if isinstance(found, list) else []


def shared_samples(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The prompts of at least two runs, with each run's output after training."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for id, of_run in samples.items():
        for sample in of_run:
            key = str(sample.get("prompt", "")), str(sample.get("reference", ""))
            if sample.get("after") is not None:
                found.setdefault(key, {}).setdefault(id, str(sample["after"]))
    return [
        {"prompt": prompt, "reference": reference, "outputs": outputs}
        for (prompt, reference), outputs in found.items()
        if len(outputs) > 1
    ]


# -- curves ----------------------------------------------------------------------------------------------------------


def csv_text(readers: Iterable[tuple[str, Curves]]) -> Iterator[str]:
    """The points of all runs as CSV, in parts: 20 long runs are hundreds of megabytes."""
    readers = list(readers)
    metrics = dict.fromkeys(key for _, reader in readers for key in reader.columns)
    keys = ["run", "step", "epoch", "tokens", "seconds", *metrics]
    text = io.StringIO()
    writer = csv.DictWriter(text, keys, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for id, reader in readers:
        points = read_points(reader.path)
        axes = {
            name: reader.axes.place(name, [p["step"] for p in points]) for name in AXES[1:] if reader.axes.known(name)
        }
        for number, point in enumerate(points):
            placed = {name: values[number] for name, values in axes.items()}
            writer.writerow({**point, "run": id, **placed})
            if text.tell() > 64 * 1024:
                yield text.getvalue()
                text.seek(text.truncate(0))
    yield text.getvalue()
