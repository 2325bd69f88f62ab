"""Option table of RunSpec: reading, editing, flattening and validating specs by option key, and their visibility.

An option has one key everywhere: `train.learning_rate` is the YAML key, the command-line option, the column of a table
and, with a dash, the element ID on the page.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from backend.config import Condition, OneOf, RunSpec, Source, Ui, variables
from backend.config.sources import KEY, SOURCES, SourceError, collected, key_of, with_first, without_first
from backend.config.suggestions import suggest_option, suggest_section, suggest_value
from backend.registry import Choice

Values = dict[str, Any]


@dataclass(frozen=True)
class Option:
    """One option of RunSpec. `kind` is bool, int, float, str, choice, list, table or datasets; `path` is that of Ui;
    limits are inclusive or None.

    It is visible if one of the conditions in `when` holds.
    """

    name: str
    kind: str
    default: Any
    label: str
    help: str
    when: tuple[Condition, ...]
    widget: str
    unit: str
    path: str = ""
    choices: tuple[tuple[str, str], ...] = ()  # (value, label)
    minimum: float | None = None
    maximum: float | None = None
    excludes_minimum: bool = False
    excludes_maximum: bool = False

    @property
    def section(self) -> str:
        """The first half of the key."""
        return self.name.partition(".")[0]

    @property
    def element_id(self) -> str:
        """The element ID of its widget on the page."""
        return self.name.replace(".", "-")


@dataclass(frozen=True)
class Problem:
    """An invalid value or an unknown key: `field` is the dotted key ('' for the whole spec), and the message completes
    it: "train.max_steps: must be at least 1, but is 0"."""

    field: str
    message: str


class SpecError(ValueError):
    """An invalid spec; `problems` has one entry for each invalid field."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{p.field}: {p.message}" if p.field else p.message for p in problems))
        self.problems = problems


def _kind(annotation: Any, ui: Ui) -> tuple[str, Mapping[str, Choice]]:
    if ui.widget == "sources":
        return "datasets", {}
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        labels = {v: v.replace("_", " ").capitalize() for v in typing.get_args(annotation)}
        labels |= {k: v for k, v in {**LITERAL_LABELS, **ui.choices}.items() if k in labels}
        return "choice", {value: Choice(label) for value, label in labels.items()}
    return {bool: "bool", int: "int", float: "float", str: "str", dict: "table", tuple: "list"}[
        origin or annotation
    ], {}


# Folders of the machine that runs the training; other paths name what the training reads.
MACHINE_FOLDERS = ("parallel.nvme_path", "llamafactory.environment")
# Labels of Literal values that are not just the capitalized value.
LITERAL_LABELS = {
    "builtin": "Built-in",
    "path": "Local folder",
    "hub": "Hugging Face Hub",
    "files": "Local files",
    "no": "Never",
    "none": "None",
    "steps": "Every N steps",
    "epoch": "Every epoch",
    "cuda": "CUDA or ROCm GPU",
    "npu": "Ascend NPU",
    "xpu": "Intel XPU",
    "mps": "Apple GPU",
    "cpu": "CPU",
    "auto": "Automatic",
    "torchrun": "torchrun",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "python": "python",
    "split": "Split of the data",
    "completions": "Completions only",
    "all_tokens": "All tokens",
    "latest": "Latest checkpoint",
    "scratch": "From scratch (step 0)",
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
                    path=ui.path,
                    choices=tuple((value, row.label) for value, row in table.items()),
                    minimum=_limit(leaf.metadata, "ge", "gt"),
                    maximum=_limit(leaf.metadata, "le", "lt"),
                    excludes_minimum=_limit(leaf.metadata, "gt") is not None,
                    excludes_maximum=_limit(leaf.metadata, "lt") is not None,
                )
            )
    return tuple(found)


def _limit(metadata: list[Any], *names: str) -> float | None:
    """The first limit with one of these names: annotated_types.Ge has `ge`, Gt has `gt`, and so on."""
    return next((getattr(mark, name) for mark in metadata for name in names if hasattr(mark, name)), None)


@cache
def by_name() -> Mapping[str, Option]:
    """Option key -> option."""
    return {o.name: o for o in options()}


def get(spec: RunSpec, name: str) -> Any:
    """The value of an option, which may belong to a single dataset, such as data.sources[1].weight."""
    if match := KEY.fullmatch(name):
        return getattr(spec.data.datasets[int(match[1])], match[2])
    return _getter(name)(spec)


_getter = cache(attrgetter)


