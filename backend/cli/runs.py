"""Commands on runs: run, queue, show, stop, resume, logs, metrics, stacks.

A run is a folder: each command reads or writes that folder and ends.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from backend.cli.commands import (  # fmt: skip
    notes,
    print_json,
    print_json_list,
    print_warnings,
    read_spec,
    refuse,
    set_arguments,
    wait_for_preflight,
)
from backend.cli.status_line import StatusLine
from backend.inspect import predecessor
from backend.machine import probe
from backend.runs import (
    LOG,
    METRICS,
    SKIP_CHECKS,
    SPEC,
    events,
    files,
    jobs,
    marks,
    queue,
    schedule,
    stacks,
    validation,
)
from backend.runs.folder import ALIVE, UNREADABLE, Run, RunError, damage, find, has_plan, runs
from backend.runs.metrics import chunks, gaps, since, stream_points
from backend.runs.search import SCORES
from backend.tasks import bundle as debug_bundle
from backend.tasks import measured_time, remedies
from backend.tasks import retry as retries
from backend.tasks.resume import resume as resume_run
from backend.wording import data_size

OUTCOMES = {"done": 0, "stopped": 3}
LABELS = {"train_loss": "mean train loss"}  # of all steps, as the Trainer reports it
NAMED_RUNS = 5  # in the error for an ambiguous prefix
SIMILAR_RUNS = 3  # in the error for an unknown name
SHORT_NAME = 3  # characters; fewer are a part of most names
POLL_SECONDS = 0.25  # between two reads of a log or a state


def run(arguments: argparse.Namespace) -> int:
    """Start a run and print its id; with --follow wait until it ends."""
    report = wait_for_preflight(read_spec(arguments), probe(Path.cwd()))
    report = measured_time.MeasuredStarts(Path(arguments.runs)).applied(report)
    if not report.can_run and not arguments.skip_checks:
        return refuse(report, arguments.json)
    print_warnings(report)
    plan = report.plan
    if not report.can_run:  # the trainer must not refuse what the user has chosen to start
        plan = replace(plan, env={**plan.env, SKIP_CHECKS: "1"})
    after = arguments.after_ok or arguments.after_any
    wanted = find_run(Path(arguments.runs), after) if after else None
    earlier = predecessor(report.spec, Path.cwd(), wanted, not arguments.after_any)
    created = Run.create(Path(arguments.runs), report.title, plan, datetime.now(), report.about, report.expected)
    try:
        created.start(after=earlier, after_ok=not arguments.after_any)
    except RunError as error:  # the same command again would create another run
        again = f"`footplate resume {shlex.quote(str(created.path.absolute()))}` starts this run"
        raise RunError(f"{error} {again}{f' and does not wait for {earlier.id}' if earlier else ''}.") from error
    return _started(created, arguments, 0)


def resume(arguments: argparse.Namespace) -> int:
    """Resume from the last complete checkpoint, or start from scratch."""
    resumed = _find_run(arguments)
    if resumed.state == "done" and resumed.about().get("kind"):  # a restart that fails would delete its model
        raise RunError("This job has finished, so it cannot be restarted. Start a new one.")
    log = resumed.path / LOG
    offset = log.stat().st_size if log.exists() else 0  # --follow prints only the new part of the log
    resume_run(resumed, arguments.from_scratch)
    return _started(resumed, arguments, offset)


def retry(arguments: argparse.Namespace) -> int:
    """Continue a run that diverged or stopped after a spike: from an earlier checkpoint, with half the learning
    rate."""
    failed, machine = _find_run(arguments), probe(Path.cwd())
    if arguments.automatic and not retries.applies(failed):
        return 0
    started = retries.start(failed, lambda spec: wait_for_preflight(spec, machine), arguments.automatic)
    return _started(started, arguments, 0)


def _started(started: Run, arguments: argparse.Namespace, offset: int) -> int:
    """Print the id of a started run; with --follow print its log from byte `offset` on, and its outcome."""
    if not arguments.json:
        print(started.id, flush=True)
    if started.state == "queued":
        print(started.summary()["sentence"], file=sys.stderr, flush=True)
    if not arguments.follow:
        if arguments.json:
            print_json({"id": started.id, "folder": str(started.path)})
        return 0
    for text in follow(started, offset):
        print(text, end="", flush=True, file=sys.stderr if arguments.json else sys.stdout)
    summary = started.summary()
    if arguments.json:
        print_json(_run_json(started))
    else:
        print(summary["sentence"])
    return OUTCOMES.get(summary["state"], 1)


def follow(followed: Run, offset: int) -> Iterator[str]:
    """The log from byte `offset` on, as it grows, until the run has ended and everything was read."""
    while True:
        alive = followed.state in (*ALIVE, "new")
        part = since(followed.path / LOG, offset, ended=not alive)
        offset = part.end
        if part.text:
            yield part.text
        elif not alive:
            return
        else:
            time.sleep(POLL_SECONDS)


def show(arguments: argparse.Namespace) -> int:
    """Print one run: its state, its options and its results; for a job, which has no options, only its state."""
    shown = _find_run(arguments)
    if shown.about().get("kind"):
        job = jobs.as_json(shown)
        print_json(job) if arguments.json else print(f"{job['id']}\n{job['sentence']}")
        return 0
    about = _run_json(shown)
    spec = about.pop("spec")
    if arguments.json:
        print_json(about)
        return 0
    print(f"{shown.id}\n{about['summary']['sentence']}\n\n{spec}")
    if about["warning"]:
        print(about["warning"])
    for alert in about["alerts"]:
        print(f"Alert at step {alert['step']}: {alert['text']}")
    for gap in about["missing_points"]:
        print(f"{METRICS} has no points for steps {gap['after'] + 1:g} to {gap['until']:g}.")
    _print_result(about)
    if failure := about["failure"]:
        sentence = "" if failure["sentence"] in about["summary"]["sentence"] else failure["sentence"]
        # Last is what helps, which a long traceback would hide.
        print("\n".join(filter(None, (failure["traceback"], sentence, failure["help"]))))
    _print_remedies(shown)
    if shown.can()["resume"] and shown.state != "new":
        print(f"\nTo resume it: footplate resume {shlex.quote(str(shown.path))}")
    return 0


def _print_result(about: dict[str, Any]) -> None:
    """Print the scores, the losses and the time of a run."""
    shares = (*(f"{score}_{side}" for score in SCORES for side in ("before", "after")), "eval_reward_accuracy")
    for name in (
        *shares,
        "eval_reward_margin",
        "eval_loss",
        "train_loss",
        "skipped_steps",
        "seconds",
    ):
        if (value := about["result"].get(name)) is not None:
            of_model = f" ({about['validation']})" if name == "eval_loss" else ""
            text = f"{100 * value:.4g}%" if name in shares else f"{value:.4g}"
            print(f"{LABELS.get(name, name.replace('_', ' '))}: {text}{of_model}")
    if timed := about["timed"]:
        for what, predicted, measured in timed["rows"]:
            print(f"{what.lower()}: {measured}, predicted {predicted}")
        print(timed["sentence"])
    if about["router_note"]:
        print(about["router_note"])


def _print_remedies(run: Run) -> None:
    """Print the changes that are suggested for a new run after this one, each with its command."""
    found = remedies.find(run, probe(Path.cwd()), Path.cwd())
    if found.fixes:
        print(f"\nSuggested changes for a new run. {found.note}".rstrip())
    for fix in found.fixes:
        peak = f", {data_size(fix.peak)} {found.where}" if fix.peak else ""
        print(f"  {fix.label}{peak}{notes(fix)}")
        print(f"    footplate run {shlex.quote(str(run.path / SPEC))} {set_arguments(fix)}")


def bundle(arguments: argparse.Namespace) -> int:
    """Write the debug bundle of a run and print its path."""
    found = _find_run(arguments)
    output = Path(arguments.output or f"{found.id}-bundle.zip")
    packed = debug_bundle.build(found, probe(Path.cwd()), datetime.now())
    with open(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(packed)
    if arguments.json:
        print_json({"path": str(output), "bytes": len(packed)})
    else:
        print(f"{output}: review it before you share it; log and traceback may quote training examples.")
    return 0


def _run_json(shown: Run) -> dict[str, Any]:
    """Everything about a run but its log and metrics. Raises RunError for a damaged run."""
    try:
        return {
            "summary": shown.summary(),
            "progress": shown.progress(),
            "result": shown.result(),
            "timed": timed.as_json() if (timed := measured_time.measure_time(shown)) else None,
            "warning": marks.mark(shown).sentence,
            "validation": validation.model(shown.result()),
            "router_note": validation.router_note(shown.result() or shown.progress()),
            "failure": shown.failure(),
            "alerts": events.alerts(shown.path),
            "missing_points": [{"after": low, "until": high} for low, high in gaps(shown.path / METRICS)],
            "checkpoints": shown.checkpoints(),
            "folder": str(shown.path),
            "command": shown.plan().command(),
            "spec": files.read_text(shown.path / SPEC),
        }
    except UNREADABLE as error:
        raise RunError(damage(error)) from error


def stop(arguments: argparse.Namespace) -> int:
    """Request a run to stop, and wait until it has ended."""
    stopped = _find_run(arguments)
    stopped.stop(save=not arguments.no_save)
    with StatusLine() as line:
        while (state := stopped.state) in ALIVE:
            if state == "stopping":
                line.show(stopped.waits_for().rstrip("."))
            time.sleep(POLL_SECONDS)
    if arguments.json:
        print_json(stopped.summary())
    else:
        print(stopped.summary()["sentence"])
    return 0


def logs(arguments: argparse.Namespace) -> int:
    """Print a run's log; with --follow until the run has ended."""
    found = _find_run(arguments)
    if arguments.follow:
        for text in follow(found, 0):
            print(text, end="", flush=True, file=sys.stderr if arguments.json else sys.stdout)
        if arguments.json:
            print_json(found.summary())
        return 0
    parts = chunks(found.path / LOG)
    if arguments.json:
        read = list(parts)
        print_json({"log": "".join(part.text for part in read), "bytes": read[-1].end})
        return 0
    for part in parts:
        print(part.text, end="")
    return 0


