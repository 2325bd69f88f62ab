"""Endpoints for the chat with a run's models: its content, its start and end, requests, the tokens of an output, code
that generates the output again, and prompts that are kept for evaluations.

The conversation is in the files of the chat's job, so it is the same after a reload, in another tab and after a restart
of the server.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from backend.memory import inference
from backend.models import chat, chat_code, chat_files, kept_prompts
from backend.models.chat_files import CLEAR, GENERATE, PAGE, STOP, TUNED, Request
from backend.models.conversation import USER
from backend.runs import jobs
from backend.runs.folder import ALIVE, Run, RunError
from webui.api.app_state import AppState
from webui.api.jobs import tag_of, with_run_names
from webui.api.requests import ApiError, RequestBody, State, json, no_content
from webui.api.runs import PathRun


class ChatRequest(RequestBody):
    """A request to the chat: see `chat_files.Request`."""

    kind: str = GENERATE
    prompt: str = ""
    role: str = USER
    answers: Annotated[tuple[str, ...], Field(max_length=2, strict=False)] = ()
    sides: Annotated[tuple[str, ...], Field(max_length=2, strict=False)] = (TUNED,)
    step: int | None = None
    system: str | None = None
    history: bool = True
    tools: str = ""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    replaces: str = ""
    target: str = ""
    temperature: Annotated[float, Field(strict=False)] = 0.0
    top_p: Annotated[float, Field(strict=False)] = 1.0
    max_new_tokens: int = 256
    seed: int | None = None


class KeptPrompt(RequestBody):
    """The turn whose prompt is kept for evaluations, and the output that it should have."""

    turn: str
    reference: str


def show(state: State, run: PathRun, have: str = "") -> Any:
    """The chat of a run: what it offers, its job, the memory that loading takes, and the turns of the conversation
    without their tokens. `have` is a tag: the turns are left out if they have not changed since, and the response is
    204 if nothing has. Raises RunError if no model of the run can be loaded."""
    job = chat.current(run)
    if job and job.state in ALIVE:
        chat_files.touch_client(job.path, PAGE)
    found: dict[str, Any] = {"offer": chat.offer(run).as_json(), "job": _shown(state, job) if job else None}
    found["loaded"] = chat_files.loaded(job.path) if job else {}
    is_alive = bool(job and job.state in ALIVE)
    found["memory"] = None if is_alive else inference.of_chat(run, state.machine.get()).as_json()
    of_turns = tag_of([job.id, chat_files.tag(job.path)] if job else [])
    tag = f"{of_turns}.{tag_of([*found.values()])}"
    if have == tag:
        return no_content()
    if not have.startswith(f"{of_turns}."):  # the free memory changes more often than the turns
        found["turns"] = [turn.as_json() for turn in chat_files.read_turns(job.path, PAGE)] if job else []
    return {**found, "alive": is_alive, "tag": tag}


def start(state: State, run: PathRun) -> Response:
    """Start the chat unless it is alive."""
    job = chat.start(run)
    chat_files.touch_client(job.path, PAGE)
    return json({"job": _shown(state, job)}, 201)


def send(run: PathRun, body: ChatRequest) -> dict[str, Any]:
    """Send a request to the chat. If the chat has ended, this starts it again."""
    if body.kind not in (GENERATE, STOP, CLEAR):
        raise ApiError(422, f"The kind of a request must be {GENERATE}, {STOP} or {CLEAR}.")
    request = Request(**body.model_dump(), conversation=PAGE)
    if problem := request.problem():
        raise ApiError(422, problem)
    if body.kind == GENERATE and body.step not in chat.offer(run).steps:
        raise ApiError(422, "This model was deleted. Choose another one.")
    job = _job(run) if body.kind != GENERATE else chat.start(run)
    id = chat_files.send(job.path, request)
    if body.kind == GENERATE and job.state not in ALIVE:  # the chat has just ended
        chat.start(run)
    return {"id": id}


def tokens(run: PathRun, turn: str, side: str) -> dict[str, Any]:
    """The rendered prompt of an output, and its tokens with their probabilities."""
    found = chat_files.details(_job(run).path, turn, side)
    if not found:
        raise ApiError(404, "The tokens of this output were not recorded.")
    return {name: found[name] for name in ("prompt", "prompt_tokens", "tokens")}


def code(run: PathRun, turn: str) -> dict[str, str]:
    """Code that regenerates the trained model's output in a turn."""
    return chat_code.of_output(run, turn)


def keep(run: PathRun, body: KeptPrompt) -> Response:
    """Keep a conversation as a prompt for evaluations."""
    return json(kept_prompts.keep(run, body.turn, body.reference), 201)


def end(state: State, run: PathRun) -> dict[str, Any]:
    """End the chat's process; the conversation stays."""
    job = _job(run)
    if job.state in ALIVE:
        job.stop(save=False)
    return {"job": _shown(state, job)}


def _job(run: Run) -> Run:
    """The job of this run's chat. Raises RunError."""
    if job := chat.current(run):
        return job
    raise RunError("The chat of this run has not been started.")


def _shown(state: AppState, job: Run) -> dict[str, Any]:
    return with_run_names(state, jobs.as_json(job))
