"""Endpoints for runs: start, show, log, metrics, downloads, stop, resume, clean up and delete.

A run is its folder: each endpoint reads or writes there.
"""

from __future__ import annotations

import importlib
import re
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends
from pydantic import AfterValidator
from starlette.responses import FileResponse, Response, StreamingResponse

from backend import presets
from backend.config import RunSpec, variables
from backend.config.options import SpecError, changes, effective, masked_value
from backend.inspect import predecessor
from backend.models import gguf, merge, quantized, serve, trained
from backend.publish import publication
from backend.runs import (
    LOG,
    METRICS,
    SCRIPT,
    SPEC,
    events,
    files,
    marks,
    notebook,
    queue,
    schedule,
    stacks,
    sweeps,
    validation,
)
from backend.runs import generations as timeline
from backend.runs.folder import ALIVE, UNREADABLE, Run, RunError, damage, find
from backend.runs.metrics import (
    SINCE_BYTES,
    TAIL_BYTES,
    LogChunk,
    chunks,
    read_points,
    since,
    since_points,
    tail,
    to_csv,
)
from backend.runs.metrics import before as log_before
from backend.tasks import bundle, measured_time, measurement_report, remedies, retry
from backend.tasks.resume import resume as resume_run
from webui.api.app_state import AppState
from webui.api.checking import findings_json, form_values, not_started, parse_form, run_preflight
from webui.api.drafts import LEFT_OUT, secret_names, without_secrets
from webui.api.fixes import fix_json
from webui.api.requests import ApiError, RequestBody, State, json, no_content
from webui.api.runs_list import waiting_runs, with_names
from webui.curves import AXES

MAX_ID_LENGTH = 200
MIN_POINTS, MAX_POINTS = 10, 5000
MAX_SMOOTHING = 0.99
IMAGES = {"png": "image/png", "svg": "image/svg+xml"}
FIRST_SECONDS, MORE_SECONDS = 0.05, 0.5  # for reading metrics: the first curves appear at once, the others soon
FLOOD_BYTES = 16 * 1024  # per response, if a log grows faster than it can be read
MAX_EVENTS = 200  # alerts of a run, and other events, on its page
INSPECTION_SECONDS = 45  # for examples that no check has read yet; proxies end a request after 60 seconds


def valid_key(key: str) -> str:
    """An idempotency key. Raises ValueError."""
    if key and not re.fullmatch(r"[A-Za-z0-9_-]{8,64}", key):
        raise ValueError("must be 8 to 64 letters, digits, - and _")
    return key


class StartRequest(RequestBody):
    """The form's values, an idempotency key, and the run to start after."""

    values: dict[str, Any]
    key: Annotated[str, AfterValidator(valid_key)] = ""
    after: str = ""  # the id of a run that must end first
    after_ok: bool = True  # whether that run must succeed


class StopRequest(RequestBody):
    """Whether to save a checkpoint before the run stops, and whether only a run that still waits is meant."""

    save: bool = True
    queued: bool = False


class ResumeRequest(RequestBody):
    """Whether to delete the checkpoints and restart at step 0."""

    from_scratch: bool = False


class QueueRequest(RequestBody):
    """Changes of a waiting run: hold or release it, let it share its devices, or move it before the run with the id
    `before` ('' is the end)."""

    held: bool | None = None
    shares: bool | None = None
    before: str | None = None


def _find_run(state: State, id: str) -> Run:
    """The run in the path. Raises ApiError."""
    if len(id) > MAX_ID_LENGTH:
        raise ApiError(404, f"A run's ID has at most {MAX_ID_LENGTH} characters.")
    try:
        return find(state.runs, id)
    except RunError as error:
        raise ApiError(404, str(error)) from None


PathRun = Annotated[Run, Depends(_find_run)]


# -- start -------------------------------------------------------------------------------------------------------


