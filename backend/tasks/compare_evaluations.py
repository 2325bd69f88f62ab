"""Evaluations of several runs on the same examples: each score of each run, and what is certain about the difference
from the first one.

The examples are joined by their content. Losses are compared only if the models have the same tokens and labels.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend.models import evaluation
from backend.models.evaluation import SCORES_FILE
from backend.runs import GENERAL_LOSS
from backend.runs.folder import Run
from backend.wording import counted

LEAST, MOST = 2, 20  # runs
LOSSES = (evaluation.LOSS, GENERAL_LOSS)
NONE = "It has no complete evaluation."
MANY = 20  # intervals, of which one is expected to exclude zero by chance
SETTINGS = {  # what compared evaluations must have in common -> its name in messages
    "data": "data file",
    "max_new_tokens": "maximum number of new tokens",
    "samples_per_prompt": "samples per prompt",
    "temperature": "temperature",
    "top_p": "top_p",
    "pass_at_k": "k of pass@k",
    "regex": "regular expression",
    "regex_group": "comparison of the first group",
    "score_file": "score file",
    "score_file_sha256": "content of the score file",
}
Problem = dict[str, str]


@dataclass(frozen=True)
class Evaluated:
    """A run with one of its evaluations."""

    run: Run
    job: Run

    @property
    def key(self) -> tuple[Any, ...]:
        """The settings that must be the same."""
        found = asdict(evaluation.read_settings(self.job.path))
        return tuple(found[name] for name in SETTINGS)


def choose(runs: Sequence[Run], is_final: bool = False) -> tuple[list[Evaluated], list[Problem]]:
    """The newest evaluation of each run with the settings that most of the runs have in common, and why runs have
    none: {"id", "sentence"}. `is_final`: only evaluations of final models, not of checkpoints."""
    problems, every = [], dict[str, dict[tuple[Any, ...], Evaluated]]()
    for run in runs:
        done = [job for job in evaluation.find_all(run) if "comparisons" in job.result()]
        done = [job for job in done if not is_final or evaluation.read_settings(job.path).step is None]
        usable = [Evaluated(run, job) for job in done if evaluation.is_comparable(run, job)]
        if usable:
            every[run.id] = {}
            for each in usable:
                every[run.id].setdefault(each.key, each)  # the newest is the first
        else:
            why = "Its model has changed since its evaluation, or an earlier version of Footplate made the evaluation."
            problems.append({"id": run.id, "sentence": f"{why} Evaluate it again." if done else NONE})
    keys = [key for of_run in every.values() for key in of_run]
    most = max(keys, key=keys.count, default=())
    for id, of_run in every.items():
        if most not in of_run:
            newest = next(iter(of_run))
            names = [name for name, one, two in zip(SETTINGS.values(), newest, most, strict=True) if one != two]
            sentence = f"Its evaluation differs from those of the other runs in: {', '.join(names)}."
            problems.append({"id": id, "sentence": sentence})
    return [of_run[most] for of_run in every.values() if most in of_run], problems


def compare(chosen: Sequence[Evaluated], with_base: bool = False) -> dict[str, Any]:
    """The table of evaluations, the first of which the others are compared with: "runs" (id, job and step of each),
    "rows" (name, label, is_share, count, the base model's value and a cell for each run: value, low, high, verdict),
    "notes" (sentences) and "problems" of runs that were evaluated on other examples. The cell of the first run compares
    that run with its base model. `with_base`: every cell does so, and one evaluation is enough."""
    key = tuple((each.job.path, (each.job.path / SCORES_FILE).stat().st_mtime_ns) for each in chosen)
    others, rows, notes = _table(key, with_base)
    problems = [{"id": chosen[n].run.id, "sentence": sentence} for n, sentence in others.items()]
    shown = [each for n, each in enumerate(chosen) if n not in others]
    steps = [evaluation.read_settings(each.job.path).step for each in shown]
    runs = [{"id": each.run.id, "job": each.job.id, "step": step} for each, step in zip(shown, steps, strict=True)]
    return {"runs": runs, "rows": rows, "notes": notes, "problems": problems}


def _examples(numbers: Mapping[str, Any]) -> set[str]:
    """The contents of the examples, without general texts."""
    return {content for content, found in numbers.items() if GENERAL_LOSS not in found["scores"]}


@lru_cache(maxsize=16)  # the page requests this repeatedly, and an interval of 1,000 examples takes a moment
def _table(
    evaluations: tuple[tuple[Path, int], ...], with_base: bool
) -> tuple[dict[int, str], list[dict[str, Any]], list[str]]:
    """The positions of evaluations that share no examples with the first one, each with a sentence; and rows and notes
    of the other evaluations. `evaluations` are folders with the times of their change."""
    jobs = [Run(path) for path, _ in evaluations]
    numbers = [evaluation.numbers(job) for job in jobs]
    own = [_examples(found) for found in numbers]
    others = {
        n: "It was evaluated on other examples." if examples else "It was evaluated on general texts only."
        for n, examples in enumerate(own)
        if own[0] and not own[0] & examples
    }
    jobs = [job for n, job in enumerate(jobs) if n not in others]
    numbers = [found for n, found in enumerate(numbers) if n not in others]
    if len(jobs) < (1 if with_base else LEAST):
        return others, [], []
    rows, notes = [], list[str]()
    for each in jobs[0].result()["comparisons"]:
        name = each["name"]
        if name == evaluation.JUDGE:
            notes.append("The judge compares each model with its base model only, so its score is left out.")
            continue
        contents = [content for content in numbers[0] if all(_has(found, content, name) for found in numbers)]
        if name in LOSSES and len({tuple(found[c]["labels"] for c in contents) for found in numbers}) > 1:
            notes.append(
                f"{each['label']} is not compared: the models of these runs get different tokens or labels for the "
                "same texts, because of the tokenizer, the chat template, data.max_length or data.loss_on."
            )
        elif contents:
            rows.append(_row(each, [[found[content] for content in contents] for found in numbers], with_base))
    shared = set.intersection(*map(_examples, numbers))
    return others, rows, [*_differences(jobs, rows, len(shared)), *notes]


def _has(found: Mapping[str, dict[str, Any]], content: str, name: str) -> bool:
    pair = found[content]["scores"].get(name) if content in found else None
    return pair is not None and None not in pair


def _row(each: Mapping[str, Any], numbers: Sequence[Sequence[dict[str, Any]]], with_base: bool) -> dict[str, Any]:
    """A score of each run; `numbers` has the same examples in the same order for each."""
    intervals = importlib.import_module("backend.models.intervals")  # numpy, which most commands do not need
    name, label = each["name"], each["label"]
    weights = [float(one["tokens"]) for one in numbers[0]] if name in LOSSES else ()
    bases, trained = ([[one["scores"][name][side] for one in of_run] for of_run in numbers] for side in (0, 1))
    pairs = list(zip(bases, trained, strict=True))
    if not with_base:
        pairs[1:] = ((trained[0], other) for other in trained[1:])
    found = intervals.compare_pairs(name, label, pairs, weights)
    cells = [
        {"base": one.base, "value": one.trained, "low": one.low, "high": one.high, "verdict": one.verdict}
        for one in found
    ]
    shown = {"name": name, "label": label, "is_share": found[0].is_share, "count": found[0].count}
    return {**shown, "base": found[0].base, "cells": cells}


def _differences(jobs: Sequence[Run], rows: Sequence[Mapping[str, Any]], shared: int) -> list[str]:
    """What a reader must know about the table, as sentences. `shared`: examples that all evaluations have."""
    notes, sizes = [], [job.result()["examples"] for job in jobs]
    if shared < max(sizes):
        notes.append(
            f"Only the {counted(shared, 'example')} that all of these evaluations have are compared; the largest "
            f"evaluation has {max(sizes):,}."
        )
    many = sum(len(row["cells"]) for row in rows)
    if many >= MANY:
        notes.append(
            f"Of {many} intervals of 95%, about {round(many / MANY)} would exclude zero by chance alone if all models "
            "were equally good."
        )
    return notes
