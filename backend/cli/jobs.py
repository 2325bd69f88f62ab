"""Waiting for a job of a run, such as a merge, in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from backend.cli.commands import print_json
from backend.cli.runs import OUTCOMES
from backend.cli.status_line import StatusLine
from backend.runs.folder import ALIVE, Run

POLL_SECONDS = 0.25


def follow(job: Run, is_enough: Callable[[], object] = lambda: False) -> None:
    """Show on stderr what the job does until it has ended, or until `is_enough`: a terminal gets one line that is
    rewritten, anything else gets a new line for each activity. Ctrl-C stops the job."""
    shown = ""
    with StatusLine() as line:
        while True:
            try:
                if job.state not in (*ALIVE, "new") or is_enough():
                    return
                text = job.progress().get("text", "") or job.summary()["sentence"]
                title = text.partition(":")[0].partition(" (")[0]  # a number that changes follows
                if sys.stderr.isatty():
                    line.show(text.rstrip("."))
                elif title != shown:
                    print(text, file=sys.stderr, flush=True)
                shown = title
                time.sleep(POLL_SECONDS)
            except KeyboardInterrupt:
                if job.state == "stopping":
                    raise
                job.stop(save=False)


def report(job: Run, shown: dict[str, Any], as_json: bool, print_result: Callable[[], None]) -> int:
    """Print the result of a job that has ended, or `shown` (of `jobs.as_json`), and return its exit code. stderr says
    why a job has no result."""
    if as_json:
        print_json({**shown, "folder": str(job.path)})
    elif shown["state"] == "done":
        print_result()
    if shown["state"] != "done":
        failure = shown["failure"]
        print(f"{failure['sentence']} {failure['help']}".strip() if failure else shown["sentence"], file=sys.stderr)
    return OUTCOMES.get(shown["state"], 1)
