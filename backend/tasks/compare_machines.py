"""Comparison of machines for one spec: how long the run takes on each and what it costs, or why it cannot run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from backend.machine import Machine, describe
from backend.preflight import Report
from backend.timing import texts


def lines(reports: Iterable[tuple[str, Machine, Report]]) -> list[dict[str, Any]]:
    """A line for each (name, machine, report), the shortest time first, then the highest speed; those that cannot run
    the spec come last. Numbers are None where nothing is predicted; "texts" has them as shown, "-" for None. "result"
    is the verdict, and "unknown" why no time is predicted."""
    found = [_line(name, machine, report) for name, machine, report in reports]
    return sorted(found, key=lambda x: (not x["can_run"], x["seconds"] or float("inf"), -(x["tokens_per_second"] or 0)))


def _line(name: str, machine: Machine, report: Report) -> dict[str, Any]:
    found, on_gpu = report.time, report.run.on_gpu
    known = report.can_run and not found.unknown
    seconds = found.run.seconds if known and found.run else None
    price = found.price[1] if known and found.price else None
    return {
        "name": name,
        "machine": describe(machine) + _used(machine, report),
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


def _used(machine: Machine, report: Report) -> str:
    """How many nodes of a machine the spec uses, or how many machines like it; '' if they are as many as it has."""
    nodes = report.run.nnodes
    if nodes > machine.nodes:
        return f", {nodes} nodes like it"
    return f", {nodes} of {machine.nodes} nodes" if nodes < machine.nodes else ""
