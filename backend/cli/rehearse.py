"""The command rehearse: two steps of a spec with everything that a run does, as a table of its phases."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from backend.cli.commands import print_json, print_warnings, read_spec, refuse, target_machine, wait_for_preflight
from backend.machine import probe
from backend.runs.rehearsals import Rehearsal
from backend.runs.throughput import duration
from backend.tasks.rehearsal import rehearse

POLL_SECONDS = 0.25
WIDTH = 46
OUTCOMES = {"done": 0, "stopped": 3}


def start(arguments: argparse.Namespace) -> int:
    """Rehearse a spec and wait for the end; Ctrl-C stops the rehearsal."""
    report, rehearsal = wait_for_preflight(read_spec(arguments), target_machine(arguments)), None
    if report.can_run:
        print_warnings(report)
        report, rehearsal = rehearse(Path(arguments.runs), report, Path.cwd(), probe(Path.cwd()))
    if rehearsal is None:
        return refuse(report, arguments.json)
    status = _follow(rehearsal, quiet=arguments.json)
    if arguments.json:
        print_json(status)
    else:
        _print_end(status)
    return OUTCOMES.get(status["state"], 1)


def _follow(rehearsal: Rehearsal, quiet: bool) -> dict[str, Any]:
    """Print each phase as it ends, until all have; returns the final status."""
    printed, stopping, waiting = 0, False, ""
    while True:
        try:
            status = rehearsal.status()
            for phase in () if quiet else status["phases"][printed:]:
                print(_row(phase["label"], phase["seconds"], phase["peak_bytes"]), flush=True)
            printed = len(status["phases"])
            if status["state"] != "running":
                return status
            if status["text"].startswith("Waiting in the queue") and status["text"] != waiting:
                waiting = status["text"]
                print(waiting, file=sys.stderr, flush=True)
            time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            if stopping:
                raise
            stopping = True
            rehearsal.stop()


def _print_end(status: dict[str, Any]) -> None:
    estimated, peak = status["estimated_bytes"], status["peak_bytes"]
    memory = f" Peak memory of a rank: {_gib(peak)}" if peak else ""
    memory += f", estimated {_gib(estimated)}." if peak and estimated else "." if peak else ""
    for note in status["notes"]:
        print(note)
    took = duration(status["seconds"])
    if status["state"] == "done":
        print(f"The rehearsal passed in {took}.{memory}")
    elif status["failure"]:
        failure = status["failure"]
        print(f"The rehearsal failed after {took} in the phase: {failure['phase']}.{memory}")
        print(" ".join(filter(None, (failure["sentence"], failure["help"]))))
        if failure["traceback"]:
            print(f"\n{failure['traceback']}")
    else:
        print(f"The rehearsal was {status['state']} after {took}.")


def _row(name: str, seconds: float, peak: int) -> str:
    return f"{name:{WIDTH}}  {seconds:7.1f} s  {_gib(peak):>10}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
