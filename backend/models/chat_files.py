"""What the clients of a chat, which are pages and command lines, and its process exchange: files in the job's folder.

`requests.jsonl` and `outputs.jsonl` only grow, a line of JSON at a time. So a client that connects later, or again,
reads the same as a client that was there from the start, and so does a restarted process. A client shows that it is
there by touching a file of its own in `clients`; the process ends when no client has done so for a while.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from backend.models import conversation as parts
from backend.models.conversation import TOOL, USER, InvalidTools
from backend.runs import files, json_values
from backend.runs.folder import RunError

REQUESTS, OUTPUTS = "requests.jsonl", "outputs.jsonl"
LOADED = "loaded.json"  # written once a model is loaded: loading time, memory, and what its template reads
CLIENTS = "clients"  # a folder: clients/NAME is touched by each client while it is there
TUNED, BASE = "trained", "base"
SIDES = (TUNED, BASE)
PAGE = "page"  # the conversation of all pages, and their name as a client
GENERATE, STOP, CLEAR = "generate", "stop", "clear"
MAX_BYTES = 64 * 1024  # limit for all texts of a request
MAX_NEW_TOKENS = 32_768
DETAILS = '{"details"'  # begins a line of OUTPUTS with the tokens of an output, which most readers do not need
CLIENT_SECONDS = 15.0  # after which a client that has not touched its file is gone


@dataclass(frozen=True)
class Request:
    """The model of the checkpoint `step` (None: the final model) generates an output for `prompt`, as the next turn of
    a `conversation`, or in place of its turn `replaces`. `sides`: the trained model, its base model, or both.
    `answers`: for a reward model, the two texts to score. `system`: None is that of training; `history`: the prompt
    comes after the earlier turns. `role`: tool, if the prompt is a tool result. `tools`: their definitions as JSON;
    `template_kwargs`: variables of the chat template, besides those of training. A stop has a `target`, the request to
    stop."""

    kind: str = GENERATE
    id: str = ""
    conversation: str = PAGE
    prompt: str = ""
    role: str = USER
    answers: tuple[str, ...] = ()
    sides: tuple[str, ...] = (TUNED,)
    step: int | None = None
    system: str | None = None
    history: bool = True
    tools: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    replaces: str = ""
    target: str = ""
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 256
    seed: int | None = None

    def problem(self) -> str:
        """Why the request cannot be sent, as a sentence; '' if it can."""
        texts = (self.prompt, self.system or "", self.tools, str(self.template_kwargs), *self.answers)
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        if size > MAX_BYTES:
            return (
                f"The texts of this request have {size / 1024:.0f} KiB; at most "
                f"{MAX_BYTES // 1024} KiB are allowed. Shorten the prompt."
            )
        if self.kind == GENERATE and not self.prompt.strip():
            return "The prompt is empty."
        if self.answers and len(self.answers) != 2:
            return "A reward model scores exactly two completions of a prompt."
        return self._template_problem() or self._setting_problem()

    def _template_problem(self) -> str:
        if self.role not in (USER, TOOL):
            return f"The role of a prompt is {USER} or {TOOL}, not {self.role}."
        if self.role == TOOL and not self.history:
            return "A tool result needs the turn that called the tool: select Include earlier turns."
        try:
            parts.parse_tools(self.tools)
        except InvalidTools as error:
            return str(error)
        return parts.variables_problem(self.template_kwargs)

    def _setting_problem(self) -> str:
        if not self.sides or not set(self.sides) <= set(SIDES):
            return f"sides must contain {' and '.join(SIDES)}, or one of the two."
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 10):
            return "The temperature must be from 0 to 10."
        if not (math.isfinite(self.top_p) and 0 < self.top_p <= 1):
            return "top_p must be above 0 and at most 1."
        if not 1 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            return f"The maximum number of new tokens must be from 1 to {MAX_NEW_TOKENS:,}."
        if self.seed is not None and not 0 <= self.seed < 2**63:
            return "The seed must be an integer of 0 or more."
        return ""


@dataclass
class Turn:
    """A prompt with the outputs of each side: {"text"} while it is generated, then with "end" too."""

    request: Request
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether all requested outputs have ended."""
        return all("end" in self.outputs.get(side, ()) for side in self.request.sides)

    def as_json(self) -> dict[str, Any]:
        """For the page. An output with reasoning also has `reasoning` and `answer` as separate texts, without
        markers."""
        outputs = {side: {**output, **_parts_of(output)} for side, output in self.outputs.items()}
        return {**asdict(self.request), "outputs": outputs, "done": self.is_done}


def _parts_of(output: Mapping[str, Any]) -> dict[str, str]:
    whole = written(output)
    if split := parts.split_reasoning(whole, str(output.get("opened") or "")):
        return dict(zip(("reasoning", "answer"), split, strict=True))
    answer = parts.without_markers(whole)
    return {"answer": answer} if answer != whole else {}


def written(output: Mapping[str, Any]) -> str:
    """The text of an output as the model wrote it, with the special tokens inside it."""
    return str(output.get("written") or output.get("text") or "")


