"""The command evaluate: base model and trained model on the same examples, and what is certain about the difference."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from backend.cli.jobs import follow, report
from backend.cli.runs import find_run
from backend.models import evaluation
from backend.models.evaluation import EXAMPLES, Settings
from backend.runs.folder import Run, RunError


def start(arguments: argparse.Namespace) -> int:
    """Evaluate and wait for the end; Ctrl-C stops it, and the same command continues it."""
    run = find_run(Path(arguments.runs), arguments.run)
    settings = _settings(arguments, evaluation.offer(run))
    job = evaluation.start(run, settings)
    follow(job)
    shown = evaluation.as_json(job)
    return report(job, shown, arguments.json, lambda: _print_result(job, shown["result"]))


def _settings(arguments: argparse.Namespace, offered: evaluation.Offer) -> Settings:
    """Raises RunError."""
    if arguments.max_new_tokens is not None and not arguments.examples:
        raise RunError("--max-new-tokens has no effect without examples. Leave it out, or set --examples.")
    if arguments.max_new_tokens is not None and not offered.generates:
        raise RunError("--max-new-tokens has no effect: the examples of this run are texts, so nothing is generated.")
    return Settings(
        step=arguments.step,
        data=os.path.abspath(os.path.expanduser(arguments.data)) if arguments.data else "",
        examples=arguments.examples,
        max_new_tokens=offered.max_new_tokens if arguments.max_new_tokens is None else arguments.max_new_tokens,
        general=not arguments.no_general_texts,
    )


def _print_result(job: Run, result: dict[str, Any]) -> None:
    for each in result["comparisons"]:
        print(each["sentence"])
    counts = sorted({each["count"] for each in result["comparisons"]})
    number = " to ".join(str(count) for count in (counts[:1] + counts[-1:] if len(counts) > 1 else counts))
    noun = "text" if counts == [1] else "texts"
    print(f"Intervals: paired bootstrap over {number} {noun}.")
    for limit in result["limits"]:
        print(f"Limitation: {limit}")
    print(f"Each example: {job.path / EXAMPLES}")
