"""A zip file for a bug report about a run: what was asked for, what ran and how it ended, without secrets.

It has no data, checkpoints, model or generated texts; but log and traceback may quote examples, and all texts name
paths and hosts.
"""

from __future__ import annotations

import io
import json
import os
import string
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from backend.config import variables
from backend.machine import Machine, describe
from backend.runs import (  # fmt: skip
    ACCELERATE,
    CHECKPOINTS,
    DEEPSPEED,
    ERROR,
    ESTIMATE,
    EVENTS,
    FSDP,
    HOSTFILE,
    LOG,
    METRICS,
    MONITOR,
    PLAN,
    PROGRESS,
    RANK_LOGS,
    RESOLVED,
    RESULT,
    SCRIPT,
    SPEC,
    STACKS,
    STATE,
    SWEEP,
)
from backend.runs.folder import UNREADABLE, Run

FILES = (
    SPEC, RESOLVED, PLAN, DEEPSPEED, FSDP, ACCELERATE, HOSTFILE, ESTIMATE, SWEEP, SCRIPT, STATE, PROGRESS, MONITOR,
    EVENTS, ERROR,
)  # fmt: skip
FILE_BYTES, LOG_BYTES, RANK_BYTES = 2**20, 2 * 2**20, 64 * 2**10  # the end of a file of this size is kept
MAX_RANK_FILES = 192  # three files for each of 64 ranks
MAX_LINE = 8192  # characters
PART = 32 * 2**10  # characters that are searched at once; a private key is shorter
KEY_BEGIN, KEY_END = "-----BEGIN ", "-----END "
WORD = string.ascii_letters + string.digits + "_.~+/=-%"
TRUNCATED = "[The beginning of this file was left out.]\n"
README = """\
Debug bundle of the Footplate run {id}, created on {now:%Y-%m-%d %H:%M:%S} (local time).

State: {state}
{failure}
Machine: {machine}
Packages: {packages}

run.json has the same facts in machine-readable form. The other files are copied from the run folder; only the last part
of long files is kept. Datasets, checkpoints, model files and generated texts are not included. Access tokens, passwords
in URLs, and environment variables that look like secrets are replaced by {mask}. Log and traceback may quote training
examples, and all files may contain paths, user names and host names: review them before you share the bundle.
"""


def build(run: Run, machine: Machine, now: datetime) -> bytes:
    """The zip file. Files that are missing or cannot be read are left out."""
    known = {**{name: value for name, value in os.environ.items() if name != "PWD"}, **_planned_env(run)}
    secrets = {name: known[name] for name in variables.secrets(known)}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in _texts(run, machine, now):
            file.writestr(f"{run.id}/{name}", _masked(text, secrets))
    return packed.getvalue()


def _masked(text: str, secrets: Mapping[str, str]) -> str:
    """`text` without secrets. Python holds its global lock while it searches with a pattern, so a long text is searched
    in parts: the server's other requests are served in between."""
    text = variables.hide_named(text, secrets)
    return "".join(map(variables.hide_tokens, _parts(_clip_lines(text))))


def _clip_lines(text: str) -> str:
    """Lines of at most MAX_LINE characters. A word that is cut could be a part of a secret, so it is left out."""
    if len(text) <= MAX_LINE:
        return text
    lines = text.splitlines(keepends=True)
    return "".join(line if len(line) <= MAX_LINE else _clipped(line) for line in lines)


def _clipped(line: str) -> str:
    kept = line[:MAX_LINE].rstrip(WORD)
    end = line[len(line.rstrip("\r\n")) :]
    return f"{kept} [{len(line) - len(kept) - len(end)} characters of this line were left out.]{end}"


def _parts(text: str) -> Iterator[str]:
    """Parts of the text that end with a line, neither within a private key nor between a name and its value."""
    begin = 0
    while begin < len(text):
        end = begin + PART
        if text.rfind(KEY_BEGIN, begin, end) > text.rfind(KEY_END, begin, end):
            end += PART
        end = text.find("\n", end) + 1
        while end and text[max(begin, end - 3) : end].strip("\"' \r\n").endswith(("=", ":")):
            end = text.find("\n", end) + 1
        end = end or len(text)
        yield text[begin:end]
        begin = end


def _planned_env(run: Run) -> Mapping[str, str]:
    with suppress(*UNREADABLE):
        return run.plan().env
    return {}


def _texts(run: Run, machine: Machine, now: datetime) -> Iterator[tuple[str, str]]:
    about = _about(run, machine)
    failure = about["failure"]
    lines = f"Failure: {failure['sentence']} {failure['help']}".rstrip() + "\n" if failure else ""
    packages = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    yield (
        "README.txt",
        README.format(
            id=run.id, now=now, state=about["state"], failure=lines, machine=describe(machine), packages=packages,
            mask=variables.MASK,
        ),
    )  # fmt: skip
    yield "run.json", json.dumps(about, indent=1, default=str)
    for name in FILES:
        if text := _end_of(run.path / name, FILE_BYTES):
            yield name, text
    for name in (LOG, METRICS):
        if text := _end_of(run.path / name, LOG_BYTES):
            yield name, text
    found = [*(run.path / STACKS).glob("*"), *_newest((run.path / RANK_LOGS).glob("*/attempt_*/*/*"))]
    for path in found:
        if text := _end_of(path, RANK_BYTES):
            yield str(path.relative_to(run.path)), text


def _about(run: Run, machine: Machine) -> dict[str, Any]:
    """State, failure, result without generated texts, checkpoints with their sizes, and the machine."""
    state, failure, result = "damaged", None, {}
    with suppress(*UNREADABLE):
        state = run.state
        failure = run.failure()
        result = {name: value for name, value in run.result().items() if name != "samples"}
    checkpoints = {
        str(path.relative_to(run.path)): path.stat().st_size
        for path in islice((run.path / CHECKPOINTS).glob("*/*"), MAX_RANK_FILES)
        if path.is_file()
    }
    return {
        "id": run.id, "state": state, "failure": failure, RESULT: result, CHECKPOINTS: checkpoints,
        "machine": asdict(machine),
    }  # fmt: skip


def _newest(paths: Iterator[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.lstat().st_mtime_ns, reverse=True)[:MAX_RANK_FILES]


def _end_of(path: Path, limit: int) -> str:
    """The last `limit` bytes of a regular file; '' if it is missing, a link or cannot be read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            text = file.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""
    return TRUNCATED + text if size > limit else text
