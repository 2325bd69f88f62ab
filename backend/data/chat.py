"""Turns and texts of a row, checked: what is wrong is one plain sentence. Floor 1. Imports nothing of ours."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
Turns = list[dict[str, Any]]
ROLES = {
    "messages": {
        "system": "system",
        "developer": "system",
        "user": "user",
        "assistant": "assistant",
        "tool": "tool",
        "function": "tool",
    },
    "sharegpt": {
        "system": "system",
        "human": "user",
        "user": "user",
        "gpt": "assistant",
        "assistant": "assistant",
        "function_call": "assistant",
        "observation": "tool",
        "tool": "tool",
    },
}
KEYS = {"messages": ("role", "content"), "sharegpt": ("from", "value")}


class Unfit(ValueError):
    """A row that is not of its format, in one plain sentence."""


def said(role: str, content: str) -> dict[str, Any]:
    """One turn."""
    return {"role": role, "content": content}


def talk(row: Row, column: str, layout: str = "") -> Turns:
    """The turns in a column, written as `layout` (a key of KEYS; empty: as the first turn is). Raises Unfit."""
    found = unpacked(row[column])
    if isinstance(found, Mapping) and not layout:
        found = [found]  # one answer
    if not isinstance(found, list):
        raise Unfit(f"column {column} holds {kind(found)} instead of a list of turns")
    if not found:
        raise Unfit(f"column {column} holds no turn")
    layout = layout or layout_of(found) or "messages"
    return [_turn(turn, number, layout) for number, turn in enumerate(found, 1)]


def layout_of(value: Any) -> str:
    """messages or sharegpt, by the keys of the first of several turns (or of one); empty if it is neither."""
    value = unpacked(value)
    first = value[0] if isinstance(value, list) and value else value
    named = (name for name, keys in KEYS.items() if isinstance(first, Mapping) and keys[0] in first)
    return next(named, "")


def _turn(turn: Any, number: int, layout: str) -> dict[str, Any]:
    who, what = KEYS[layout]
    if not isinstance(turn, Mapping):
        raise Unfit(f"turn {number} is {kind(turn)} instead of {{{who}, {what}}}")
    if who not in turn:
        raise Unfit(f"turn {number} has no {who}; its keys are: {', '.join(str(key) for key in turn)}")
    name, roles = str(turn[who]), ROLES[layout]
    if name not in roles:
        raise Unfit(f"turn {number} has the unknown role {name!r}; known are {', '.join(roles)}")
    role, calls = roles[name], turn.get("tool_calls")
    if name == "function_call":
        calls = _calls(turn.get(what), number)
    content = "" if name == "function_call" else _content(turn.get(what), number, what)
    if role == "assistant" and not content.strip() and not calls:
        raise Unfit(f"turn {number} is an empty answer")
    more = {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key)}
    return {**said(role, content), **({"tool_calls": calls} if calls else {}), **more}


def _calls(value: Any, number: int) -> list[dict[str, Any]]:
    """ShareGPT's function_call: one call, or a list of them, as JSON."""
    found = unpacked(value)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise Unfit(f"turn {number} is a function_call without a name: it must be JSON with name and arguments")
    return [{"type": "function", "function": dict(call)} for call in calls]


def _content(value: Any, number: int, what: str) -> str:
    """Text, or OpenAI's list of text parts; None (beside tool calls) is empty."""
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        other = [str(part.get("type")) for part in value if part.get("type") != "text"]
        if other:
            raise Unfit(f"turn {number} has a part of type {other[0]}; only text can be learned")
        return "".join(str(part.get("text", "")) for part in value)
    if not isinstance(value, str):
        raise Unfit(f"turn {number}: {what} is {kind(value)} instead of text")
    return value


def instruction(row: Row, column: str) -> Turns:
    """Alpaca's question: history, then instruction and input. Raises Unfit."""
    turns = []
    history = unpacked(row.get("history")) or []
    if not isinstance(history, list):
        raise Unfit(f"column history holds {kind(history)} instead of pairs of question and answer")
    for pair in history:
        if not isinstance(pair, list | tuple) or [type(part) for part in pair] != [str, str]:
            raise Unfit("column history must hold pairs of question and answer")
        turns += [said("user", pair[0]), said("assistant", pair[1])]
    asked = [text(row, column), optional(row, "input")]
    return [*turns, said("user", "\n\n".join(part for part in asked if part))]


def opened(turns: Turns, system: str) -> Turns:
    """The turns behind a system prompt, unless they bring one."""
    return [said("system", system), *turns] if system and turns[0]["role"] != "system" else turns


def tools(row: Row) -> dict[str, Any]:
    """{"tools"} where the row brings some."""
    found = unpacked(row.get("tools"))
    return {"tools": found} if isinstance(found, list) and found else {}


def need(row: Row, names: Iterable[str]) -> None:
    """Raise Unfit naming the columns that are missing."""
    missing = [name for name in names if name not in row]
    if missing:
        raise Unfit(f"has no column {' and no column '.join(missing)}; the columns are: {listed(row)}")


def listed(row: Row) -> str:
    """The names of a row's columns."""
    return ", ".join(str(name) for name in row) or "none"


def text(row: Row, column: str) -> str:
    """A text that says something. Raises Unfit."""
    value = row[column]
    if not isinstance(value, str):
        raise Unfit(f"column {column} holds {kind(value)} instead of text")
    if not value.strip():
        raise Unfit(f"column {column} is empty")
    return value


def optional(row: Row, column: str) -> str:
    """A text that may be missing. Raises Unfit."""
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise Unfit(f"column {column} holds {kind(value)} instead of text")
    return value or ""


def unpacked(value: Any) -> Any:
    """A value, or what its JSON text holds: a CSV file can only hold text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def kind(value: Any) -> str:
    """The type of a value in a person's words."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    words = {
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        tuple: "a list",
        dict: "an object",
    }
    return words.get(type(value), f"a {type(value).__name__}")