def flat(spec: RunSpec) -> Values:
    """Option key -> value, for every option."""
    return {o.name: get(spec, o.name) for o in options()}


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys -> nested sections."""
    sections: dict[str, Any] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return sections


def build(sections: Mapping[str, Any]) -> RunSpec:
    """RunSpec from nested values. Raises SpecError with a problem for each invalid field."""
    try:
        if isinstance(data := sections.get("data"), dict):
            sections = {**sections, "data": without_first(data)}
        return RunSpec.model_validate(sections)
    except SourceError as error:
        raise SpecError([Problem(error.field, str(error))]) from None
    except ValidationError as error:
        raise SpecError([_problem(e) for e in error.errors()]) from None


def parse(values: Mapping[str, Any]) -> RunSpec:
    """RunSpec from dotted keys, as the form sends them. Raises SpecError."""
    return build(nest(_known(values)))


def find(name: str) -> Option | None:
    """The option with this key, which may belong to a single dataset, such as data.sources[1].weight."""
    match = KEY.fullmatch(name)
    return by_name().get(f"data.{match[2]}" if match and match[2] in Source.model_fields else name)


def _known(values: Mapping[str, Any], sources: Sequence[Source] = ()) -> dict[str, Any]:
    """Option -> value. Values of single datasets, such as data.sources[1].weight, are merged into the list `sources`.
    Raises SpecError."""
    if unknown := [_unknown(name) for name in values if find(name) is None]:
        raise SpecError(unknown)
    try:
        return collected(values, sources)
    except SourceError as error:
        raise SpecError([Problem(error.field, str(error))]) from None


def _unknown(name: str) -> Problem:
    """The problem of an unknown key: names the option or section that it most likely means."""
    sections = RunSpec.model_fields
    if match := KEY.fullmatch(name):
        return _unknown_of_dataset(int(match[1]), match[2])
    if name in sections:
        return Problem(
            name, f"is a section; set one of its options, such as {name}.{next(iter(nest(by_name())[name]))}"
        )
    is_option = "." in name or bool(suggest_option(name, by_name(), exact=True))
    if not is_option and (section := suggest_section(name, sections)):
        return Problem(name, f"unknown section; did you mean {section}?")
    if suggestion := suggest_option(name, by_name()):
        return Problem(name, f"unknown option; did you mean {suggestion}?")
    if is_option:
        return Problem(name, "unknown option; docs/options.md lists all options")
    return Problem(name, f"unknown section; sections are {', '.join(sections)}")


def _unknown_of_dataset(index: int, key: str) -> Problem:
    """The problem of a key that is not an option of a single dataset."""
    name = key_of(index, key) if index else f"{SOURCES}[0].{key}"
    if f"data.{key}" in by_name():
        return Problem(name, f"is the same for all datasets; set data.{key}")
    own = [f"data.{field}" for field in Source.model_fields]
    if suggestion := suggest_option(f"data.{key}", own):
        return Problem(name, f"unknown option; did you mean {SOURCES}[{index}].{suggestion.removeprefix('data.')}?")
    return Problem(name, "unknown option; docs/options.md lists all options")


def edit(spec: RunSpec, patch: Mapping[str, Any]) -> RunSpec:
    """`spec` with the options of `patch` (dotted keys) replaced. Raises SpecError."""
    changed = nest(_known(patch, spec.data.sources))  # only these sections are validated again
    try:
        if "data" in changed:
            changed["data"] = without_first(changed["data"])
    except SourceError as error:
        raise SpecError([Problem(error.field, str(error))]) from None
    return build({**vars(spec), **{name: {**vars(getattr(spec, name)), **part} for name, part in changed.items()}})


def for_dataset(spec: RunSpec, index: int) -> RunSpec:
    """`spec` with one of its datasets alone."""
    if not spec.data.sources:
        return spec
    own = {name: getattr(spec.data.datasets[index], name) for name in Source.model_fields}
    return spec.model_copy(update={"data": spec.data.model_copy(update={**own, "weight": 1.0, "sources": ()})})


def renamed(text: str, index: int) -> str:
    """A text about the options of a single dataset, such as data.files, with the keys that they have in the list."""
    return _OWN_KEY.sub(lambda match: key_of(index, match[1]), text) if index else text


_OWN_KEY = re.compile(rf"\bdata\.({'|'.join(sorted(Source.model_fields, key=len, reverse=True))})\b(?!\.?\w)")

MESSAGES = {  # pydantic error type -> message
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "int_type": "must be an integer",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "dict_type": "must be a table of names and values",
    "model_type": "must be a mapping of options",
}


def _problem(error: Any) -> Problem:
    """A pydantic error as a Problem: the field, its limits and the value."""
    name = _field(error["loc"])
    option, kind, value = find(name), error["type"], error.get("input")
    if kind == "extra_forbidden":
        return _unknown(name)
    if option is not None and option.kind == "choice":
        return Problem(name, _choice_message(option, value))
    if kind in ("too_long", "string_too_long"):
        unit = "characters" if kind == "string_too_long" else "entries"
        size = f", but has {len(value):,}" if isinstance(value, str | list | tuple | dict) else ""
        return Problem(name, f"must have at most {error['ctx']['max_length']:,} {unit}{size}")
    if kind == "value_error":
        return Problem(name, str(error["ctx"]["error"]))
    if option is not None and option.kind in ("int", "float") and value in (None, ""):
        return Problem(name, f"must not be empty; the default is {option.default}")
    if kind == "string_type" and isinstance(value, int | float | date):  # YAML reads 12:00:00 as 43200
        which = "" if option is None or isinstance(option.default, str) else "an entry "  # of a list, or a variable
        return Problem(name, f"{which}must be text, but YAML reads it as {_shown_yaml(value)}; put it in quotes")
    if kind not in MESSAGES:
        return Problem(name, str(error["msg"]))
    limits = with_integers(error.get("ctx", {}))
    return Problem(name, f"{MESSAGES[kind].format(**limits)}, but is {_shown_value(value)}")


def with_integers(limits: Mapping[str, Any]) -> dict[str, Any]:
    """The limits in a pydantic error, with 8 for 8.0."""
    return {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in limits.items()}


def _field(location: Sequence[str | int]) -> str:
    """The key of an invalid field."""
    if location[:2] == ("data", "sources") and len(location) > 2:
        index, key = location[2], location[3] if len(location) > 3 else ""
        return f"{SOURCES}[{index}].{key}" if key else f"{SOURCES}[{index}]"
    return ".".join(str(part) for part in location[:2])


def _choice_message(option: Option, value: Any) -> str:
    choices = [choice for choice, _ in option.choices]
    if suggestion := suggest_value(option.name, word(value), choices):
        return f"has no value {_shown_value(value)}; did you mean {suggestion}? Its values are {', '.join(choices)}"
    return f"must be one of {', '.join(choices)}, but is {_shown_value(value)}"


def _shown_yaml(value: float | date) -> str:
    """What YAML makes of a word without quotes: a number, a date, or true and false."""
    kind = "" if isinstance(value, bool) else "the date " if isinstance(value, date) else "the number "
    return f"{kind}{str(value).lower() if isinstance(value, bool) else value}"


def _shown_value(value: Any) -> str:
    """A value in a message; quoted if it is text, and shortened."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def shown(spec: RunSpec, option: Option) -> bool:
    """Whether `option` is visible and has an effect in `spec`: one of the conditions in `when` holds."""
    return _holds(option.when, lambda name: word(get(spec, name)))


