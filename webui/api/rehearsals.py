"""Endpoints for rehearsals: start, status, stop.

A rehearsal is its folder, so its state survives a restart of the server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.responses import Response

from backend.runs.folder import RunError
from backend.runs.rehearsals import Rehearsal, find_rehearsal
from backend.tasks.rehearsal import rehearse
from webui.api.app_state import AppState
from webui.api.checking import findings_json, not_started, report_of_form
from webui.api.requests import ApiError, FormRequest, State, json
from webui.api.runs import INSPECTION_SECONDS
from webui.api.runs_list import with_names


def start(state: State, body: FormRequest) -> Response:
    """Start a rehearsal of the form's values on this machine; with a small model if the values are for another
    machine."""
    report, rehearsal = report_of_form(state, body, INSPECTION_SECONDS), None
    if report.can_run:
        report, rehearsal = rehearse(state.runs, report, Path.cwd(), state.machine.get())
    if rehearsal is None:
        raise not_started(findings_json(report, report.spec))
    return json({"id": rehearsal.id}, 201)


def status(state: State, id: str) -> dict[str, Any]:
    """The phases that have ended, the current one, and the outcome."""
    return _status(state, _find(state, id))


def stop(state: State, id: str) -> dict[str, Any]:
    """Request a stop."""
    rehearsal = _find(state, id)
    rehearsal.stop()
    return _status(state, rehearsal)


def _status(state: AppState, rehearsal: Rehearsal) -> dict[str, Any]:
    status = rehearsal.status()
    return {**status, "text": with_names(state, status["text"])}


def _find(state: AppState, id: str) -> Rehearsal:
    try:
        return find_rehearsal(state.runs, id)
    except RunError as error:
        raise ApiError(404, str(error)) from None