def metrics(arguments: argparse.Namespace) -> int:
    """Print a run's logged metrics, one line per logging step; steps repeated by a resumed run appear once."""
    points = stream_points(_find_run(arguments).path / METRICS)
    if arguments.json:
        print_json_list(points)
        return 0
    for point in points:
        print(
            "  ".join(f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in point.items() if k != "time")
        )
    return 0


def explain_stacks(arguments: argparse.Namespace) -> int:
    """Print what each rank of a running run is doing, and its stacks."""
    found = _find_run(arguments)
    if found.state not in ALIVE:
        raise RunError(stacks.ENDED)
    collected, none = stacks.collect(found.path), stacks.why_none(found.path)
    if arguments.json:
        print_json(stacks.as_json(collected, none))
        return 0
    print(stacks.explain(collected, none=none))
    for stack in collected:
        if stack.text:
            print(f"\nRank {stack.rank}, PID {stack.pid} on {stack.host}:\n{stack.text.rstrip()}")
    return 0


def queued(arguments: argparse.Namespace) -> int:
    """Print the waiting runs in order, or change the place of one."""
    wishes = ("hold", "release", "first", "last", "before", "share")
    if bool(arguments.run) != any(getattr(arguments, wish) for wish in wishes):
        raise RunError(f"Name a waiting run and what to do with it: --{', --'.join(wishes)}.")
    if arguments.run:
        place = find_run(Path(arguments.runs), arguments.run).path
        if arguments.hold or arguments.release:
            queue.change(place, held=arguments.hold)
        elif arguments.share:
            queue.change(place, shares=True)
        elif arguments.last:
            queue.move(place)
        elif arguments.before or arguments.first:
            first = next((Path(entry.run) for entry in queue.entries() if entry.run != str(place)), None)
            queue.move(place, find_run(Path(arguments.runs), arguments.before).path if arguments.before else first)
    times = schedule.waiting()
    found = [(entry, Run(Path(entry.run)).summary(), times.get(entry.run)) for entry in queue.entries()]
    if arguments.json:
        print_json([
            {**asdict(entry), "id": entry.id, "sentence": row["sentence"], "times": when and asdict(when)}
            for entry, row, when in found
        ])  # fmt: skip
        return 0
    for number, (entry, row, when) in enumerate(found, 1):
        print(f"{number:3}  {entry.id:48}  {row['sentence']} {when.sentence if when else ''}".rstrip())
    if not found:
        print("No run is waiting.")
    return 0


