"""Conversations and texts of an example, validated: a problem is an InvalidExample with a plain message."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from backend.config.data import RESERVED_KWARGS, Data

Example = Mapping[str, Any]
Turns = list[dict[str, Any]]
ROLES = {
    "messages": {
        "system": "system",
        "developer": "system",
        "user": "user",
        "assistant": "assistant",
        "tool": "tool",
        "function": "tool",
        "tool_call": "assistant",  # ms-swift's
        "tool_response": "tool",
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
CALL_ROLES = ("function_call", "tool_call")  # roles of turns whose content is a call, or a list of calls, as JSON
KEYS = {"messages": ("role", "content"), "sharegpt": ("from", "value")}
# Whether the loss includes a turn: OpenAI's and axolotl's weight, axolotl's train, and other tools' names for the same.
WEIGHTS, SWITCHES = ("weight", "loss_weight"), ("train", "training", "trainable", "loss")
LOSS_MASK = "loss_mask"  # a column with the weights of all turns
LOSS_WEIGHT = "loss_weight"  # key for the weight of a converted assistant turn; not for 0 (train is False) and 1
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0  # fp32 has 7 digits: with other weights, a part of the loss would be rounded off
VALID_WEIGHT = f"0 for no loss, or a weight from {MIN_WEIGHT:g} to {MAX_WEIGHT:,.0f}"
# Keys with facts about a turn that no model is trained on.
WITHOUT_MEANING = {
    "id", "_id", "uid", "uuid", "idx", "index", "turn", "turn_id", "turn_idx", "message_id", "parent_id", "hash",
    "source", "origin", "url", "score", "rating", "rank", "timestamp", "time", "created_at", "date", "lang", "language",
    "model", "num_tokens", "token_count", "metadata", "meta", "finish_reason", "refusal", "annotations", "synthetic",
}  # fmt: skip
READ = {key for keys in KEYS.values() for key in keys} | {"tool_calls", "function_call", "name", "tool_call_id"}
# Columns with weights of a whole example, or masks in a form that no loss in Footplate supports.
EXAMPLE_WEIGHTS = ("weight", "weights", "loss_weight", "sample_weight", "mask", "masks", "train_on_turn")
# Prefixes of the names of such columns in the counts of unused parts.
COLUMN, PROMPT_COLUMN, SYSTEM_TEXT = "the weights in column ", "the prompt in column ", "the system prompt in column "
TEMPLATE_KWARGS = "chat_template_kwargs"  # TRL's column with variables of the chat template
VARIABLES = ("tools", "documents", TEMPLATE_KWARGS)  # keys of a converted example that the chat template reads
REASONING = ("reasoning_content", "reasoning", "thinking")  # keys for what a model thinks before it answers
MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
MEDIA_FILE = re.compile(r".+\.(jpe?g|png|webp|gif|bmp|tiff?|mp4|mkv|webm|avi|mov|wav|mp3|flac|ogg|m4a)", re.IGNORECASE)
PLACEHOLDER = re.compile(r"<(image|video|audio)>|<\|?(image|video|audio|vision)_?(pad|start)?\|?>")
MAX_COLUMNS, MAX_SHOWN = 10, 60  # columns, and characters of a value, that a message shows
MAX_LEVELS = 100  # nesting of tools and tool calls; transformers' renderer is recursive


class InvalidExample(ValueError):
    """An example that does not match its data format. The message completes "FILE, line N: "."""


def turn(role: str, content: str) -> dict[str, Any]:
    """One turn of a conversation."""
    return {"role": role, "content": content}


def conversation(example: Example, column: str, turn_format: str = "") -> Turns:
    """The turns in a column, in `turn_format` (a key of KEYS; '': by its first turn). Raises InvalidExample."""
    found = parse_json(example[column])
    if isinstance(found, Mapping) and not turn_format:
        found = [found]  # a single turn
    if not isinstance(found, list):
        raise InvalidExample(f"column {column} contains {type_name(found)}; expected a list of turns")
    if not found:
        raise InvalidExample(f"column {column} is an empty list; expected at least one turn")
    turn_format = turn_format or turn_format_of(found) or "messages"
    return [_turn(item, number, turn_format) for number, item in enumerate(found, 1)]


def turn_format_of(value: Any) -> str:
    """messages or sharegpt, by the keys of a turn or of the first turn of a list; '' if it is neither. JSON in a text
    is a turn only with a known role: completions may be JSON objects with any keys."""
    found = parse_json(value)
    first = found[0] if isinstance(found, list) and found else found
    if not isinstance(first, Mapping):
        return ""
    for name, (role, content) in KEYS.items():
        if role in first and (not isinstance(value, str) or (content in first and str(first[role]) in ROLES[name])):
            return name
    return ""


def _turn(value: Any, number: int, turn_format: str) -> dict[str, Any]:
    role_key, content_key = KEYS[turn_format]
    if not isinstance(value, Mapping):
        raise InvalidExample(f"turn {number} is {type_name(value)}; expected an object {{{role_key}, {content_key}}}")
    if role_key not in value:
        raise InvalidExample(f"turn {number} has no key {role_key}; its keys are {column_names(value)}")
    name, roles = value[role_key], ROLES[turn_format]
    if not isinstance(name, str) or name not in roles:
        shown = f"unknown role {shorten(name)!r}" if isinstance(name, str) else f"role {type_name(name)}"
        raise InvalidExample(f"turn {number} has the {shown}; supported roles are {', '.join(roles)}")
    role = roles[name]
    is_call = name in CALL_ROLES
    calls = _calls(value.get(content_key), number) if is_call else _tool_calls(value, number)
    if not calls and role == "assistant" and value.get("function_call"):  # OpenAI's earlier form of a call
        calls = _calls(value["function_call"], number)
    if content_key not in value and not calls:
        raise InvalidExample(f"turn {number} has no key {content_key}; its keys are {column_names(value)}")
    if role == "user" and value.get(content_key) is None:
        raise InvalidExample(f"the {content_key} of turn {number} is null; expected text")
    content = "" if is_call else _content(value.get(content_key), number, content_key)
    if role == "assistant" and not content.strip() and not calls:
        raise InvalidExample(f"turn {number} is an empty assistant turn")
    more = {key: value[key] for key in ("name", "tool_call_id") if value.get(key)}
    return {**turn(role, content), **({"tool_calls": calls} if calls else {}), **more, **_more(value, role, number)}


def _more(value: Mapping[str, Any], role: str, number: int) -> dict[str, Any]:
    """What else a turn says, for a chat template that reads it, such as reasoning; and the weight of an assistant turn:
    train is False for a weight of 0, and LOSS_WEIGHT has any other weight than 1. Raises InvalidExample."""
    if value.keys() <= READ:
        return {}
    said = {key: part for key, part in value.items() if isinstance(key, str) and part not in (None, "", [], {})}
    found = {key: part for key, part in said.items() if key not in READ and key.lower() not in WITHOUT_MEANING}
    given = {key: _weight(key, found[key], number) for key in (*WEIGHTS, *SWITCHES) if key in found}
    weights = {key: weight for key, weight in given.items() if weight is not None}
    if role != "assistant":  # it has no loss; a weight other than 0 is reported
        return {key: part for key, part in found.items() if weights.get(key) != 0}
    numbers = {weights[key] for key in WEIGHTS if key in weights}
    if len(numbers) > 1 or len({weight > 0 for weight in weights.values()}) > 1:
        raise InvalidExample(
            f"the keys {' and '.join(weights)} of turn {number} contradict each other; remove one of them"
        )
    rest = {key: part for key, part in found.items() if key not in weights}
    return _weighted(rest, next(iter(weights.values()), 1.0))


def _weighted(turn: dict[str, Any], weight: float) -> dict[str, Any]:
    """A converted assistant turn with a weight in the loss."""
    if weight == 0:
        return {**{key: part for key, part in turn.items() if key != LOSS_WEIGHT}, "train": False}
    return turn if weight == 1 else {**turn, LOSS_WEIGHT: weight}


def unused_weights(example: Example, names: Iterable[str]) -> list[str]:
    """Those of the columns that have a weight other than 1, or something else."""
    values = {name: example.get(name) for name in names}
    return [name for name, value in values.items() if not is_missing(value) and _number(value) != 1]


def has_loss_weights(turns: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a converted assistant turn has a weight other than 0 and 1."""
    return any(LOSS_WEIGHT in turn and turn["role"] == "assistant" for turn in turns)


