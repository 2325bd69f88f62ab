"""What the columns of data files are used for, and the options that change it.

A use, such as prompt, is what an option such as data.prompt_column sets the column of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from backend.config import Data
from backend.config.options import by_name
from backend.data import chat
from backend.data.chat import Example
from backend.data.formats import DEFAULTS, detect_format, required_columns
from backend.data.preferences import usual_columns

ALPACA = ("input", "history")


def column_options(format: str) -> tuple[str, ...]:
    """The options that name the columns of a data format."""
    return tuple(
        name
        for name, option in by_name().items()
        if name.endswith("_column") and any(format in condition.get("data.format", ()) for condition in option.when)
    )


def uses(formats: Iterable[str]) -> dict[str, str]:
    """The uses that columns can have in one of the formats: use -> its label."""
    known = by_name()
    names = dict.fromkeys(name for format in formats for name in column_options(format))
    return {_use(name): known[name].label.removesuffix(" column") for name in names}


def uses_of_columns(example: Example, data: Data, formats: Iterable[str]) -> dict[str, str]:
    """Column of `example` -> its use, for those that are used; {} if the format is not recognized. `formats` are those
    that the stage accepts."""
    columns = _columns(example, data, _format(example, data, formats))
    return {column: use for use, column in columns.items() if column in example}


def read_by_name(example: Example, data: Data, formats: Iterable[str]) -> tuple[str, ...]:
    """The columns of `example` that are used for what their name says, which no option changes."""
    format = _format(example, data, formats)
    names = {
        "alpaca": (*ALPACA, *chat.REASONING),
        "prompt_completion": chat.REASONING,
        "messages": ("loss_mask",),
        "sharegpt": ("loss_mask",),
        "text": (),
    }.get(format, ())
    variables = () if format in ("", "text") else (*chat.VARIABLES, "functions")
    return tuple(name for name in (*variables, *names) if example.get(name) not in (None, "", [], {}))


def patch(example: Example, data: Data, formats: Iterable[str], column: str, use: str) -> dict[str, Any]:
    """The options with which `column` is used for `use`, '' for nothing: option -> value. A column that had this use
    gets the former use of `column`; the other columns keep their uses if a format has all of them."""
    formats = tuple(formats)
    before = _format(example, data, formats)
    columns = {name: each for name, each in _columns(example, data, before).items() if each in example}
    old = next((name for name, each in columns.items() if each == column), "")
    columns.pop(old, None)
    if use:
        columns |= ({old: columns[use]} if old and use in columns else {}) | {use: column}
    format = _format_with(columns, use, before, formats) if columns else ""
    if use == "messages":
        format = chat.turn_format_of(chat.parse_json(example.get(column))) or format
    options = column_options(format)
    unset = {name: option.default for name, option in by_name().items() if name.endswith("_column")}
    names = {name: columns.get(_use(name), "") for name in options}
    if "data.system_column" in names and use != "system" and data.system_column not in example:
        names["data.system_column"] = data.system_column  # later examples may have it
    return {"data.format": format or "auto", **unset, **names}


def _format(example: Example, data: Data, formats: Iterable[str]) -> str:
    return data.format if data.format != "auto" else detect_format(example, formats) or ""


def _format_with(columns: Mapping[str, str], use: str, before: str, formats: tuple[str, ...]) -> str:
    """The format that has `use` and most of the uses in `columns`; if several have as many, the format that is set
    now."""
    preferred = [before] if before in formats else []
    # An Alpaca prompt has more parts, which are read by name, so it is the last guess for a prompt and a completion.
    candidates = dict.fromkeys([*preferred, *sorted(formats, key=lambda name: name == "alpaca")])
    known = {name: {_use(option) for option in column_options(name)} for name in candidates}
    able = [name for name in candidates if not use or use in known[name]]
    return max(able, key=lambda name: len(known[name] & columns.keys()))


def _columns(example: Example, data: Data, format: str) -> dict[str, str]:
    """Use -> the column that has it, whether `example` has that column or not."""
    if not format:
        return {}
    names = required_columns(data, format) if format in DEFAULTS else usual_columns(example, data, format)
    system = {"system": data.system_column} if format != "text" and data.system_column else {}
    return {_use(option): column for option, column in names.items()} | system


def _use(option: str) -> str:
    return option.removeprefix("data.").removesuffix("_column")
