"""The data formats: how a row is read, recognised, checked, and turned into a conversation or a text.

Floor 1. Imports spec. Used by the training and by the glance before it: both say the same about a row.
Every format but plain text becomes {"messages": [{"role", "content"}, ...]}.
"""

from __future__ import annotations

import csv
import glob
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from backend.spec import Data

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
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
DEFAULTS = {
    "messages": {"messages_column": "messages"},
    "sharegpt": {"messages_column": "conversations"},
    "alpaca": {"prompt_column": "instruction", "completion_column": "output"},
    "prompt_completion": {"prompt_column": "prompt", "completion_column": "completion"},
    "text": {"text_column": "text"},
}


class RowError(ValueError):
    """What is wrong with a file, or with one row of it: `line` counts from 1, 0 means the whole file."""

    def __init__(self, path: str | Path, line: int, sentence: str) -> None:
        super().__init__(f"{path}, line {line}: {sentence}" if line else f"{path}: {sentence}")
        self.path, self.line, self.sentence = str(path), line, sentence


class Unfit(ValueError):
    """A row that is not of its format, in one plain sentence."""


def recognise(row: Row) -> str | None:
    """The format of `row` from its column names and value types; None if it is none of ours."""
    for format in ("messages", "sharegpt"):
        turns = _unpacked(row.get(DEFAULTS[format]["messages_column"]))
        first = turns[0] if isinstance(turns, list) and turns else None
        if isinstance(first, Mapping) and KEYS[format][0] in first:
            return format
    for format in ("alpaca", "prompt_completion", "text"):
        if all(isinstance(row.get(column), str) for column in DEFAULTS[format].values()):
            return format
    return None


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
    """{"text"} for plain text, else {"messages"} (and "tools" where the row brings some). Raises Unfit."""
    if not isinstance(row, Mapping):
        raise Unfit(f"is {_kind(row)} and no row: a row has named columns")
    names = columns(data, format)
    missing = [name for name in names.values() if name not in row]
    if missing:
        there = ", ".join(str(name) for name in row) or "none"
        raise Unfit(f"has no column {' and no column '.join(missing)}; the columns are: {there}")
    if format == "text":
        return {"text": _text(row, names["text_column"])}
    turns = _CONVERSATIONS[format](row, names)
    if not any(turn["role"] == "assistant" for turn in turns):
        raise Unfit("has no turn of the assistant, so there is no answer to learn")
    system = _optional(row, "system") if format != "messages" else ""
    if (system or data.system) and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system or data.system})
    tools = _unpacked(row.get("tools"))
    return {"messages": turns, **({"tools": tools} if isinstance(tools, list) and tools else {})}


def plain(converted: Row) -> str:
    """A converted row as plain text, for pre-training: what was said, blank lines between the turns."""
    if "text" in converted:
        return str(converted["text"])
    return "\n\n".join(turn["content"] for turn in converted["messages"] if turn["content"])


def _pair(row: Row, names: Mapping[str, str]) -> list[dict[str, Any]]:
    return [_turn("user", _text(row, names["prompt_column"])), _turn("assistant", _answer(row, names))]


def _alpaca(row: Row, names: Mapping[str, str]) -> list[dict[str, Any]]:
    turns = []
    history = _unpacked(row.get("history")) or []
    if not isinstance(history, list):
        raise Unfit(f"column history holds {_kind(history)} instead of pairs of question and answer")
    for pair in history:
        if not isinstance(pair, list | tuple) or [type(part) for part in pair] != [str, str]:
            raise Unfit("column history must hold pairs of question and answer")
        turns += [_turn("user", pair[0]), _turn("assistant", pair[1])]
    asked = [_text(row, names["prompt_column"]), _optional(row, "input")]
    question = "\n\n".join(part for part in asked if part)
    return [*turns, _turn("user", question), _turn("assistant", _answer(row, names))]


def _messages(row: Row, names: Mapping[str, str]) -> list[dict[str, Any]]:
    return _turns(row, names["messages_column"], "messages")


def _sharegpt(row: Row, names: Mapping[str, str]) -> list[dict[str, Any]]:
    return _turns(row, names["messages_column"], "sharegpt")


_CONVERSATIONS: Mapping[str, Callable[[Row, Mapping[str, str]], list[dict[str, Any]]]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _pair,
}


def _turns(row: Row, column: str, format: str) -> list[dict[str, Any]]:
    turns = _unpacked(row[column])
    if not isinstance(turns, list):
        raise Unfit(f"column {column} holds {_kind(turns)} instead of a list of turns")
    if not turns:
        raise Unfit(f"column {column} holds no turn")
    return [_one_turn(turn, number, format) for number, turn in enumerate(turns, 1)]


