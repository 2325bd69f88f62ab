"""The routes of runs: start, list, one run, its log, metrics and downloads, and what is done to it.

Floor 6. Imports: options, presets, run, checking. A run is its folder: each of these reads or writes there.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from datetime import datetime
from typing import Any

import orjson
from starlette.responses import FileResponse, Response

from backend.config import presets
from backend.config.options import SpecError, changes
from backend.runs import LOG, METRICS, SCRIPT, SPEC
from backend.runs.folder import ALIVE, Run, RunError, find
from backend.runs.metrics import Piece, before, since, since_points, table, tail
from webui.api.app_state import Desk
from webui.api.checking import findings_of, judged, understood, values_of
from webui.api.requests import Ask, Refusal, json, nothing

KEY = re.compile(r"[A-Za-z0-9_-]{8,64}")
LONGEST_ID = 200
LEAST_POINTS, MOST_POINTS = 10, 5000


def _run(desk: Desk, ask: Ask) -> Run:
    """The run that the path names. Raises Refusal."""
    name = ask.path["id"]
    if len(name) > LONGEST_ID:
        raise Refusal(404, "There is no run with so long a name.")
    try:
        return find(desk.runs, name)
    except RunError as error:
        raise Refusal(404, str(error)) from None


# -- starting ----------------------------------------------------------------------------------------------------


def start(desk: Desk, ask: Ask) -> Response:
    """Make a run of the values and start it. The same key, sent again, gives the same run."""
    key, values = ask.text("key", ""), ask.table("values")
    if key and not KEY.fullmatch(key):
        raise Refusal(400, "key must be 8 to 64 letters, digits, - and _.", field="key")
    with desk.keys.alone():
        run = _before(desk, key) or _made(desk, values, key)
        if run.state == "new":
            run.start()
    return json({"id": run.id}, 201)


def _before(desk: Desk, key: str) -> Run | None:
    """The run that this key made, also if it was cut off before it was started."""
    made = desk.keys.run_of(key) if key else ""
    if not made:
        return None
    try:
        return find(desk.runs, made)
    except RunError:
        raise Refusal(409, "This was started already, and the run has been deleted since.") from None


def _made(desk: Desk, values: Any, key: str) -> Run:
    spec, problems = understood(values)
    found = judged(desk, spec)
    findings = findings_of(found, spec)
    if problems:
        invalid = [{"field": p.field, "message": p.message} for p in problems]
        named = "; ".join(f"{p.field} {p.message}" for p in problems)
        raise Refusal(422, f"Not started: {named}.", field=problems[0].field, findings=findings, invalid=invalid)
    if not found.can_run:
        titles = "; ".join(f["title"] for f in findings if f["level"] == "error")
        raise Refusal(422, f"Not started: {titles}.", findings=findings)
    run = Run.create(desk.runs, found.title, found.plan, datetime.now(), found.about, found.expected)
    if key:
        desk.keys.keep(key, run.id)
    return run


# -- looking -----------------------------------------------------------------------------------------------------


def list_runs(desk: Desk, ask: Ask) -> Response:
    """Every run, newest first; 204 where `have` is the tag of the same list."""
    body = orjson.dumps({"runs": desk.summaries.all()})
    tag = hashlib.blake2s(body, digest_size=8).hexdigest()
    if ask.query.get("have") == tag:
        return nothing()
    return json({"etag": tag, "runs": orjson.Fragment(body[len(b'{"runs":') : -1])})


def show(desk: Desk, ask: Ask) -> dict[str, Any]:
    """All that is known of one run, but for log and metrics."""
    run = _run(desk, ask)
    plan, yaml = run.plan(), _spec_text(run)
    return {
        "summary": run.summary(),
        "progress": run.progress(),
        "result": run.result(),
        "estimate": run.estimate(),
        "failure": run.failure(),
        "spec": _changes(yaml),
        "yaml": yaml,
        "command": plan.command(),
        "script": _script(run),
        "joining": "\n".join(f"# {node}\n{command}" for node, command in run.joining().items()),
        "notes": list(plan.notes),
        "ranks": sorted(run.rank_logs()),
        "checkpoints": run.checkpoints(),
        "folder": str(run.path),
        "can": run.can(),
    }


def values(desk: Desk, ask: Ask) -> dict[str, Any]:
    """The run's options as the form shows them, to begin another run from."""
    return {"values": values_of(presets.load(_spec_text(_run(desk, ask))))}


def log(desk: Desk, ask: Ask) -> Any:
    """Whole lines of the log: after byte `off`, before byte `before`, or the last ones. `s` is where they begin."""
    run = _run(desk, ask)
    path, ended = run.path / LOG, run.state not in ALIVE
    rank = ask.whole("rank", -1)
    only = rank if rank >= 0 else None
    offset = ask.whole("off", -1)
    if "before" in ask.query:
        return _piece(before(path, max(0, ask.whole("before", 0)), rank=only))
    piece = tail(path, ended, rank=only) if offset < 0 else since(path, offset, ended, rank=only)
    if offset < 0:
        return _piece(piece, more=False) if piece.end else nothing()
    return nothing() if piece.end == offset else _piece(piece)


