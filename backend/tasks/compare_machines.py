"""Comparison of machines for one spec: how long the run takes on each and what it costs, or why it cannot run.

A machine with fewer devices per node than the spec has processes is compared with as many processes as it has devices,
if the global batch size can stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import describe
from backend.preflight import Report
from backend.timing import texts
from backend.wording import counted

MORE_PROCESSES_THAN_DEVICES = "LCH002"  # the rule whose fix adapts the number of processes


def lines(spec: RunSpec, names: Iterable[str], check: Callable[[RunSpec, str], Report]) -> list[dict[str, Any]]:
    """A line for each machine, the shortest time first, then the highest speed; those that cannot run the spec come
    last. `check` makes the report of a spec on a machine, which it gets by name. Numbers are None where nothing is
    predicted; "texts" has them as shown, "-" for None. "result" is the verdict, "unknown" why no time is predicted, and
    "change" what is different from the spec, '' for nothing."""
    found = [_line(name, *_adapted(spec, name, check)) for name in names]
    return sorted(found, key=lambda x: (not x["can_run"], x["seconds"] or float("inf"), -(x["tokens_per_second"] or 0)))


def _adapted(spec: RunSpec, name: str, check: Callable[[RunSpec, str], Report]) -> tuple[Report, str]:
    """The report on a machine, with fewer processes where it has fewer devices, and the sentence about that."""
    report = check(spec, name)
    errors = [finding for finding in report.findings if finding.level == "error"]
    fixes = [fix for error in errors if error.code == MORE_PROCESSES_THAN_DEVICES for fix in error.fixes[:1]]
    if not fixes or not fixes[0].safe:
        return report, ""
    fewer = check(edit(spec, fixes[0].for_spec(spec).patch), name)
    accumulation = fewer.spec.train.gradient_accumulation_steps
    change = f"With {counted(fewer.run.nproc_per_node, 'process')}{' per node' if fewer.run.nnodes > 1 else ''}"
    if accumulation != spec.train.gradient_accumulation_steps:
        change += f" and {counted(accumulation, 'gradient accumulation step')}, for the same global batch size"
    return fewer, f"{change}."


def _line(name: str, report: Report, change: str) -> dict[str, Any]:
    found, on_gpu = report.time, report.run.on_gpu
    known = report.can_run and not found.unknown
    seconds = found.run.seconds if known and found.run else None
    price = found.price[1] if known and found.price else None
    return {
        "name": name,
        "machine": describe(report.machine) + _used(report),
        "change": change,
        "can_run": report.can_run,
        "gpus": report.run.world_size if on_gpu else None,
        "seconds": seconds,
        "tokens_per_second": found.tokens_per_second if known else None,
        "price": price,
        "result": _result(report),
        "unknown": found.unknown,
        "texts": {
            "gpus": str(report.run.world_size) if on_gpu else "-",
            "time": texts.run_text(found) if seconds is not None else "-",
            "tokens": texts.tokens_text(found).partition(" ")[0] if known else "-",
            "price": f"{price:,.2f}" if price is not None else "-",
        },
    }


def _result(report: Report) -> str:
    """The verdict, with the first error, or why no time is predicted."""
    titles = [finding.title for finding in report.findings if finding.level == "error"]
    if titles:
        return f"{report.verdict}: {titles[0]}"
    return f"{report.verdict}. {texts.summary_text(report.time)}" if report.time.unknown else report.verdict


def _used(report: Report) -> str:
    """How many nodes of a machine the spec uses, or how many machines like it; '' if they are as many as it has."""
    machine, nodes = report.machine, report.run.nnodes
    if nodes > machine.nodes:
        return f", {nodes} nodes like it"
    return f", {nodes} of {machine.nodes} nodes" if nodes < machine.nodes else ""