def _holds(when: Sequence[Condition], value_of: Callable[[str], str]) -> bool:
    return any(all(value_of(name) in allowed for name, allowed in condition.items()) for condition in when)


@cache
def controlling_options() -> list[str]:
    """Options whose value decides whether others are visible."""
    return sorted({name for option in options() for condition in option.when for name in condition})


@lru_cache(maxsize=1024)
def _hidden_options(values: tuple[Any, ...]) -> Mapping[str, Any]:
    """The options without effect and their defaults, for these values of the controlling options."""
    words = dict(zip(controlling_options(), map(word, values), strict=True))
    return {option.name: option.default for option in options() if not _holds(option.when, words.__getitem__)}


def _effective_datasets(spec: RunSpec) -> tuple[Source, ...]:
    """The list data.sources with every hidden option at its default."""
    found = [Source()]
    for index, source in enumerate(spec.data.sources[1:], 1):
        alone = _hidden(for_dataset(spec, index))
        hidden = {name: alone[f"data.{name}"] for name in Source.model_fields if f"data.{name}" in alone}
        hidden.pop("weight", None)
        found.append(source.model_copy(update=hidden))
    return tuple(found)


def _hidden(spec: RunSpec) -> Mapping[str, Any]:
    return _hidden_options(_values(spec, controlling_options()))


def _values(spec: RunSpec, names: Iterable[str]) -> tuple[Any, ...]:
    """The values of two or more options, in one call, because a check reads thousands of values."""
    found: tuple[Any, ...] = _getter(*names)(spec)
    return found


