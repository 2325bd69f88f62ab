"""Endpoints for the list of runs: the list and what changed in it, annotations, and deleting several runs.

The page filters and sorts (static/runs/runs_search.js), so that typing waits for no response.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import Field
from starlette.responses import Response

from backend.runs import JOBS, METRICS, notebook, queue, rehearsals, schedule
from backend.runs.dependents import dependents
from backend.runs.folder import ALIVE, Run, RunError, find
from backend.runs.search import COLUMNS
from backend.tasks import device_test
from backend.tasks.tuning import tuning
from webui.api.app_state import AppState
from webui.api.requests import ApiError, RequestBody, State, json, no_content

Ids = Annotated[list[str], Field(min_length=1, max_length=10_000)]
RUN_ID = re.compile(r"\d{4}-\d\d-\d\d_\d{6}_[\w.-]*[\w-]")
IN_TUNING = re.compile(rf"[\w-]+ in the runs folder /.*/{re.escape(tuning.FOLDER)}/\d+")
OF_A_RUN = re.compile(rf"[\w-]+_([a-z]+) in the runs folder /.*/([\w-]+)/{JOBS}(?= )")  # a job, and its run
IN_REHEARSAL = re.compile(rf"[\w-]+ in the runs folder /.*/{re.escape(rehearsals.FOLDER)}/\d+")
NAMED_PROBLEMS = 3  # problems that an error about several runs names


class AnnotateRequest(RequestBody):
    """The runs, and what to change in their annotations."""

    ids: Ids
    add_tags: list[str] = Field(default_factory=list)
    remove_tags: list[str] = Field(default_factory=list)
    notes: str | None = None
    starred: bool | None = None
    archived: bool | None = None
    name: str | None = None  # '' restores the name that the run was started with


class DeleteRequest(RequestBody):
    """The runs to delete, or whose deletion is a question."""

    ids: Ids


def list_runs(state: State, have: str = "") -> Response:
    """The runs that changed since the list with the tag `have`, newest first, the ids of removed ones, and the waiting
    runs in order; 204 if nothing changed. Without `have`, or if it is unknown, all runs and the columns."""
    known, _, known_queue = have.partition("-")
    changes = state.runs_list.since(known)
    waiting = orjson.dumps(waiting_runs(state))
    queue_tag = hashlib.blake2s(waiting, digest_size=8).hexdigest()
    if changes.tag == known and queue_tag == known_queue:
        return no_content()
    response = {
        "etag": f"{changes.tag}-{queue_tag}",
        "complete": changes.complete,
        "runs": list(map(_without_blanks, changes.rows)),
        "removed": changes.removed,
        "queue": orjson.Fragment(waiting),
    }
    return json({**response, "columns": [asdict(c) for c in COLUMNS]} if changes.complete else response)


def _without_blanks(row: dict[str, Any]) -> dict[str, Any]:
    """The rows without blank values, which make up half of the bytes of a list of thousands of runs."""
    return {key: value for key, value in row.items() if value or (value == 0 and value is not False)}


def with_names(state: AppState, text: str) -> str:
    """Why a run waits, with the names of other runs instead of their ids; an id stays if two runs have the same
    name."""
    text = IN_TUNING.sub("A measurement of the fastest settings", IN_REHEARSAL.sub("A rehearsal", text))
    text = OF_A_RUN.sub(r"The job \1 of \2", text)
    if not RUN_ID.search(text):
        return text
    names = {row["id"]: row["name"] for row in state.runs_list.all()}
    count = Counter(names.values())
    text = text.replace(f" in the runs folder {state.runs.resolve()}", "")
    return RUN_ID.sub(lambda found: names[found[0]] if count[names.get(found[0])] == 1 else found[0], text)


def waiting_runs(state: AppState) -> list[dict[str, Any]]:
    """The waiting runs in order. Those of another folder (`elsewhere` says which) can only be viewed; another run can
    be moved before their `place`, as the ID may be that of several runs."""
    found, times = [], schedule.waiting()
    for entry in queue.entries():
        run = Run(Path(entry.run))
        known = {"id": run.id, "place": entry.run, "name": run.name, "held": entry.held}
        waiting = run.waiting()
        waiting["reason"] = with_names(state, waiting["reason"])
        starts = with_names(state, when.sentence) if (when := times.get(entry.run)) and not entry.held else ""
        found.append({**known, "elsewhere": _elsewhere(state, run), **waiting, "starts": starts})
    return found


def _elsewhere(state: AppState, run: Run) -> str:
    """What a waiting run is if it is not in the list of runs; '' if it is in the list."""
    parents, root = run.path.parents, state.runs.resolve()
    if parents[0] == root:
        return ""
    if parents[1] == root / rehearsals.FOLDER:
        return "Rehearsal, started with Try it"
    if parents[1] == root / tuning.FOLDER:
        return "Trial of Find fastest settings"
    if parents[0] == root / device_test.FOLDER:
        return "Device test"
    if parents[0].name == JOBS and parents[2] == root:
        return with_names(state, f"Uses the model of {parents[1].name}")
    return "In another runs folder"


def annotate(state: State, body: AnnotateRequest) -> dict[str, Any]:
    """Change tags, notes, star or archive of runs."""
    changes = body.model_dump(exclude={"ids"})
    try:
        for tag in body.add_tags:
            notebook.checked_tag(tag)
        return _each(state, body.ids, lambda run: notebook.change(run.path, **changes))
    except notebook.AnnotationError as error:
        raise ApiError(422, str(error)) from error


def name_dependents(state: State, body: DeleteRequest) -> dict[str, Any]:
    """The names of the other runs that need a model or a checkpoint of these runs."""
    return {"names": [run.name for run in dependents(state.runs, set(body.ids))]}


def delete_runs(state: State, body: DeleteRequest) -> dict[str, Any]:
    """Delete the folders of runs."""

    def delete(run: Run) -> None:
        if run.state in ALIVE:  # checking this first is quicker than waiting for the lock
            raise RunError("The run is still running or waiting. Stop it before you delete it.")
        run.delete()
        state.forget_curves(run.path / METRICS)

    return _each(state, body.ids, delete)


def _each(state: AppState, ids: list[str], work: Callable[[Run], object]) -> dict[str, Any]:
    """Do `work` for each run, and name the runs for which it is not possible. Raises ApiError if it never is."""
    done, problems = [], []
    for id in dict.fromkeys(ids):
        try:
            work(find(state.runs, id))
            done.append(id)
        except (RunError, OSError) as error:
            sentence = f"{error.strerror or error}." if isinstance(error, OSError) else str(error)
            problems.append({"id": id[:200], "sentence": sentence})
    state.runs_list.expire()
    if not done:
        named = " ".join(f"{p['id']}: {p['sentence']}" for p in problems[:NAMED_PROBLEMS])
        raise ApiError(409, named, problems=problems)
    return {"done": done, "problems": problems}
