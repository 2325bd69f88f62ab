"""Rows with one answer: every format but plain text becomes {"messages": [{"role", "content"}, ...]}.

Floor 1. Imports spec, turns, preferences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from backend.config import Data
from backend.data import chat
from backend.data.chat import Row, Turns, Unfit
from backend.data.preferences import PREFERENCES

DEFAULTS = {
    "messages": {"messages_column": "messages"},
    "sharegpt": {"messages_column": "conversations"},
    "alpaca": {"prompt_column": "instruction", "completion_column": "output"},
    "prompt_completion": {"prompt_column": "prompt", "completion_column": "completion"},
    "text": {"text_column": "text"},
}


def recognise(row: Row, wanted: Iterable[str] = ()) -> str | None:
    """The format of `row` from its column names and value types, tried in the order of `wanted`, then the others; None
    if it is none of ours."""
    every = dict.fromkeys((*wanted, *PREFERENCES, *DEFAULTS))
    return next((format for format in every if _is(row, format)), None)


def _is(row: Row, format: str) -> bool:
    if format in PREFERENCES:
        return PREFERENCES[format].seen(row)
    names = DEFAULTS[format]
    if format in chat.KEYS:
        found = chat.unpacked(row.get(names["messages_column"]))
        return isinstance(found, list) and chat.layout_of(found) == format
    return all(isinstance(row.get(column), str) for column in names.values())


def columns(data: Data, format: str) -> dict[str, str]:
    """Option -> the column that a row of `format` must have: the one that `data` names, or the usual one."""
    return {option: getattr(data, option) or usual for option, usual in DEFAULTS[format].items()}


def problem(row: Row, format: str, data: Data) -> str | None:
    """What is wrong with `row` as a row of `format`, in a sentence; None if it can be learned from."""
    try:
        convert(row, format, data)
    except Unfit as error:
        return str(error)
    return None


def convert(row: Row, format: str, data: Data) -> dict[str, Any]:
    """{"text"} for plain text; {"prompt"} with {"chosen", "rejected"} or {"completion", "label"} for preferences; else
    {"messages"}; and "tools" where the row brings some. Raises Unfit."""
    if not isinstance(row, Mapping):
        raise Unfit(f"is {chat.kind(row)} and no row: a row has named columns")
    if format in PREFERENCES:
        return PREFERENCES[format].convert(row, data)
    names = columns(data, format)
    chat.need(row, names.values())
    if format == "text":
        return {"text": chat.text(row, names["text_column"])}
    found = _CONVERSATIONS[format](row, names)
    if not any(turn["role"] == "assistant" for turn in found):
        raise Unfit("has no turn of the assistant, so there is no answer to learn")
    system = chat.optional(row, "system") if format != "messages" else ""
    return {"messages": chat.opened(found, system or data.system_prompt), **chat.tools(row)}


def plain(converted: Row) -> str:
    """A converted row as plain text, for pre-training: what was said, blank lines between the turns."""
    if "text" in converted:
        return str(converted["text"])
    return "\n\n".join(turn["content"] for turn in converted["messages"] if turn["content"])


def _pair(row: Row, names: Mapping[str, str]) -> Turns:
    return [chat.said("user", chat.text(row, names["prompt_column"])), _answer(row, names)]


def _alpaca(row: Row, names: Mapping[str, str]) -> Turns:
    return [*chat.instruction(row, names["prompt_column"]), _answer(row, names)]


def _answer(row: Row, names: Mapping[str, str]) -> dict[str, Any]:
    return chat.said("assistant", chat.text(row, names["completion_column"]))


_CONVERSATIONS: Mapping[str, Callable[[Row, Mapping[str, str]], Turns]] = {
    "messages": lambda row, names: chat.talk(row, names["messages_column"], "messages"),
    "sharegpt": lambda row, names: chat.talk(row, names["messages_column"], "sharegpt"),
    "alpaca": _alpaca,
    "prompt_completion": _pair,
}
