"""Several datasets: the list data.sources, whose first entry is the dataset of the options data.*, and its notations.

In a file, the list has all datasets. In a RunSpec, its first entry is empty, since the options data.* have its values.
`data.sources[1].weight` names an option of the second dataset.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import yaml

from backend.config.yaml_text import load_yaml, syntax_problem

SOURCES = "data.sources"
KEY = re.compile(r"data\.sources\[(\d+)\]\.(\w+)")


class SourceError(ValueError):
    """What is wrong with an option of a dataset: `field` is its key, and the message completes it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def key_of(index: int, name: str) -> str:
    """The key of the option `name` of a dataset: data.files, or data.sources[1].files."""
    return f"data.{name}" if index == 0 else f"{SOURCES}[{index}].{name}"


def read_sources(text: str) -> Any:
    """The list in a text of YAML or JSON. Raises ValueError."""
    try:
        found = load_yaml(text) if text.strip() else []
    except yaml.YAMLError as error:
        raise ValueError(f"is not a list of datasets: {syntax_problem(error)}") from None
    if not isinstance(found, list):
        raise ValueError("must be a list of datasets, each with options such as source and files")
    return found


def without_option(value: Any, field: str) -> Any:
    """The list without the option `field` of one dataset; an empty list if `field` is not an option of a dataset in
    it."""
    entries, match = _entries(value), KEY.fullmatch(field)
    index = int(match[1]) if match else len(entries)
    if index >= len(entries) or not isinstance(entries[index], dict) or match is None:
        return ()
    entries[index].pop(match[2], None)
    return entries


def collected(values: Mapping[str, Any], known: Sequence[Any] = ()) -> dict[str, Any]:
    """Dotted keys in which those of single datasets, such as data.sources[1].weight, are part of data.sources. `known`:
    the list before the change. Raises SourceError."""
    found = {name: value for name, value in values.items() if not KEY.fullmatch(name)}
    parts = [(int(match[1]), match[2], values[name]) for name in values if (match := KEY.fullmatch(name))]
    if not parts:
        return found
    entries = _entries(found.get(SOURCES, known)) or [{}]
    count = len(entries)
    for index, name, value in sorted(parts, key=lambda part: part[0]):
        if index > len(entries):
            problem = f"there {_are(len(entries))}, so the next index is {SOURCES}[{len(entries)}]"
            raise SourceError(f"{SOURCES}[{index}].{name}", problem)
        if index == len(entries):
            entries.append({})
        entries[index][name] = value
    for index in range(count, len(entries)):
        if "source" not in entries[index]:
            name = next(name for number, name, _ in parts if number == index)
            problem = f"there {_are(count)}; to add one, also set {SOURCES}[{index}].source"
            raise SourceError(f"{SOURCES}[{index}].{name}", problem)
    return {**found, SOURCES: entries}


def _are(count: int) -> str:
    return "is one dataset" if count == 1 else f"are {count} datasets"


def without_first(data: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the section data, with those of the first dataset moved out of the list `sources`. Raises
    SourceError."""
    entries = _entries(data.get("sources"))
    if not entries or not isinstance(entries[0], Mapping):
        return {**data}
    first, *others = entries
    if twice := [name for name in first if name in data]:
        raise SourceError(f"{SOURCES}[0].{twice[0]}", f"is also set as data.{twice[0]}; set it once")
    return {**data, **first, "sources": ({}, *others) if others else ()}


def with_first(data: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The options of the section data as they are written: with several datasets, those of the first one (`names`) are
    in the list."""
    if not data.get("sources"):
        return {**data}
    first = {name: value for name, value in data.items() if name in names}
    others = {name: value for name, value in data.items() if name not in names}
    return {**others, "sources": [first, *data["sources"][1:]]}


def _entries(value: Any) -> list[Any]:
    """The list as tables that may be changed; [] if it is not a list, which is reported when it is validated."""
    if isinstance(value, str):
        try:
            value = read_sources(value)
        except ValueError:
            return []
    if not isinstance(value, list | tuple):
        return []
    return [_table(entry) for entry in value]


def _table(entry: Any) -> Any:
    """The options of a dataset that are set. Files or an ID on the Hub say what its source is."""
    if isinstance(entry, Mapping) and "source" not in entry:
        given = [source for name, source in (("files", "files"), ("hub_id", "hub")) if entry.get(name)]
        return {**entry, **({"source": given[0]} if len(given) == 1 else {})}
    if hasattr(entry, "model_dump"):
        return {name: value for name, value in entry if value != type(entry).model_fields[name].default}
    return dict(entry) if isinstance(entry, Mapping) else entry