def _piece(piece: Piece, more: bool | None = None) -> dict[str, Any]:
    return {"t": piece.text, "s": piece.start, "o": piece.end, "more": piece.more if more is None else more}


def points(desk: Desk, ask: Ask) -> Any:
    """The points after byte `off`, as they were written; 204 where there are none."""
    path, offset = _run(desk, ask).path / METRICS, max(0, ask.whole("off", 0))
    if path.is_file() and path.stat().st_size < offset:
        offset = 0  # it is another file now
    found, end = since_points(path, offset)
    return {"points": found, "o": end} if found or end != offset else nothing()


def series(desk: Desk, ask: Ask) -> Any:
    """The curves, thinned to about `n` points, from step `x0` to `x1`; 204 where `have` is the tag of the same."""
    metrics = desk.metrics(_run(desk, ask).path / METRICS)
    if ask.query.get("have") == metrics.etag:
        return nothing()
    count = min(MOST_POINTS, max(LEAST_POINTS, ask.whole("n", 1000)))
    return metrics.series(count, ask.number("x0"), ask.number("x1"))


# -- keeping -----------------------------------------------------------------------------------------------------


def log_file(desk: Desk, ask: Ask) -> Response:
    """The whole log, or one rank's lines."""
    run = _run(desk, ask)
    rank = ask.whole("rank", -1)
    if not (run.path / LOG).is_file():
        raise Refusal(404, "Nothing has been logged yet.")
    if rank < 0:
        return FileResponse(run.path / LOG, media_type="text/plain; charset=utf-8", filename=f"{run.id}.log.txt")
    parts, offset, more = [], 0, True
    while more:
        piece = since(run.path / LOG, offset, ended=True, rank=rank)
        parts.append(piece.text)
        offset, more = piece.end, piece.more
    return _download("".join(parts), f"{run.id}.rank{rank}.log.txt", "text/plain; charset=utf-8")


def metrics_csv(desk: Desk, ask: Ask) -> Response:
    """Every point that counts, a column a key."""
    run = _run(desk, ask)
    return _download(table(desk.metrics(run.path / METRICS).points), f"{run.id}.csv", "text/csv; charset=utf-8")


def spec_yaml(desk: Desk, ask: Ask) -> Response:
    """What was asked."""
    run = _run(desk, ask)
    return _download(_spec_text(run), f"{run.id}.yaml", "application/yaml; charset=utf-8")


def report_png(desk: Desk, ask: Ask) -> Response:
    """A picture of the run to keep."""
    run = _run(desk, ask)
    report = importlib.import_module("webui.run_image")  # matplotlib: half a second and 50 MB that most never need
    picture = report.picture(run.summary(), desk.metrics(run.path / METRICS).points, run.result())
    return Response(picture, media_type="image/png", headers=_named(f"{run.id}.png", "inline"))


def _download(text: str, name: str, kind: str) -> Response:
    return Response(text, media_type=kind, headers=_named(name, "attachment"))


def _named(name: str, how: str) -> dict[str, str]:
    return {"content-disposition": f'{how}; filename="{name}"', "cache-control": "no-store"}


# -- acting ------------------------------------------------------------------------------------------------------


def stop(desk: Desk, ask: Ask) -> dict[str, Any]:
    """Ask for the end, with or without a checkpoint."""
    run = _run(desk, ask)
    run.stop(save=ask.flag("save", True))
    return {"summary": run.summary()}


def resume(desk: Desk, ask: Ask) -> dict[str, Any]:
    """Go on from the last complete checkpoint, or begin anew."""
    run = _run(desk, ask)
    with desk.keys.alone():
        run.resume(anew=ask.flag("anew", False))
    return {"summary": run.summary()}


def sweep(desk: Desk, ask: Ask) -> dict[str, Any]:
    """End what a lost run left behind."""
    run = _run(desk, ask)
    return {"count": run.sweep(), "summary": run.summary()}


def delete(desk: Desk, ask: Ask) -> dict[str, Any]:
    """Remove the run's folder."""
    run = _run(desk, ask)
    run.delete()
    desk.forget(run.path / METRICS)
    return {"id": run.id}


# -- parts -------------------------------------------------------------------------------------------------------


def _spec_text(run: Run) -> str:
    try:
        return (run.path / SPEC).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Refusal(404, f"{SPEC} is missing from the run's folder.") from None


def _script(run: Run) -> str:
    try:
        return (run.path / SCRIPT).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _changes(yaml: str) -> dict[str, Any]:
    """What differs from the defaults; empty for the spec of an older Footplate that is none any more."""
    try:
        return changes(presets.load(yaml))
    except SpecError:
        return {}
