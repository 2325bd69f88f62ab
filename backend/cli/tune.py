"""The command tune: which settings of a spec are fastest on this machine, as a table."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from backend.cli import table
from backend.cli.commands import print_json, print_warnings, read_spec, refuse, set_arguments, wait_for_preflight
from backend.cli.status_line import StatusLine
from backend.config import RunSpec
from backend.machine import probe
from backend.rules import Fix
from backend.runs.throughput import duration
from backend.tasks.tuning.tuning import Tuning, earlier, tune

POLL_SECONDS = 0.25
OUTCOMES = {"done": 0, "stopped": 3}
STATES = {
    "base": "", "faster": "faster, kept", "same": "within the spread", "slower": "slower", "refused": "refused",
    "failed": "failed", "skipped": "not tried", "stopped": "not measured", "repeated": "",
}  # fmt: skip
HEAD = ("SETTINGS", "TOKENS/S", "SPREAD", "STEP", "MEMORY", "WHOLE RUN", "RESULT")


def start(arguments: argparse.Namespace) -> int:
    """Measure the settings of a spec and wait for the end, or print the earlier result; Ctrl-C stops measuring."""
    here, root = probe(Path.cwd()), Path(arguments.runs)
    spec = read_spec(arguments)
    report = wait_for_preflight(spec, here)
    if not report.can_run:
        return refuse(report, arguments.json)
    print_warnings(report)
    found = None if arguments.again else earlier(root, report, arguments.allow_changes, arguments.minutes)
    if found is None:
        trial, found = tune(root, report, Path.cwd(), here, arguments.minutes, arguments.allow_changes)
        if found is None:
            return refuse(trial, arguments.json)
        status = _follow(found)
    elif found.status()["state"] == "running":
        limit = f"{found.status()['minutes']:g}"
        print(f"These settings are being measured already, with a time limit of {limit} minutes.", file=sys.stderr)
        status = _follow(found)
    else:
        status = found.status()
        when = datetime.fromtimestamp(status["created"]).strftime("%Y-%m-%d %H:%M")
        print(f"Measured on {when} with the same settings. To measure again, add --again.", file=sys.stderr)
    if arguments.json:
        print_json(status)
    else:
        print("\n".join(_lines(status, spec)))
    return OUTCOMES.get(status["state"], 1)


def _follow(tuning: Tuning) -> dict[str, Any]:
    """Show on stderr what is measured, until the end; returns the final status."""
    shown, stopping = "", False
    with StatusLine() as line:
        while True:
            try:
                status = tuning.status()
                if status["state"] != "running":
                    return status
                text = status["text"] or _progress(status)
                if sys.stderr.isatty():
                    line.show(f"{text}, {duration(status['left'])} left" if status["left"] else text)
                elif text != shown:
                    print(text, file=sys.stderr, flush=True)
                shown = text
                time.sleep(POLL_SECONDS)
            except KeyboardInterrupt:
                if stopping:
                    raise
                stopping = True
                tuning.stop()


def _progress(status: Mapping[str, Any]) -> str:
    where = f"Trial {status['trial']} of about {status['planned']}"
    return f"{where}: {status['now']}" if status["now"] else "Checking the settings"


def _lines(status: Mapping[str, Any], spec: RunSpec) -> Iterator[str]:
    rows = status["rows"]
    if rows:
        yield from table.lines([HEAD, *map(_cells, rows)])
        yield ""
    for row in rows:
        if row["reason"]:
            yield f"{row['label']}: {row['reason']}"
    yield from status["notes"]
    took = duration(status["seconds"])
    if status["state"] == "failed":
        yield f"The measurement failed after {took}. {status['failure'] or ''}".rstrip()
    elif status["state"] != "done":
        yield f"The measurement was {status['state']} after {took}."
    if status["fastest"] is not None:
        best = rows[status["fastest"]]
        effect = "" if best["safe"] else " The fastest settings change the training result slightly."
        yield f"Fastest after {took}: {best['label']}, {best['gain']:.2f}x as fast as the current settings.{effect}"
        yield set_arguments(Fix(best["label"], best["patch"]).for_spec(spec))
    elif not any(row["state"] in ("faster", "same", "slower") for row in rows):
        yield "No other settings were measured."
    elif status["state"] == "done":
        yield f"No other settings were faster than the current ones by more than the spread of the step times ({took})."


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["step_seconds"] is None:
        return row["label"], "-", "-", "-", "-", "-", STATES[row["state"]]
    speed, peak, gain = row["tokens_per_second"], row["peak_bytes"], row["gain"]
    return (
        row["label"], f"{speed:,.0f}" if speed else "-", f"{100 * row['spread']:.0f}%", f"{row['step_seconds']:.3g} s",
        f"{peak / 2**30:.2f} GiB" if peak else "-", f"{gain:.2f}x", STATES[row["state"]],
    )  # fmt: skip
