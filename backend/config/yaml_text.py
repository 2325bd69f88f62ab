"""YAML and JSON text with bounds, so that a small file cannot keep the server busy for minutes.

Aliases can multiply a few hundred bytes to gigabytes, and deeply nested lists exceed the recursion limit of every
reader. Text that looks like JSON is read as YAML only if it is not valid JSON, because YAML allows no tabs as
indentation.
"""

from __future__ import annotations

from typing import Any

import yaml

from backend.config.json_text import BYTE_ORDER_MARK, MAX_DIGITS, JsonError, load_json

MAX_CHARACTERS = 256 * 1024
MAX_DEPTH = 32
MAX_VALUES = 20_000
MAX_KEYS = 500  # in one mapping


class InvalidJson(yaml.MarkedYAMLError):
    """Text that looks like JSON, but is neither JSON nor YAML."""


def load_yaml(text: str) -> Any:
    """Same as yaml.safe_load, but also reads JSON. Raises yaml.YAMLError, also for text beyond the bounds."""
    if len(text) > MAX_CHARACTERS:
        raise yaml.MarkedYAMLError(problem=f"the text is longer than {MAX_CHARACTERS // 1024} KiB")
    text = text.removeprefix(BYTE_ORDER_MARK)
    if not text.lstrip().startswith(("{", "//", "/*")):
        return _load_yaml(text)
    try:
        found = load_json(text)
    except JsonError as error:
        if not error.line:
            raise InvalidJson(problem=error.reason) from None
        try:
            return _load_yaml(text)
        except yaml.YAMLError:
            mark = yaml.Mark("", 0, error.line - 1, error.column - 1, None, None)  # type: ignore[arg-type]
            raise InvalidJson(problem=error.reason, problem_mark=mark) from None
    _check_json(found)
    return found


def syntax_problem(error: yaml.YAMLError) -> str:
    """What is wrong with a text that cannot be read, and where."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    reason = getattr(error, "problem", None) or str(error)
    return f"invalid {'JSON' if isinstance(error, InvalidJson) else 'YAML'}: {where}{reason}"


def _check_json(value: Any) -> None:
    """Raise yaml.YAMLError for values beyond the bounds."""
    parts, depth, values = [value], 0, 0
    while parts:
        depth, values = depth + 1, values + len(parts)
        if any(isinstance(part, dict) and len(part) > MAX_KEYS for part in parts):
            raise InvalidJson(problem=f"more than {MAX_KEYS} keys in one mapping")
        parts = [
            item
            for part in parts
            if isinstance(part, dict | list)
            for item in (part.values() if isinstance(part, dict) else part)
        ]
        if depth > MAX_DEPTH:
            raise InvalidJson(problem=f"nested more than {MAX_DEPTH} levels deep")
        if values > MAX_VALUES:
            raise InvalidJson(problem=f"more than {MAX_VALUES:,} values")


def _load_yaml(text: str) -> Any:
    counts: list[int] = []  # nodes in each open mapping; a list starts below zero
    scalars = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            counts.pop()
        elif isinstance(event, yaml.NodeEvent):
            scalars += 1
            if counts:
                counts[-1] += 1
            if isinstance(event, yaml.CollectionStartEvent):
                counts.append(0 if isinstance(event, yaml.MappingStartEvent) else -MAX_CHARACTERS)
            if problem := _problem(event, scalars, counts):
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]
    return yaml.load(text, Loader=_LoaderOfDistinctKeys)


class _LoaderOfDistinctKeys(yaml.SafeLoader):
    """Same as SafeLoader, but refuses a mapping with the same key twice, where YAML would use the last value."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is set twice", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


def _problem(event: yaml.Event, values: int, counts: list[int]) -> str:
    if isinstance(event, yaml.AliasEvent):
        return "aliases (*name) are not supported; write the value again"
    if len(counts) > MAX_DEPTH:
        return f"nested more than {MAX_DEPTH} levels deep"
    if values > MAX_VALUES:
        return f"more than {MAX_VALUES:,} values"
    if counts and max(counts[-2:]) > 2 * MAX_KEYS:
        return f"more than {MAX_KEYS} keys in one mapping"
    value = event.value if isinstance(event, yaml.ScalarEvent) else ""
    if len(value) > MAX_DIGITS and not value.strip("+-0123456789_:.abcdefxABCDEFX"):
        return f"a number with more than {MAX_DIGITS} digits"
    return ""