def start(state: State, body: StartRequest) -> Response:
    """Create a run from the values and start it. The same key, sent again, returns the same run."""
    if run_of_key(state, body.key) is None:
        spec, _ = parse_form(body.values)
        # Checked before the lock is taken, so that other starts do not wait for the check.
        run_preflight(state, spec, wait_seconds=INSPECTION_SECONDS)
    spec, _ = parse_form(body.values)
    after = predecessor(
        effective(spec), Path.cwd(), _find_run(state, body.after) if body.after else None, body.after_ok
    )
    with state.keys.lock():
        run = run_of_key(state, body.key) or _create(state, body)
        if run.state == "new":
            run.start(after=after, after_ok=body.after_ok)
    state.runs_list.expire()
    return json({"id": run.id}, 201)


def run_of_key(state: AppState, key: str) -> Run | None:
    """The run created for this key, even if the server stopped before it started the run; None if it was deleted."""
    created = state.keys.run_of(key) if key else ""
    try:
        return find(state.runs, created) if created else None
    except RunError:
        return None


def _create(state: AppState, body: StartRequest) -> Run:
    spec, problems = parse_form(body.values)
    report = run_preflight(state, spec)
    findings = findings_json(report, spec)
    if problems:
        invalid = [{"field": p.field, "message": p.message} for p in problems]
        named = "; ".join(f"{p.field} {p.message}" for p in problems)
        raise ApiError(422, f"Not started: {named}.", field=problems[0].field, findings=findings, invalid=invalid)
    if not report.can_run:
        raise not_started(findings)
    run = Run.create(state.runs, report.title, report.plan, datetime.now(), report.about, report.expected)
    if body.key:
        state.keys.save(body.key, run.id)
    return run


# -- show --------------------------------------------------------------------------------------------------------


def show(state: State, run: PathRun) -> dict[str, Any]:
    """Everything about one run except its log and metrics. Raises RunError for a damaged run."""
    try:
        found = _everything(run)
        for part, key in (("summary", "sentence"), ("queue", "reason"), ("queue", "starts")) if found["queue"] else ():
            found[part][key] = with_names(state, found[part][key])
        return found
    except UNREADABLE as error:
        raise RunError(damage(error)) from error


def _everything(run: Run) -> dict[str, Any]:
    plan, yaml = run.plan(), _spec_text(run) if (run.path / SPEC).exists() else ""
    return {
        "summary": run.summary(),
        "queue": _place_in_queue(run),
        "sweep": part.sweep if (part := sweeps.member(run.path)) else "",
        "progress": run.progress(),
        "events": events.newest(run.path, MAX_EVENTS),
        "monitor": run.monitor(),
        "result": run.result(),
        "warning": marks.mark(run).sentence,
        "validation": validation.model(run.result()),
        "generations": timeline.size(run.path),
        "router_note": validation.router_note(run.result() or run.progress()),
        "estimate": run.estimate(),
        "timed": timed.as_json() if (timed := measured_time.measure_time(run)) else None,
        "failure": run.failure(),
        "retry_applies": retry.applies(run),
        "spec": _changed_options(yaml),
        "yaml": variables.hide_secrets(yaml, plan.env),
        "command": variables.hide_secrets(plan.command(), plan.env),
        "script": variables.hide_secrets(_script(run), plan.env),
        "joining": "\n".join(f"# {node}\n{command}" for node, command in run.node_commands().items()),
        "notes": list(plan.notes),
        "annotations": notebook.read(run.path).as_json(),
        "ranks": sorted(run.rank_logs()),
        "checkpoints": run.checkpoints(),
        "model": model.as_json() if (model := trained.find(run)) else None,
        "merge": merge.as_json(job) if model and model.base and (job := merge.find(run, model)) else None,
        "publications": [publication.as_json(job) for job in publication.find_all(run)],
        "gguf": [gguf.as_json(job) for job in gguf.find_all(run, model)] if model else [],
        "gguf_missing": gguf.missing(),
        "quantized": [quantized.as_json(job) for job in quantized.find_all(run, model)] if model else [],
        "quantized_formats": quantized.menu(),
        "server": serve.as_json(job) if (job := serve.current(run)) else None,
        "vllm": serve.vllm_offer(run),
        "folder": str(run.path),
        "can": run.can(),
    }


