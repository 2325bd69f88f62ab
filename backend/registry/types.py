"""The row types of the registry's tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Choice:
    """One value of an option: its label and help, and what it requires (package, device type, GPU generation)."""

    label: str
    help: str = ""
    package: str = ""
    package_min_version: str = field(default="", kw_only=True)  # the library that imports it refuses older ones
    devices: tuple[str, ...] = field(default=(), kw_only=True)  # the only device types it runs on; () for all
    min_capability: tuple[int, int] = field(default=(0, 0), kw_only=True)  # CUDA compute capability; (0, 0): any
    max_capability: tuple[int, int] = field(default=(0, 0), kw_only=True)


@dataclass(frozen=True)
class Stage(Choice):
    """A training stage.

    `formats`: the data formats that it accepts, its usual one first. `generates`: the trained model generates text, so
    its generations can be evaluated. `is_reward_model`: it is trained with a scalar head instead of the LM head.
    `uses_reference_model`: the loss needs log-probabilities of the initial model. `sequences_per_example`: 2 where each
    example is a chosen and a rejected sequence in one batch.
    """

    formats: tuple[str, ...] = ()
    generates: bool = False
    is_reward_model: bool = False
    uses_reference_model: bool = False
    sequences_per_example: int = 1


@dataclass(frozen=True)
class Dataset(Choice):
    """A built-in dataset and its data `format`."""

    format: str = ""


@dataclass(frozen=True)
class BuiltinModel(Choice):
    """A model that needs no Hugging Face Hub. `config` is the content of its config.json, known before it exists;
    `hub_id` the model on the Hub that it is a copy of, '' for none; `difference`: how its weights differ from that one,
    as a sentence."""

    parameters: int = 0
    download_bytes: int = 0
    hub_id: str = ""
    difference: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Optimizer(Choice):
    """An optimizer. `trainer_optim` is the Trainer's `optim`, by default its own name; '' for one that `backend.train`
    builds itself.

    The state of each trained parameter is `states` elements of `bits` bits each (0: the parameter's own dtype).
    `state_layout` says which part of this state is kept: `low_rank`: that of projected gradients; `matrix_momentum`:
    one element instead of two for matrices (Muon); `per_head`: one second moment per attention head or output row
    (Adam-mini); `one_block`: that of one transformer layer at a time (BAdam). `factored`: row and column sums instead
    of a full second moment. `reads` are the options of section `train` that it uses.
    """

    trainer_optim: str = ""
    states: float = 0.0
    bits: int = 0
    state_layout: Literal["", "low_rank", "matrix_momentum", "per_head", "one_block"] = ""
    factored: bool = False
    reads: frozenset[str] = frozenset()
    arguments: Mapping[str, str] = field(default_factory=dict)  # the Trainer's optim_args
    steps_in_backward: bool = False  # updates each parameter in the backward pass and frees its gradient immediately
    paged: bool = False  # state is in CUDA unified memory, which the driver evicts to CPU memory
    state_on_cpu: bool = False  # state is kept in CPU memory and copied at every step
    loses_state_on_save: bool = False  # its state is not in its checkpoints
    temporaries: int = 0  # elements per parameter that its step allocates on GPUs (foreach updates all at once)
    copies_decayed: bool = False  # one more temporary with weight decay, which is added to a copy of the gradients
    rounding: str = ""  # how it keeps small updates of bf16 parameters
    compiled: bool = False  # torch.compile compiles its kernels at the first step
    allocates_state_at_init: bool = False  # in its constructor, before an engine replaces the parameters
    waits_for_variance: bool = False  # its first steps do not change the weights (RAdam)
    per_tensor: str = ""  # what it computes for each tensor on its own, as the predicate of a sentence
    kahan: bool = False  # one more state element for each bf16 parameter: the rounding error (Kahan summation)

    @property
    def has_adamw_state(self) -> bool:
        """Whether its state is AdamW's two moments and nothing else: DeepSpeed can reshard no other state."""
        return self.trainer_optim in ("adamw_torch", "adamw_torch_fused", "adamw_torch_npu_fused")

    @property
    def is_adaptive(self) -> bool:
        """Whether it scales gradients by their size. SGD and LOMO do not, so the usual learning rates, which are those
        of Adam, do not hold for them."""
        other = self.factored or "adam_beta1" in self.reads or not self.reads
        return other or not ("sgd" in self.trainer_optim or self.trainer_optim == "lomo")

    def needs_plain_tensors(self, fp32_master_weights: bool) -> bool:
        """Whether it fails on DTensor parameters, which FSDP2 and tensor parallelism use. torchao's 8-bit state fails
        only on bf16 DTensors."""
        torchao = self.package == "torchao" and (self.bits == 4 or not fp32_master_weights)
        return self.factored or torchao or self.package in ("bitsandbytes", "apollo-torch")

    @property
    def needs_sharded_state(self) -> bool:
        """Whether FSDP2 restores its state from sharded checkpoints only. In a gathered checkpoint, Adam-mini's second
        moments are no longer divided among the ranks, and torch refuses to read the tensors of torchao."""
        return self.package in ("adam-mini", "torchao")

    def is_saved_by_fsdp2(self, sharded: bool) -> bool:
        """Whether FSDP2 can save its state, in `sharded` or in full checkpoints: torch's distributed checkpoint takes
        tensors and numbers under the names of parameters, and no projectors."""
        has_other_keys = self.state_on_cpu and self.loses_state_on_save
        return self.state_layout != "low_rank" and not (sharded and has_other_keys)

    @property
    def swaps_weights_for_eval(self) -> bool:
        """Whether the weights during training differ from those that are evaluated and saved (optimizer.eval())."""
        return self.package == "schedulefree"

    @property
    def state_bytes(self) -> float:
        """Bytes of state per fp32 parameter, with the scale of each block of 256 (8-bit) or 128 (4-bit) elements."""
        return self.states * {0: 4, 32: 4, 8: 1 + 4 / 256, 4: 0.5 + 4 / 128}[self.bits]


@dataclass(frozen=True)
class Precision(Choice):
    """A precision: its compute dtype ('' for the best of the device), and whether trained weights stay in fp32."""

    compute_dtype: str = ""
    fp32_master_weights: bool = True


@dataclass(frozen=True)
class Device(Choice):
    """A device type, the environment variable that selects devices, and its torch.distributed backends, best first.
    `noun` names what holds a rank."""

    visible_devices_env: str = ""
    backends: tuple[str, ...] = ("gloo",)
    noun: str = "GPU"
    bf16: bool = True
    fp16: bool = True


def is_residual(init: object) -> bool:
    """Whether peft 0.21 subtracts an adapter with this init_lora_weights from the base weights
    (tuners/lora/layer.py)."""
    return isinstance(init, str) and init.lower().startswith(("pissa", "olora", "corda", "loftq", "lora_ga"))


@dataclass(frozen=True)
class LoraInit(Choice):
    """A LoRA initialization: peft's `init_lora_weights`, and whether it subtracts the initial adapter from the base."""

    init_lora_weights: str | bool = True

    @property
    def changes_base_weights(self) -> bool:
        """Whether it subtracts the initial adapter from the base weights."""
        return is_residual(self.init_lora_weights)


@dataclass(frozen=True)
class Attention(Choice):
    """An attention implementation, and the head dimensions that its kernels take (0: any, up to any size)."""

    max_head_dim: int = 0
    head_dim_multiple: int = 0


@dataclass(frozen=True)
class Quantization(Choice):
    """A quantization of the base model: bits per weight, 0 for none."""

    bits: int = 0


@dataclass(frozen=True)
class PrequantizedFormat(Choice):
    """A quantization format of published checkpoints: whether adapters can be trained on it (transformers'
    HfQuantizer.is_trainable), or whether it is dequantized while loading, so that every method works."""

    is_trainable: bool = False
    dequantized_on_load: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)  # package -> minimum version, '' for any


@dataclass(frozen=True)
class Strategy(Choice):
    """A distributed strategy: its engine ('' for one process), ZeRO stage and FSDP version. `shards_weights`: no
    process holds all weights between steps."""

    engine: Literal["", "ddp", "deepspeed", "fsdp", "tensor"] = ""
    zero_stage: int = 0
    fsdp_version: int = 0
    shards_weights: bool = False


@dataclass(frozen=True)
class DeepSpeedKey:
    """The values that a key of a DeepSpeed configuration accepts.

    `kind` is that of a pydantic field (bool, int, float, str, strings, list, dict, any, or none for what a file cannot
    contain). DeepSpeed itself checks those of the kinds finite, integer and count (numbers), names (a string, or a list
    of them) and caseless (a choice in upper or lower case), and uses those of the kinds flag and number unchecked.
    """

    kind: str
    choices: tuple[int | str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    nullable: bool = False
