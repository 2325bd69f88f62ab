"""Conversations of chats that users keep as prompts for evaluations, each with a reference: a file in the folder of the
runs, so that all of them can be evaluated on the same prompts."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from backend.data.chat import TEMPLATE_KWARGS
from backend.models import chat_code, conversation
from backend.runs import files, json_values
from backend.runs.folder import Run, RunError

FILE = "evaluation_prompts.jsonl"
# A file of this name is read with these options, whatever the data of the run is.
OPTIONS: dict[str, Any] = {
    "train.stage": "sft", "data.format": "prompt_completion", "data.prompt_column": "", "data.completion_column": "",
    "data.system_prompt": "",
}  # fmt: skip


def path_of(run: Run) -> Path:
    """The file, which may not exist yet."""
    return run.path.absolute().parent / FILE


def count(run: Run) -> int:
    """How many prompts are kept; 0 if the file cannot be read, which an evaluation reports."""
    try:
        return len(_lines(files.read_bytes(path_of(run))))
    except OSError:
        return 0


def keep(run: Run, turn: str, reference: str) -> dict[str, Any]:
    """Append the conversation up to the prompt of a turn, with the `reference` that outputs are compared with; returns
    `path` and `count`. Raises RunError."""
    if not reference.strip():
        raise RunError("The reference is empty. Enter the output that the model should give.")
    found, details, _ = chat_code.find(run, turn)
    if "messages" not in details:
        raise RunError("This model continues texts. Only the prompts of chat models can be kept for evaluations.")
    example: dict[str, Any] = {
        "prompt": details["messages"],
        "completion": [{"role": "assistant", "content": reference.strip()}],
    }
    if tools := conversation.parse_tools(found.request.tools):
        example["tools"] = tools
    if found.request.template_kwargs:
        example[TEMPLATE_KWARGS] = dict(found.request.template_kwargs)
    path = path_of(run)
    try:
        number = _append(path, json.dumps(json_values.as_unicode(example), ensure_ascii=False).encode())
    except OSError as error:
        raise RunError(f"The prompt was not kept: {path} cannot be written ({error.strerror}).") from error
    return {"path": str(path), "count": number}


def _append(path: Path, line: bytes) -> int:
    """The number of lines, including the new one. Raises RunError if the file has that line already, or OSError."""
    opened = files.open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)  # only for this user
    with open(opened, "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two pages may keep a prompt at the same time
        before = file.read()
        lines = _lines(before)
        if line in lines:
            raise RunError(f"This conversation is already in {path}, with the same reference.")
        whole = (b"" if before.endswith(b"\n") or not before else b"\n") + line + b"\n"
        written = file.write(whole)
        if written != len(whole):  # a full disk
            file.truncate(len(before))
            raise OSError(0, "no space left on the disk")
        os.fsync(file.fileno())
    return len(lines) + 1


def _lines(content: bytes) -> list[bytes]:
    return [line for line in content.split(b"\n") if line.strip()]
