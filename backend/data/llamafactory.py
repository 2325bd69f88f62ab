"""How LLaMA-Factory reads examples: what it would leave out of one, or train on in its place, and the same example in a
form that it reads completely. Source: llamafactory 0.9.5 data/converter.py and data/processor/*.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from backend.config import Data
from backend.data import chat
from backend.data.chat import Example
from backend.data.compression import is_compressed, open_text
from backend.data.formats import required_columns, to_text
from backend.data.preferences import PREFERENCES, unpair, usual_columns
from backend.data.reading import DataFileError, column_separator

DIFFERENCE = "llamafactory: "  # begins the key of a difference in the counts of examples
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[Tt]rue|[Ff]alse|TRUE|FALSE")
NAMES = {  # option for a column -> LLaMA-Factory's name of the column
    "messages_column": "messages", "prompt_column": "prompt", "completion_column": "response", "text_column": "prompt",
    "chosen_column": "chosen", "rejected_column": "rejected", "label_column": "kto_tag",
}  # fmt: skip
BEGINNING = 64 * 1024  # characters of a JSON file
CALL, TOOLS = "function_call", "tools"
ALPACA = ("input", "history")  # columns besides those that have options
FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")  # endings that extras/constants.py knows, in these letters
# Cells of a CSV file that pandas, and so `datasets`, reads as missing values.
MISSING = frozenset({
    "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA", "NULL",
    "NaN", "None", "n/a", "nan", "null",
})  # fmt: skip
# Roles of the turns of a conversation, which alternate after an optional system prompt; examples with any other order
# are left out.
PROMPTS = {"messages": ("user", "tool"), "sharegpt": ("human", "observation")}
REPLIES = {"messages": ("assistant", CALL), "sharegpt": ("gpt", CALL)}


def unread_file(path: Path) -> str:
    """The kind of a file that LLaMA-Factory does not read, and what to do with it; '' if it reads the file, or
    it cannot be read at all."""
    ending = path.suffix
    if not path.is_file():
        return ""
    if is_compressed(path):
        return "compressed files; decompress"
    if ending not in FILES:
        return f"files whose names end in {ending}; {'rename' if ending.lower() in FILES else 'convert to .jsonl'}"
    try:
        if ending == ".csv" and column_separator(path) != ",":
            return "CSV files whose columns are not separated by commas; convert to .jsonl"
        if ending == ".json" and _has_key(path):
            return "JSON files whose list is under a key; convert to .jsonl"
    except (DataFileError, OSError, UnicodeDecodeError):
        pass
    return ""


def _has_key(path: Path) -> bool:
    """Whether a JSON file has its list under a key, by its beginning: the check for each preview must not read all of
    it. A first object that is complete there is an example, one per line."""
    with open_text(path) as file:
        beginning = file.read(BEGINNING).lstrip()
    if beginning[:1] != "{":
        return False
    try:
        first, _ = json.JSONDecoder().raw_decode(beginning)
    except (ValueError, RecursionError):
        return True
    return isinstance(first.get("data"), list)


def form(example: Example, format: str, data: Data) -> str:
    """How LLaMA-Factory reads examples like this one: alpaca (columns with texts), messages or sharegpt (turns with
    these keys); '' if it has no form for them. It reads preferences if prompt and completions are texts, if one chosen
    and one rejected turn follow a conversation, or if a labeled completion is the last turn of a conversation."""
    if format not in PREFERENCES:
        return format if format in chat.KEYS else "alpaca"
    cells = {option: example.get(name) for option, name in usual_columns(example, data, format).items()}
    prompt = cells.pop("prompt_column")
    if not isinstance(cells.pop("label_column", True), bool):
        return ""
    completions = list(cells.values())
    if all(isinstance(part, str) for part in (prompt, *completions)):
        return "" if any(map(chat.turn_format_of, (prompt, *completions))) else "alpaca"
    if not isinstance(prompt, list) or not prompt:
        return ""
    follow = completions if format == "pairs" else []
    is_whole = all(isinstance(part, Mapping) for part in follow) and (format == "pairs" or completions == [None])
    styles = {chat.turn_format_of(part) for part in (prompt, *follow)} if is_whole else {""}
    return styles.pop() if len(styles) == 1 else ""


def columns(example: Example, format: str, data: Data, read: str) -> dict[str, str]:
    """LLaMA-Factory's name -> column, of what it needs of examples like this one, whose `form` is `read`."""
    if format not in PREFERENCES:
        return {NAMES[option]: column for option, column in required_columns(data, format).items()}
    names = NAMES | ({"prompt_column": "messages"} if read in chat.KEYS else {})
    found = usual_columns(example, data, format)
    return {names[option]: column for option, column in found.items() if column in example}


def difference(example: Example, format: str, data: Data, first: Example, path: Path) -> str:
    """What LLaMA-Factory does not read in a valid example of a file, as words after "In 3 examples, "; '' if it reads
    all of it. `first`: the first example of the file, whose columns and form it is told to read."""
    if not (read := form(first, format, data)):
        return ""  # none of the examples is read
    required = columns(first, format, data, read)
    if format in PREFERENCES and (
        form(example, format, data) != read or columns(example, format, data, read) != required
    ):
        return "the prompt and the completions are in other columns, or of other types, than in the first example"
    optional = (TOOLS, data.system_column, *(ALPACA if is_alpaca(required.values(), format) else ()))
    cells = (example.get(name) for name in (*required.values(), *optional))
    if path.suffix == ".csv" and any(map(_is_no_text, cells)):
        return "a cell of the CSV file, such as 12, True or NA, may not be read as text"
    if format == "text":
        return ""
    return _of_columns(example, first, optional) or _of_parts(example, read, required, ALPACA[1] in optional)