def has_other_weights(turns: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a converted assistant turn has a weight other than 1."""
    return any(turn["role"] == "assistant" and (LOSS_WEIGHT in turn or turn.get("train") is False) for turn in turns)


def _weight(key: str, value: Any, number: int) -> float | None:
    """The weight that a key of turn `number` gives its loss; None if the key means something else. Raises
    InvalidExample."""
    yes, weight = _yes(value), _number(value)
    if yes is not None:
        return float(yes)
    if key in WEIGHTS and _is_weight(weight):
        return weight
    if key in (*WEIGHTS, "train"):
        expected = VALID_WEIGHT if key in WEIGHTS else "1 for a turn with a loss, or 0 for one without"
        raise InvalidExample(f"the {key} of turn {number} is {shorten(repr(value))}; expected {expected}")
    return None


def _is_weight(number: float) -> bool:
    return number == 0 or MIN_WEIGHT <= number <= MAX_WEIGHT


def _number(value: Any) -> float:
    """A number or its text; NaN for anything else."""
    try:
        return float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _yes(value: Any) -> bool | None:
    """Whether a turn has a loss, from a number, a boolean or its text; None for anything else."""
    text = str(value).strip().lower() if isinstance(value, str | int | float) else ""
    return True if text in ("1", "1.0", "true", "yes") else False if text in ("0", "0.0", "false", "no") else None


def is_missing(value: Any) -> bool:
    """Whether a cell of a table has no value: null, the empty text of a CSV file, or the NaN of a Parquet file."""
    return value is None or value == "" or value != value


def with_loss_mask(turns: Turns, example: Example) -> Turns:
    """The turns with the weights in the column loss_mask. Raises InvalidExample."""
    mask = parse_json(example.get(LOSS_MASK))
    if is_missing(mask):
        return turns
    weights = [_number(each) for each in mask] if isinstance(mask, list) else []
    if len(weights) != len(turns) or not all(map(_is_weight, weights)):
        raise InvalidExample(
            f"column loss_mask is not a list of {len(turns)} numbers, one for each turn: {VALID_WEIGHT}"
        )
    return [_masked(*each) for each in zip(turns, weights, range(1, len(turns) + 1), strict=True)]


def _masked(turn: dict[str, Any], weight: float, number: int) -> dict[str, Any]:
    """A turn with its weight in the column loss_mask, which may leave out turns that have a weight already."""
    if turn["role"] != "assistant":  # it has no loss; a weight other than 0 is reported
        return {**turn, LOSS_MASK: weight} if weight else turn
    if weight == 1:
        return turn
    own = 0.0 if turn.get("train") is False else turn.get(LOSS_WEIGHT, weight)
    if weight and own != weight:
        raise InvalidExample(
            f"turn {number} has the weight {own:g}, and {weight:g} in column loss_mask; remove one of them"
        )
    return _weighted(turn, weight)


def refuse_media(example: Example) -> None:
    """Raise InvalidExample for images, audio or video in separate columns: the model would not see them."""
    for name in sorted(MEDIA & example.keys()):
        value = example[name]
        if isinstance(value, str) and not MEDIA_FILE.fullmatch(value.strip()):
            continue  # a text about an image, not the path of one
        if isinstance(value, str) and not PLACEHOLDER.search(str(example)):
            continue  # a file that the text does not use, such as a cover picture
        if value not in (None, "", [], {}) and not isinstance(value, int | float):
            raise InvalidExample(
                f"column {name} is not empty, and only text is supported; remove the column if the text is complete "
                "without it"
            )


def _calls(value: Any, number: int) -> list[dict[str, Any]]:
    """ShareGPT's function_call: one call or a list of calls, as JSON."""
    found = parse_json(value)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise InvalidExample(f"turn {number} is a function_call without a name; expected JSON with name and arguments")
    return [{"type": "function", "function": _with_arguments(call, number)} for call in calls]


def _with_arguments(function: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A called function; its arguments are an object or the JSON text of one. Llama 3 names them parameters, which
    other templates would leave out. Raises InvalidExample."""
    given = (function.get(name) for name in ("arguments", "parameters"))  # a table has both columns, and one is null
    arguments: Any = next((value for value in given if value not in (None, "")), {})  # {}: a call without arguments
    if not isinstance(parse_json(arguments), Mapping):
        shown = shorten(arguments)
        raise InvalidExample(f"the arguments of a tool call of turn {number} are not a JSON object: {shown!r}")
    return {**{key: value for key, value in function.items() if key != "parameters"}, "arguments": arguments}


def _tool_calls(value: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """OpenAI's tool calls of a turn; a call may also be the function itself."""
    calls = parse_json(value.get("tool_calls")) or []
    if not isinstance(calls, list):
        raise InvalidExample(f"tool_calls of turn {number} is {type_name(calls)}; expected a list")
    found = []
    for call in calls:
        function = call.get("function") or call if isinstance(call, Mapping) else call
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidExample(f"a tool call of turn {number} has no function with a name")
        about = call if call.get("function") else {"type": "function"}
        found.append({**about, "function": _with_arguments(function, number)})
    return found


def _content(value: Any, number: int, key: str) -> str:
    """Text, or OpenAI's list of text parts; None (next to tool calls) is empty."""
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        other = [shorten(part.get("type")) for part in value if part.get("type") != "text"]
        if other:
            raise InvalidExample(f"turn {number} has a content part of type {other[0]}; only text parts are supported")
        wrong = [type_name(part.get("text")) for part in value if not isinstance(part.get("text"), str)]
        if wrong:
            raise InvalidExample(f"a content part of turn {number} is {wrong[0]}; expected text")
        return "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise InvalidExample(f"the {key} of turn {number} is {type_name(value)}; expected text")
    return value


def alpaca_prompt(example: Example, column: str) -> Turns:
    """Alpaca's prompt: the history, then instruction and input. Raises InvalidExample."""
    turns = []
    history = parse_json(example.get("history")) or []
    if not isinstance(history, list):
        raise InvalidExample(
            f"column history contains {type_name(history)}; expected a list of [prompt, response] pairs"
        )
    for pair in history:
        if not isinstance(pair, list | tuple) or [type(part) for part in pair] != [str, str]:
            raise InvalidExample("column history must be a list of [prompt, response] pairs")
        turns += [turn("user", pair[0]), turn("assistant", pair[1])]
    parts = [required_text(example, column), optional_text(example, "input")]
    return [*turns, turn("user", "\n\n".join(part for part in parts if part))]


def with_system_prompt(turns: Turns, system: str) -> Turns:
    """The turns after a system prompt, unless they have their own. Exported conversations often begin with an empty
    one, which is none."""
    has_own = turns[0]["role"] == "system"
    if not system or (has_own and turns[0]["content"].strip()):
        return turns
    return [turn("system", system), *turns[has_own:]]


def system_prompt(example: Example, data: Data) -> str:
    """The system prompt of an example, else that of the data, '' for none. Raises InvalidExample."""
    own = optional_text(example, data.system_column) if data.system_column else ""
    return own or data.system_prompt


def unused_system(example: Example, turns: Turns, data: Data) -> dict[str, str]:
    """{"unused_system"} with the name of the system column, if a conversation has another system prompt of its own; {}
    if it has none. `turns`: the converted ones."""
    own = optional_text(example, data.system_column).strip() if turns and data.system_column else ""
    is_unused = own and turns[0]["role"] == "system" and turns[0]["content"].strip() != own
    return {"unused_system": data.system_column} if is_unused else {}


def variables(example: Example) -> dict[str, Any]:
    """Those VARIABLES that the example has. Raises InvalidExample."""
    found = _tools(example)
    documents = parse_json(example.get("documents"))
    if isinstance(documents, list) and documents and all(isinstance(each, Mapping) for each in documents):
        found["documents"] = documents
    if kwargs := parse_json(example.get(TEMPLATE_KWARGS)):
        if not isinstance(kwargs, Mapping):
            raise InvalidExample(f"column {TEMPLATE_KWARGS} contains {type_name(kwargs)}; expected an object")
        if reserved := RESERVED_KWARGS & kwargs.keys():
            raise InvalidExample(
                f"column {TEMPLATE_KWARGS} has {', '.join(sorted(reserved))}, which transformers sets itself"
            )
        found[TEMPLATE_KWARGS] = kwargs
    return found


def _tools(example: Example) -> dict[str, Any]:
    found = parse_json(example.get("tools"))
    if not found and isinstance(functions := parse_json(example.get("functions")), list):  # OpenAI's earlier form
        found = [{"type": "function", "function": each} for each in functions if isinstance(each, Mapping)]
    if not found or (isinstance(found, str) and found.lstrip()[:1] not in ("[", "{")):
        return {}  # the text of a column that has this name but another purpose
    if isinstance(found, str):
        raise InvalidExample("column tools is not valid JSON; expected a list of tools")
    if not isinstance(found, list):
        raise InvalidExample(f"column tools contains {type_name(found)}; expected a list of tools")
    wrong = [type_name(tool) for tool in found if not isinstance(tool, Mapping)]
    if wrong:
        raise InvalidExample(f"column tools contains {wrong[0]} in its list; expected an object for each tool")
    return {"tools": [as_tool(tool) for tool in found]}


def as_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool as chat templates expect it. In LLaMA-Factory's datasets, a tool is only the function, and in OpenAI's
    Responses API the type is next to the name."""
    if tool.get("function") or not isinstance(tool.get("name"), str) or tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def require_columns(example: Example, names: Iterable[str]) -> None:
    """Raise InvalidExample naming the columns that the example lacks."""
    missing = [name for name in names if name not in example]
    if missing:
        raise InvalidExample(
            f"has no column {' and no column '.join(missing)}; its columns are: {column_names(example)}"
        )


def column_names(example: Example, with_types: bool = False) -> str:
    """The names of an example's columns, for a message."""
    shown = []
    for name in list(example)[:MAX_COLUMNS]:
        text = shorten(name)
        text = text if text.isprintable() and text == text.strip() else repr(text)
        kind = type_name(example[name]).removeprefix("a ").removeprefix("an ")
        shown.append(f"{text}: {kind}" if with_types else text)
    more = f" and {len(example) - MAX_COLUMNS:,} more" if len(example) > MAX_COLUMNS else ""
    return (", ".join(shown) or "none") + more


def printable(text: str) -> str:
    """The text with halves of surrogate pairs escaped: they cannot be written as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def shorten(value: Any) -> str:
    """The beginning of a value as text, for a message."""
    text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def required_text(example: Example, column: str) -> str:
    """The text of a column that must not be empty. Raises InvalidExample."""
    value = example[column]
    if not isinstance(value, str):
        raise InvalidExample(f"column {column} contains {type_name(value)}; expected text")
    if not value.strip():
        raise InvalidExample(f"column {column} is empty")
    return value


def optional_text(example: Example, column: str) -> str:
    """The text of a column that may be missing. Raises InvalidExample."""
    value = example.get(column)
    if value is not None and not isinstance(value, str):
        raise InvalidExample(f"column {column} contains {type_name(value)}; expected text")
    return value or ""


def check_encodable(converted: Mapping[str, Any]) -> None:
    """Raise InvalidExample for half of a surrogate pair, which JSON can escape but no tokenizer can encode, and for
    tools that are nested too deeply for a chat template."""
    texts: list[str] = []
    if not _collect(converted, MAX_LEVELS, texts):
        raise InvalidExample(f"has tools or tool calls that are nested more than {MAX_LEVELS} levels deep")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        character = error.object[error.start]
        raise InvalidExample(f"contains {character!r}, half of a surrogate pair, which is not a character") from None


def _collect(value: Any, levels: int, texts: list[str]) -> bool:
    """Append every text in `value` to `texts`; False if it nests deeper than `levels`."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, Mapping):
        texts.extend(map(str, value))
        return levels > 0 and all(_collect(part, levels - 1, texts) for part in value.values())
    elif isinstance(value, list | tuple):
        return levels > 0 and all(_collect(part, levels - 1, texts) for part in value)
    elif value is not None:
        texts.append(str(value))
    return True


def parse_json(value: Any) -> Any:
    """The value of a JSON text, or the value itself: CSV columns can only contain text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def type_name(value: Any) -> str:
    """The name of a value's type with an article, such as 'a number'."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, float) and value != value:  # as pandas writes a missing value
        return "NaN (a missing value)"
    words = {
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        tuple: "a list",
        dict: "an object",
        bytes: "binary data",
    }
    return words.get(type(value), f"a {type(value).__name__}")
