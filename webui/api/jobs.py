"""The requests and responses that all kinds of a run's jobs have in common."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any

import orjson

from backend.runs import jobs
from backend.runs.folder import Run, RunError
from webui.api.app_state import AppState
from webui.api.requests import ApiError, no_content
from webui.api.runs import PathRun
from webui.api.runs_list import with_names


def stop(run: PathRun, job: str) -> dict[str, Any]:
    """Request a stop."""
    found = find_job(run, job)
    found.stop(save=False)
    return jobs.as_json(found)


def remove(run: PathRun, job: str) -> dict[str, Any]:
    """Delete a job with all its files. What was published stays."""
    jobs.delete(run, find_job(run, job))
    return {"id": job}


def find_job(run: Run, job: str, kind: str = "") -> Run:
    """The job of a run with this id, and with this kind if one is given. Raises ApiError."""
    try:
        found = jobs.find(run, job)
    except RunError as error:
        raise ApiError(404, str(error)) from None
    if kind and found.about().get("kind") != kind:
        raise ApiError(404, f"The job {job} is not of the kind {kind}.")
    return found


def absolute(path: str, what: str) -> str:
    """The path that a user typed, with `~` expanded. Raises ApiError for a relative path, since the page has no folder
    that it could be relative to."""
    found = os.path.expanduser(path)  # `~name` stays as it is if there is no such user
    if found and not os.path.isabs(found):
        example = os.path.abspath(found)
        raise ApiError(422, f"The path {path} of the {what} is relative. Enter its absolute path, such as {example}.")
    return found


def results(state: AppState, offer: dict[str, Any], found: Iterable[dict[str, Any]], have: str) -> Any:
    """What a card with results shows: the `offer` of what can be measured, and the jobs; 204 if `have` is the current
    tag."""
    shown = {"offer": offer, "jobs": [with_run_names(state, job) for job in found]}
    tag = tag_of(shown)
    return no_content() if have == tag else {**shown, "tag": tag}


def tag_of(shown: Any) -> str:
    """Identifies the content that a page has, so that new content is sent only after a change."""
    return hashlib.sha256(orjson.dumps(shown)).hexdigest()[:16]


def with_run_names(state: AppState, job: dict[str, Any]) -> dict[str, Any]:
    """A job as it is shown, with the names of the runs that it waits for instead of their ids."""
    return {**job, "sentence": with_names(state, job["sentence"])} if job["state"] == "queued" else job
