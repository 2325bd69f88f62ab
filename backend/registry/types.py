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
    package_min_version: str = field(default="", kw_only=True)  # older ones are refused by the library that imports it
    devices: tuple[str, ...] = field(default=(), kw_only=True)  # the only device types it runs on; () for all
    min_capability: tuple[int, int] = field(default=(0, 0), kw_only=True)  # CUDA compute capability; (0, 0): any
    max_capability: tuple[int, int] = field(default=(0, 0), kw_only=True)


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
    """What turns gradients into steps. `name` is the Trainer's `optim`; '' for one that `backend.train` makes itself.

    Beside each trained weight stand `states` numbers of `bits` each (0: as wide as the weight). `layout` says where
    there are fewer: low_rank in projected matrices, matrices one instead of two, heads one of two, block for one block
    only; `factored`: rows and columns instead of matrices. `reads` are the options of `train` that it looks at.
    """

    name: str = ""
    states: float = 0.0
    bits: int = 0
    layout: Literal["", "low_rank", "matrices", "heads", "block"] = ""
    factored: bool = False
    reads: frozenset[str] = frozenset()
    arguments: Mapping[str, str] = field(default_factory=dict)  # the Trainer's optim_args
    inside: bool = False  # steps within the backward pass: each gradient is used and freed at once
    paged: bool = False  # its state may leave for the host's RAM
    state_on_cpu: bool = False  # its state lies in the host's RAM, and travels at each step
    loses_state_on_save: bool = False  # its checkpoints do not hold its state
    rounding: str = ""  # how it keeps small updates of bf16 weights
    compiled: bool = False  # torch.compile builds its kernels at the first step
    early: bool = False  # its state is made with it, before an engine changes the weights
    kahan: bool = False  # one more number a bf16 weight, for what was rounded away

    @property
    def moments(self) -> bool:
        """Whether its state is AdamW's two moments and no more: DeepSpeed deals out no other anew."""
        return self.name in ("adamw_torch", "adamw_torch_fused", "adamw_torch_npu_fused")

    def plain(self, masters: bool) -> bool:
        """Whether it takes ordinary tensors alone, and fails on the weights of FSDP2 and tensor parallel, which are in
        fp32 where there are `masters`."""
        packed = self.package == "torchao" and (self.bits == 4 or not masters)
        return self.factored or packed or self.package in ("bitsandbytes", "apollo-torch")

    @property
    def swaps_weights_for_eval(self) -> bool:
        """Whether it holds other weights while it trains than those that are evaluated and saved."""
        return self.package == "schedulefree"

    @property
    def state_bytes(self) -> float:
        """Bytes of state an ordinary weight in fp32; a number of 8 or 4 bits shares the scale of its block."""
        return self.states * {0: 4, 32: 4, 8: 1 + 4 / 256, 4: 0.5 + 4 / 128}[self.bits]


@dataclass(frozen=True)
class Precision(Choice):
    """In what numbers a run computes: bf16, fp16 or fp32 ('' for the device's best), and whether trained weights are
    held in fp32 all the same."""

    compute_dtype: str = ""
    fp32_master_weights: bool = True


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
    changes_base_weights: bool = False


@dataclass(frozen=True)
class Attention(Choice):
    """An attention implementation, and the head dimensions that its kernels take (0: any, up to any size)."""

    max_head_dim: int = 0
    head_dim_multiple: int = 0


@dataclass(frozen=True)
class Quantization(Choice):
    """How many bits a packed base weight has; 0 is not packed."""

    bits: int = 0


@dataclass(frozen=True)
class PrequantizedFormat(Choice):
    """A format that a model may come in: whether adapters are trained on it, whether it is unpacked while loading so
    that anything can be trained, and the packages that it needs."""

    adapters: bool = False
    unpacked: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)  # package -> minimum version, '' for any


@dataclass(frozen=True)
class Strategy(Choice):
    """How processes work together: the engine that does it ('' for one process) and its ZeRO stage.

    `spread`: no process holds the weights whole between steps.
    """

    engine: Literal["", "ddp", "deepspeed", "fsdp", "tensor"] = ""
    zero_stage: int = 0
    fsdp_version: int = 0
    shards_weights: bool = False
