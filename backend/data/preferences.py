"""Preference formats: a chosen and a rejected completion of one prompt, or one completion with a label; and a prompt
with a completion as lists of turns.

Prompt and completions may each be a text, a turn or a list of turns, {role, content} or {from, value}. Without a prompt
column, two whole conversations share the turns that both begin with (TRL's implicit prompt).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.config import Data
from backend.data import chat
from backend.data.chat import Example, InvalidExample, Turns

# Columns that may contain a part, where no column is set: the first that exists is used.
PROMPTS = ("prompt", "conversations", "messages", "instruction", "question", "input")
COMPLETIONS = ("completion", "output", "response")
LABELS = ("label", "kto_tag")
MARGIN = "margin"  # the column of TRL's reward data with how much better the chosen completion is
NO_WEIGHTS = "remove the weight, which only SFT with the data format messages supports"
TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")


@dataclass(frozen=True)
class Format:
    """How examples of one preference format are detected and converted."""

    matches: Callable[[Example], bool]
    convert: Callable[[Example, Data], dict[str, Any]]


def usual_columns(example: Example, data: Data, format: str) -> dict[str, str]:
    """Option -> the column that is used: the one set in `data`, else the first usual one that `example` has."""
    prompt = {"prompt_column": _first(example, data.prompt_column, PROMPTS)}
    if format == "pairs":
        return {
            **prompt,
            "chosen_column": data.chosen_column or "chosen",
            "rejected_column": data.rejected_column or "rejected",
        }
    return {
        **prompt,
        "completion_column": _first(example, data.completion_column, COMPLETIONS),
        "label_column": _first(example, data.label_column, LABELS),
    }


def _pairs(example: Example, data: Data) -> dict[str, Any]:
    """{"prompt", "chosen", "rejected"}, each a list of turns, {"margin"} of an example that has one, and
    {"unused_prompt"} with the name of a prompt column that is not used."""
    names = data.chosen_column or "chosen", data.rejected_column or "rejected"
    chat.require_columns(example, names)
    chosen, rejected = (_completion(example, name) for name in names)
    if chosen[0]["role"] != "assistant" and rejected[0]["role"] != "assistant":
        shared = _shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not prompt:
            raise InvalidExample(f"columns {names[0]} and {names[1]} begin with different prompts")
        unused = _unused_prompt(example, data, [*prompt, *chosen, *rejected])
    else:
        prompt, unused = _prompt(example, data), ""
    for name, completion in zip(names, (chosen, rejected), strict=True):
        if completion[0]["role"] != "assistant":
            raise InvalidExample(
                f"column {name} begins with a {completion[0]['role']} turn after the prompt; expected an assistant turn"
            )
    return {
        "prompt": _with_system_prompt(prompt, example, data),
        "chosen": chosen,
        "rejected": rejected,
        **_margin(example),
        **chat.variables(example),
        **({"unused_prompt": unused} if unused else {}),
    }


def _unused_prompt(example: Example, data: Data, conversations: Turns) -> str:
    """The prompt column of an example whose completions are whole conversations, if it has a text that these lack; ''
    if it has none."""
    try:
        turns = _prompt(example, data)
    except InvalidExample:
        return ""
    contents = {str(turn["content"]).strip() for turn in conversations}
    name = _first(example, data.prompt_column, PROMPTS)
    return "" if contents.issuperset(str(turn["content"]).strip() for turn in turns) else name


def _margin(example: Example) -> dict[str, float]:
    """{"margin"} of an example that has one; {} if it is missing."""
    given = example.get(MARGIN)
    if given in (None, ""):
        return {}
    try:
        value = float(given)
    except (TypeError, ValueError, OverflowError):
        expected = "expected a number, such as 0.5 (or rename the column)"
        raise InvalidExample(f"column {MARGIN} contains {_shown(given)}; {expected}") from None
    return {MARGIN: value} if math.isfinite(value) else {}  # NaN: a missing value of a Parquet file


def _labels(example: Example, data: Data) -> dict[str, Any]:
    """{"prompt", "completion", "label"}: two lists of turns, and whether the completion is desirable."""
    label = _first(example, data.label_column, LABELS)
    chat.require_columns(example, [label])
    column = _first(example, data.completion_column, COMPLETIONS)
    prompt = _prompt(example, data)
    if column in example:
        completion = _completion(example, column)
    elif data.completion_column or prompt[-1]["role"] != "assistant":
        raise InvalidExample(
            f"has no column {column}, and its prompt does not end with an assistant turn; its columns are: "
            f"{chat.column_names(example)}"
        )
    else:
        prompt, completion = prompt[:-1], _with_loss(prompt[-1:], _first(example, data.prompt_column, PROMPTS))
    if completion[0]["role"] != "assistant":
        raise InvalidExample(f"column {column} begins with a {completion[0]['role']} turn; expected an assistant turn")
    if not prompt:
        raise InvalidExample("has a completion but no prompt")
    desirable = _label(example[label], label)
    return {
        "prompt": _with_system_prompt(prompt, example, data),
        "completion": completion,
        "label": desirable,
        **chat.variables(example),
    }


def prompt_and_completion(example: Example, prompt_column: str, column: str, data: Data) -> dict[str, Any]:
    """{"prompt", "completion"}, two lists of turns, of TRL's conversational prompt-completion format."""
    prompt, completion = _turns(example, prompt_column, "user"), _completion(example, column)
    if completion[0]["role"] != "assistant":
        raise InvalidExample(f"column {column} begins with a {completion[0]['role']} turn; expected an assistant turn")
    return {
        "prompt": _with_system_prompt(prompt, example, data),
        "completion": completion,
        **chat.variables(example),
    }


