"""Endpoints for tunings, which measure the fastest settings: start, the earlier result, status, stop.

A tuning is its folder, so its state survives a restart of the server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from backend.config.options import by_name, text
from backend.runs.folder import RunError
from backend.tasks.tuning.tuning import MINUTES, MOST_MINUTES, Tuning, earlier, find_tuning, tune
from webui.api.app_state import AppState
from webui.api.checking import findings_json, not_started, report_of_form
from webui.api.requests import ApiError, FormRequest, State, json
from webui.api.runs import INSPECTION_SECONDS
from webui.api.runs_list import with_names


class TuningRequest(FormRequest):
    """`minutes`: the longest time, without the queue and kernel builds; `changes_result`: also try settings that change
    the result slightly."""

    minutes: Annotated[float, Field(gt=0, le=MOST_MINUTES)] = MINUTES
    changes_result: bool = False


def start(state: State, body: TuningRequest) -> Response:
    """Measure the fastest settings for the form's values on this machine."""
    report, tuning = report_of_form(state, body, INSPECTION_SECONDS), None
    if report.can_run:
        options = (body.minutes, body.changes_result)
        report, tuning = tune(state.runs, report, Path.cwd(), state.machine.get(), *options)
    if tuning is None:
        raise not_started(findings_json(report, report.spec))
    return json({"id": tuning.id}, 201)


def show_earlier(state: State, body: TuningRequest) -> dict[str, Any]:
    """The id of the earlier or running measurement of the form's values; '' without one."""
    report = report_of_form(state, body, INSPECTION_SECONDS)
    found = earlier(state.runs, report, body.changes_result, body.minutes)
    return {"id": found.id if found else ""}


def status(state: State, id: str) -> dict[str, Any]:
    """The state, what is measured now, and the rows so far, with the form values of each."""
    return _status(state, _find(state, id))


def stop(state: State, id: str) -> dict[str, Any]:
    """Request a stop."""
    tuning = _find(state, id)
    tuning.stop()
    return _status(state, tuning)


def _status(state: AppState, tuning: Tuning) -> dict[str, Any]:
    status = tuning.status()
    patches = tuning.settings([row["patch"] for row in status["rows"]])
    rows = [{**row, "patch": _form_values(patch)} for row, patch in zip(status["rows"], patches, strict=True)]
    return {**status, "rows": rows, "text": with_names(state, status["text"])}


def _form_values(patch: dict[str, Any]) -> dict[str, Any]:
    return {name: text(by_name()[name], value) for name, value in patch.items()}


def _find(state: AppState, id: str) -> Tuning:
    try:
        return find_tuning(state.runs, id)
    except RunError as error:
        raise ApiError(404, str(error)) from None
