"""The job that a run is in a cluster, and the process that follows it: the launcher process of such a run.

The follower submits the job, waits for its end, and writes job.json, from which the page knows what the job waits for.
If this process is killed, the job continues; the next start of the run finds it in job.json and waits for it instead of
submitting another one. Only what is on disk cancels the job: a user's stop request, if the job waits, or if the
supervisor has recorded that the ranks did not end in time. SIGTERM does not, because a machine that shuts down sends it
too. `slurm.py`, `ray.py` and `kubernetes.py` have the clusters.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from backend.runs import JOB, RESULT, STATE, STOP, SUPERVISOR, files, json_values, lock_file, replace_text
from backend.runs.freshness import is_fresh, start_state

POLL = "FOOTPLATE_CLUSTER_SECONDS"  # environment variable: between two requests to the cluster
DEFAULT_SECONDS, MOST_SECONDS = 5.0, 3600.0


def poll_seconds(text: str) -> float | None:
    """The value of the variable POLL; None if it is not a time that can be waited."""
    try:
        return found if 0 < (found := float(text)) <= MOST_SECONDS else None
    except ValueError:
        return None


POLL_SECONDS = poll_seconds(os.environ.get(POLL, "")) or DEFAULT_SECONDS
T = TypeVar("T")
SAYS = "backend.runs.follower: "  # begins the line that says why a job failed (failure.py)
FROM_SCRATCH = "--from-scratch"  # an argument of the trainer
FORGOTTEN = 3  # polls in which the cluster no longer knows the job
CANCEL_SECONDS = 120.0  # for a job that was canceled: Slurm's KillWait, GraceTime and epilog
DONE, STOPPED, FAILED = "done", "stopped", "failed"  # a job that a person, a limit or another job ended is STOPPED


class ClusterError(Exception):
    """A cluster did not respond, or refused a request; the message is a sentence."""


@dataclass(frozen=True)
class Job:
    """A job as its cluster describes it: `state` in the cluster's words; whether it `waits` in a queue, for the first
    time or again, and why, as sentences; how it ended (`end`: '', DONE, STOPPED or FAILED), and why (`cause`)."""

    id: str
    state: str
    waits: bool = False
    text: str = ""
    end: str = ""
    cause: str = ""


class Cluster(ABC):
    """What can be requested of a cluster. Every method raises ClusterError."""

    name: str
    interruption = ""  # what the job's own scripts write into the stop file when the cluster interrupts it

    @abstractmethod
    def submit(self, arguments: Sequence[str]) -> str:
        """Submit the job of the run in the current folder, with further arguments of the trainer; its id."""

    @abstractmethod
    def find(self, job: str, max_age: float) -> Job | None:
        """A job as it was at most `max_age` seconds ago; None if the cluster does not know it."""

    @abstractmethod
    def cancel(self, job: str) -> None:
        """Cancel a job; one that has ended is no error."""

    def wait_for_processes(self) -> str:
        """Wait until an ended job has no processes left. Returns a sentence about those that may be left, or ''."""
        return ""

    def end(self, job: str) -> None:
        """Cancel a job and wait until it has ended."""
        self.cancel(job)
        until = time.monotonic() + CANCEL_SECONDS
        while (found := self.find(job, max_age=1.0)) and not found.end:
            if time.monotonic() > until:
                raise ClusterError(f"The {self.name} job {job} was canceled, but has not ended yet.")
            time.sleep(1)


def answer(request: Callable[..., T], *arguments: Any) -> T:
    """What a cluster answers to a request. Raises ClusterError, also for an answer that is not the cluster's, such as
    the login page of a proxy: if the follower failed, the job would be canceled."""
    try:
        return request(*arguments)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ClusterError(f"The answer of the cluster, or of a proxy, cannot be read ({what}).") from error


def read(folder: Path) -> dict[str, Any]:
    """What the follower has written about the run's job; empty for a run without one."""
    return json_values.read_object(folder / JOB)


