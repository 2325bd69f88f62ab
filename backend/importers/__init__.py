"""Importers: a DeepSpeed JSON, an accelerate YAML, or a training YAML of LLaMA-Factory, axolotl or TRL as a spec.

Values that have an option set it. Keys of a DeepSpeed or accelerate config that have none become extra config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from backend.config import RunSpec
from backend.config.options import Problem, SpecError, edit
from backend.config.yaml_text import load_yaml, syntax_problem
from backend.importers import accelerate_file, axolotl, deepspeed_file, llamafactory, not_training, trl
from backend.importers.foreign import Import, Imported, Table

# A training configuration of a tool: what it is recognized by, and its reader.
TOOLS: Mapping[str, tuple[Callable[[Table], bool], Callable[[Table, Path], Import]]] = {
    "llamafactory": (llamafactory.is_llamafactory, llamafactory.read),
    "axolotl": (axolotl.is_axolotl, axolotl.read),
    "trl": (trl.is_trl, trl.read),
}
NO_TRAINING = "no-training"
# A configuration that is merged into a spec. accelerate's may contain DeepSpeed's.
MERGED: Mapping[str, tuple[Callable[[Table], bool], Callable[[Table, RunSpec], Imported]]] = {
    "accelerate": (accelerate_file.is_accelerate, accelerate_file.read),
    "deepspeed": (deepspeed_file.is_deepspeed, deepspeed_file.read),
}


def detect_format(text: str) -> str:
    """'deepspeed', 'accelerate', one of TOOLS, or NO_TRAINING for a file of TOOLS that describes no training; '' for
    any other text."""
    try:
        found = load_yaml(text)
    except yaml.YAMLError:
        return ""
    if not isinstance(found, dict):
        return ""
    merged = next((name for name, (is_one, _) in MERGED.items() if is_one(found)), "")
    if merged or not_training.is_no_training(found):
        return merged or NO_TRAINING
    return next((name for name, (is_one, _) in TOOLS.items() if is_one(found)), "")


def invalid_text(text: str) -> str:
    """What is wrong with a text that is neither YAML nor JSON, and where; '' if nothing is."""
    try:
        load_yaml(text)
    except yaml.YAMLError as error:
        return syntax_problem(error)
    return ""


def import_file(text: str, spec: RunSpec, base: Path) -> Imported:
    """A file of a known format. A DeepSpeed or accelerate config is merged into `spec`; a training YAML of one of
    TOOLS, whose relative paths are relative to `base`, replaces it. Raises SpecError."""
    tool, table = detect_format(text), load_yaml(text)
    if tool in MERGED:
        return MERGED[tool][1](parse_numbers(table), spec)
    if tool == NO_TRAINING:
        raise not_training.refuse(table)
    found = TOOLS[tool][1](table, base)
    try:
        result = edit(RunSpec(), found.patch)
    except SpecError as error:
        by_key = {found.keys.get(problem.field, problem.field): problem for problem in reversed(error.problems)}
        raise SpecError([_problem_of_file(found, problem) for problem in reversed(by_key.values())]) from None
    found.name_without_effect(result)
    return Imported(result, different=found.different, missing=found.missing)


def _problem_of_file(found: Import, problem: Problem) -> Problem:
    """A problem of an option, with the key of the file that set it."""
    key = found.keys.get(problem.field)
    return Problem("", f"{key} ({problem.field}): {problem.message}") if key else problem


def parse_numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    """The table with numbers for strings such as 5e8, which YAML reads as text, and with 8 for 8.0."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, str):
            try:
                return int(float(value)) if float(value).is_integer() else float(value)
            except ValueError:
                return value
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return {str(k): plain(v) for k, v in found.items()}
