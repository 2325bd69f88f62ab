"""Jobs of a run that has trained: merging its adapter, chatting with its model.

A job is a run of its own in the folder `jobs` of the run: detached from page and server, with a lock, a log, progress,
a state, a place in the queue if it needs devices, and the same way to stop it. Renaming the run moves its jobs along;
deleting the run deletes them. `backend/models` and `backend/publish` start them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from backend import registry
from backend.runs import EVALUATED, JOBS, Plan, files, json_values
from backend.runs.folder import ALIVE, PACKAGES, Run, RunError, runs

CHAT, EVALUATION, BENCHMARK, MERGE = "chat", "evaluation", "benchmark", "merge"
GGUF, QUANTIZE, SERVE, PUBLISH = "gguf", "quantize", "serve", "publish"
MODULES = {  # kind -> its process
    CHAT: "backend.inference",
    EVALUATION: "backend.inference",
    BENCHMARK: "backend.inference",
    MERGE: "backend.export",
    GGUF: "backend.export",
    QUANTIZE: "backend.export",
    SERVE: "backend.serve",
    PUBLISH: "backend.publish",
}
STOP_SECONDS = 5.0  # a job has nothing to save
MUTEX = ".start-lock"  # in the folder of the jobs


def create(
    run: Run,
    kind: str,
    request: Mapping[str, Any],
    env: Mapping[str, str],
    devices: Mapping[str, str],
    texts: Mapping[str, str] = MappingProxyType({}),
    partial: tuple[str, ...] = (),
) -> Run:
    """A new job of `run`, which does what is requested; `texts` are further files in its folder, `partial` what is
    deleted unless it finishes. Raises RunError."""
    argv = (sys.executable, "-m", MODULES[kind], ".")
    written = {request_file(kind): json.dumps(request), **texts}
    env = {"PYTHONPATH": str(PACKAGES), **env}
    plan = Plan(argv, env, written, devices=devices, stop_timeout=STOP_SECONDS, partial=partial)
    return Run.create(run.path / JOBS, kind, plan, datetime.now(), {"kind": kind})


def request_file(kind: str) -> str:
    """The file in a job's folder that says what was requested; written once."""
    return f"{kind}.json"


def request(folder: Path, kind: str) -> dict[str, Any]:
    """What was requested from the job in `folder`; empty if that cannot be read."""
    return json_values.read_object(folder / request_file(kind))


def required_request(folder: Path, kind: str) -> dict[str, Any]:
    """What was requested from the job in `folder`. Raises RunError."""
    found = request(folder, kind)
    if not found:
        raise RunError(f"{request_file(kind)} of this job cannot be read. Start the job again.")
    return found


def is_newer(job: Run, kind: str, folder: Path) -> bool:
    """Whether a job was created after the last change of a model's folder."""
    try:
        return (job.path / request_file(kind)).stat().st_mtime >= folder.stat().st_mtime
    except OSError:
        return False


def find_all(run: Run, kind: str) -> list[Run]:
    """The jobs of this kind, the newest first."""
    return [job for job in runs(run.path / JOBS) if job.about().get("kind") == kind]


def find(run: Run, id: str) -> Run:
    """The job with this id. Raises RunError."""
    for job in runs(run.path / JOBS):
        if job.id == id:
            return job
    raise RunError("This job no longer exists.")


def delete(run: Run, job: Run) -> None:
    """Delete a job, and what the list of runs has of it. Raises RunError."""
    job.delete()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if json_values.read(run.path / EVALUATED).get("job") == job.id:
            (run.path / EVALUATED).unlink()


@contextlib.contextmanager
def alone(run: Run) -> Iterator[None]:
    """Lets one caller at a time start a job, for two pages whose users click at once."""
    place = run.path / JOBS
    place.mkdir(mode=0o700, exist_ok=True)
    with files.open_to_append(place / MUTEX) as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        yield


def require_ended(run: Run, kind: str, what: str) -> None:
    """Raise RunError, which begins with `what` is done, if a job of this kind is alive."""
    for job in find_all(run, kind):
        if job.state in ALIVE:
            raise RunError(f"{what} ({job.id}). Wait until it has finished, or stop it.")


def place(run: Run, is_light: bool) -> tuple[dict[str, str], dict[str, str]]:
    """The environment and the devices of a job: the first device of the run. On the CPU, a light job has one thread and
    runs next to trainings; other jobs have the threads of the run and wait for the CPU as the run did."""
    plan, resolved = run.plan(), run.resolved()
    env = {name: value for name, value in {**plan.defaults, **plan.env}.items() if name != "PYTHONPATH"}
    devices = dict(list(plan.devices.items())[:1])
    family = str(resolved.get("device") or "cpu")
    if family == "cpu" or family not in registry.DEVICES or run.job():
        on_cpu = {**env, "ACCELERATE_USE_CPU": "true", **registry.NO_GPUS}
        return (on_cpu, devices) if family == "cpu" and not is_light else ({**on_cpu, "OMP_NUM_THREADS": "1"}, {})
    variable, ids = registry.DEVICES[family].visible_devices_env, resolved.get("device_ids") or ()
    if variable and ids:
        env.setdefault(variable, str(ids[0]))
        chosen = {name: env[name].partition(",")[0] for name in (variable, registry.HIP_VISIBLE_DEVICES) if name in env}
        env |= chosen
    return env, devices


def as_json(job: Run) -> dict[str, Any]:
    """For the page: id, state, a sentence about it, the completed fraction, result and failure."""
    summary = job.summary()
    shown = {key: summary[key] for key in ("id", "state", "sentence", "fraction", "created")}
    return {**shown, "result": job.result(), "failure": job.failure(), "text": job.progress().get("text", "")}
