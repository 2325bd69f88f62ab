"""Slurm: submit the job of a run and wait for its end. The launcher process of a run with launch.place slurm.

Imports backend.runs, backend.paths. It writes job.json, from which the page knows what the job waits for. If this
process is killed, the job continues; the next start of the run finds it in job.json and waits for it instead of
submitting another one. All followers of a user share the output of one squeue call, since each call costs the cluster's
controller time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.paths import cache_folder
from backend.runs import JOB, STOP, replace_text

POLL = "FOOTPLATE_SLURM_SECONDS"  # environment variable: between two calls of squeue
POLL_SECONDS = float(os.environ.get(POLL, "5"))
COMMAND_SECONDS = 30  # Slurm's commands retry for 10 to 20 seconds if the controller does not respond
SUBMIT_SECONDS = 180  # longer: a job whose id did not arrive would go on without its run
SAYS = "backend.runs.slurm: "  # begins the line that says why a job failed (failure.py)
SNAPSHOT = "squeue.json"  # in the cache folder: the last output of squeue
FORGOTTEN = 3  # polls in which Slurm no longer knows the job
CANCEL_SECONDS = 120.0  # KillWait, GraceTime and the epilog
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED", "STOPPED")
ENDED = {
    "COMPLETED": "",
    "FAILED": "",
    "CANCELLED": "The Slurm job was canceled.",
    "TIMEOUT": "The time limit of the Slurm job ended it.",
    "PREEMPTED": "Another Slurm job preempted this one.",
    "DEADLINE": "The Slurm job reached its deadline.",
    "NODE_FAIL": "A node of the Slurm job failed.",
    "BOOT_FAIL": "A node of the Slurm job did not boot.",
    "OUT_OF_MEMORY": "The Slurm job exceeded the memory that it requested.",
    "REVOKED": "The Slurm job was revoked.",
}
INTERRUPTED = "Slurm interrupted the job."  # what the job's scripts write into the stop file (backend/launch/slurm.py)
BY_SOMEONE = ("CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE", "REVOKED")  # the run was stopped; it did not fail
# Why a job waits, in plain words (squeue(1), JOB REASON CODES). A key also covers the reasons that begin with it.
REASONS: Mapping[str, str] = {
    "None": "",  # the controller has not looked at it yet
    "Resources": "Waiting for free nodes.",
    "Priority": "Jobs with a higher priority are ahead.",
    "BeginTime": "Slurm waits a little before it starts the job again.",
    "Dependency": "Waiting for another job.",
    "JobHeldUser": "The job is on hold; release it with scontrol release.",
    "JobHeldAdmin": "An administrator has put the job on hold.",
    "JobHoldMaxRequeue": "The job is on hold, because it was started again too often.",
    "launch failed requeued held": "The job is on hold, because it could not be started on a node.",
    "ReqNodeNotAvail": "A node that the job needs is not available.",
    "Nodes required for job are DOWN": "Nodes that the job needs are down, drained or reserved.",
    "NodeDown": "A node that the job needs is down.",
    "PartitionDown": "The partition is down.",
    "PartitionInactive": "The partition accepts jobs but does not start any now.",
    "PartitionNodeLimit": "The job requests more nodes than the partition allows; it will never start.",
    "PartitionTimeLimit": "The job requests more time than the partition allows; it will never start.",
    "PartitionConfig": "The job requests more than the partition has; it will never start.",
    "BadConstraints": "No node satisfies what the job requests; it will never start.",
    "Reservation": "Waiting for a reservation.",
    "Licenses": "Waiting for a license.",
    "InvalidAccount": "The account is invalid; the job will never start.",
    "InvalidQOS": "The QOS is invalid; the job will never start.",
    "QOS": "A limit of the QOS is reached.",
    "Assoc": "A limit of your account is reached.",
    "MaxJob": "A limit of your account is reached.",
    "Cleaning": "The nodes of the last attempt are being cleaned up.",
    "Prolog": "The nodes are being prepared.",
}


class SlurmError(Exception):
    """A command of Slurm failed; the message is a sentence."""


@dataclass(frozen=True)
class Job:
    """A job as squeue shows it: state, such as PENDING, the reason to wait, and when it starts or was started (local
    time as 2026-11-24T10:30:00, or '')."""

    id: str
    state: str
    reason: str = ""
    start: str = ""

    @property
    def waits(self) -> bool:
        """Whether it is in Slurm's queue, for the first time or again."""
        return self.state in WAITING

    @property
    def text(self) -> str:
        """Why it waits, as sentences; '' if it does not."""
        if not self.waits:
            return ""
        reason = self.reason.strip("()") or "None"
        known = next((text for key, text in REASONS.items() if reason.startswith(key)), None)
        expected = f" Slurm expects to start it at {self.start.replace('T', ' ')}." if self.start[:1].isdigit() else ""
        return f"{f'Slurm says: {reason}.' if known is None else known}{expected}".strip()


