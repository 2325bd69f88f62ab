"""RunSpec <-> YAML: the files under presets/, a run's spec.yaml, and what people import and export.

Floor 2. Imports: machine, options, spec, paths. A YAML file holds sections with only what differs from the defaults,
and may open with `title`, `about` and `machine` (the name of the one it is meant for, in presets/machines).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from backend.config import RunSpec
from backend.config.options import Problem, SpecError, build, changes, nest
from backend.machine import Machine, machines
from backend.paths import PRESETS

HEAD = ("title", "about", "machine")


@dataclass(frozen=True)
class Preset:
    """A named starting point, and the machine that it is meant for: there it raises no error."""

    name: str
    title: str
    about: str
    place: str
    machine: Machine
    spec: RunSpec


def dump(spec: RunSpec) -> str:
    """`spec` as YAML: what is shown and differs from the defaults, by section. Hidden values are left out."""
    plain = {name: _plain(value) for name, value in changes(spec).items()}
    return yaml.safe_dump(nest(plain), sort_keys=False, allow_unicode=True) if plain else "{}\n"


def load(text: str) -> RunSpec:
    """RunSpec from YAML. Raises SpecError naming the line, or each field, that is wrong."""
    return build({k: v for k, v in _mapping(text).items() if k not in HEAD})


def read(source: str | Path) -> RunSpec:
    """RunSpec from a YAML file, or from the preset of that name. Raises SpecError naming the file."""
    path = Path(source)
    if not path.is_file() and path.suffix not in (".yaml", ".yml") and (PRESETS / f"{source}.yaml").is_file():
        path = PRESETS / f"{source}.yaml"
    try:
        return load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = ", ".join(p.name for p in presets())
        raise SpecError([Problem("", f"{source}: no such file, and no such preset ({names})")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem("", f"{path}: cannot be read: {error}")]) from None
    except SpecError as error:
        raise SpecError([Problem(p.field, f"{p.message} ({path})") for p in error.problems]) from None


def presets(folder: Path = PRESETS) -> list[Preset]:
    """Every preset, those for the smallest machine first."""
    found, places = [], machines()
    order = list(places)
    for path in folder.glob("*.yaml"):
        head = _mapping(path.read_text(encoding="utf-8"))
        title, about, place = (str(head.get(key, "")) for key in HEAD)
        found.append(Preset(path.stem, title, about, place, places[place], read(path)))
    return sorted(found, key=lambda preset: (order.index(preset.place), preset.name))


def _mapping(text: str) -> Mapping[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or str(error)
        raise SpecError([Problem("", f"is no YAML: {where}{reason}")]) from None
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise SpecError([Problem("", "is no run: a run is sections (model, data, ...) with their options")])
    for key, part in value.items():
        if key not in HEAD and key in RunSpec.model_fields and not isinstance(part, dict):
            raise SpecError([Problem(str(key), "is a section: write its options below it, one a line")])
    return {str(key): part for key, part in value.items()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
