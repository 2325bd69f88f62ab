"""What the runs of a sweep can be ranked by: the validation loss, scores of generations, and scores of evaluations.

Generations are those for validation prompts after training (eval.num_generations), or of the latest evaluation while a
run trains. Evaluations are those of final models with the settings that most of the runs have in common, on the
examples that all of them have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend import presets
from backend.config import RunSpec
from backend.config.options import SpecError
from backend.runs import METRICS, SPEC, files, json_values, sweeps
from backend.runs.folder import Run, RunError
from backend.runs.metrics import last_values
from backend.runs.search import SCORES
from backend.tasks import compare_evaluations
from backend.tasks.comparable import decisive, not_comparable
from backend.wording import counted

LOSS = "eval_loss"
EVALUATION = "evaluation."  # before the name of a score of an evaluation
FIRST_STEP = 1  # scores of step 0 are those of the base model
ALL_WORSE = " All other evaluated runs are clearly worse."
Row = dict[str, Any]


@dataclass(frozen=True)
class Ranking:
    """A value that runs of a sweep have. `is_share`: from 0 to 1, shown in percent."""

    key: str
    label: str
    is_lower_better: bool = False
    is_share: bool = True

    def as_json(self) -> dict[str, Any]:
        """The ranking as the page gets it."""
        return {"key": self.key, "label": self.label, "is_share": self.is_share}


@dataclass(frozen=True)
class Ranked:
    """The runs of a sweep, the best first. Each row has the value `by.key`, None if it has none, and with an evaluation
    its `interval`: base, low, high, verdict. `sentence`: which run is the best, and what is not certain about that, or
    why the values cannot be compared."""

    rows: list[Row]
    rankings: list[Ranking]
    by: Ranking
    sentence: str
    is_comparable: bool = True


def rank(root: Path, sweep: str, by: str = LOSS) -> Ranked:
    """The runs of a sweep by the ranking with the key `by`. Raises RunError."""
    rows = sweeps.rows(root, sweep)
    runs = {row["id"]: Run(root / row["id"]) for row in rows}
    chosen, _ = compare_evaluations.choose(list(runs.values()), is_final=True)
    compared = compare_evaluations.compare(chosen, with_base=True) if chosen else {"runs": [], "rows": []}
    rankings = [Ranking(LOSS, "Best validation loss", is_lower_better=True, is_share=False), *_add_scores(rows, runs)]
    rankings += [_add_evaluation(rows, score, compared["runs"]) for score in compared["rows"]]
    for each in rankings:
        if each.key == by:
            ordered = sweeps.ranked(rows, by, each.is_lower_better)
            for row in ordered:
                row["interval"] = row.pop("intervals", {}).get(by)
            notes = compared.get("notes", []) if by.startswith(EVALUATION) else []
            options = decisive(_spec(runs.values()), [row["varied"] for row in rows]) if by == LOSS else []
            if options:
                return Ranked(ordered, rankings, each, not_comparable(options), is_comparable=False)
            sentence = _sentence(ordered, each, chosen)
            return Ranked(ordered, rankings, each, " ".join([sentence, *notes]) if sentence else "")
    known = ", ".join(each.key for each in rankings)
    raise RunError(f"The runs of this sweep cannot be ranked by {by}. They have: {known}.")


def _spec(runs: Iterable[Run]) -> RunSpec | None:
    """The options of one of the runs; None if they cannot be read."""
    for run in runs:
        with contextlib.suppress(OSError, SpecError):
            return presets.load(files.read_text(run.path / SPEC))
    return None


def _add_scores(rows: Sequence[Row], runs: Mapping[str, Run]) -> list[Ranking]:
    """Add the scores of generations to the rows."""
    for row in rows:
        run = runs[row["id"]]
        result, during = run.result(), last_values(run.path / METRICS, [f"eval_{name}" for name in SCORES], FIRST_STEP)
        for name in SCORES:
            value = result.get(f"{name}_after")
            value = during[f"eval_{name}"] if value is None else value
            row[name] = value if json_values.is_number(value) else None
    return [
        Ranking(name, f"{label} of generations")
        for name, label in SCORES.items()
        if any(row[name] is not None for row in rows)
    ]


def _add_evaluation(rows: Sequence[Row], score: Mapping[str, Any], evaluated: Sequence[Mapping[str, Any]]) -> Ranking:
    """Add a score of the evaluations to the rows."""
    key = f"{EVALUATION}{score['name']}"
    cells = {run["id"]: cell for run, cell in zip(evaluated, score["cells"], strict=True)}
    for row in rows:
        cell = cells.get(row["id"])
        row[key] = cell["value"] if cell else None
        row.setdefault("intervals", {})[key] = cell and {**cell, "is_share": score["is_share"], "count": score["count"]}
    is_loss = not score["is_share"]
    return Ranking(key, f"{score['label']} (evaluation)", is_lower_better=is_loss, is_share=not is_loss)


def _sentence(rows: Sequence[Row], by: Ranking, chosen: Sequence[compare_evaluations.Evaluated]) -> str:
    """Which run is the best, and which others are not clearly worse."""
    having = [row for row in rows if row[by.key] is not None]
    if len(having) < 2:
        return ""
    best = having[0]
    text = f"Best by {by.label}: {sweeps.label(best['varied'])}."
    if equal := sum(row[by.key] == best[by.key] for row in having) - 1:
        text += f" {counted(equal, 'other run')} {'has' if equal == 1 else 'have'} the same value."
    if by.key.startswith(EVALUATION):
        close, others = _not_clearly_worse([row["id"] for row in having], by, chosen), len(having) - 1
        verb = "is" if close == 1 else "are"
        some = f" {close} of {counted(others, 'other evaluated run')} {verb} not clearly worse."
        text += some if close else ALL_WORSE
    if missing := len(rows) - len(having):
        verb, whose = ("has", "its final model") if missing == 1 else ("have", "their final models")
        what = "no such score yet"
        if by.key.startswith(EVALUATION):
            what = f"no evaluation of {whose} with the settings and examples of the others"
        text += f" {counted(missing, 'run')} {verb} {what}."
    return text


def _not_clearly_worse(ids: Sequence[str], by: Ranking, chosen: Sequence[compare_evaluations.Evaluated]) -> int:
    """How many of the other runs differ from the first one by an interval that contains zero."""
    by_id = {each.run.id: each for each in chosen}
    compared = compare_evaluations.compare([by_id[id] for id in ids])
    cells = next((row["cells"] for row in compared["rows"] if f"{EVALUATION}{row['name']}" == by.key), ())
    return sum(cell["verdict"] != "worse" for cell in cells[1:])