def stop_request(folder: Path) -> str | None:
    """The text of the stop file; None without one."""
    return _request(folder / STOP)


def _request(path: Path) -> str | None:
    try:
        return files.read_text(path, errors="replace")
    except OSError:
        return None


def is_interruption(request: str | None, interruption: str) -> bool:
    """Whether the cluster, and not a user, has requested the stop. `interruption`: what the job's scripts write."""
    return bool(request and interruption and interruption in request)


def withdraw_interruption(folder: Path, interruption: str) -> None:
    """Delete the cluster's stop request, but not that of a user who has replaced it meanwhile."""
    aside = folder / f".{STOP}.{os.getpid()}"
    try:
        (folder / STOP).rename(aside)
    except FileNotFoundError:
        return
    if not is_interruption(_request(aside), interruption):
        with contextlib.suppress(FileExistsError):  # a newer request exists
            (folder / STOP).hardlink_to(aside)
    aside.unlink()


def running_times(job: Mapping[str, Any]) -> tuple[float, float]:
    """When the job began to run in this start of the run, for the last time (0: it waits), and how many seconds it ran
    before it was put back into the queue."""
    began, ran = (found if json_values.is_number(found := job.get(key)) else 0.0 for key in ("began", "ran"))
    return began, ran


def without_queue(job: Mapping[str, Any], started: float | None, earlier: Any) -> tuple[float | None, float | None]:
    """When a start of the run began to run, after the time in the queue of its cluster, and how many seconds the run
    ran before; None if it did not. `started` and `earlier`: the same with the time in the queue."""
    earlier = earlier if json_values.is_number(earlier) else 0.0
    began, ran = running_times(job)
    if started and began > started:
        started, earlier = began, earlier + ran
    return started, earlier or None


def unended(folder: Path) -> str:
    """The id of a run's job whose end no follower has seen; '' if there is none."""
    job = read(folder)
    return "" if job.get("ended") else str(job.get("id", ""))