def generations(run: PathRun, step: int | None = None) -> dict[str, Any]:
    """The prompts and references of eval.generate_during_eval, and the scores at each step; with `step`, also the
    outputs at that step. Raises ApiError."""
    found = timeline.read(run.path)
    by_step = {line["step"]: line for line in found["steps"]}
    if step is not None and step not in by_step:
        raise ApiError(404, f"This run has no outputs from step {step}.")
    scores = [{key: value for key, value in line.items() if key != "outputs"} for line in by_step.values()]
    outputs = {} if step is None else {"step": step, "outputs": by_step[step]["outputs"]}
    return {"prompts": found["prompts"], "steps": scores, **outputs}


def list_remedies(state: State, run: PathRun) -> dict[str, Any]:
    """The changes with which a failed run can be started again, and whether their memory peaks are per device, per
    process or in host RAM."""
    found = remedies.find(run, state.machine.get(), Path.cwd())
    spec = presets.load(_spec_text(run)) if found.fixes else RunSpec()
    return {
        "fixes": [fix_json(fix.for_spec(spec), spec) for fix in found.fixes],
        "where": found.where,
        "note": found.note,
    }


def _place_in_queue(run: Run) -> dict[str, Any] | None:
    """Whether a waiting run is held, whether it can be held (unlike a job in a cluster's queue), whether another
    program uses its devices, and when it starts; None for other runs."""
    if run.state != "queued":
        return None
    held = any(entry.held for entry in queue.entries() if entry.run == str(run.path))
    times = None if held else schedule.waiting().get(str(run.path))
    starts = times.sentence if times else ""
    return {"held": held, "can_hold": not run.job().get("waits"), **run.waiting(), "starts": starts}


def values(run: PathRun) -> dict[str, Any]:
    """The run's options as the form shows them, to start another run with them, the variables that are left out because
    they seem to hold secrets, and the folder of the checkpoint that the new run could resume from; "" for none."""
    checkpoint = run.resume_point().checkpoint if run.can()["resume"] else None
    own = form_values(presets.load(_spec_text(run)))
    found = {"values": without_secrets(own), LEFT_OUT: secret_names(own)}
    return {**found, "checkpoint": str(checkpoint.resolve()) if checkpoint else ""}


def log(run: PathRun, off: int = -1, before: int | None = None, rank: int = -1, latest: bool = False) -> Any:
    """Complete lines of the log: after byte `off`, before byte `before`, or the last ones. `s` is the byte where they
    begin. `latest`: if one response cannot hold all lines after `off`, it has only the last ones."""
    path, ended = run.path / LOG, run.state not in ALIVE
    only = rank if rank >= 0 else None
    if before is not None:
        return _log_chunk(log_before(path, max(0, before), rank=only))
    if off < 0:
        chunk = tail(path, ended, rank=only)
        return _log_chunk(chunk, more=False) if chunk.end else no_content()
    chunk = since(path, off, ended, TAIL_BYTES if latest else SINCE_BYTES, only)
    if latest and chunk.more:
        return _log_chunk(tail(path, ended, FLOOD_BYTES, only), more=False)
    return no_content() if chunk.end == off else _log_chunk(chunk)


def _log_chunk(chunk: LogChunk, more: bool | None = None) -> dict[str, Any]:
    return {"t": chunk.text, "s": chunk.start, "o": chunk.end, "more": chunk.more if more is None else more}


def points(run: PathRun, off: int = 0) -> Any:
    """The points after byte `off` of the metrics file, as they were written; 204 if there are none."""
    path, offset = run.path / METRICS, max(0, off)
    if path.is_file() and path.stat().st_size < offset:
        offset = 0  # the file was replaced
    found, end = since_points(path, offset)
    return {"points": found, "o": end} if found or end != offset else no_content()


