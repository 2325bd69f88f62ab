"""Declaration of options: label and visibility (Ui), value types, and the visibility conditions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from backend import registry
from backend.config import merge

Condition = Mapping[str, tuple[str, ...]]
When = Condition | tuple[Condition, ...]


@dataclass(frozen=True)
class Ui:
    """The label, visibility and widget of an option. `when`: option -> allowed values, which must all hold; if there
    are several conditions, one is enough. `path`: what the value names if it is a path: a folder, a data file or
    another file."""

    label: str
    when: When = field(default_factory=dict)
    widget: Literal["", "lines", "text", "list", "sources"] = ""
    unit: str = ""
    path: Literal["", "folder", "data", "file"] = ""
    choices: Mapping[str, str] = field(default_factory=dict)  # labels of a Literal's values


@dataclass(frozen=True)
class OneOf:
    """The registry table of a choice."""

    table: Mapping[str, registry.Choice]


def one_of(table: Mapping[str, registry.Choice]) -> tuple[OneOf, AfterValidator]:
    """Annotations for a text option whose value is a key of `table`."""

    def check(value: str) -> str:
        if value not in table:
            raise ValueError(f"must be one of {', '.join(table)}")
        return value

    return OneOf(table), AfterValidator(check)


def _split_by(pattern: str) -> BeforeValidator:
    """Accept one text for a list, as a form field or the command line sends it."""

    def split(value: Any) -> Any:
        return tuple(p.strip() for p in re.split(pattern, value) if p.strip()) if isinstance(value, str) else value

    return BeforeValidator(split)


def _pairs(value: Any) -> Any:
    """Accept lines of NAME=value for environment variables."""
    if not isinstance(value, str):
        return value
    pairs = {}
    for line in filter(None, (line.strip() for line in value.splitlines())):
        name, equals, text = line.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name.strip()):
            raise ValueError(f"must have one NAME=value per line, but has the line {line!r}")
        pairs[name.strip()] = text.strip()
    return pairs


def _variable_names(value: dict[str, str]) -> dict[str, str]:
    for name in value:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"contains an invalid environment variable name: {name!r}")
    return value


def word_like(or_empty: bool = False) -> tuple[AfterValidator]:
    """Annotation for a name that becomes part of a command and of a file path."""

    def check(value: str) -> str:
        if not (or_empty and not value) and not re.fullmatch(r"[A-Za-z0-9][\w.-]*", value):
            raise ValueError("must begin with a letter or digit and contain only letters, digits, _, . and -")
        return value

    return (AfterValidator(check),)


def matches(pattern: str, what: str) -> AfterValidator:
    """Annotation for a text that is empty or matches the pattern; otherwise, `what` is the error message."""

    def check(value: str) -> str:
        if value and not re.fullmatch(pattern, value):
            raise ValueError(what)
        return value

    return AfterValidator(check)


def each_matches(pattern: str, what: str) -> AfterValidator:
    """Annotation for lines that each match the pattern; otherwise, the error message is `what` with the line."""

    def check(lines: tuple[str, ...]) -> tuple[str, ...]:
        for line in lines:
            if not re.fullmatch(pattern, line):
                raise ValueError(f"{what}, but has the line {line!r}")
        return lines

    return AfterValidator(check)


def _no(value: Any) -> Any:
    """Accept `no` without quotes, which YAML reads as false."""
    return "no" if value is False else value


NO = BeforeValidator(_no)


def _json(text: str) -> str:
    merge.parse(text)
    return text


JsonText = Annotated[str, AfterValidator(_json)]
# Checking each entry takes time; a longer list is a mistake, such as a pasted file.
MAX_TEXT, MAX_LINES, MAX_NAMES, MAX_NAME, MAX_IDS, MAX_PAIRS = 100_000, 10_000, 1000, 300, 1024, 1000
Lines = Annotated[tuple[str, ...], Field(max_length=MAX_LINES), _split_by(r"[\n]")]
Names = Annotated[
    tuple[Annotated[str, Field(max_length=MAX_NAME)], ...], Field(max_length=MAX_NAMES), _split_by(r"[\s,]+")
]
Tokens = Annotated[Names, each_matches(r"(?s).*\S.*", "must be tokens that do not consist of spaces only")]
Ids = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=MAX_IDS), _split_by(r"[\s,]+")]
Pairs = Annotated[dict[str, str], Field(max_length=MAX_PAIRS), BeforeValidator(_pairs), AfterValidator(_variable_names)]


class Section(BaseModel):
    """A section of the spec: immutable, without unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
        str_max_length=MAX_TEXT,
    )

    @field_validator("*")
    @classmethod
    def _has_no_null(cls, value: Any) -> Any:
        """No file name and no environment variable can contain it."""
        if any("\0" in text for text in _texts(value)):
            raise ValueError("must not contain a null character")
        return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for text in pair if isinstance(text, str))
    elif isinstance(value, tuple):
        yield from (text for text in value if isinstance(text, str))


