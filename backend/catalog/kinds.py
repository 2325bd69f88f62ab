"""What a row of each table holds.

Floor 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Choice:
    """One row: what a person reads (`label`, `help`) and the package it needs beyond the installed base."""

    label: str
    help: str = ""
    package: str = ""


@dataclass(frozen=True)
class Stage(Choice):
    """`formats` that its rows may have, first the one it is made for; whether the model still `answers` in words or
    `scores` them; whether it is held to a `reference`; `sequences` that one row makes."""

    formats: tuple[str, ...] = ()
    answers: bool = False
    scores: bool = False
    reference: bool = False
    sequences: int = 1


@dataclass(frozen=True)
class Dataset(Choice):
    """An embedded dataset: the `format` of its rows."""

    format: str = ""


@dataclass(frozen=True)
class BuiltinModel(Choice):
    """A model that needs no hub. `config` is what its config.json says, known before it was made or fetched."""

    parameters: int = 0
    download_bytes: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Optimizer(Choice):
    """`name` is the Trainer's `optim`; `state_bytes` is bytes of state a trained parameter."""

    name: str = ""
    state_bytes: float = 0.0


@dataclass(frozen=True)
class Device(Choice):
    """A family of devices: the variable that selects them, and the collective backends in order of preference."""

    visible: str = ""
    backends: tuple[str, ...] = ("gloo",)
    bf16: bool = True
    fp16: bool = True


@dataclass(frozen=True)
class Init(Choice):
    """How adapters begin: peft's `init_lora_weights`, and whether it takes a part out of the base weights."""

    name: str | bool = True
    moves: bool = False


@dataclass(frozen=True)
class Attention(Choice):
    """How attention is computed; a kernel runs from the `oldest` to the `newest` compute capability, (0, 0): any."""

    oldest: tuple[int, int] = (0, 0)
    newest: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Quantization(Choice):
    """How many bits a packed base weight has; 0 is not packed."""

    bits: int = 0


@dataclass(frozen=True)
class Packed(Choice):
    """A format that a model may come in: whether adapters are trained on it, whether it is unpacked while loading so
    that anything can be trained, and the packages that it needs."""

    adapters: bool = False
    unpacked: bool = False
    packages: tuple[str, ...] = ()
    gpu: bool = False  # needs one


@dataclass(frozen=True)
class Strategy(Choice):
    """How processes work together: the engine that does it ('' for one process) and its ZeRO stage.

    `spread`: no process holds the weights whole between steps.
    """

    engine: Literal["", "ddp", "deepspeed", "fsdp", "tensor"] = ""
    stage: int = 0
    version: int = 0  # of FSDP
    spread: bool = False
