"""Walks RunSpec: one Option a leaf; read, edit, flatten, and leave out what is hidden.

Floor 1. Imports: catalog, spec. Names are the same everywhere: `train.learning_rate` is the option, the element
id (with a dash), the YAML key and the column of a table.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from backend.config import Condition, OneOf, RunSpec, Ui
from backend.registry import Choice

Values = dict[str, Any]


@dataclass(frozen=True)
class Option:
    """One leaf of RunSpec. `kind` is bool, int, float, str, choice, list or table; limits are inclusive or None.

    It is shown if one of the conditions of `when` holds.
    """

    name: str
    kind: str
    default: Any
    label: str
    help: str
    when: tuple[Condition, ...]
    widget: str
    unit: str
    choices: tuple[tuple[str, str], ...] = ()  # (value, label)
    minimum: float | None = None
    maximum: float | None = None

    @property
    def section(self) -> str:
        """The first half of the name."""
        return self.name.partition(".")[0]

    @property
    def element_id(self) -> str:
        """The id of its widget on the page."""
        return self.name.replace(".", "-")


@dataclass(frozen=True)
class Problem:
    """One value that is no value for its option: `field` is a dotted name ('' for the whole spec)."""

    field: str
    message: str


class SpecError(ValueError):
    """Values that are no RunSpec; `problems` names each field and what it takes."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{p.field}: {p.message}" if p.field else p.message for p in problems))
        self.problems = problems


def _kind(annotation: Any, ui: Ui) -> tuple[str, Mapping[str, Choice]]:
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        words = {v: v.replace("_", " ").capitalize() for v in typing.get_args(annotation)}
        words |= {k: v for k, v in {**LITERAL_LABELS, **ui.choices}.items() if k in words}
        return "choice", {value: Choice(label) for value, label in words.items()}
    return {bool: "bool", int: "int", float: "float", str: "str", dict: "table", tuple: "list"}[
        origin or annotation
    ], {}


# Literal values whose capitalised word is not how the field says it.
LITERAL_LABELS = {
    "builtin": "Built in",
    "path": "A folder",
    "hub": "Hugging Face Hub",
    "no": "Never",
    "steps": "Every n steps",
    "epoch": "Every epoch",
    "cuda": "CUDA GPU",
    "npu": "Ascend NPU",
    "xpu": "Intel XPU",
    "mps": "Apple GPU",
    "cpu": "CPU",
    "auto": "Automatic",
    "torchrun": "torchrun",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "python": "python",
    "split": "Part of the data",
    "completions": "Completions only",
    "all_tokens": "All tokens",
    "latest": "Latest checkpoint, if any",
    "scratch": "Step 0, always",
}


@cache
def options() -> tuple[Option, ...]:
    """Every option, in the order of declaration."""
    found = []
    for section, info in RunSpec.model_fields.items():
        assert isinstance(info.annotation, type)
        for key, leaf in info.annotation.model_fields.items():
            ui = next(m for m in leaf.metadata if isinstance(m, Ui))
            kind, table = _kind(leaf.annotation, ui)
            table = next((m.table for m in leaf.metadata if isinstance(m, OneOf)), table)
            default = leaf.default if leaf.default is not PydanticUndefined else leaf.default_factory()
            found.append(
                Option(
                    name=f"{section}.{key}",
                    kind="choice" if table else kind,
                    default=default,
                    label=ui.label,
                    help=" ".join((leaf.description or "").split()),
                    when=ui.when if isinstance(ui.when, tuple) else (ui.when,),
                    widget=ui.widget,
                    unit=ui.unit,
                    choices=tuple((value, row.label) for value, row in table.items()),
                    minimum=_limit(leaf.metadata, "ge", "gt"),
                    maximum=_limit(leaf.metadata, "le", "lt"),
                )
            )
    return tuple(found)


def _limit(metadata: list[Any], *names: str) -> float | None:
    """The first of an annotation's limits with one of these names: Ge has `ge`, Gt has `gt`, and so on."""
    return next((getattr(mark, name) for mark in metadata for name in names if hasattr(mark, name)), None)


