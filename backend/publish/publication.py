"""Publishing a model of a run: what would leave the machine, and the job that sends it (`backend.publish`)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend.publish import folder
from backend.publish.contents import Contents, Request, contents
from backend.runs import jobs
from backend.runs.folder import PACKAGES, Run, RunError, StopTimeouts

STATE_SECONDS = 60
# An upload can be interrupted at any time: the next one sends what is missing.
TIMEOUTS = StopTimeouts(save=1.0, discard=1.0, sigterm=10.0)


@dataclass(frozen=True)
class Summary:
    """What a request would do: `request` with the full name of the repository, what is published, and `effect`, a
    sentence about the destination."""

    request: Request
    contents: Contents
    effect: str

    def as_json(self) -> dict[str, Any]:
        """For the page and `--json`."""
        return {
            "request": self.request.as_json(),
            "files": [
                {"name": file.name, "bytes": file.bytes, "version": file.version} for file in self.contents.files
            ],
            "bytes": self.contents.bytes,
            "left_out": list(self.contents.left_out),
            "base_model": self.contents.base_model,
            "card": self.contents.card,
            "effect": self.effect,
        }


def summary(run: Run, request: Request) -> Summary:
    """What a request publishes, and what its destination has already, for which the Hub is queried. No files are sent.
    Raises RunError if it cannot be published."""
    found = contents(run, request)  # first, so that its errors come before a request to the Hub
    if request.folder:
        folder.check(Path(request.folder))
        return Summary(request, found, f"Copies the files to the folder {request.folder}.")
    state = _state(request)
    if request.repository != state["repository"]:  # the request named no account, and neither did the model card
        request = replace(request, repository=state["repository"])
        found = contents(run, request)
    found.check_repository(request.repository, state["files"])
    visibility = "public" if request.public else "private"
    effect = f"Creates the {visibility} repository {request.repository}."
    if state["exists"]:
        effect = (
            f"Updates the {visibility} repository {request.repository}, whose last commit is {state['commit'][:8]}: "
            "files of the same name are replaced, others stay."
        )
    return Summary(request, found, effect)


def _state(request: Request) -> dict[str, Any]:
    """What the Hub says about the repository. Raises RunError."""
    asked = ["--state", request.repository, *(["--public"] if request.public else [])]
    command = [sys.executable, "-m", jobs.MODULES[jobs.PUBLISH], *asked]
    try:
        done = subprocess.run(
            command, cwd=PACKAGES, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=STATE_SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RunError(f"The Hub did not answer within {STATE_SECONDS} seconds. Try again later.") from None
    if done.returncode:  # only the exception's name is shown: its text could quote a header with the token
        name = (done.stderr.strip().splitlines() or ["no message"])[-1].partition(":")[0]
        raise RunError(f"huggingface_hub failed with {name}. Try again, or report this as a bug.")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise RunError(answer["error"])
    return answer


def start(run: Run, request: Request, shown: Mapping[str, str]) -> Run:
    """The job that publishes the files whose versions (`Contents.versions`) were `shown`: it fails if they have changed
    since. Raises RunError."""
    request.check()
    planned = {"request": request.as_json(), "files": dict(shown)}
    with jobs.alone(run):
        jobs.require_ended(run, jobs.PUBLISH, "A model of this run is being published")
        for earlier in jobs.find_all(run, jobs.PUBLISH):
            if _destination(earlier) == request.destination and not earlier.result():
                earlier.delete()
        job = jobs.create(run, jobs.PUBLISH, planned, {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}, {})
        job.start(timeouts=TIMEOUTS)
        return job


def _request(job: Run) -> dict[str, Any]:
    found = jobs.request(job.path, jobs.PUBLISH).get("request")
    return found if isinstance(found, dict) else {}


def _destination(job: Run) -> str:
    request = _request(job)
    return str(request.get("repository") or request.get("folder") or "")


def find_all(run: Run) -> list[Run]:
    """The newest job for each destination, the newest first."""
    found: dict[str, Run] = {}
    for job in jobs.find_all(run, jobs.PUBLISH):
        found.setdefault(_destination(job), job)
    return list(found.values())


def as_json(job: Run) -> dict[str, Any]:
    """For the page: the job and its request."""
    return {**jobs.as_json(job), "request": _request(job)}
