"""The command evaluate: base model and trained model on the same examples, and what is certain about the difference."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from backend.cli.commands import print_json
from backend.cli.jobs import follow, model_step, report
from backend.cli.runs import find_run
from backend.models import evaluation
from backend.models.evaluation import EXAMPLES, JUDGE, Settings
from backend.models.spec import read_spec
from backend.runs.folder import Run, RunError
from backend.scoring.scorer import ScoreError, sha256_of
from backend.tasks import compare_evaluations
from backend.tasks.compare_evaluations import MOST, Evaluated
from backend.wording import counted

BASE_MODEL = "Base model of the first run"


def start(arguments: argparse.Namespace) -> int:
    """Evaluate and wait for the end; Ctrl-C stops it, and the same command continues it."""
    runs = [find_run(Path(arguments.runs), name) for name in arguments.run]
    if len(runs) > 1 and arguments.judge:
        raise RunError(
            "--judge compares the outputs of one run with those of its base model; it cannot compare several runs. "
            "Name one run, or leave out --judge."
        )
    run = runs[0]
    settings = _settings(arguments, run, offered := evaluation.offer(run))
    if len(runs) == 1:
        settings = replace(settings, step=model_step(run, settings.step))
    if settings.judge and not arguments.send_outputs and not evaluation.problem(run, evaluation.with_consent(settings)):
        raise RunError(f"{evaluation.problem(run, settings)} To agree, add --send-outputs.")
    if len(runs) > 1:
        return evaluate_each(runs, settings, arguments.json)
    job = evaluation.start(run, settings)
    if text := evaluation.predict(offered, settings):
        print(text, file=sys.stderr)
    follow(job)
    shown = evaluation.as_json(job)
    return report(job, shown, arguments.json, lambda: print_result(job, shown["result"]))


def evaluate_each(runs: Sequence[Run], settings: Settings, as_json: bool) -> int:
    """Evaluate each run with these settings, unless it already is, and compare them. Raises RunError."""
    if len({run.id for run in runs}) < len(runs):
        raise RunError("A run is named twice. Name each run once.")
    if len(runs) > MOST:
        raise RunError(f"{len(runs)} runs are named; at most {MOST} can be compared.")
    settings_of = [replace(settings, step=model_step(run, settings.step)) for run in runs]
    for run, own in zip(runs, settings_of, strict=True):  # all are checked before the first one starts
        if why := evaluation.problem(run, own):
            raise RunError(f"{run.id}: {why}")
    found = []
    for run, own in zip(runs, settings_of, strict=True):
        if job := evaluation.finished(run, own):
            print(f"{run.id}: using the evaluation {job.id}.", file=sys.stderr)
        else:
            print(f"{run.id}:", file=sys.stderr)
            job = evaluation.start(run, own)
            follow(job)
        if job.state != "done":
            return report(job, evaluation.as_json(job), as_json, lambda: None)
        found.append(Evaluated(run, job))
    compared = compare_evaluations.compare(found)
    if as_json:
        print_json({"evaluations": [{**evaluation.as_json(e.job), "run": e.run.id} for e in found], **compared})
    else:
        _print_table(compared)
    return 0


def _print_table(compared: dict[str, Any]) -> None:
    ids = [run["id"] for run in compared["runs"]]
    width = max(len(text) for text in (*ids, BASE_MODEL))
    for row in compared["rows"]:
        print(f"{row['label']} ({counted(row['count'], 'text')})")
        print(f"  {BASE_MODEL:{width}}  {value_text(row['base'], row['is_share']):>7}")
        for number, (id, cell) in enumerate(zip(ids, row["cells"], strict=True)):
            against = "the first run" if number else "its base model"
            value = value_text(cell["value"], row["is_share"])
            print(f"  {id:{width}}  {value:>7}  {change_text(cell, row['is_share'], against)}")
    for problem in compared["problems"]:
        print(f"{problem['id']}: {problem['sentence']}")
    for note in compared["notes"]:
        print(f"Limitation: {note}")


def value_text(value: float, is_share: bool) -> str:
    """A share in percent, or a loss."""
    return f"{100 * value:.1f}%" if is_share else f"{value:.3f}"


def change_text(cell: dict[str, Any], is_share: bool, against: str) -> str:
    """What is certain about the difference: better than first run, +1.2 to +3.4 percentage points"""
    if cell["verdict"] == "few":
        return "too few texts to compare"
    words = "no clear change from" if cell["verdict"] == "unclear" else f"{cell['verdict']} than"
    low, high = cell["low"], cell["high"]
    span = f"{100 * low:+.1f} to {100 * high:+.1f} percentage points" if is_share else f"{low:+.3f} to {high:+.3f}"
    return f"{words} {against} ({span})"


def _settings(arguments: argparse.Namespace, run: Run, offered: evaluation.Offer) -> Settings:
    """The settings of the evaluation. Raises RunError."""
    if arguments.max_new_tokens is not None and not arguments.examples:
        raise RunError("--max-new-tokens has no effect without examples. Leave it out, or set --examples.")
    if arguments.max_new_tokens is not None and not evaluation.generates(read_spec(run), arguments.data):
        raise RunError("--max-new-tokens has no effect: the examples of this run are texts, so nothing is generated.")
    if arguments.with_code and not arguments.score_file:
        raise RunError("--with-code has no effect without --score-file.")
    if arguments.send_outputs and not arguments.judge:
        raise RunError("--send-outputs has no effect without --judge.")
    settings = Settings(
        step=arguments.step,
        data=_absolute(arguments.data),
        examples=arguments.examples,
        max_new_tokens=offered.max_new_tokens if arguments.max_new_tokens is None else arguments.max_new_tokens,
        general=not arguments.no_general_texts,
        samples_per_prompt=arguments.samples_per_prompt,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        pass_at_k=arguments.pass_at_k,
        regex=arguments.regex,
        regex_group=arguments.regex_group,
        score_file=_absolute(arguments.score_file),
        score_file_sha256=_agreed(_absolute(arguments.score_file), arguments.with_code),
        judge_url=arguments.judge,
        judge_model=arguments.judge_model,
        judge_key=arguments.judge_key,
        judge_instruction=arguments.judge_instruction,
    )
    if settings.judge and arguments.send_outputs:
        return replace(settings, judge_agreed=settings.judge.agreement)
    return settings


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path)) if path else ""


def _agreed(path: str, with_code: bool) -> str:
    """The hash of a score file that may be run; '' without one. Raises RunError."""
    try:
        found = sha256_of(path) if path else ""
    except ScoreError as error:
        raise RunError(f"The score file {path} {error}.") from None
    if path and not with_code:
        raise RunError(f"{evaluation.needs_consent(path, found)} To agree, add --with-code.")
    return found


def print_result(job: Run, result: dict[str, Any]) -> None:
    """Print each score with its change, and where the examples are."""
    for each in result["comparisons"]:
        print(each["sentence"])
    if JUDGE in result:
        print(result[JUDGE]["sentence"])
    counts = sorted({each["count"] for each in result["comparisons"] if each["verdict"] != "few"})
    number = " to ".join(str(count) for count in (counts[:1] + counts[-1:] if len(counts) > 1 else counts))
    noun = "text" if counts == [1] else "texts"
    settings = evaluation.read_settings(job.path)
    if counts:
        print(f"Intervals: paired bootstrap over {number} {noun}{_samples(settings)}.")
    for limit in result["limits"]:
        print(f"Limitation: {limit}")
    if file := settings.file_rule:
        print(f"Score file: {file.path} (SHA-256 {file.sha256})")
    print(f"Each example: {job.path / EXAMPLES}")


def _samples(settings: Settings) -> str:
    """How outputs were sampled, '' for greedy decoding."""
    if not settings.temperature:
        return ""
    drawn = f", each with {counted(settings.samples_per_prompt, 'sample')} at temperature {settings.temperature:g}"
    return f"{drawn} and top_p {settings.top_p:g}" if settings.top_p < 1 else drawn
