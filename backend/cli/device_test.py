"""The command test-devices: what each device and link of a spec reaches, as a table, and which of them is slow."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from backend.cli.commands import print_json, read_spec, refuse, wait_for_preflight
from backend.machine import probe
from backend.runs.folder import ALIVE, Run, RunError
from backend.runs.scratch import TIMEOUTS
from backend.tasks import device_test

POLL_SECONDS = 0.2


def start(arguments: argparse.Namespace) -> int:
    """Test the devices that a spec would use; exit code 1 if one is slow. Ctrl-C stops the test."""
    report = wait_for_preflight(read_spec(arguments), probe(Path.cwd()))
    if not report.can_run:
        return refuse(report, arguments.json)
    run = device_test.create(Path(arguments.runs), report)
    try:
        run.start(timeouts=TIMEOUTS)
        for node, command in run.node_commands().items():
            print(f"Run this on {node}: {command}", file=sys.stderr, flush=True)
        _wait(run)
        found = device_test.result(run)
    finally:
        _discard(run)
    if arguments.json:
        print_json(found)
    else:
        _print(found)
    return 1 if found["problems"] else 0


def _wait(run: Run) -> None:
    shown = ""
    while run.state in ALIVE:
        text = run.waits_for()
        if text not in ("", shown):
            print(text, file=sys.stderr, flush=True)
        shown = text
        time.sleep(POLL_SECONDS)


def _discard(run: Run) -> None:
    """Stop the test if it is still running, and delete its folder."""
    with contextlib.suppress(RunError):
        run.stop(save=False)
    while run.state in ALIVE:
        time.sleep(POLL_SECONDS)
    with contextlib.suppress(RunError):
        run.delete()


def _print(found: dict[str, Any]) -> None:
    ranks, several = found["ranks"], len(found["ranks"]) > 1
    width = max(len("Host"), *(len(rank["host"]) for rank in ranks))
    print(f"Rank  {'Host':{width}}  {'Device':8}  {'Matmul':>14}{'  Send to next rank' if several else ''}")
    for number, rank in enumerate(ranks):
        link = f"  {rank['to_next'] / 1e9:12.2f} GB/s" if several else ""
        print(f"{number:4}  {rank['host']:{width}}  {rank['device']:8}  {rank['flops'] / 1e12:6.2f} TFLOP/s{link}")
    if several:
        size = found["message_bytes"] / 2**20
        print(f"All-reduce of {size:.0f} MiB: {found['all_reduce'] / 1e9:.2f} GB/s (bus bandwidth).")
    print(
        "\n".join(found["problems"])
        or ("No rank or link is much slower than the median." if several else "There is no other rank to compare with.")
    )
