"""Endpoints for benchmarks of a run's models: list, start, and the samples of a benchmark."""

from __future__ import annotations

from typing import Any

from starlette.responses import FileResponse, Response

from backend.models import benchmark, benchmark_tasks
from backend.models.benchmark import LIMIT, SAMPLES, Settings
from backend.runs import jobs
from webui.api.jobs import absolute, find_job, results
from webui.api.requests import ApiError, RequestBody, State, json
from webui.api.runs import PathRun


class BenchmarkRequest(RequestBody):
    """See `benchmark.Settings`; `tasks` are separated by commas."""

    tasks: str
    step: int | None = None
    limit: int = LIMIT
    shots: int | None = None
    base: bool = True
    chat_template: bool | None = None
    allow_code: bool = False


def show(run: PathRun, state: State, have: str = "") -> Any:
    """What can be measured, and the run's benchmarks; 204 if `have` is the current tag."""
    return results(state, benchmark.offer(run).as_json(), map(benchmark.as_json, benchmark.find_all(run)), have)


def start(run: PathRun, body: BenchmarkRequest) -> Response:
    """Start a benchmark, or return the job that already measures the same."""
    named = benchmark.parse_tasks(body.tasks)
    tasks = tuple(absolute(task, "task file") if benchmark_tasks.is_file(task) else task for task in named)
    settings = Settings(**{**body.model_dump(), "tasks": tasks})
    return json(benchmark.as_json(benchmark.start(run, settings)), 201)


def download(run: PathRun, job: str) -> Response:
    """All samples with prompts, outputs and metrics, as JSON lines. Raises ApiError."""
    path = find_job(run, job, jobs.BENCHMARK).path / SAMPLES
    if not path.is_file():
        raise ApiError(404, "This benchmark has no samples.")
    return FileResponse(path, filename=f"{run.id}-benchmark.jsonl", media_type="application/x-ndjson")
