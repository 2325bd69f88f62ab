"""Endpoints for sweeps: the runs that a sweep would start, start, and the runs of one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from starlette.responses import Response

from backend.config.options import SpecError, by_name
from backend.preflight import Report
from backend.runs import schedule, sweeps
from backend.tasks import start_sweep, sweep, sweep_scores
from webui.api.app_state import AppState
from webui.api.checking import findings_json, parse_form, run_preflight
from webui.api.requests import ApiError, RequestBody, State, json
from webui.api.runs import INSPECTION_SECONDS, run_of_key, valid_key
from webui.api.runs_list import with_names

MAX_OPTIONS, MAX_TEXT = 8, 2000


class Varied(RequestBody):
    """An option and its values, as on the command line."""

    name: Annotated[str, Field(max_length=MAX_TEXT)]
    values: Annotated[str, Field(max_length=MAX_TEXT)]


class SweepRequest(RequestBody):
    """The form's values, the options that vary, and how: see backend/tasks/start_sweep.py. `key` as for a run."""

    values: dict[str, Any]
    vary: Annotated[list[Varied], Field(max_length=MAX_OPTIONS)]
    samples: Annotated[int, Field(ge=0, le=start_sweep.LIMIT)] = 0
    seeds: Annotated[int, Field(ge=1, le=start_sweep.LIMIT)] = 1
    halving: Annotated[int, Field(ge=0, le=start_sweep.LIMIT)] = 0
    key: Annotated[str, AfterValidator(valid_key)] = ""


def check(state: State, body: SweepRequest) -> dict[str, Any]:
    """What each run of the sweep would change, the errors that the checks report for it, and how long all runs take."""
    planned, reports = _check(state, body, 0)
    rows = [_row(*pair) for pair in zip(planned.labels(), reports, strict=True)]
    return {"runs": rows, "note": planned.note, "time": start_sweep.time_text(planned, reports)}


def start(state: State, body: SweepRequest) -> Response:
    """Queue all runs, if all of them can run. The same key, sent again, returns the same sweep."""
    _check(state, body, INSPECTION_SECONDS)  # before the lock, so that other starts do not wait for the checks
    with state.keys.lock():
        if found := run_of_key(state, body.key):
            part = sweeps.member(found.path)
            return json({"sweep": part.sweep if part else "", "runs": [found.id]}, 201)
        planned, reports = _check(state, body, 0)
        for label, report in zip(planned.labels(), reports, strict=True):
            if row := _row(label, report)["errors"]:
                raise ApiError(422, f"Nothing was started. {label}: {'; '.join(row)}.")
        identity, runs = start_sweep.start(state.runs, planned, reports, Path.cwd())
        if body.key:
            state.keys.save(body.key, runs[0].id)
    state.runs_list.expire()
    return json({"sweep": identity, "runs": [run.id for run in runs]}, 201)


def show(state: State, id: str, by: str = sweep_scores.LOSS) -> dict[str, Any]:
    """The runs of a sweep, the best one first by the chosen value; the other values that they can be ranked by; the
    labels of the options that the sweep varies; and when the last run ends."""
    found = sweep_scores.rank(state.runs, id, by)
    labels = {name: _label(name) for row in found.rows for name in row["varied"]}
    ranking = {"by": found.by.key, "best": found.sentence, "rankings": [each.as_json() for each in found.rankings]}
    ends = with_names(state, schedule.sweep_text(state.runs, id))
    return {"runs": found.rows, "labels": labels, "ends": ends, "comparable": found.is_comparable, **ranking}


def _label(name: str) -> str:
    """The label of an option; its key if there is none, as in a run of another version."""
    return by_name()[name].label if name in by_name() else name


def _check(state: AppState, body: SweepRequest, seconds: float) -> tuple[start_sweep.SweepPlan, list[Report]]:
    """The runs and their preflight reports. Raises ApiError."""
    spec, problems = parse_form(body.values)
    if problems:
        raise ApiError(422, f"{_label(problems[0].field)}: {problems[0].message}.", field=problems[0].field)
    if not body.vary:
        raise ApiError(422, "Choose an option to vary.")
    for each in body.vary:
        if not each.values.strip():
            raise ApiError(422, f"Enter the values of {_label(each.name)}.")
    try:
        varied = [sweep.parse(f"{each.name}={each.values}") for each in body.vary]
        planned = start_sweep.plan(spec, varied, body.samples, body.seeds, halving=body.halving)
    except SpecError as error:
        named = (f"{_label(p.field)}: {p.message}" if p.field else p.message for p in error.problems)
        raise ApiError(422, f"{'; '.join(named)}.", field=error.problems[0].field) from None
    until = time.monotonic() + seconds
    return planned, [
        run_preflight(state, made, wait_seconds=max(0.0, until - time.monotonic())) for made in planned.specs()
    ]


def _row(label: str, report: Report) -> dict[str, Any]:
    findings = findings_json(report, report.spec)
    errors = [finding["title"].rstrip(".") for finding in findings if finding["level"] == "error"]
    return {"label": label, "errors": [] if report.can_run else errors}
