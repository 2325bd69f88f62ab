"""footplate estimate: memory, disk and time of a spec, on one machine or on several."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from backend.cli import table
from backend.cli.commands import print_json, read_spec, target_machine, wait_for_preflight
from backend.config.options import Problem, SpecError
from backend.machine import Machine, read
from backend.machine.descriptions import machines
from backend.preflight import Report, estimate_json
from backend.tasks import compare_machines
from backend.tasks.measured import MeasuredPeaks
from backend.tasks.measured_time import MeasuredStarts, MeasuredTimes
from backend.timing import TimeEstimate, texts, time_json

CPU_SECONDS = 60.0  # to wait for the measurement of this CPU: loading the libraries takes most of it


def estimate(arguments: argparse.Namespace) -> int:
    """Print the estimate of memory, disk and time, item by item; with --machines, a line for each machine."""
    if arguments.machines is not None:
        return _compare_machines(arguments)
    runs = Path(arguments.runs)
    report = wait_for_preflight(read_spec(arguments), target_machine(arguments), CPU_SECONDS)
    report = MeasuredStarts(runs).applied(report)
    found = report.estimate
    measured, timed = MeasuredPeaks(runs).latest(report), MeasuredTimes(runs).latest(report)
    if arguments.json:
        time = {**time_json(report.time), "measured": timed.for_next(report) if timed else None}
        peaks = measured.as_json(report) if measured else None
        print_json({**estimate_json(found), "measured": peaks, "time": time, "assumed": report.assumed})
        return 0
    if report.assumed:
        print(report.assumed)
    print("\n".join(_memory_lines(report)))
    if measured:
        scaled = _gib(measured.corrected(report)).strip()
        print(f"{measured.sentence} Scaled by {measured.ratio:.2f}, this run's estimate is {scaled} per device.")
    print()
    print("\n".join(_time_lines(report.time)))
    if timed:
        print(timed.for_next(report)["sentence"])
    return 0


def _memory_lines(report: Report) -> Iterator[str]:
    found = report.estimate
    if found.unknown:
        yield f"{'This is a lower bound' if found.lower_bound else 'Memory use cannot be estimated'}: {found.unknown}"
    totals = (("device", found.device_bytes), ("host", found.host_bytes), ("disk", found.disk_bytes))
    width = max((len(row.name) for row in found.rows), default=0)
    for row in found.rows:
        yield f"{_gib(row.bytes)}  {row.where:6}  {row.name:{width}}  {row.formula}"
    for where, total in totals if found.rows else ():
        yield f"{_gib(total)}  {where:6}  total"
    yield f"{_gib(found.capacity_bytes)}  device  free memory"
    if not found.unknown:
        low, high = _gib(found.low_bytes).strip(), _gib(found.high_bytes).strip()
        yield f"Estimated peak per device: {low} to {high}."


def _time_lines(found: TimeEstimate) -> Iterator[str]:
    """The items of a step and of the run, and the totals in words."""
    if found.unknown:
        yield texts.summary_text(found)
        return
    items = [*found.items, *(found.run.items if found.run else ())]
    width = max(len(item.label) for item in items)
    for item in items:
        where = "step" if item in found.items else "run"
        yield f"{_seconds(item.seconds)}  {where:6}  {item.label:{width}}  {item.formula}"
    yield f"{_seconds(found.step_seconds)}  step    total"
    if found.run:
        yield f"{_seconds(found.run.seconds)}  run     total"
    yield f"Estimated time: {texts.run_text(found)}." if found.run else texts.run_steps_text(found)
    sentences = [texts.step_text(found), texts.tokens_text(found), texts.dominating_text(found)]
    sentences += [texts.padding_text(found), texts.range_text(found), texts.not_included_text(found)]
    price = texts.price_text(found)
    for sentence in filter(None, [*sentences, price[:1].upper() + price[1:]]):
        yield f"{sentence}."
    yield from filter(None, [texts.busy_text(found), found.cpu.note if found.cpu else ""])


def _compare_machines(arguments: argparse.Namespace) -> int:
    """A line for each machine, the shortest time first; those that cannot run the spec come last, with the reason."""
    if arguments.machine:
        raise SpecError([Problem("", "--machine and --machines exclude each other: name one machine, or compare all")])
    spec = read_spec(arguments)
    described = _described(arguments)
    lines = compare_machines.lines(spec, described, lambda variant, name: wait_for_preflight(variant, described[name]))
    if arguments.json:
        print_json(lines)
        return 0
    rows = [("MACHINE", "GPUS", "TIME", "TOKENS/S", "PRICE", "RESULT")]
    figures = ("gpus", "time", "tokens", "price")
    for line in lines:
        result = ". ".join(filter(None, [line["result"].rstrip("."), line["can_run"] and line["change"]]))
        rows.append((line["name"], *(line["texts"][key] for key in figures), result))
    print("\n".join(table.lines(rows)))
    if any(line["tokens_per_second"] and line["seconds"] is None for line in lines):
        print("TIME is -, because the number of steps is not known before the run.")
    return 0


def _described(arguments: argparse.Namespace) -> dict[str, Machine]:
    """The machines of --machines: those of presets/machines, or of the YAML files in a folder."""
    if not arguments.machines:
        return machines()
    paths = sorted(Path(arguments.machines).glob("*.yaml"))
    if not paths:
        raise SpecError(
            [Problem("", f"--machines {arguments.machines}: the folder has no YAML files that describe machines")]
        )
    return {path.stem: read(path) for path in paths}


def _gib(size: int) -> str:
    return f"{size / 2**30:10.2f} GiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:10.3f} s  "
