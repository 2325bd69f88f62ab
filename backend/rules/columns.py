"""Fixes that use columns with unknown names."""

from __future__ import annotations

from collections.abc import Sequence

from backend import registry
from backend.data import chat
from backend.rules.base import Case, Fix

PROMPTS = ("question", "query", "input", "prompt", "instruction", "source", "problem", "text")
COMPLETIONS = ("answer", "response", "output", "completion", "target", "solution", "summary", "label")
CHOSEN = ("chosen", "preferred", "accepted", "positive", "better", "good", "winner")
LABELS = ("label", "kto_tag", "desirable", "thumbs_up", "liked", "is_good")
REJECTED = ("rejected", "dispreferred", "negative", "worse", "bad", "loser")
IDS = ("id", "idx", "index", "uuid", "key", "number")


def guessed_columns(case: Case) -> list[Fix]:
    """Formats for columns that no format of the stage has: conversations, a prompt with a completion, with a labeled
    completion or with a pair of completions, and one column as text. Columns with unknown names are taken in their
    order, text columns before number columns. A column that is set already is kept. [] if the columns are unknown or
    too few."""
    formats, found = registry.STAGES[case.spec.train.stage].formats, case.facts.text_columns
    if "text" not in formats:
        labeled = _labeled(case, found) if "labels" in formats else []
        return labeled or (_pair(case, found) if "pairs" in formats and case.facts.columns else [])
    if conversations := [_conversation(*each) for each in case.facts.column_kinds if each[1] in chat.KEYS]:
        return conversations
    texts = [name for name, kind in case.facts.column_kinds if kind == "text"]
    return _completion_or_text(case, tuple(dict.fromkeys((*found, *texts)))) if texts else []


def _conversation(column: str, format: str) -> Fix:
    patch = {"data.format": format, "data.messages_column": column}
    return Fix(f"Use column {column} as the conversation", patch, False)


def _completion_or_text(case: Case, found: Sequence[str]) -> list[Fix]:
    data = case.spec.data
    known = _named(found, (data.prompt_column, *PROMPTS), (data.completion_column, *COMPLETIONS))
    prompt, completion = _filled(known, found)
    fixes = []
    if prompt and completion:
        patch = {"data.prompt_column": prompt, "data.completion_column": completion}
        label = f"Use column {prompt} as the prompt and {completion} as the completion"
        fixes.append(Fix(label, {"data.format": "prompt_completion", **patch}, False))
    if not all(known):
        text = prompt or completion or found[0]
        patch = {"data.format": "text", "data.text_column": text}
        fixes.append(Fix(f"Use column {text} as plain text", patch, False))
    return fixes


def _labeled(case: Case, found: Sequence[str]) -> list[Fix]:
    data = case.spec.data
    (label,) = _named(case.facts.columns, (data.label_column, *LABELS))
    texts = [name for name in found if name != label]
    names = (data.prompt_column, *PROMPTS), (data.completion_column, *COMPLETIONS)
    prompt, completion = _filled(_named(texts, *names), texts)
    if not (label and prompt and completion):
        return []
    columns = {"data.prompt_column": prompt, "data.completion_column": completion, "data.label_column": label}
    text = f"Use column {prompt} as the prompt, {completion} as the completion and {label} as its label"
    return [Fix(text, {"data.format": "labels", **columns}, False)]


def _pair(case: Case, found: Sequence[str]) -> list[Fix]:
    data = case.spec.data
    names = (data.prompt_column, *PROMPTS), (data.chosen_column, *CHOSEN), (data.rejected_column, *REJECTED)
    prompt, chosen, rejected = _filled(_named(case.facts.columns, *names), found)
    if not (prompt and rejected):
        return []
    columns = {"data.prompt_column": prompt, "data.chosen_column": chosen, "data.rejected_column": rejected}
    label = f"Use column {prompt} as the prompt, {chosen} as the chosen and {rejected} as the rejected completion"
    return [Fix(label, {"data.format": "pairs", **columns}, False)]


def _named(found: Sequence[str], *wanted: Sequence[str]) -> list[str]:
    """For each use, the column with the first of its wanted names, '' if there is none; no column has two uses."""
    columns = {name.lower(): name for name in found}
    return [next((columns.pop(name.lower()) for name in names if name.lower() in columns), "") for names in wanted]


def _filled(named: Sequence[str], found: Sequence[str]) -> list[str]:
    """`named` with each '' replaced by the next of the other columns, as long as there are any."""
    others = iter([name for name in found if name not in named and name.lower() not in IDS])
    return [name or next(others, "") for name in named]
