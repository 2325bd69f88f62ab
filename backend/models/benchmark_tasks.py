"""Tasks of lm-eval in YAML files of a user: what they are called, and what in them runs code.

lm-eval itself imports the functions that a file names while it reads the file, so Footplate reads the file before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from backend.runs.folder import RunError

SUFFIXES = (".yaml", ".yml")
MAX_BYTES = 2**20
RUN_CODE = ("unsafe_code", "trust_remote_code", "hf_evaluate")  # keys that allow code
PICKLES = ("pandas", "webdataset")  # readers of the library datasets whose files can contain pickles


@dataclass(frozen=True)
class PythonCode:
    """A value with a YAML tag, such as `!function utils.score`, which names Python code."""

    text: str


class _Loader(yaml.SafeLoader):
    """Reads values with tags as PythonCode."""


_Loader.add_multi_constructor("!", lambda loader, tag, node: PythonCode(f"!{tag} {getattr(node, 'value', '')}"))


def is_file(task: str) -> bool:
    """Whether a task is a file, and not a name."""
    return task.endswith(SUFFIXES)


def name_of(path: Path) -> str:
    """The name of the task or group in a file. Raises RunError."""
    found = _read(path, ())
    name = found.get("task") if isinstance(found.get("task"), str) else found.get("group")
    if not isinstance(name, str) or not name:
        raise RunError(f"{path} is no task of lm-eval: it has no key `task` with a name.")
    return name


def code_in(path: Path) -> list[str]:
    """What in a file, and in the files that it includes, runs code: keys with their values. Raises RunError."""
    return sorted(set(_code("", _read(path, ()))))


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The values of a file and of those that it includes. Raises RunError."""
    if path in seen:
        raise RunError(f"{path} includes itself, so lm-eval cannot read it. Remove the key `include`.")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RunError(f"{path} has more than 1 MiB: a task of lm-eval has its examples in a data file.")
        found = yaml.load(path.read_bytes(), _Loader)
    except OSError as error:
        raise RunError(f"The task file {path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RunError(f"The task file {path} is not valid YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(found, dict):
        raise RunError(f"The task file {path} has no keys. A task of lm-eval has at least `task` and `dataset_path`.")
    included = found.get("include", [])
    merged: dict[str, Any] = {}
    for other in included if isinstance(included, list) else [included]:
        merged |= _read((path.parent / str(other)).resolve(), (*seen, path))
    return {**merged, **found}


def _code(key: str, value: Any) -> Iterator[str]:
    """The parts of a value that run code, each with its key."""
    last = key.rpartition(".")[2]
    if isinstance(value, PythonCode):
        yield f"{key}: {value.text}"
    elif (last in RUN_CODE and value) or (last == "dataset_path" and value in PICKLES):
        yield f"{key}: {value}"
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _code(f"{key}.{name}" if key else str(name), each)
    elif isinstance(value, list):
        for each in value:
            yield from _code(key, each)