def is_alpaca(required: Iterable[str], format: str) -> bool:
    """Whether the prompt also consists of the columns input and history. `required`: the columns of the examples."""
    return format == "alpaca" or (format in PREFERENCES and "instruction" in required)


def _is_no_text(cell: Any) -> bool:
    """Whether pandas may read a cell of a CSV file as something else than text: it decides for each column, and
    LLaMA-Factory leaves out examples whose completion is no text."""
    return isinstance(cell, str) and (cell in MISSING or NUMBER.fullmatch(cell.strip()) is not None)


def _of_columns(example: Example, first: Example, optional: Iterable[str]) -> str:
    """What is not read next to prompts and completions. `optional`: columns that are read if the first example has
    them."""
    if late := next((name for name in optional if name and example.get(name) and name not in first), ""):
        return f"the column {late} has a value, and the first example does not have this column"
    used = chat.variables(example)
    if TOOLS in used and not isinstance(example.get(TOOLS), str):
        return "the tools are not JSON text in a column named tools"
    return "there are variables of the chat template" if used.keys() - {TOOLS} else ""


def _of_parts(example: Example, read: str, required: Mapping[str, str], with_history: bool) -> str:
    """What is not read of prompts and completions in the columns `required`, in the form `read`."""
    parts = {name: example[column] for name, column in required.items() if name != "kto_tag"}
    if read in chat.KEYS:
        own = parts.pop("messages")
        ends = [[*own, part] for part in parts.values()] or [own]
        return next(filter(None, (_of_turns(turns, read) for turns in ends)), "")
    if any(isinstance(example.get(key), str) and example[key] for key in chat.REASONING):
        return "the reasoning is in a column of its own"
    if with_history and not isinstance(example.get("history") or [], list):
        return "the history is not a list"
    return "" if all(isinstance(part, str) for part in parts.values()) else "prompt and completion are not both texts"


def _of_turns(turns: Any, format: str) -> str:
    """What is not read in a conversation."""
    role, content = chat.KEYS[format]
    if not isinstance(turns, list):
        return "the conversation is not a list"
    turns = turns[1:] if turns[0].get(role) == "system" else turns
    if any(turn.get("tool_calls") or isinstance(turn.get(CALL), Mapping) for turn in turns):
        return "a turn has tool calls in a key of its own"
    if any(turn.get(key) for turn in turns for key in chat.REASONING):
        return "a turn has its reasoning in a key of its own"
    if not all(isinstance(turn.get(content), str) for turn in turns):
        return "the content of a turn is not a text"
    sides = PROMPTS[format], REPLIES[format]
    if len(turns) % 2 or any(turn[role] not in sides[number % 2] for number, turn in enumerate(turns)):
        return f"turns of {sides[0][0]} and {sides[1][0]} do not alternate"
    return ""


def as_read(value: Mapping[str, Any], stage: str) -> list[dict[str, Any]]:
    """A converted example as the lines of a file that LLaMA-Factory reads completely; none if there is no such form."""
    if stage == "pretraining":
        return [{"text": to_text(value)}]
    lines = [_line(part) for part in (unpair(value) if stage == "kto" else [value])]
    return [line for line in lines if line]


def _line(value: Mapping[str, Any]) -> dict[str, Any]:
    """A conversation with one completion, with a label, or with a chosen and a rejected one; {} if it has none."""
    parts = {name: value[name] for name in ("chosen", "rejected") if name in value}
    if any(len(part) > 1 for part in (*parts.values(), value.get("completion", ()))):
        return {}
    own = value.get("messages") or [*value["prompt"], *value.get("completion", ())]
    ends = ([*own, part[0]] for part in parts.values()) if parts else [own]
    if set(chat.VARIABLES[1:]) & value.keys() or any(map(_unread, map(_turns, ends))):
        return {}
    line: dict[str, Any] = {"messages": _turns(own)}
    line |= {name: _turns(part)[0] for name, part in parts.items()}
    line |= {"kto_tag": value["label"]} if "label" in value else {}
    return {**line, TOOLS: json.dumps(value[TOOLS], ensure_ascii=False)} if TOOLS in value else line


def _unread(turns: list[dict[str, Any]]) -> bool:
    return bool(_of_turns(turns, "messages"))


def _turns(turns: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [_turn(turn) for turn in turns]


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A converted turn: role and content, and what cannot be expressed by them. Weights are reported elsewhere."""
    reasoning = {key: turn[key] for key in chat.REASONING if turn.get(key)}
    calls = [_call(call["function"]) for call in turn.get("tool_calls", ())]
    if calls and not turn["content"].strip():
        return {"role": CALL, "content": json.dumps(calls if len(calls) > 1 else calls[0], ensure_ascii=False)}
    return {"role": turn["role"], "content": turn["content"], **reasoning, **({"tool_calls": calls} if calls else {})}


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments", function.get("parameters"))
    return {"name": function["name"], "arguments": chat.parse_json(arguments)}


def columns_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """LLaMA-Factory's names of the columns of these lines."""
    names = {name for line in lines for name in line}
    return {"prompt": "text"} if "text" in names else {name: name for name in sorted(names)}


def is_read(stage: str, format: str) -> bool:
    """Whether LLaMA-Factory reads examples of a format as they are, if they have one of its forms. It reads labeled
    completions for KTO only, and of a conversation in pretraining only the first turn."""
    if format in PREFERENCES:
        return (stage == "kto") == (format == "labels")
    return stage != "pretraining" or format == "text"