class Follower:
    """The job of the run in `folder`."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder = folder
        self.cluster = cluster
        self.job = Job("", "")
        self.canceled = False
        self.silent_since, self.problem = 0.0, ""
        self.began, self.ran = 0.0, 0.0  # as in `running_times`
        self.is_supervised = lock_file.read(folder).starter == SUPERVISOR

    def follow(self, arguments: Sequence[str]) -> int:
        """Find or submit the job, wait for its end, and return an exit status. Raises ClusterError."""
        if self.is_supervised:  # otherwise SIGTERM ends this process
            signal.signal(signal.SIGTERM, lambda *_: None)
        if (given := os.environ.get(POLL)) and not poll_seconds(given):
            limits = f"must be a number above 0 and at most {MOST_SECONDS:g}"
            print(f"{POLL} is {given!r}, but {limits}; {DEFAULT_SECONDS:g} is used.", flush=True)
        if FROM_SCRATCH in arguments:
            self._end_earlier_job()
        if not self._find_earlier_job():
            self.job = Job(self.cluster.submit(arguments), "SUBMITTED", waits=True)
            print(f"{self.cluster.name} job {self.job.id}", flush=True)
        unknown = 0
        while unknown < FORGOTTEN and not self.job.end:
            self._poll()
            if (found := self._look(1.0 if self.canceled else POLL_SECONDS)) is not None:
                unknown = 0 if found else unknown + 1
        return self._end()

    def _find_earlier_job(self) -> bool:
        """Whether to follow the job of an earlier start. Also true if the cluster does not respond."""
        self.job = Job(unended(self.folder), "")
        if not self.job.id:
            return False
        while (found := self._look(max_age=0)) is None:
            self._poll()
        return self.canceled or (found and not self.job.end)

    def _end_earlier_job(self) -> None:
        """Cancel the job of an earlier start: it would train on from its checkpoints. Raises ClusterError."""
        if earlier := unended(self.folder):
            print(f"Canceling the {self.cluster.name} job {earlier} of an earlier start.", flush=True)
            answer(self.cluster.end, earlier)
            if left := self.cluster.wait_for_processes():
                print(left, flush=True)
            self.job = Job(earlier, "")
            self._record(ended=True)

    def _is_overdue(self) -> bool:
        """Whether the supervisor has recorded that the ranks did not end in time."""
        return self.is_supervised and "forced" in json_values.read_object(self.folder / STATE)

    def _poll(self) -> None:
        """Record the job, cancel it if that is requested, and wait until the next request to the cluster."""
        self._record()
        interruption = self.cluster.interruption
        if self.job.waits and is_interruption(stop_request(self.folder), interruption):
            withdraw_interruption(self.folder, interruption)  # left behind by a failed node: the job is back
        request = stop_request(self.folder)
        by_user = request is not None and not is_interruption(request, interruption) and not self.canceled
        if by_user and (self.job.waits or self._is_overdue()):
            with contextlib.suppress(ClusterError):  # tried again at the next poll
                answer(self.cluster.cancel, self.job.id)
                self.canceled = True
        time.sleep(min(1.0, POLL_SECONDS) if self.canceled else POLL_SECONDS)

    def _look(self, max_age: float) -> bool | None:
        """Whether the cluster knows the job; None if it did not respond."""
        try:
            found = answer(self.cluster.find, self.job.id, max_age)
        except (ClusterError, OSError) as error:
            self.silent_since, self.problem = self.silent_since or time.time(), _sentence(error)
            return None
        self.silent_since, self.problem = 0.0, ""
        if found:
            self._note_times(found)
            self.job = found
        return bool(found)

    def _note_times(self, found: Job) -> None:
        """Take note of when the job began to run, and of how long it ran before it was put back into the queue."""
        if found.waits and self.began:
            self.began, self.ran = 0.0, self.ran + time.time() - self.began
        elif not (found.waits or found.end or self.began):
            self.began = time.time()

    def _record(self, ended: bool = False) -> None:
        about = {"id": self.job.id, "cluster": self.cluster.name, "state": self.job.state, "waits": self.job.waits}
        about |= {"text": self.job.text, "began": self.began, "ran": self.ran, "ended": ended}
        about |= {"silent_since": self.silent_since, "problem": self.problem}
        if about != read(self.folder):
            with contextlib.suppress(OSError):  # a full disk: tried again at the next poll
                replace_text(self.folder / JOB, json.dumps(about))

    def _end(self) -> int:
        job, request = self.job, stop_request(self.folder)
        left = self.cluster.wait_for_processes()
        self._record(ended=True)
        cause, is_done = job.cause, job.end == DONE
        if not job.end and is_fresh(self.folder, RESULT, self._start_state()):
            is_done = True  # the cluster has forgotten a job that completed the run
        elif not job.end:
            cause = f"{self.cluster.name} no longer knows the job {job.id}, so how it ended is not known."
        if job.end == STOPPED and (request is None or is_interruption(request, self.cluster.interruption)):
            replace_text(self.folder / STOP, f"save\n{cause}\n")
        for line in filter(None, (left, cause)):
            print(line if job.end == STOPPED else f"{SAYS}{line}", flush=True)
        return 0 if is_done or job.end == STOPPED else 1

    def _start_state(self) -> dict[str, Any]:
        return start_state(json_values.read_object(self.folder / STATE), lock_file.read(self.folder))


def _sentence(error: Exception) -> str:
    return f"{str(error).rstrip('.')}."


def follow(cluster: Cluster, arguments: Sequence[str]) -> int:
    """Follow the job of the run in the current folder; the exit status of the launcher."""
    try:
        return Follower(Path(), cluster).follow(arguments)
    except (ClusterError, OSError) as error:
        print(f"{SAYS}{_sentence(error)}", flush=True)
        return 1
