"""Slurm: submit, find and cancel jobs.

All followers of a user share the output of one squeue call, since each call costs the cluster's controller time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from backend.paths import cache_folder
from backend.runs import JOB_SCRIPT, files
from backend.runs.follower import DONE, FAILED, POLL_SECONDS, STOPPED, Cluster, ClusterError, Job, follow

COMMAND_SECONDS = 30  # Slurm's commands retry for 10 to 20 seconds if the controller does not respond
SUBMIT_SECONDS = 180  # longer, since a job whose id did not arrive would continue without its run
SNAPSHOT = "squeue.json"  # in the cache folder: the last output of squeue
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED", "STOPPED")
# State of a job that has ended -> how its run ends, and the cause.
ENDED: Mapping[str, tuple[str, str]] = {
    "COMPLETED": (DONE, ""),
    "FAILED": (FAILED, ""),
    "CANCELLED": (STOPPED, "The Slurm job was canceled."),
    "TIMEOUT": (STOPPED, "The time limit of the Slurm job ended it."),
    "PREEMPTED": (STOPPED, "Another Slurm job preempted this one."),
    "DEADLINE": (STOPPED, "The Slurm job reached its deadline."),
    "NODE_FAIL": (FAILED, "A node of the Slurm job failed."),
    "BOOT_FAIL": (FAILED, "A node of the Slurm job did not boot."),
    "OUT_OF_MEMORY": (FAILED, "The Slurm job exceeded the memory that it requested."),
    "REVOKED": (STOPPED, "The Slurm job was revoked."),
}
# What the scripts of a job write into the stop file (backend/launch/clusters/slurm.py).
INTERRUPTED = "Slurm interrupted the job."
# Why a job waits, in plain words (squeue(1), JOB REASON CODES). A key also covers the reasons that begin with it.
REASONS: Mapping[str, str] = {
    "None": "",  # the controller has not considered it yet
    "Resources": "Waiting for free nodes.",
    "Priority": "Jobs with a higher priority are ahead.",
    "BeginTime": "The earliest start time of the job has not been reached; after a requeue, it is a little later.",
    "DependencyNeverSatisfied": "The job waits for another job that did not end as required; it will never start.",
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
    "PartitionNodeLimit": "The job requests more nodes than the partition allows, or some of its nodes are down.",
    "PartitionTimeLimit": "The job requests more time than the partition allows; it will never start.",
    "PartitionConfig": "The job requests more than the partition has; it will never start.",
    "BadConstraints": "No node satisfies what the job requests; it will never start.",
    "ReservationDeleted": "The reservation of the job was deleted; it will never start.",
    "ReservationInvalid": "The reservation of the job is invalid; it will never start.",
    "Reservation": "Waiting for a reservation.",
    "Licenses": "Waiting for a license.",
    "InvalidAccount": "The account is invalid; the job will never start.",
    "InvalidQOS": "The QOS is invalid; the job will never start.",
    "QOSNotAllowed": "The account or the partition does not allow the QOS of the job; it will never start.",
    "QOSMin": "The job requests less than its QOS requires; it will never start.",
    "QOS": "A limit of the QOS is reached.",
    "Assoc": "A limit of your account is reached.",
    "MaxJob": "A limit of your account is reached.",
    "Cleaning": "The nodes of the last attempt are being cleaned up.",
    "Prolog": "The nodes are being prepared.",
}
# sbatch reads options from variables too, and prefers them to those in the script (sbatch(1), INPUT ENVIRONMENT
# VARIABLES). The script relies on its own values of the first ones. Where it has an option, long or short, its value
# counts; otherwise that of the variable does, such as an account for all jobs of a user.
NEVER_INHERITED = {
    "ARRAY_INX", "CLUSTERS", "CPUS_PER_GPU", "ERROR", "EXPORT", "GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET",
    "GPUS_PER_TASK", "GRES", "NO_REQUEUE", "OPEN_MODE", "OUTPUT", "REQUEUE", "SIGNAL", "WAIT",
}  # fmt: skip
# What users set for their own look at the queue. With SQUEUE_PARTITION, a job in another partition would seem to be
# gone, and with SCANCEL_INTERACTIVE, scancel would ask a question (ENVIRONMENT VARIABLES in their manual pages).
OF_OUTPUT = ("SQUEUE_", "SINFO_", "SCANCEL_", "SLURM_TIME_FORMAT")
MEMORY = ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU")  # of which one may be set
# Option -> its variables, where the name does not say them.
VARIABLES: Mapping[str, tuple[str, ...]] = {
    "A": ("ACCOUNT",), "C": ("CONSTRAINT",), "J": ("JOB_NAME",), "p": ("PARTITION",), "q": ("QOS",),
    "time": ("TIMELIMIT",), "t": ("TIMELIMIT",), "mem": MEMORY, "mem-per-cpu": MEMORY, "mem-per-gpu": MEMORY,
}  # fmt: skip


def sbatch(*arguments: str, script: str, seconds: float = COMMAND_SECONDS, text: str = "") -> str:
    """The output of sbatch for the job `script`, whose options the environment does not replace. Raises
    ClusterError."""
    lines = " ".join(re.findall(r"^#SBATCH( .*)", script, re.MULTILINE))  # a line may have several options
    options = {long or short for long, short in re.findall(r" (?:--([\w-]+)|-(\w))", lines)}
    own = (VARIABLES.get(name, (name.upper().replace("-", "_"),)) for name in options)
    dropped = NEVER_INHERITED.union(*own)
    return call("sbatch", *arguments, seconds=seconds, text=text, dropped={f"SBATCH_{each}" for each in dropped})


def call(*command: str, seconds: float = COMMAND_SECONDS, text: str = "", dropped: Collection[str] = ()) -> str:
    """The output of one of Slurm's commands, with `text` as its input. It does not get the variables `dropped`, nor
    those that filter or format its output, or make it ask. Raises ClusterError with its message."""
    env = {name: value for name, value in os.environ.items() if name not in dropped and not name.startswith(OF_OUTPUT)}
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=seconds, check=False, errors="replace",
            env=env,
        )  # fmt: skip
    except FileNotFoundError:
        raise ClusterError(f"The command {command[0]} is not installed on this machine.") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"Slurm did not respond to {command[0]} within {seconds:g} seconds.") from None
    except OSError as error:
        raise ClusterError(f"The command {command[0]} cannot be started: {error.strerror}.") from None
    if done.returncode:
        said = " ".join(line.partition("error: ")[2] or line for line in done.stderr.strip().splitlines())
        raise ClusterError(f"{command[0]}: {said[:400] or f'exit status {done.returncode}'}")
    return done.stdout


def jobs(max_age: float = POLL_SECONDS) -> dict[str, Job]:
    """All jobs of this user that Slurm knows, by id. A list that is less than `max_age` seconds old is reused. Raises
    ClusterError."""
    place = cache_folder(os.environ) / SNAPSHOT
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(files.open_regular(place, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):  # of another version, or damaged
            known = json.loads(file.read() or "{}")
            if 0 <= time.time() - known.get("time", 0) < max_age:
                return {job["id"]: Job(**job) for job in known["jobs"]}
        found = parse(call("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r|%S"))
        file.truncate(0)
        json.dump({"time": time.time(), "jobs": [asdict(job) for job in found.values()]}, file)
    return found


def parse(output: str) -> dict[str, Job]:
    """The jobs in the output of squeue. Each task of an array is a job."""
    rows = (line.strip().split("|") for line in output.splitlines())
    return {row[0]: _job(row[0], row[1].rstrip("+*"), row[2], row[3]) for row in rows if len(row) == 4}


def _job(job: str, state: str, reason: str, start: str) -> Job:
    """`start`: when it is expected to start, or was started, in local time as 2026-11-24T10:30:00; '' or N/A."""
    end, cause = ENDED.get(state, ("", ""))
    waits = state in WAITING
    return Job(job, state, waits, _why(reason, start) if waits else "", end, cause)


def _why(reason: str, start: str) -> str:
    """Why a job waits, as sentences."""
    reason = reason.strip("()") or "None"
    known = next((text for key, text in REASONS.items() if reason.startswith(key)), None)
    expected = f" Slurm expects to start it at {start.replace('T', ' ')}." if start[:1].isdigit() else ""
    return f"{f'Slurm says: {reason}.' if known is None else known}{expected}".strip()


class Slurm(Cluster):
    """The cluster that Slurm's commands on this machine reach."""

    name = "Slurm"
    interruption = INTERRUPTED

    def submit(self, arguments: Sequence[str]) -> str:
        """Submit the batch script of the run."""
        script = files.read_text(Path(JOB_SCRIPT))
        printed = sbatch("--parsable", JOB_SCRIPT, *arguments, script=script, seconds=SUBMIT_SECONDS)
        return printed.strip().splitlines()[-1].partition(";")[0]  # "ID;CLUSTER" with several clusters

    def find(self, job: str, max_age: float) -> Job | None:
        """A job of this user."""
        return jobs(max_age).get(job)

    def cancel(self, job: str) -> None:
        """Cancel a job with scancel."""
        try:
            call("scancel", job)
        except ClusterError as error:
            if "Invalid job id" not in str(error):
                raise

    def end(self, job: str) -> None:
        """Cancel a job and wait until it has ended. A machine without Slurm's commands, which may have access to the
        run's folder, cannot do that."""
        if shutil.which("scancel"):
            super().end(job)


if __name__ == "__main__":
    sys.exit(follow(Slurm(), sys.argv[2:]))
