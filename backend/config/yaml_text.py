"""YAML text with bounds, so that a small file cannot keep the server busy for minutes.

Imports nothing of Footplate. Aliases can multiply a few hundred bytes to gigabytes, and nested lists end the recursion
of every reader.
"""

from __future__ import annotations

from typing import Any

import yaml

MAX_CHARACTERS = 256 * 1024
MAX_DEPTH = 32
MAX_VALUES = 20_000
MAX_KEYS = 500  # in one mapping
MAX_DIGITS = 400  # Python refuses to convert more than 4300, and takes quadratic time


def load_yaml(text: str) -> Any:
    """As yaml.safe_load. Raises yaml.YAMLError, also for text beyond the bounds."""
    if len(text) > MAX_CHARACTERS:
        raise yaml.MarkedYAMLError(problem=f"the text is longer than {MAX_CHARACTERS // 1024} KiB")
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
    return yaml.safe_load(text)


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
