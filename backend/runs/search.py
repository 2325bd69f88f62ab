"""The columns of the list of runs, and the search in them.

A search is a list of terms that a run must all match:

    word            in the name, id, model, method, stage, strategy, dataset, tags, notes, failure reason or mark
    key:value       a text column that contains the value, the whole tag, the number, or yes and no
    key<number      a number column below the number; key>number above it

Upper and lower case are the same; "double quotes" keep spaces and colons together. Archived runs match only a search
with `archived:`. webui/static/runs/runs_search.js does the same on the page; tests/unit/search_cases.json has the cases
of both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from backend.runs import FORGETTING, GENERAL_LOSS

Row = Mapping[str, Any]
WORDS = ("name", "id", "model", "method", "stage", "strategy", "dataset", "notes", "failure", "mark")  # and the tags
TOKEN = re.compile(r'(?:[^\s"]|"[^"]*"?)+')
TERM = re.compile(r"([A-Za-z][A-Za-z0-9_]*)([:<>])(.*)", re.DOTALL)
IN_QUOTES = 'Put text with : < or > in "double quotes".'
NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")


class SearchError(ValueError):
    """A search that cannot be read; the message is for users."""


@dataclass(frozen=True)
class Column:
    """A column of the list. `scale`: a search compares the value divided by it. `names`: other names in a search."""

    key: str
    label: str
    kind: Literal["text", "number", "time", "tags", "yes_no"] = "number"
    names: tuple[str, ...] = ()
    scale: float = 1.0
    unit: str = ""  # of the scaled value

    def scaled(self, value: float) -> float:
        """The value as a search compares it. Rounded, since 0.29 / 0.01 is less than 29."""
        return float(f"{value / self.scale:.12g}")


def _share(key: str, label: str) -> Column:
    return Column(key, label, scale=0.01, unit="%")


# The scores of generations (backend/train/text_metrics.py). In result.json their names end with _before and _after.
SCORES: Mapping[str, str] = {
    "exact_match": "Exact match",
    "rouge_1": "ROUGE-1",
    "rouge_2": "ROUGE-2",
    "rouge_l": "ROUGE-L",
    "bleu": "BLEU",
}
COLUMNS = (
    Column("name", "Name", "text"),
    Column("state", "State", "text"),
    Column("model", "Model", "text"),
    Column("method", "Method", "text"),
    Column("stage", "Training stage", "text"),
    Column("strategy", "Strategy", "text"),
    Column("dataset", "Dataset", "text"),
    Column("step", "Progress", names=("progress",), unit="steps"),
    Column("loss", "Loss"),
    Column("eval_loss", "Validation loss"),
    *(_share(name, label) for name, label in SCORES.items()),
    Column(GENERAL_LOSS, "General loss"),
    Column(FORGETTING, "Forgetting"),
    _share("reward_accuracy", "Reward accuracy"),
    Column("reward_margin", "Reward margin"),
    Column("learning_rate", "Learning rate", names=("lr",)),
    Column("tokens_per_second", "Tokens/s"),
    Column("peak_memory", "Peak memory", names=("memory",), scale=2.0**30, unit="GiB"),
    Column("started", "Started", "time"),
    Column("created", "Created", "time"),
    Column("duration", "Duration", scale=60.0, unit="minutes"),
    Column("tags", "Tags", "tags", names=("tag",)),
    Column("notes", "Notes", "text"),
    Column("failure", "Failure reason", "text"),
    Column("mark", "Mark", "text"),
    Column("starred", "Starred", "yes_no", names=("star",)),
    Column("archived", "Archived", "yes_no"),
)
BY_NAME: Mapping[str, Column] = {name: column for column in COLUMNS for name in (column.key, *column.names)}


def column(name: str, hint: str = "") -> Column:
    """The column with this name. Raises SearchError with a further sentence, `hint`."""
    if name.lower() not in BY_NAME:
        known = f"Columns: {', '.join(c.key for c in COLUMNS)}."
        raise SearchError(" ".join(filter(None, (f"There is no column {name}.", hint, known))))
    return BY_NAME[name.lower()]


def value(row: Row, key: str, now: float) -> Any:
    """A row's value in a column; None if it has none. `now` is in Unix seconds, as are all times."""
    if key == "duration":
        end = row.get("ended") or (now if row["state"] in ("starting", "running", "stopping") else None)
        if not end or not row.get("started"):
            return None
        return max(0.0, end - row["started"]) + (row.get("earlier_seconds") or 0)  # without the time between starts
    return row.get(key)


@dataclass(frozen=True)
class Term:
    """One term of a search; without a column, a word."""

    text: str
    column: Column | None = None
    sign: str = ""

    def matches(self, row: Row, now: float) -> bool:
        """Whether a row matches this term."""
        if self.column is None:
            return any(self.text in str(row.get(key) or "").lower() for key in WORDS) or any(
                self.text in tag.lower() for tag in row.get("tags") or ()
            )
        found = value(row, self.column.key, now)
        match self.column.kind:
            case "text":
                return self.text in str(found or "").lower()
            case "tags":
                return any(self.text == tag.lower() for tag in found or ())
            case "yes_no":
                return bool(found) == (self.text == "yes")
        if not isinstance(found, int | float):
            return False
        scaled, limit = self.column.scaled(found), float(self.text)
        if self.sign == ":":
            return math.isclose(scaled, limit)
        return scaled < limit if self.sign == "<" else scaled > limit


@dataclass(frozen=True)
class Search:
    """A search that was read."""

    terms: tuple[Term, ...] = ()

    def matches(self, row: Row, now: float) -> bool:
        """Whether a row matches all terms."""
        if row.get("archived") and not any(term.column and term.column.key == "archived" for term in self.terms):
            return False
        return all(term.matches(row, now) for term in self.terms)


def parse(text: str) -> Search:
    """Read a search. Raises SearchError."""
    return Search(tuple(map(_term, TOKEN.findall(text))))


def _term(token: str) -> Term:
    found = TERM.fullmatch(token)
    if not found:
        return Term(token.replace('"', "").lower())
    named, sign, text = column(found[1], IN_QUOTES), found[2], found[3].replace('"', "").lower()
    if named.kind == "time":
        raise SearchError(f"{named.label} is a time: search for the beginning of the run's ID, such as 2026-11-22.")
    if not text:
        raise SearchError(f"{found[1]}{sign} needs a value.")
    if named.kind == "number" and not NUMBER.fullmatch(text):
        raise SearchError(f"{named.label} is a number, and {text} is not.")
    if named.kind == "yes_no" and text not in ("yes", "no"):
        raise SearchError(f"{named.label} is yes or no: {named.key}:yes")
    if named.kind != "number" and sign != ":":
        raise SearchError(f"{named.label} is not a number: use {named.key}:value")
    return Term(text, named, sign)


def sort(rows: Iterable[Row], name: str, now: float, descending: bool = False) -> list[Row]:
    """The rows by a column, text without regard to case; those without a value come last. Raises SearchError."""
    key = column(name).key
    keyed = [(_sort_key(value(row, key, now)), row) for row in rows]
    if key == "started":  # a run that waits begins after the others
        keyed = [(row.get("created") if found is None else found, row) for found, row in keyed]
    known = [pair for pair in keyed if pair[0] is not None]
    known.sort(key=lambda pair: pair[0], reverse=descending)
    return [row for _, row in known] + [row for found, row in keyed if found is None]


def _sort_key(found: Any) -> Any:
    """What a value is sorted by; None for a missing value."""
    if isinstance(found, list | tuple):
        found = " ".join(found)
    return found.lower() or None if isinstance(found, str) else found
