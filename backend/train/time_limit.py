"""The time limit of a run (train.max_hours): once it is over, rank 0 requests a stop with a checkpoint.

It is the same request as a user's, so that all ranks end at the same step, and the supervisor ends what does not react.
What counts is the time in which processes of this start ran: also that before a restart by torchrun or by a cluster,
but not the wait in a queue.
"""

from __future__ import annotations

import contextlib
import threading
import time

import psutil

from backend.runs import STOP, request_stop
from backend.runs.folder import Run
from backend.runs.throughput import duration
from backend.train.run_log import RunLog

POLL_SECONDS = 1.0
# Phases that are completed first: after an evaluation or a save the next step can end with a checkpoint at once, and
# after the last step nothing is left to train.
COMPLETED = ("evaluating", "generating during", "checkpoint", "saving", "generating after", "done")


def reason(hours: float, resumes: bool) -> str:
    """Why the run stopped, and what Resume does if the run can resume, for the list of runs and the page of the run."""
    allowed = duration(3600 * hours)
    more = f" Resume continues the run for up to {allowed} more." if resumes else ""
    return f"The run reached its max run time of {allowed} (train.max_hours).{more}"


def watch(hours: float, resumes: bool, run_log: RunLog) -> threading.Thread | None:
    """Request a stop, in a thread of rank 0, once the run has taken that many hours; 0 is no limit. Call it before the
    first progress of this process is written: that of an earlier process of this start says how long that one ran.
    `resumes`: whether the run can resume from its checkpoint."""
    if not hours or run_log.rank:
        return None
    imports = time.time() - psutil.Process().create_time()
    run_log.earlier_seconds = imports + float(Run(run_log.folder).progress().get("elapsed", 0.0))
    thread = threading.Thread(target=_wait, args=(hours, reason(hours, resumes), run_log), daemon=True)
    thread.start()
    return thread


def _wait(hours: float, why: str, run_log: RunLog) -> None:
    stop = run_log.folder / STOP
    while not stop.exists():
        left = 3600 * hours - run_log.elapsed
        if left <= 0 and run_log.phase not in COMPLETED:
            with contextlib.suppress(OSError):  # a full disk: try again
                request_stop(run_log.folder, f"save\n{why}\n")
                run_log.info(f"Stopping. {why}")
                return
        time.sleep(min(POLL_SECONDS, max(left, POLL_SECONDS / 10)))
