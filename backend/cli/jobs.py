"""Waiting for a job of a run, such as a merge, in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from backend.cli.commands import print_json
from backend.cli.runs import OUTCOMES
from backend.cli.status_line import StatusLine
from backend.models import trained
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


def model_step(run: Run, step: int | None) -> int | None:
    """The step of --step; without one, None for the final model or, if the run has none, the step of its newest
    checkpoint that can be loaded, which stderr names."""
    models = trained.models(run) if step is None else []
    if not models or models[0].step is None:
        return step
    say_newest(run, models[0].step)
    return models[0].step


def say_newest(run: Run, step: int | None) -> None:
    """Say on stderr that this checkpoint is used in place of the final model."""
    print(f"{run.id} has no final model. Using its newest checkpoint, of step {step} (--step).", file=sys.stderr)


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
