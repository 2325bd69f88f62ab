"""Tasks of lm-eval in YAML files of a user: their names, and the parts that run code.

While lm-eval reads a file, it imports the functions that the file names, so Footplate reads the file first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from backend.runs.folder import RunError

SUFFIXES = (".yaml", ".yml")
MAX_BYTES = 2**20
RUN_CODE = ("unsafe_code", "trust_remote_code", "hf_evaluate")  # keys that allow code
ALLOW = "--allow-code, or Allow tasks to run code on the page"  # how a user allows it
PICKLES = ("pandas", "webdataset")  # readers of the library datasets whose files can contain pickles


class _Loader(yaml.SafeLoader):
    """Reads values with tags, such as `!function utils.score`, as their tags."""


_Loader.add_multi_constructor("!", lambda loader, tag, node: f"!{tag}")


def is_file(task: str) -> bool:
    """Whether a task is a file, and not a name."""
    return task.endswith(SUFFIXES)


def name_of(path: Path) -> str:
    """The name of the task or group in a file. Raises RunError."""
    merged: dict[str, Any] = {}
    for values, _ in _read(path, set()):
        merged |= values
    name = merged.get("task") if isinstance(merged.get("task"), str) else merged.get("group")
    if not isinstance(name, str) or not name:
        raise RunError(f"{path} is not an lm-eval task: it has no key `task` with a name.")
    return name


def code_in(path: Path) -> list[str]:
    """The parts of a file, and of the files that it includes, that run code: keys with their values. lm-eval imports
    every function that a file names, even if the value is then replaced. Raises RunError."""
    return sorted({found for _, node in _read(path, set()) for found in _code("", node, set())})


def _read(path: Path, seen: set[Path]) -> Iterator[tuple[dict[str, Any], Node]]:
    """The values and the YAML nodes of the files that a file includes, and then its own. Raises RunError."""
    if path in seen:
        raise RunError(f"{path} is included twice, or includes itself, so lm-eval cannot read it. Include it once.")
    seen.add(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RunError(f"{path} is larger than 1 MiB. Move its samples to a data file (data_files).")
        content = path.read_bytes()
        found, node = yaml.load(content, _Loader), yaml.compose(content, _Loader)
    except OSError as error:
        raise RunError(f"The task file {path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RunError(f"The task file {path} is not valid YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(found, dict) or node is None:
        raise RunError(f"The task file {path} has no keys. A task of lm-eval has at least `task` and `dataset_path`.")
    included = found.get("include", [])
    for other in included if isinstance(included, list) else [included]:
        yield from _read((path.parent / str(other)).resolve(), seen)
    yield found, node


def _code(key: str, node: Node, seen: set[Node]) -> Iterator[str]:
    """The parts of a node that run code, each with its key. `seen`: nodes that were visited already, since an alias is
    the same node again."""
    if node in seen:
        return
    seen.add(node)
    text = node.value if isinstance(node, ScalarNode) else ""
    if node.tag.startswith("!"):
        yield f"{key}: {node.tag} {text}".strip()
    elif isinstance(node, SequenceNode):
        for each in node.value:
            yield from _code(key, each, seen)
    elif isinstance(node, MappingNode):
        for name, value in node.value:
            last = name.value if isinstance(name, ScalarNode) else ""
            below = f"{key}.{last}" if key else last
            if (last in RUN_CODE and not _is_false(value)) or (last == "dataset_path" and value.value in PICKLES):
                yield f"{below}: {value.value if isinstance(value, ScalarNode) else '...'}"
            yield from _code(key, name, seen)
            yield from _code(below, value, seen)


def _is_false(node: Node) -> bool:
    kind = node.tag.rpartition(":")[2]
    return kind == "null" or (kind == "bool" and node.value.lower() in ("false", "no", "off"))