@cache
def by_name() -> Mapping[str, Option]:
    """Every option by its dotted name."""
    return {o.name: o for o in options()}


def get(spec: RunSpec, name: str) -> Any:
    """The value of `section.field`."""
    section, _, key = name.partition(".")
    return getattr(getattr(spec, section), key)


def flat(spec: RunSpec) -> Values:
    """Dotted name -> value, for every option."""
    return {o.name: get(spec, o.name) for o in options()}


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names -> sections."""
    sections: dict[str, Any] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return sections


def build(sections: Mapping[str, Any]) -> RunSpec:
    """RunSpec from nested values. Raises SpecError naming every field that is wrong, with what it takes."""
    try:
        return RunSpec.model_validate(sections)
    except ValidationError as error:
        raise SpecError([_problem(e) for e in error.errors()]) from None


def parse(values: Mapping[str, Any]) -> RunSpec:
    """RunSpec from dotted names, as a form sends them. Raises SpecError."""
    _known(values)
    return build(nest(values))


def _known(values: Mapping[str, Any]) -> None:
    if unknown := [Problem(name, "is no option of Footplate") for name in values if name not in by_name()]:
        raise SpecError(unknown)


def edit(spec: RunSpec, patch: Mapping[str, Any]) -> RunSpec:
    """`spec` with the options of `patch` (dotted names) replaced. Raises SpecError."""
    _known(patch)
    sections = {section: {**vars(getattr(spec, section))} for section in RunSpec.model_fields}
    for name, value in patch.items():
        section, _, key = name.partition(".")
        sections[section][key] = value
    return build(sections)


def _problem(error: Any) -> Problem:
    """A pydantic error in a form's words: the field, and what it takes."""
    name = ".".join(str(part) for part in error["loc"][:2])
    option = by_name().get(name)
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return Problem(name, "is no option of Footplate")
    if kind == "value_error":
        return Problem(name, str(context["error"]))
    if option is not None and option.kind in ("int", "float") and error["input"] in (None, ""):
        return Problem(name, f"is empty; the default is {option.default}")
    words = {
        "greater_than_equal": "must be at least {ge}",
        "greater_than": "must be more than {gt}",
        "less_than_equal": "must be at most {le}",
        "less_than": "must be less than {lt}",
        "int_from_float": "must be a whole number",
        "int_parsing": "must be a whole number",
        "int_type": "must be a whole number",
        "float_parsing": "must be a number",
        "float_type": "must be a number",
        "finite_number": "must be a finite number",
        "bool_parsing": "must be true or false",
        "bool_type": "must be true or false",
        "literal_error": "must be one of {expected}",
    }
    message = words[kind].format(**context) if kind in words else error["msg"]
    return Problem(name, message)


def shown(spec: RunSpec, option: Option) -> bool:
    """Whether `option` has an effect in `spec`: one of the conditions of its `when` holds."""
    return any(all(word(get(spec, name)) in allowed for name, allowed in c.items()) for c in option.when)


def word(value: Any) -> str:
    """A value as `when` and the page's CSS write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def effective(spec: RunSpec) -> RunSpec:
    """`spec` with every hidden option at its default: two specs that do the same are then equal."""
    hidden = {o.name: o.default for o in options() if not shown(spec, o)}
    return edit(spec, hidden) if hidden else spec


def changes(spec: RunSpec) -> Values:
    """Dotted name -> value of what is shown and differs from the default, in order of declaration."""
    return {o.name: get(spec, o.name) for o in options() if shown(spec, o) and get(spec, o.name) != o.default}


def text(option: Option, value: Any) -> Any:
    """A value as a form's field shows it: lists and tables become text, others stay as they are."""
    if option.kind == "list" and not isinstance(value, str):
        return ("\n" if option.widget == "lines" else ", ").join(str(v) for v in value)
    if option.kind == "table" and not isinstance(value, str):
        return "\n".join(f"{k}={v}" for k, v in value.items())
    return value
