"""Rows that compare answers: two to one question, or one with a label. Floor 1. Imports spec, turns.

Question and answers may each be a text, a turn or a list of turns, {role, content} or {from, value}. Without a
question of their own two whole conversations share one: what both begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.config import Data
from backend.data import chat
from backend.data.chat import Row, Turns, Unfit

# Columns that may hold a part, first come, first served, where none is named.
PROMPTS = ("prompt", "conversations", "messages", "instruction", "question")
COMPLETIONS = ("completion", "output", "response")
LABELS = ("label", "kto_tag")
TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")


@dataclass(frozen=True)
class Format:
    """How rows of one kind are known, and turned."""

    seen: Callable[[Row], bool]
    convert: Callable[[Row, Data], dict[str, Any]]


def _pairs(row: Row, data: Data) -> dict[str, Any]:
    """{"prompt", "chosen", "rejected"}, each a list of turns."""
    names = data.chosen_column or "chosen", data.rejected_column or "rejected"
    chat.need(row, names)
    chosen, rejected = (_answer(row, name) for name in names)
    if chosen[0]["role"] != "assistant" and rejected[0]["role"] != "assistant":
        shared = _shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not prompt:
            raise Unfit(f"{names[0]} and {names[1]} begin with different questions")
    else:
        prompt = _prompt(row, data)
    for name, answer in zip(names, (chosen, rejected), strict=True):
        if answer[0]["role"] != "assistant":
            raise Unfit(f"column {name} goes on with a turn of the {answer[0]['role']} instead of an answer")
    return {"prompt": _opened(prompt, row, data), "chosen": chosen, "rejected": rejected, **chat.tools(row)}


def _labels(row: Row, data: Data) -> dict[str, Any]:
    """{"prompt", "completion", "label"}: lists of turns, and whether the answer is a good one."""
    label = _first(row, data.label_column, LABELS)
    chat.need(row, [label])
    answer = _first(row, data.completion_column, COMPLETIONS)
    prompt = _prompt(row, data)
    if answer in row:
        completion = _answer(row, answer)
    elif data.completion_column or prompt[-1]["role"] != "assistant":
        raise Unfit(f"has no column {answer}, and no conversation that ends with an answer")
    else:
        prompt, completion = prompt[:-1], prompt[-1:]
    if completion[0]["role"] != "assistant":
        raise Unfit(f"column {answer} begins with a turn of the {completion[0]['role']} instead of an answer")
    if not prompt:
        raise Unfit("has an answer and no question")
    good = _label(row[label], label)
    return {"prompt": _opened(prompt, row, data), "completion": completion, "label": good, **chat.tools(row)}


def unpaired(converted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A converted row as labelled answers: of a pair the chosen one is good, the rejected one is not."""
    if "chosen" not in converted:
        return [dict(converted)]
    shared = {key: converted[key] for key in ("prompt", "tools") if key in converted}
    return [{**shared, "completion": converted[name], "label": name == "chosen"} for name in ("chosen", "rejected")]


def _shared(one: Turns, other: Turns) -> int:
    """Turns that both conversations begin with; at least one of each is left as its answer."""
    most = min(len(one), len(other)) - 1
    return next((n for n in range(most) if one[n] != other[n]), most)


def _opened(prompt: Turns, row: Row, data: Data) -> Turns:
    return chat.opened(prompt, chat.optional(row, "system") or data.system_prompt)


def _prompt(row: Row, data: Data) -> Turns:
    name = _first(row, data.prompt_column, PROMPTS)
    if name not in row:
        wanted = data.prompt_column or "prompt"
        raise Unfit(f"has no column {wanted}, so nobody knows what is answered; the columns are: {chat.listed(row)}")
    if name == "instruction":
        return chat.instruction(row, name)
    if chat.layout_of(row[name]):
        return chat.talk(row, name)
    return [chat.said("user", chat.text(row, name))]


def _answer(row: Row, name: str) -> Turns:
    if isinstance(chat.unpacked(row[name]), list) or chat.layout_of(row[name]):
        return chat.talk(row, name)
    return [chat.said("assistant", chat.text(row, name))]


def _first(row: Row, named: str, usual: Sequence[str]) -> str:
    """The column that is named, else the first of the usual ones that is there, else the first."""
    return named or next((name for name in usual if row.get(name) is not None), usual[0])


def _label(value: Any, column: str) -> bool:
    said = str(value).strip().lower()
    if said not in TRUE + FALSE:
        raise Unfit(f"column {column} holds {value!r} instead of true or false")
    return said in TRUE


def _labelled(row: Row) -> bool:
    label = row.get(_first(row, "", LABELS))
    asked = any(name in row for name in PROMPTS)
    return asked and str(label).strip().lower() in TRUE + FALSE


PREFERENCES: Mapping[str, Format] = {
    "pairs": Format(lambda row: "chosen" in row and "rejected" in row, _pairs),
    "labels": Format(_labelled, _labels),
}
