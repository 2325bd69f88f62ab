"""Data formats with one completion: all except plain text are converted to {"messages": [{"role", "content"}, ...]},
or to {"prompt", "completion"} where both are lists of turns.

DEFAULTS: format -> column option -> the column's usual name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from backend.config import Data
from backend.data import chat
from backend.data.chat import Example, InvalidExample, Turns
from backend.data.preferences import PREFERENCES, has_completion, label_problem, prompt_and_completion

DEFAULTS = {
    "messages": {"messages_column": "messages"},
    "sharegpt": {"messages_column": "conversations"},
    "alpaca": {"prompt_column": "instruction", "completion_column": "output"},
    "prompt_completion": {"prompt_column": "prompt", "completion_column": "completion"},
    "text": {"text_column": "text"},
}

UNKNOWN_COLUMNS = "has columns that match no data format"


def detect_format(example: Example, preferred: Iterable[str] = ()) -> str | None:
    """The format of `example` by its column names and value types. `preferred` formats, those that the stage accepts,
    are tried first; None if none matches."""
    preferred = tuple(preferred)
    if "labels" in preferred and label_problem(example):
        return None  # not a prompt with a completion: the label is wrong
    formats = dict.fromkeys((*preferred, *PREFERENCES, *DEFAULTS))
    if "labels" not in preferred and not has_completion(example):  # a label of something else, such as a class
        del formats["labels"]
    return next((format for format in formats if _matches(example, format)), None)


def detection_problem(example: Example, formats: Iterable[str]) -> str:
    """Why `detect_format` finds no format; `formats` are those that the stage accepts."""
    label = label_problem(example) if "labels" in formats else ""
    columns = chat.column_names(example, with_types=True)
    return label or f"{UNKNOWN_COLUMNS} ({columns})"


def _matches(example: Example, format: str) -> bool:
    if format in PREFERENCES:
        return PREFERENCES[format].matches(example)
    names = DEFAULTS[format]
    if format in chat.KEYS:
        found = chat.parse_json(example.get(names["messages_column"]))
        return isinstance(found, list) and chat.turn_format_of(found) == format
    if format == "prompt_completion" and None not in map(example.get, names.values()) and _has_turns(example, names):
        return True
    return all(isinstance(example.get(column), str) for column in names.values())


def _has_turns(example: Example, names: Mapping[str, str]) -> bool:
    """Whether prompt or completion is a list of turns (TRL's conversational format). Texts are turns only if both are:
    a single text may be JSON that the model reads or writes."""
    parts = [example[name] for name in names.values()]
    found = [part for part in parts if chat.turn_format_of(part)]
    return len(found) == len(parts) or any(not isinstance(part, str) for part in found)


def required_columns(data: Data, format: str) -> dict[str, str]:
    """Option -> the column that an example of `format` must have: the one set in `data`, or the usual one."""
    return {option: getattr(data, option) or usual for option, usual in DEFAULTS[format].items()}


def example_problem(example: Example, format: str, data: Data) -> str | None:
    """Why `example` is not a valid example of `format`; None if it is valid."""
    try:
        convert(example, format, data)
    except InvalidExample as error:
        return str(error)
    return None


def convert(example: Example, format: str, data: Data) -> dict[str, Any]:
    """{"text"} for plain text; {"prompt"} with {"chosen", "rejected"} or {"completion", "label"} for preferences, with
    {"completion"} for lists of turns; else {"messages"}; and those of chat.VARIABLES that the example has,
    "unused_columns" with weights that no loss uses, and "unused_system". Raises InvalidExample."""
    found = _convert(example, format, data)
    found |= chat.unused_system(example, found.get("messages") or found.get("prompt") or [], data)
    chat.check_encodable(found)
    used = (data.prompt_column, data.completion_column, data.messages_column, data.text_column)
    weights = chat.EXAMPLE_WEIGHTS if format in chat.KEYS else (*chat.EXAMPLE_WEIGHTS, chat.LOSS_MASK)
    unused = chat.unused_weights(example, (name for name in weights if name not in used))
    return {**found, "unused_columns": unused} if unused else found


def _convert(example: Example, format: str, data: Data) -> dict[str, Any]:
    if not isinstance(example, Mapping):
        raise InvalidExample(f"is {chat.type_name(example)}; expected an object with named columns")
    chat.refuse_media(example)
    if format in PREFERENCES:
        return PREFERENCES[format].convert(example, data)
    names = required_columns(data, format)
    chat.require_columns(example, names.values())
    if format == "text":
        return {"text": chat.required_text(example, names["text_column"])}
    if format == "prompt_completion" and _has_turns(example, names):
        return prompt_and_completion(example, names["prompt_column"], names["completion_column"], data)
    found = _CONVERSATIONS[format](example, names)
    if not any(turn["role"] == "assistant" for turn in found):
        raise InvalidExample("has no assistant turn, so there is no completion to train on")
    return {"messages": chat.with_system_prompt(found, chat.system_prompt(example, data)), **chat.variables(example)}


def to_text(converted: Example) -> str:
    """A converted example as plain text, for pretraining: the content of its turns, separated by blank lines."""
    if "text" in converted:
        return str(converted["text"])
    turns = converted["messages"] if "messages" in converted else [*converted["prompt"], *converted["completion"]]
    return "\n\n".join(turn["content"] for turn in turns if turn["content"])


def _turns(example: Example, names: Mapping[str, str], turn_format: str) -> Turns:
    return chat.with_loss_mask(chat.conversation(example, names["messages_column"], turn_format), example)


def _prompt_completion(example: Example, names: Mapping[str, str]) -> Turns:
    return [chat.turn("user", chat.required_text(example, names["prompt_column"])), _completion(example, names)]


def _alpaca(example: Example, names: Mapping[str, str]) -> Turns:
    return [*chat.alpaca_prompt(example, names["prompt_column"]), _completion(example, names)]


def _completion(example: Example, names: Mapping[str, str]) -> dict[str, Any]:
    reasoning = {key: example[key] for key in chat.REASONING if isinstance(example.get(key), str) and example[key]}
    return {**chat.turn("assistant", chat.required_text(example, names["completion_column"])), **reasoning}


_CONVERSATIONS: Mapping[str, Callable[[Example, Mapping[str, str]], Turns]] = {
    "messages": lambda example, names: _turns(example, names, "messages"),
    "sharegpt": lambda example, names: _turns(example, names, "sharegpt"),
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
}