def call(*command: str, seconds: float = COMMAND_SECONDS) -> str:
    """The output of one of Slurm's commands. Raises SlurmError with its message."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False,
            errors="replace",
        )  # fmt: skip
    except FileNotFoundError:
        raise SlurmError(f"The command {command[0]} is not installed on this machine.") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"Slurm did not respond to {command[0]} within {seconds:g} seconds.") from None
    except OSError as error:
        raise SlurmError(f"The command {command[0]} cannot be started: {error.strerror}.") from None
    if done.returncode:
        said = " ".join(line.partition("error: ")[2] or line for line in done.stderr.strip().splitlines())
        raise SlurmError(f"{command[0]}: {said[:400] or f'exit status {done.returncode}'}")
    return done.stdout


def jobs(max_age: float = POLL_SECONDS) -> dict[str, Job]:
    """All jobs of this user that Slurm knows, by id; at most `max_age` seconds old. Raises SlurmError."""
    place = cache_folder(os.environ) / SNAPSHOT
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        with contextlib.suppress(ValueError, TypeError):
            known = json.loads(file.read() or "{}")
            if 0 <= time.time() - known.get("time", 0) < max_age:
                return {job["id"]: Job(**job) for job in known["jobs"]}
        found = parse(call("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r|%S"))
        file.truncate(0)
        json.dump({"time": time.time(), "jobs": [asdict(job) for job in found.values()]}, file)
    return found


def parse(output: str) -> dict[str, Job]:
    """The jobs in the output of squeue. Of an array, each task is a job."""
    rows = (line.strip().split("|") for line in output.splitlines())
    return {row[0]: Job(row[0], row[1].rstrip("+*"), row[2], row[3]) for row in rows if len(row) == 4}


def submit(script: str, arguments: Sequence[str]) -> str:
    """Submit the script in the current folder and return the job's id. Raises SlurmError."""
    printed = call("sbatch", "--parsable", script, *arguments, seconds=SUBMIT_SECONDS)
    return printed.strip().splitlines()[-1].partition(";")[0]  # "ID;CLUSTER" with several clusters


def cancel(job: str) -> None:
    """Cancel a job. Raises SlurmError if Slurm does not respond; a job that has ended is no error."""
    try:
        call("scancel", job)
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise


def read(folder: Path) -> dict[str, Any]:
    """What the follower has written about the run's job; empty for a run without one."""
    try:
        found = json.loads((folder / JOB).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def unended(folder: Path) -> str:
    """The id of a run's job whose end no follower has seen; '' if there is none."""
    job = read(folder)
    return "" if job.get("ended") else str(job.get("id", ""))


def end(folder: Path) -> None:
    """Cancel the job of a run whose follower was killed, and wait until it is gone. Raises SlurmError."""
    job = unended(folder)
    if not job or not shutil.which("scancel"):
        return
    cancel(job)
    until = time.monotonic() + CANCEL_SECONDS
    while (found := jobs(max_age=1.0).get(job)) and found.state not in ENDED:
        if time.monotonic() > until:
            raise SlurmError(f"The Slurm job {job} was canceled, but has not ended yet.")
        time.sleep(1)


class Follower:
    """The job of the run in the current folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = Job("", "PENDING")
        self.canceled = False
        self.silent_since = 0.0
        self.began = 0.0

    def follow(self, script: str, arguments: Sequence[str]) -> int:
        """Find or submit the job, wait for its end, and return an exit status. Raises SlurmError."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "canceled", True))
        earlier = unended(self.folder)
        job = jobs(max_age=0).get(earlier) if earlier else None
        if job is None or job.state in ENDED:
            job = Job(submit(script, arguments), "PENDING")
            print(f"Slurm job {job.id}", flush=True)
        self.job = job
        unknown, asked = 0, False
        while unknown < FORGOTTEN and self.job.state not in ENDED:
            self._record()
            request = self._stop_request()
            if self.job.waits and INTERRUPTED in (request or ""):  # left from a failed node: the job has come back
                (self.folder / STOP).unlink(missing_ok=True)
                request = None
            if (self.canceled or (self.job.waits and request is not None)) and not asked:
                asked = self._cancel()
            time.sleep(min(1.0, POLL_SECONDS) if asked else POLL_SECONDS)
            if (found := self._look()) is not None:
                unknown = 0 if found else unknown + 1
        return self._end()

    def _cancel(self) -> bool:
        """Whether Slurm has accepted that the job is canceled. If not, it is requested again at the next poll."""
        with contextlib.suppress(SlurmError):
            cancel(self.job.id)
            return True
        return False

    def _look(self) -> bool | None:
        """Whether Slurm knows the job; None if it did not respond."""
        try:
            found = jobs(1.0 if self.canceled else POLL_SECONDS).get(self.job.id)
        except (SlurmError, OSError):
            self.silent_since = self.silent_since or time.time()
            return None
        self.silent_since = 0.0
        if found:
            if not found.waits and self.job.waits:
                self.began = time.time()
            self.job = found
        return bool(found)

    def _record(self, ended: bool = False) -> None:
        about = {"id": self.job.id, "state": self.job.state, "waits": self.job.waits, "text": self.job.text}
        about |= {"silent_since": self.silent_since, "began": self.began, "ended": ended}
        if about != read(self.folder):
            with contextlib.suppress(OSError):  # a full disk: tried again at the next poll
                replace_text(self.folder / JOB, json.dumps(about))

    def _stop_request(self) -> str | None:
        """The text of the stop file; None without one."""
        try:
            return (self.folder / STOP).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def _end(self) -> int:
        state, request = self.job.state, self._stop_request()
        self._record(ended=True)
        if what := ENDED.get(state, f"Slurm no longer knows the job {self.job.id}, so its end is not known."):
            print(what if state in BY_SOMEONE else f"{SAYS}{what}", flush=True)
        if state in BY_SOMEONE and (request is None or INTERRUPTED in request):
            replace_text(self.folder / STOP, f"save\n{what}\n")
        return 0 if state in (*BY_SOMEONE, "COMPLETED") else 1


def main(arguments: Sequence[str]) -> int:
    """Follow the job of the script named first; further arguments are passed to it."""
    try:
        return Follower(Path.cwd()).follow(arguments[0], arguments[1:])
    except (SlurmError, OSError) as error:
        print(f"{SAYS}{str(error).rstrip('.')}.", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