def unpair(converted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A converted example as labeled completions: the chosen one of a pair is desirable, the rejected one is not."""
    if "chosen" not in converted:
        return [dict(converted)]
    names = ("prompt", *chat.VARIABLES, "unused_columns", "unused_prompt", "unused_system")
    shared = {key: converted[key] for key in names if key in converted}
    return [{**shared, "completion": converted[name], "label": name == "chosen"} for name in ("chosen", "rejected")]


def _shared(one: Turns, other: Turns) -> int:
    """The number of turns that both conversations begin with; at least one turn of each is left as its completion."""
    most = min(len(one), len(other)) - 1
    return next((n for n in range(most) if _words(one[n]) != _words(other[n])), most)


def _words(turn: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a model reads of a turn, without what describes the turn."""
    calls = [call["function"] for call in turn.get("tool_calls", ())]  # without their ids
    return (calls, *(turn.get(key) for key in ("role", "content", "name", *chat.REASONING)))


def _with_system_prompt(prompt: Turns, example: Example, data: Data) -> Turns:
    return chat.with_system_prompt(prompt, chat.system_prompt(example, data))


def _prompt(example: Example, data: Data) -> Turns:
    name = _first(example, data.prompt_column, PROMPTS)
    if name not in example:
        expected = data.prompt_column or "prompt"
        raise InvalidExample(f"has no prompt column {expected}; its columns are: {chat.column_names(example)}")
    if name == "instruction":
        return chat.alpaca_prompt(example, name)
    return _turns(example, name, "user")


def _completion(example: Example, name: str) -> Turns:
    return _with_loss(_turns(example, name, "assistant"), name)


def _with_loss(turns: Turns, column: str) -> Turns:
    """The turns of a completion in a column. Raises InvalidExample if one has no loss."""
    if any(turn.get("train") is False for turn in turns):
        raise InvalidExample(f"column {column} has a turn with a weight of 0; {NO_WEIGHTS}")
    return turns


def _turns(example: Example, name: str, role: str) -> Turns:
    """The turns in a column; a text is one turn of `role`."""
    if isinstance(example[name], list) or chat.turn_format_of(example[name]):
        turns = chat.conversation(example, name)
        if chat.has_loss_weights(turns):
            raise InvalidExample(f"column {name} has a turn with a weight; {NO_WEIGHTS}")
        return turns
    return [chat.turn(role, chat.required_text(example, name))]


def _first(example: Example, configured: str, usual: Sequence[str]) -> str:
    """The column that is set, else the first of the usual ones that exists, else the first one."""
    return configured or next((name for name in usual if example.get(name) is not None), usual[0])


def _label(value: Any, column: str) -> bool:
    text = _label_text(value)
    if text not in TRUE + FALSE:
        raise InvalidExample(_wrong_label(value, column))
    return text in TRUE


def _wrong_label(value: Any, column: str) -> str:
    return f"column {column} contains {'null' if value is None else _shown(value)}; expected true or false"


def _shown(value: Any) -> str:
    """The beginning of a value of a column, for a message."""
    return repr(chat.shorten(value)) if isinstance(value, str) else chat.shorten(value)


def _label_text(value: Any) -> str:
    """A label as one of TRUE or FALSE where it is one; CSV and Parquet files may contain 1.0 and 0.0."""
    return str(value).strip().lower().removesuffix(".0")


def _is_labeled(example: Example) -> bool:
    label = example.get(_first(example, "", LABELS))
    has_prompt = any(name in example for name in PROMPTS)
    return has_prompt and _label_text(label) in TRUE + FALSE


def has_completion(example: Example) -> bool:
    """Whether an example has a column with a completion, or a conversation, which may end with one."""
    prompt = example.get(_first(example, "", PROMPTS))
    return any(name in example for name in COMPLETIONS) or bool(chat.turn_format_of(prompt))


def label_problem(example: Example) -> str:
    """Why an example that has a prompt, a completion and a label column is not labeled data, as the end of a sentence;
    '' if it is something else."""
    has_parts = any(name in example for name in PROMPTS) and any(name in example for name in COMPLETIONS)
    column = _first(example, "", LABELS)
    if not has_parts or column not in example or _is_labeled(example):
        return ""
    return _wrong_label(example[column], column)


PREFERENCES: Mapping[str, Format] = {
    "pairs": Format(lambda example: "chosen" in example and "rejected" in example, _pairs),
    "labels": Format(_is_labeled, _labels),
}
