"""Endpoints for evaluating a run's models: list, start, stop, delete, and the examples of an evaluation."""

from __future__ import annotations

from typing import Any, Literal

from starlette.responses import FileResponse, Response

from backend.models import evaluation
from backend.models.evaluation import EXAMPLES, Settings
from backend.runs import jobs
from webui.api.jobs import absolute, find_job, results
from webui.api.requests import ApiError, RequestBody, State, json
from webui.api.runs import PathRun

ROWS = 20  # examples per response


class EvaluationRequest(RequestBody):
    """See `evaluation.Settings`."""

    step: int | None = None
    data: str = ""
    examples: int = 100
    max_new_tokens: int = 256
    general: bool = True
    samples_per_prompt: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    pass_at_k: int = 0
    regex: str = ""
    regex_group: bool = False
    score_file: str = ""
    score_file_sha256: str = ""
    judge_url: str = ""
    judge_model: str = ""
    judge_key: str = ""
    judge_instruction: str = ""
    judge_agreed: str = ""


def show(run: PathRun, state: State, have: str = "") -> Any:
    """What can be evaluated, and the run's evaluations; 204 if `have` is the current tag."""
    return results(state, evaluation.offer(run).as_json(), map(evaluation.as_json, evaluation.find_all(run)), have)


def start(run: PathRun, body: EvaluationRequest) -> Response:
    """Start an evaluation, or return the job that already computes the same. If a score file or a judge lacks consent,
    `consent` in the error has what the page asks about, and the values that the page sends if the user agrees."""
    paths = {"data": absolute(body.data, "data file"), "score_file": absolute(body.score_file, "score file")}
    settings = Settings(**{**body.model_dump(), **paths})
    if not (problem := evaluation.problem(run, settings)):
        return json(evaluation.as_json(evaluation.start(run, settings)), 201)
    agreed = evaluation.with_consent(settings)
    if evaluation.problem(run, agreed):
        raise ApiError(409, problem)
    if agreed.score_file_sha256 != settings.score_file_sha256:
        raise ApiError(409, problem, consent={"path": agreed.score_file, "sha256": agreed.score_file_sha256})
    raise ApiError(409, problem, consent={"question": problem, "judge_agreed": agreed.judge_agreed})


def examples(
    run: PathRun, job: str, score: str, change: Literal["", "better", "worse", "unchanged"] = "", first: int = 0
) -> dict[str, Any]:
    """ROWS examples whose `score` changed as `change` says, starting at the position `first`, and how many examples
    have each kind of change."""
    rows = [(evaluation.change_of(row, score), row) for row in evaluation.rows(find_job(run, job, jobs.EVALUATION))]
    chosen = [row for found, row in rows if change in ("", found)]
    counts = {each: sum(found == each for found, _ in rows) for each in evaluation.CHANGES}
    return {"rows": chosen[max(0, first) :][:ROWS], "counts": {"": len(rows), **counts}}


def download(run: PathRun, job: str) -> Response:
    """All examples with outputs and scores, as a JSON file. Raises ApiError."""
    path = find_job(run, job, jobs.EVALUATION).path / EXAMPLES
    if not path.is_file():
        raise ApiError(404, "This evaluation has no examples.")
    return FileResponse(path, filename=f"{run.id}-evaluation.json", media_type="application/json")