def read_by(option: str) -> Condition:
    """The condition that the optimizer uses this option."""
    return {"train.optim": tuple(name for name, row in registry.OPTIMIZERS.items() if option in row.reads)}


LORA: Condition = {"method.kind": ("lora",)}
FREEZE: Condition = {"method.kind": ("freeze",)}
SFT: Condition = {"train.stage": ("sft",)}
NEXT_TOKEN: Condition = {"train.stage": registry.NEXT_TOKEN_STAGES}
CHAT: Condition = {"train.stage": tuple(name for name in registry.STAGES if name != "pretraining")}
GENERATING: Condition = {"train.stage": tuple(name for name, row in registry.STAGES.items() if row.generates)}
DPO: Condition = {"train.stage": ("dpo",)}
KTO: Condition = {"train.stage": ("kto",)}
REWARD: Condition = {"train.stage": ("reward",)}
WITH_REFERENCE: Condition = {
    "train.stage": tuple(name for name, row in registry.STAGES.items() if row.uses_reference_model)
}
WITH_BETA: Condition = {"train.stage": ("dpo", "kto", "orpo")}
SHUFFLING: Condition = {"train.stage": tuple(name for name in registry.STAGES if name != "kto")}
DDP: Condition = {"parallel.strategy": ("ddp",)}
MULTI_PROCESS: Condition = {"parallel.strategy": registry.MULTI_PROCESS}
LOCAL: Condition = {"launch.place": ("local",)}
SLURM: Condition = {"launch.place": ("slurm",)}
RAY: Condition = {"launch.place": ("ray",)}
KUBERNETES: Condition = {"launch.place": ("kubernetes",)}
IN_CLUSTER: Condition = {"launch.place": ("slurm", "ray", "kubernetes")}
LLAMAFACTORY: Condition = {"launch.trainer": ("llamafactory",)}
MEGATRON: Condition = {**LLAMAFACTORY, "llamafactory.backend": ("megatron",)}
KTRANSFORMERS: Condition = {**LLAMAFACTORY, "llamafactory.backend": ("ktransformers",)}
WITH_LAUNCHER: Condition = {
    **MULTI_PROCESS,
    **LOCAL,
    "launch.launcher": ("torchrun", "accelerate", "deepspeed"),
}
MULTI_NODE: Condition = {**WITH_LAUNCHER, "launch.rendezvous": ("static", "elastic")}
STATIC: Condition = {**WITH_LAUNCHER, "launch.rendezvous": ("static",)}
ELASTIC: Condition = {**WITH_LAUNCHER, "launch.rendezvous": ("elastic",)}
WITH_HOSTFILE: Condition = {**STATIC, "launch.launcher": ("deepspeed",)}
BUCKETS: Condition = {"parallel.strategy": ("ddp", *registry.DEEPSPEED)}
OFFLOADING: Condition = {"parallel.strategy": ("zero1", "zero2", "zero3")}
ZERO: Condition = {"parallel.strategy": registry.DEEPSPEED}
ZERO3: Condition = {"parallel.strategy": ("zero3",)}
FSDP: Condition = {"parallel.strategy": registry.FSDP}
WITH_ENGINE_CONFIG: Condition = {"parallel.strategy": (*registry.DEEPSPEED, *registry.FSDP)}
FSDP1: Condition = {"parallel.strategy": ("fsdp1",)}
FSDP2: Condition = {"parallel.strategy": ("fsdp2",)}
TENSOR: Condition = {"parallel.strategy": ("tensor",)}
NVME_WEIGHTS: Condition = {**ZERO3, "parallel.offload_param": ("nvme",)}
NVME = ({**OFFLOADING, "parallel.offload_optimizer": ("nvme",)}, NVME_WEIGHTS)
OFFLOADED = (
    {**OFFLOADING, "parallel.offload_optimizer": ("cpu", "nvme")},
    {**ZERO3, "parallel.offload_param": ("cpu", "nvme")},
)
USER_DATA: Condition = {"data.source": ("files", "hub")}
SEVERAL: Condition = {"data.sources": ("several",)}
SOME_USER_DATA = (USER_DATA, SEVERAL)
FP8: Condition = {"precision.compute": ("fp8",)}
EVALUATING: Condition = {"eval.strategy": ("steps", "epoch")}
SAVING: Condition = {"save.strategy": ("steps", "epoch")}
