"""RunSpec <-> YAML: the presets, a run's spec.yaml, and the files that users import and export.

A YAML file has sections with only the options that differ from their defaults. It may start with `title`, `about` and
`machine` (a name in presets/machines: the machine that the preset is for).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from backend.config import RunSpec
from backend.config.options import Problem, SpecError, build, changes, sections
from backend.config.yaml_text import load_yaml, syntax_problem
from backend.machine import Machine, machines
from backend.paths import PRESETS

DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # with libyaml, which is four times as fast
HEADER = ("title", "about", "machine")


@dataclass(frozen=True)
class Preset:
    """A complete spec to start from, and the machine that it is for: there the checks report no error."""

    name: str
    title: str
    about: str
    machine_name: str
    machine: Machine
    spec: RunSpec


def dump(spec: RunSpec) -> str:
    """`spec` as YAML: the active options that differ from their defaults, by section."""
    found = sections(changes(spec))
    return yaml.dump(found, Dumper=DUMPER, sort_keys=False, allow_unicode=True) if found else "{}\n"


def load(text: str, without: Collection[str] = ()) -> RunSpec:
    """RunSpec from YAML text, `without` some of its options. Raises SpecError with the line, or with each invalid
    field."""
    tree = {key: part for key, part in _mapping(text).items() if key not in HEADER}
    for section, part in tree.items() if without else ():
        if isinstance(part, dict):
            tree[section] = {key: value for key, value in part.items() if f"{section}.{key}" not in without}
    return build(tree)


def read(source: str | Path, without: Collection[str] = ()) -> RunSpec:
    """RunSpec from a YAML file, or from the preset of that name, `without` some of its options. Raises SpecError with
    the file."""
    path = Path(source)
    if not path.is_file() and path.suffix not in (".yaml", ".yml") and (PRESETS / f"{source}.yaml").is_file():
        path = PRESETS / f"{source}.yaml"
    try:
        return load(path.read_text(encoding="utf-8"), without)
    except FileNotFoundError:
        names = ", ".join(p.name for p in presets())
        raise SpecError([Problem("", f"{source}: no such file or preset (presets: {names})")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem("", f"cannot read {path}: {error}")]) from None
    except SpecError as error:
        raise SpecError([Problem(p.field, f"{p.message} ({path})") for p in error.problems]) from None


def presets(folder: Path = PRESETS) -> list[Preset]:
    """Every preset, the smallest machine first."""
    found, known = [], machines()
    order = list(known)
    for path in folder.glob("*.yaml"):
        head = _mapping(path.read_text(encoding="utf-8"))
        title, about, machine_name = (str(head.get(key, "")) for key in HEADER)
        found.append(Preset(path.stem, title, about, machine_name, known[machine_name], read(path)))
    return sorted(found, key=lambda preset: (order.index(preset.machine_name), preset.name))


@lru_cache(maxsize=64)  # a preset is read for its heading, and again for its options
def _mapping(text: str) -> Mapping[str, Any]:
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        raise SpecError([Problem("", syntax_problem(error))]) from None
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise SpecError([Problem("", "the file must have sections (model, data, ...) with options below them")])
    for key, part in value.items():
        if key not in HEADER and key in RunSpec.model_fields and not isinstance(part, dict):
            raise SpecError([Problem(str(key), "is a section: put its options below it, one per line")])
    return {str(key): part for key, part in value.items()}