class Lines:
    """Reads each line of a growing JSONL file once."""

    def __init__(self, path: Path, skip: str = "") -> None:
        self.path, self.skip, self.offset = path, skip.encode(), 0

    def read(self) -> list[dict[str, Any]]:
        """The complete lines since the last call; without those that begin with `skip`, and without broken ones."""
        try:
            if self.path.stat().st_size <= self.offset:
                return []
            with files.open_to_read(self.path) as file:
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        return [
            value for line in complete.splitlines() if not (self.skip and line.startswith(self.skip))
            and (value := _parsed(line)) is not None
        ]  # fmt: skip


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None for anything else, such as the rest of a line that was cut off."""
    try:
        value = json_values.parse(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def send(folder: Path, request: Request) -> str:
    """Append a request to the chat in `folder`, and return its id. Raises RunError."""
    if problem := request.problem():
        raise RunError(problem)
    id = request.id or secrets.token_hex(8)
    append(folder / REQUESTS, {**asdict(request), "id": id, "time": time.time()})
    return id


def append(path: Path, *values: Mapping[str, Any]) -> None:
    """Append lines with a single write, so that lines of other processes do not come between them. Raises OSError."""
    text = "".join(f"{json.dumps(json_values.as_unicode(dict(value)), ensure_ascii=False)}\n" for value in values)
    with files.open_to_append(path, buffering=0) as file:
        file.write(text.encode())


def parse(value: Mapping[str, Any]) -> Request | None:
    """The request in a line of REQUESTS; None if the line has none."""
    known = {each.name for each in fields(Request)}
    given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in value.items() if n in known}
    try:
        request = Request(**given)
        return None if not request.id or request.problem() else request
    except (TypeError, AttributeError, ValueError):
        return None


def turns(requests: Iterable[Request], outputs: Iterable[Mapping[str, Any]], conversation: str) -> list[Turn]:
    """The turns of a conversation that still belong to it, with what was generated so far."""
    found: list[Turn] = []
    for request in requests:
        if request.conversation != conversation:
            continue
        if request.kind == CLEAR:
            found = []
        elif request.kind == GENERATE:
            numbers = [n for n, turn in enumerate(found) if turn.request.id == request.replaces]
            found = [*(found[: numbers[0]] if numbers else found), Turn(request)]
    of_id = {turn.request.id: turn for turn in found}
    for output in outputs:
        turn, side = of_id.get(str(output.get("id"))), output.get("side")
        if turn and side in SIDES:
            add(turn.outputs, str(side), output)
    return found


def add(outputs: dict[str, dict[str, Any]], side: str, output: Mapping[str, Any]) -> None:
    """Add a line of OUTPUTS to the outputs of a turn: the beginning of an output, more of its text, or its end."""
    if "end" in output:
        outputs[side] = {name: value for name, value in output.items() if name not in ("id", "side")}
    elif "begin" in output:
        outputs[side] = {"text": "", **({"opened": output["opened"]} if output.get("opened") else {})}
    else:
        outputs.setdefault(side, {"text": ""})
        outputs[side]["text"] += str(output.get("text", ""))


def read_turns(folder: Path, conversation: str) -> list[Turn]:
    """The turns of a conversation of the chat in `folder`."""
    requests = [request for value in Lines(folder / REQUESTS).read() if (request := parse(value))]
    return turns(requests, Lines(folder / OUTPUTS, DETAILS).read(), conversation)


def conversation(folder: Path) -> dict[str, str]:
    """Name -> text of the files of a chat that its successor gets: the page's conversation, without cleared turns and
    without the prompts of command lines, and what is known about loading."""
    ids = {turn.request.id for turn in read_turns(folder, PAGE)}
    found = {}
    for name in (REQUESTS, OUTPUTS):
        lines = [v for v in Lines(folder / name).read() if {v.get("id"), *(v.get("details") or ())[:1]} & ids]
        found[name] = "".join(f"{json.dumps(value, ensure_ascii=False)}\n" for value in lines)
    return {**found, LOADED: json.dumps(loaded(folder))}


def loaded(folder: Path) -> dict[str, Any]:
    """What is known once a model is loaded, empty before: the `seconds` since the start, the `bytes` of memory, whether
    the chat template reads `tools`, and `thinking`, the name of its variable that switches reasoning."""
    try:
        return dict(json_values.read(folder / LOADED))
    except (OSError, ValueError, TypeError):
        return {}


def details(folder: Path, id: str, side: str) -> dict[str, Any] | None:
    """The rendered prompt of an output, and its tokens with their probabilities; None if there are none."""
    found = None
    for value in Lines(folder / OUTPUTS).read():
        if value.get("details") == [id, side]:
            found = value
    return found


def tag(folder: Path) -> str:
    """A tag that changes when the files have something new."""
    sizes = []
    for name in (REQUESTS, OUTPUTS):
        try:
            sizes.append((folder / name).stat().st_size)
        except OSError:
            sizes.append(0)
    return "-".join(map(str, sizes))


# -- clients -------------------------------------------------------------------------------------------------------


def touch_client(folder: Path, name: str) -> None:
    """Show that this client is there."""
    with contextlib.suppress(OSError):  # a full disk
        (folder / CLIENTS).mkdir(mode=0o700, exist_ok=True)
        with files.open_to_append(folder / CLIENTS / name) as file:
            os.utime(file.fileno())


def remove_client(folder: Path, name: str) -> None:
    """Show that this client is gone."""
    (folder / CLIENTS / name).unlink(missing_ok=True)


def last_sign(folder: Path) -> float:
    """When a client was last there, in Unix seconds; 0 if none ever was."""
    return max((seen for _, seen in _clients(folder)), default=0.0)


def other_clients(folder: Path, name: str) -> bool:
    """Whether clients other than `name` are there."""
    since = time.time() - CLIENT_SECONDS
    return any(client != name and seen >= since for client, seen in _clients(folder))


def _clients(folder: Path) -> list[tuple[str, float]]:
    try:
        return [(entry.name, entry.stat().st_mtime) for entry in os.scandir(folder / CLIENTS)]
    except OSError:
        return []