def _find_run(arguments: argparse.Namespace) -> Run:
    """The run that the argument RUN names."""
    return find_run(Path(arguments.runs), arguments.run)


def _name(run: Run) -> str:
    try:
        return run.name
    except UNREADABLE:  # a damaged run must not hide the others
        return ""


def find_run(root: Path, name: str) -> Run:
    """The run with this ID or, if there is only one, with this name or with an ID that begins with it; or a folder.
    Raises RunError."""
    if ("/" in name and Path(name).is_dir()) or (Path(name) / SPEC).is_file():
        return _at(Path(name).resolve())
    every = runs(root)
    if exact := [run for run in every if run.id == name]:
        return exact[0]
    named = {run.id: _name(run) for run in every}
    for relation, matches in (
        ("the name", [run for run in every if named[run.id] == name]),
        ("the prefix", [run for run in every if run.id.startswith(name)]),
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            more = f" and {len(matches) - NAMED_RUNS} more" if len(matches) > NAMED_RUNS else ""
            listed = ", ".join(run.id for run in matches[:NAMED_RUNS])
            raise RunError(f"{name!r} is {relation} of several runs: {listed}{more}.")
    similar = _similar(name, named) or _similar(Path(name).name, named)  # of the folder, if it is a path
    hint = f" Similar: {', '.join(similar)}." if similar else " footplate list shows the runs."
    raise RunError(f"There is no run named {name!r} in {root}.{hint}")


def _at(folder: Path) -> Run:
    """The run in a folder. Raises RunError."""
    if not has_plan(folder):
        raise RunError(f"{folder} is not the folder of a run. footplate list shows the runs.")
    return find(folder.parent, folder.name)


def _similar(name: str, named: Mapping[str, str]) -> list[str]:
    """Names and IDs of runs that may be meant by an unknown one; `named`: ID -> name. Upper and lower case are the same
    here, and a part is enough, such as the end of an ID without its date."""
    known = {text.lower(): text for text in (*named, *filter(None, named.values()))}
    parts = [text for text in known if len(name) >= SHORT_NAME and name.lower() in text]
    starts = {text[: len(name)]: text for text in reversed(known)}
    close = get_close_matches(name.lower(), [*known, *starts], n=SIMILAR_RUNS)
    found = dict.fromkeys(known.get(text) or known[starts[text]] for text in (*parts, *close))
    return list(found)[:SIMILAR_RUNS]