def word(value: Any) -> str:
    """A value as `when` writes it; for a list, only whether it has several entries."""
    if isinstance(value, tuple):
        return "several" if value else ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def list_or_text(name: str, text: str) -> str | list[str]:
    """A value of an option as it is written on the command line. Values of several entries can be a YAML list, such as
    [a.jsonl, b.jsonl]; tokens cannot, because [INST] is one. In a line of the shell, a space follows the command [."""
    option, line = find(name), text.strip()
    is_list = option is not None and isinstance(option.default, tuple) and not name.endswith("_tokens")
    in_shell = option is not None and option.widget == "lines" and option.path != "data"
    if not is_list or not line.startswith("[") or (in_shell and line[1:2].isspace()):
        return text
    try:
        found = yaml.load(text, yaml.BaseLoader)  # entries stay texts: 007 and no
    except yaml.YAMLError:  # a pattern such as [ab]*.jsonl
        return text
    return found if isinstance(found, list) and all(isinstance(each, str) for each in found) else text


def effective(spec: RunSpec) -> RunSpec:
    """`spec` with every hidden option at its default, so that specs with the same effect are equal."""
    hidden = _hidden(spec)
    now = zip(hidden.items(), _values(spec, hidden), strict=True)
    patch = {name: default for (name, default), value in now if value != default}
    if spec.data.sources and (datasets := _effective_datasets(spec)) != spec.data.sources:
        patch[SOURCES] = datasets
    return edit(spec, patch) if patch else spec


def with_defaults(spec: RunSpec, patch: Mapping[str, Any]) -> dict[str, Any]:
    """`patch` and the defaults of the options that it makes visible. These options may still have values from an
    earlier choice, such as a parallel size of another strategy, which were hidden when the patch was checked."""
    checked, result = effective(edit(effective(spec), patch)), effective(edit(spec, patch))
    if checked == result:
        return dict(patch)
    names = list(by_name())
    pairs = zip(names, _values(checked, names), _values(result, names), strict=True)
    return {**patch, **{name: value for name, value, other in pairs if value != other}}


def visible(spec: RunSpec) -> Values:
    """Option key -> value of the options that have an effect, in order of declaration."""
    hidden, known = _hidden(spec), by_name()
    return {name: value for name, value in zip(known, _values(spec, known), strict=True) if name not in hidden}


def changes(spec: RunSpec) -> Values:
    """Same as `visible`, for the options that differ from their defaults."""
    known = by_name()
    return {name: value for name, value in visible(spec).items() if value != known[name].default}


@cache
def _texts() -> tuple[Option, ...]:
    """The options that can contain any text, except launch.env, whose variables have names."""
    return tuple(option for option in options() if option.kind in ("str", "list", "datasets"))


def options_with_secrets(spec: RunSpec) -> list[str]:
    """The options, other than launch.env, whose text contains an access token or credentials in an address."""
    values = zip(_texts(), _values(spec, (option.name for option in _texts())), strict=True)
    return [option.name for option, value in values if value and variables.contains_secret(str(text(option, value)))]


def masked_value(value: Any) -> Any:
    """An option's value with its secrets masked, to show it; several datasets as JSON text."""
    if isinstance(value, tuple) and value and isinstance(value[0], Source):
        return variables.hide_values(json.dumps(plain(value), ensure_ascii=False))
    if isinstance(value, Mapping):
        return variables.masked(value)
    if isinstance(value, tuple):
        return tuple(map(masked_value, value))
    return variables.hide_values(value) if isinstance(value, str) else value


def text(option: Option, value: Any) -> Any:
    """A value as a form field shows it: lists and tables as text, others unchanged."""
    if option.kind == "list" and not isinstance(value, str):
        return ("\n" if option.widget == "lines" else ", ").join(str(v) for v in value)
    if option.kind == "table" and not isinstance(value, str):
        return "\n".join(f"{k}={v}" for k, v in value.items())
    if option.kind == "datasets" and not isinstance(value, str):
        return json.dumps(plain(value), ensure_ascii=False) if value else ""
    return value


def plain(value: Any) -> Any:
    """A value as lists and tables, as a file has it. A dataset has only the options that differ from their defaults."""
    if isinstance(value, Source):
        known = type(value).model_fields
        return {name: plain(own) for name, own in value if own != known[name].default}
    if isinstance(value, tuple) and value and isinstance(value[0], Source):
        return [{}, *({"source": each.source, **plain(each)} for each in value[1:])]
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys -> sections as a file has them: made of lists and tables, with all datasets in one list."""
    found = nest({name: plain(value) for name, value in values.items()})
    return {**found, "data": with_first(found["data"], Source.model_fields)} if "data" in found else found