def series(
    state: State, run: PathRun, n: int = 1000, x0: float | None = None, x1: float | None = None, have: str = "",
    x: str = "step",
) -> Any:  # fmt: skip
    """The curves over the axis `x`, downsampled to about `n` points, from `x0` to `x1`; 204 if `have` is their current
    tag. For a long run, the first response has only the part of the metrics that can be read quickly; `read` is that
    part."""
    if x not in AXES:
        raise ApiError(422, f"The x axis must be one of {', '.join(AXES)}.")
    curves = state.curves(run.path / METRICS, MORE_SECONDS if have else FIRST_SECONDS)
    if have == curves.etag:
        return no_content()
    return curves.series(min(MAX_POINTS, max(MIN_POINTS, n)), x0, x1, x)


# -- download ----------------------------------------------------------------------------------------------------


def log_file(run: PathRun, rank: int = -1) -> Response:
    """The complete log, or the lines of one rank."""
    if not (run.path / LOG).is_file():
        raise ApiError(404, "This run has not written a log yet.")
    if rank < 0:
        return FileResponse(run.path / LOG, media_type="text/plain; charset=utf-8", filename=f"{run.id}.log.txt")
    texts = (chunk.text for chunk in chunks(run.path / LOG, rank))
    headers = disposition(f"{run.id}.rank{rank}.log.txt", "attachment")
    return StreamingResponse(texts, media_type="text/plain; charset=utf-8", headers=headers)


def metrics_csv(state: State, run: PathRun) -> Response:
    """Every point, except those of steps that a resumed run repeated; one column per metric."""
    return _download(to_csv(read_points(run.path / METRICS)), f"{run.id}.csv", "text/csv; charset=utf-8")


def spec_yaml(run: PathRun) -> Response:
    """The run's configuration."""
    text = variables.hide_secrets(_spec_text(run), run.plan().env)
    return _download(text, f"{run.id}.yaml", "application/yaml; charset=utf-8")


def bundle_zip(state: State, run: PathRun) -> Response:
    """The debug bundle for a bug report."""
    packed = bundle.build(run, state.machine.get(), datetime.now())
    return Response(packed, media_type="application/zip", headers=disposition(f"{run.id}-bundle.zip", "attachment"))


def measurement_json(run: PathRun) -> Response:
    """The measurement report, whose file name does not contain the name of the run. Raises RunError without a
    measurement."""
    text = measurement_report.as_text(measurement_report.build(run))
    return _download(text, "measurement.json", "application/json")


def report_image(run: PathRun, kind: str) -> Response:
    """An image of the run's curves and results."""
    kind = _image_kind(kind)
    run_image = importlib.import_module(
        "webui.images.run_image"
    )  # matplotlib takes half a second and 50 MB, which most servers never need
    image = run_image.draw(run.summary(), read_points(run.path / METRICS), run.result(), kind, run.estimate())
    return _image(image, run.id, kind)


def chart_image(
    state: State, run: PathRun, chart: str, kind: str, smoothing: float = 0.0, log: bool = False,
    x0: float | None = None, x1: float | None = None,
) -> Response:  # fmt: skip
    """An image of one chart from step `x0` to step `x1`, with the smoothing and the scale of the page."""
    kind = _image_kind(kind)
    charts = importlib.import_module("webui.images.chart_image")
    if chart not in charts.CHARTS:
        raise ApiError(404, f"There is no chart {chart[:100]}; the charts are {', '.join(charts.CHARTS)}.")
    low, high = (x0, x1) if x0 is not None and x1 is not None and x0 < x1 else (None, None)
    view = charts.View(min(MAX_SMOOTHING, max(0.0, smoothing)), log, low, high)
    found = state.curves(run.path / METRICS).series(MAX_POINTS, low, high)
    marks = charts.all_events(events.read(run.path), run.checkpoints(), found)
    return _image(charts.draw(run.name, chart, found, marks, view, kind), f"{run.id}-{chart}", kind)


def _image_kind(kind: str) -> str:
    """Raises ApiError."""
    if kind not in IMAGES:
        raise ApiError(404, f"Images are {' and '.join(IMAGES)}, not {kind[:100]}.")
    return kind


