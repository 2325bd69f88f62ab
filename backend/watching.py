"""The commands on runs: run, list, show, stop, resume, logs, metrics.

Floor 5. Imports: below. A run belongs to the disk: each of these reads or writes its folder and leaves.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from backend.glance import wait_for_architecture
from backend.judge import judge
from backend.machine import probe
from backend.run import LOG, METRICS, SPEC
from backend.run.folder import ALIVE, Run, RunError, find, runs
from backend.run.reading import Metrics, since
from backend.shell import asked, print_findings
from backend.shell import show as show_json

OUTCOMES = {"done": 0, "stopped": 3}
SCORES = ("exact_match", "rouge_1", "rouge_2", "rouge_l", "bleu")  # as train/scores.py names them
PAUSE = 0.25  # seconds between looks at a log


def run(arguments: argparse.Namespace) -> int:
    """Start a run and print its id; with --follow stay until its end."""
    spec = asked(arguments)
    wait_for_architecture(spec, Path.cwd())
    found = judge(spec, probe(Path.cwd()), Path.cwd())
    if not found.can_run and not arguments.skip_checks:
        if arguments.json:
            show_json({"error": found.verdict, "findings": [f.code for f in found.findings if f.level == "error"]})
        else:
            print_findings(found)
        return 1
    made = Run.create(Path(arguments.runs), found.title, found.plan, datetime.now(), found.about, found.expected)
    made.start()
    return _started(made, arguments, 0)


def resume(arguments: argparse.Namespace) -> int:
    """Go on from the last complete checkpoint, or begin anew."""
    found = _run(arguments)
    log = found.path / LOG
    begin = log.stat().st_size if log.exists() else 0  # follow what is new
    found.resume(anew=arguments.anew)
    return _started(found, arguments, begin)


def _started(found: Run, arguments: argparse.Namespace, begin: int) -> int:
    if not arguments.json:
        print(found.id, flush=True)
    if not arguments.follow:
        if arguments.json:
            show_json({"id": found.id, "folder": str(found.path)})
        return 0
    for text in follow(found, begin):
        print(text, end="", flush=True, file=sys.stderr if arguments.json else sys.stdout)
    summary = found.summary()
    if arguments.json:
        show_json(_described(found))
    else:
        print(summary["sentence"])
    return OUTCOMES.get(summary["state"], 1)


def follow(found: Run, offset: int) -> Iterator[str]:
    """The log from byte `offset` on, as it grows, until the run has ended and everything was read."""
    while True:
        alive = found.state in (*ALIVE, "new")
        piece = since(found.path / LOG, offset, ended=not alive)
        offset = piece.end
        if piece.text:
            yield piece.text
        elif not alive:
            return
        else:
            time.sleep(PAUSE)


def list_runs(arguments: argparse.Namespace) -> int:
    """Print all runs, newest first."""
    found = [r.summary() for r in runs(Path(arguments.runs))]
    if arguments.json:
        show_json(found)
        return 0
    for row in found:
        print(f"{row['id']:48}  {row['state']:9}  {row['sentence']}")
    if not found:
        print(f"No runs in {arguments.runs}. Start one: footplate run first-run")
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print one run: its state, its command, what came out."""
    found = _run(arguments)
    about = _described(found)
    if arguments.json:
        show_json(about)
        return 0
    print(f"{found.id}\n{about['summary']['sentence']}\n\n{(found.path / SPEC).read_text(encoding='utf-8')}")
    for name in (
        *(f"{score}_{side}" for score in SCORES for side in ("before", "after")),
        "eval_reward_accuracy",
        "eval_reward_margin",
        "eval_loss",
        "train_loss",
        "seconds",
    ):
        if (value := about["result"].get(name)) is not None:
            print(f"{name.replace('_', ' ')}: {value:.4g}")
    if about["failure"]:
        print(f"{about['failure']['sentence']} {about['failure']['help']}\n{about['failure']['traceback']}")
    return 0


def _described(found: Run) -> dict[str, Any]:
    return {
        "summary": found.summary(),
        "progress": found.progress(),
        "result": found.result(),
        "failure": found.failure(),
        "checkpoints": found.checkpoints(),
        "folder": str(found.path),
        "command": found.plan().command(),
    }


def stop(arguments: argparse.Namespace) -> int:
    """Ask a run to stop, and wait until it has."""
    found = _run(arguments)
    found.stop(save=not arguments.no_save)
    while found.state in ALIVE:
        time.sleep(PAUSE)
    if arguments.json:
        show_json(found.summary())
    else:
        print(found.summary()["sentence"])
    return 0


def logs(arguments: argparse.Namespace) -> int:
    """Print a run's log; with --follow go on until its end."""
    found = _run(arguments)
    if arguments.follow:
        for text in follow(found, 0):
            print(text, end="", flush=True, file=sys.stderr if arguments.json else sys.stdout)
        if arguments.json:
            show_json(found.summary())
        return 0
    parts, offset, more = [], 0, True
    while more:
        piece = since(found.path / LOG, offset, ended=True)
        parts.append(piece.text)
        offset, more = piece.end, piece.more
    if arguments.json:
        show_json({"log": "".join(parts), "bytes": offset})
    else:
        print("".join(parts), end="")
    return 0


def metrics(arguments: argparse.Namespace) -> int:
    """Print a run's points, without what a resumed run repeated."""
    reader = Metrics(_run(arguments).path / METRICS)
    reader.read()
    if arguments.json:
        show_json(reader.points)
        return 0
    for point in reader.points:
        print(
            "  ".join(f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in point.items() if k != "time")
        )
    return 0


def _run(arguments: argparse.Namespace) -> Run:
    """The run that RUN names: an id, the only beginning of one, or a folder. Raises RunError."""
    root, name = Path(arguments.runs), arguments.run
    if "/" in name or (Path(name) / SPEC).is_file():
        return find(Path(name).resolve().parent, Path(name).resolve().name)
    begins = [r for r in runs(root) if r.id.startswith(name)]
    exact = [r for r in begins if r.id == name]
    if len(exact or begins) == 1:
        return (exact or begins)[0]
    if begins:
        raise RunError(f"{name!r} begins several runs: {', '.join(r.id for r in begins)}.")
    return find(root, name)