def _one_turn(turn: Any, number: int, format: str) -> dict[str, Any]:
    who, what = KEYS[format]
    if not isinstance(turn, Mapping):
        raise Unfit(f"turn {number} is {_kind(turn)} instead of {{{who}, {what}}}")
    if who not in turn:
        raise Unfit(f"turn {number} has no {who}; its keys are: {', '.join(str(key) for key in turn)}")
    said, roles = str(turn[who]), ROLES[format]
    if said not in roles:
        raise Unfit(f"turn {number} has the unknown role {said!r}; known are {', '.join(roles)}")
    role, calls = roles[said], turn.get("tool_calls")
    if said == "function_call":
        calls = _calls(turn.get(what), number)
    content = "" if said == "function_call" else _content(turn.get(what), number, what)
    if role == "assistant" and not content.strip() and not calls:
        raise Unfit(f"turn {number} is an empty answer")
    more = {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key)}
    return {**_turn(role, content), **({"tool_calls": calls} if calls else {}), **more}


def _calls(value: Any, number: int) -> list[dict[str, Any]]:
    """ShareGPT's function_call: one call, or a list of them, as JSON."""
    found = _unpacked(value)
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
        raise Unfit(f"turn {number}: {what} is {_kind(value)} instead of text")
    return value


def _turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _text(row: Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise Unfit(f"column {column} holds {_kind(value)} instead of text")
    if not value.strip():
        raise Unfit(f"column {column} is empty")
    return value


def _answer(row: Row, names: Mapping[str, str]) -> str:
    return _text(row, names["completion_column"])


def _optional(row: Row, column: str) -> str:
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise Unfit(f"column {column} holds {_kind(value)} instead of text")
    return value or ""


def _unpacked(value: Any) -> Any:
    """A value, or what its JSON text holds: a CSV file can only hold text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _kind(value: Any) -> str:
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


def expand(files: Iterable[str], base: Path | None = None) -> list[Path]:
    """The files that paths and shell patterns name, each once; relative ones lie below `base`."""
    found: dict[Path, None] = {}
    for name in files:
        pattern = str((base or Path()) / Path(name).expanduser())
        paths = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise RowError(name, 0, "no file matches" if glob.has_magic(name) else "no such file")
        found.update(dict.fromkeys(map(Path, paths)))
    return list(found)


def read_rows(path: Path, limit: int = 0) -> Iterator[tuple[int, Row]]:
    """(line number, row) of each row, at most `limit` of them (0: all). Raises RowError naming file and line.

    A row's line is the one it begins in; Parquet has no lines, there it is the row's number.
    """
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise RowError(path, 0, f"is of no kind that can be read; those are {', '.join(SUFFIXES)}")
    try:
        for count, (line, row) in enumerate(reader(path), 1):
            if not isinstance(row, Mapping):
                raise RowError(path, line, f"is {_kind(row)} and no row: a row is an object with named columns")
            yield line, row
            if count == limit:
                return
    except UnicodeDecodeError as error:
        raise RowError(path, 0, f"is not UTF-8 text (byte {error.start} of a part of it)") from None
    except OSError as error:
        raise RowError(path, 0, f"cannot be read: {error.strerror or error}") from None


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                yield line, json.loads(text)
            except ValueError as error:
                raise RowError(path, line, f"is no JSON: {_reason(error)}") from None


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """A list of rows, or {"data": [rows]}; walked element by element, so that each row's line is known."""
    text = path.read_text(encoding="utf-8-sig")
    begin = _LIST.match(text)
    if begin is None:
        raise RowError(path, 0, 'must hold a list of rows, or {"data": [rows]} (one object a line is .jsonl)')
    at, line, counted, more = begin.end(), 1, 0, False
    while text[at : at + 1] != "]" or more:
        line, counted = line + text.count("\n", counted, at), at
        try:
            row, at = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise RowError(path, error.lineno, f"is no JSON: {_reason(error)}") from None
        yield line, row
        at = _skip(text, at)
        more = text[at : at + 1] == ","
        if not more and text[at : at + 1] != "]":
            raise RowError(path, text.count("\n", 0, at) + 1, "is no JSON: a comma or ] is missing")
        at = _skip(text, at + 1) if more else at
    rest = _skip(text, at + 1)
    if "{" not in begin.group() and rest < len(text):
        raise RowError(path, text.count("\n", 0, rest) + 1, "is no JSON: something stands after the list")


_LIST = re.compile(r'\s*(\{\s*"data"\s*:\s*)?\[\s*')
_BLANK = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def _skip(text: str, at: int) -> int:
    """Where the blanks from `at` on end."""
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the usual limit of 128 kB is shorter than some answers
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        line = 2
        try:
            for row in reader:
                if None in row:
                    raise RowError(
                        path,
                        line,
                        f"has more cells than the {len(reader.fieldnames or ())} columns of line 1",
                    )
                yield line, row
                line = reader.line_num + 1
        except csv.Error as error:
            raise RowError(path, line, f"is no CSV: {error}") from None


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")  # only who reads such a file pays for it
    except ImportError:
        raise RowError(path, 0, "needs the package pyarrow: pip install pyarrow") from None
    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except ValueError as error:  # pyarrow's errors are ValueErrors
        raise RowError(path, 0, f"is no Parquet file: {error}") from None


def _reason(error: ValueError) -> str:
    """json's own words without the position, which stands before them already."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} (column {error.colno})"
    return str(error)
