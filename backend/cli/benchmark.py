"""The command benchmark: a trained model and its base model on tasks of lm-eval."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from backend.cli.jobs import follow, model_step, report
from backend.cli.runs import find_run
from backend.models import benchmark, benchmark_tasks
from backend.models.benchmark import SAMPLES, Settings
from backend.runs.folder import Run


def start(arguments: argparse.Namespace) -> int:
    """Measure and wait for the end; Ctrl-C stops it."""
    run = find_run(Path(arguments.runs), arguments.run)
    job = benchmark.start(run, replace(_settings(arguments), step=model_step(run, arguments.step)))
    follow(job)
    shown = benchmark.as_json(job)
    return report(job, shown, arguments.json, lambda: _print_result(job, shown["result"]))


def _settings(arguments: argparse.Namespace) -> Settings:
    tasks = (
        os.path.abspath(os.path.expanduser(task)) if benchmark_tasks.is_file(task) else task
        for task in benchmark.parse_tasks(arguments.tasks)
    )
    return Settings(
        tasks=tuple(tasks),
        limit=arguments.limit,
        shots=arguments.shots,
        base=arguments.base,
        chat_template=arguments.chat_template,
        allow_code=arguments.allow_code,
    )


def _print_result(job: Run, result: dict[str, Any]) -> None:
    for row in result["rows"]:
        print(row["sentence"])
    template = "with the chat template" if result["chat_template"] else "without a chat template"
    print(f"Prompts: {template}. lm-eval {result['versions']['lm_eval']}.")
    for limit in result["limits"]:
        print(f"Limitation: {limit}")
    print(f"Each sample: {job.path / SAMPLES}")