def _image(data: bytes, name: str, kind: str) -> Response:
    """An SVG is downloaded and never shown as a page, where it could run scripts."""
    how = "attachment" if kind == "svg" else "inline"
    return Response(data, media_type=IMAGES[kind], headers=disposition(f"{name}.{kind}", how))


def _download(text: str, name: str, kind: str) -> Response:
    return Response(text, media_type=kind, headers=disposition(name, "attachment"))


def disposition(name: str, how: str) -> dict[str, str]:
    """The headers of a file that is downloaded (`how`: attachment) or shown (inline)."""
    # Headers are Latin-1, and the user may have renamed the folder of a run.
    file = f'filename="{name}"' if name.isascii() and '"' not in name else f"filename*=utf-8''{quote(name)}"
    return {"content-disposition": f"{how}; {file}", "cache-control": "no-store"}


# -- act ---------------------------------------------------------------------------------------------------------


def stop(run: PathRun, body: StopRequest) -> dict[str, Any]:
    """Request the run to stop, with or without a checkpoint. Raises RunError if it has started since a page asked
    whether to remove it from the queue: it would end without a checkpoint."""
    if body.queued and run.state != "queued":
        raise RunError("This run does not wait in the queue anymore, so it was not removed. Its page shows its state.")
    run.stop(save=body.save)
    return {"summary": run.summary()}


def resume(state: State, run: PathRun, body: ResumeRequest) -> dict[str, Any]:
    """Continue from the last complete checkpoint, or restart from scratch."""
    with state.keys.lock():
        resume_run(run, body.from_scratch)
    state.runs_list.expire()
    return {"summary": run.summary()}


def change_queue(state: State, run: PathRun, body: QueueRequest) -> dict[str, Any]:
    """Hold, release or move a waiting run, or start it even though another program uses its devices."""
    changes = body.model_dump(include={"held", "shares"}, exclude_none=True)
    if changes:
        queue.change(run.path, **changes)
    if body.before is not None:
        queue.move(run.path, before=_waiting(state, body.before) if body.before else None)
    return {"queue": waiting_runs(state)}


def _waiting(state: State, name: str) -> Path:
    """The folder of a waiting run: `name` is its place, or its ID, which runs of other folders may have, too. Raises
    ApiError."""
    found = [entry for entry in queue.entries() if name in (entry.run, entry.id)]
    if not found:
        raise ApiError(404, f"{Path(name).name[:MAX_ID_LENGTH]} no longer waits in the queue.")
    own = state.runs.resolve()
    return Path(min(found, key=lambda entry: (entry.run != name, Path(entry.run).parent != own)).run)


def clean_up(run: PathRun) -> dict[str, Any]:
    """Terminate the leftover processes of a lost run."""
    return {"count": run.clean_up(), "summary": run.summary()}


def explain_stacks(run: PathRun) -> dict[str, Any]:
    """What each rank is doing, and its stacks. Waits for the ranks, some seconds at most."""
    if run.state not in ALIVE:
        return stacks.as_json((), stacks.ENDED)
    return stacks.as_json(stacks.collect(run.path), stacks.why_none(run.path))


def delete(state: State, run: PathRun) -> dict[str, Any]:
    """Delete the run's folder."""
    run.delete()
    state.forget_curves(run.path / METRICS)
    state.runs_list.expire()
    return {"id": run.id}


# -- parts -------------------------------------------------------------------------------------------------------


def _spec_text(run: Run) -> str:
    try:
        return files.read_text(run.path / SPEC)
    except FileNotFoundError:
        raise ApiError(404, f"{SPEC} is missing from the run folder.") from None


def _script(run: Run) -> str:
    try:
        return files.read_text(run.path / SCRIPT)
    except FileNotFoundError:
        return ""


def _changed_options(yaml: str) -> dict[str, Any]:
    """The options that differ from their defaults; empty if this version of Footplate cannot read the spec."""
    try:
        return {name: masked_value(value) for name, value in changes(presets.load(yaml)).items()}
    except SpecError:
        return {}
