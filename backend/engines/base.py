"""Engine: what one way of training over several processes shards, offloads, loads and writes.

Imports registry and config. Pure: no torch, no machine. `backend/train/engines` has the part that runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from backend.config import RunSpec
from backend.registry import Strategy


@dataclass(frozen=True)
class Engine:
    """One process, and the base of all engines. `strategy` is the registry row that selected the engine."""

    strategy: Strategy
    config_file: ClassVar[str] = ""
    uses_autocast: ClassVar[bool] = True  # in the forward pass; other engines cast the parameters beforehand
    accelerate_type: ClassVar[str] = ""  # distributed_type in accelerate.yaml; '' where processes alone decide
    has_buckets: ClassVar[bool] = False  # gradients travel in buckets of parallel.bucket_cap_mb

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage; 0 without DeepSpeed and for its stage 0."""
        return self.strategy.zero_stage

    @property
    def fsdp_version(self) -> int:
        """1 or 2; 0 without FSDP."""
        return self.strategy.fsdp_version

    @property
    def uses_dtensor(self) -> bool:
        """Whether parameters are DTensors, which optimizers written for plain tensors cannot update."""
        return False

    @property
    def flattens_parameters(self) -> bool:
        """Whether the optimizer sees flat 1-D tensors instead of matrices."""
        return False

    def configuration(self, spec: RunSpec) -> dict[str, Any]:
        """The content of `config_file`; empty for an engine without one."""
        return {}

    def config_text(self, spec: RunSpec) -> str:
        """`configuration` as the text of a file."""
        return json.dumps(self.configuration(spec), indent=2) + "\n"

    def parameter_shards(self, spec: RunSpec, world_size: int) -> int:
        """Processes that each parameter is sharded over; 1: every process holds all of it."""
        return 1

    def gradient_shards(self, spec: RunSpec, world_size: int) -> int:
        """Processes that each gradient is sharded over."""
        return self.parameter_shards(spec, world_size)

    def optimizer_shards(self, spec: RunSpec, world_size: int) -> int:
        """Processes that the optimizer state is sharded over."""
        return self.parameter_shards(spec, world_size)

    def optimizer_offload(self, spec: RunSpec) -> str:
        """Where optimizer state and fp32 master weights are kept: none (on the device), cpu or nvme."""
        return "none"

    def param_offload(self, spec: RunSpec) -> str:
        """Where parameters are kept between uses: none, cpu or nvme."""
        return "none"

    def tensor_parallel_size(self, spec: RunSpec) -> int:
        """Devices that share every layer."""
        return 1

    def context_parallel_size(self, spec: RunSpec) -> int:
        """Devices that share the tokens of a sequence by ring attention (FSDP2)."""
        return 1

    def sequence_parallel_size(self, spec: RunSpec) -> int:
        """Devices that share the tokens of a sequence by all-to-all (DeepSpeed-Ulysses)."""
        return 1

    def resize_obstacle(self, spec: RunSpec) -> str:
        """What prevents resuming a checkpoint with a different number of processes; '' if nothing does."""
        return ""

    def loads_on_rank0(self, spec: RunSpec) -> bool:
        """Whether rank 0 alone reads the weights and sends the others their shards."""
        return False

    def checkpoint_format(self, spec: RunSpec) -> str:
        """Who writes the optimizer state of a checkpoint, and so who can read it."""
        return "ddp"


@dataclass(frozen=True)
class DDP(Engine):
    """torch's DistributedDataParallel: a full replica on each device."""

    accelerate_type: ClassVar[str] = ""  # distributed_type in accelerate.yaml; '' where processes alone decide
    has_buckets: ClassVar[bool] = True


@dataclass(frozen=True)
class TensorParallel(Engine):
    """transformers' tensor parallelism, with FSDP2 over the groups where there are more processes than one group."""

    @property
    def uses_dtensor(self) -> bool:
        """Each sharded parameter is one."""
        return True

    def parameter_shards(self, spec: RunSpec, world_size: int) -> int:
        """All processes."""
        return max(1, world_size)

    def tensor_parallel_size(self, spec: RunSpec) -> int:
        """As set."""
        return spec.parallel.tensor_parallel_size

    def checkpoint_format(self, spec: RunSpec) -> str:
        """It cannot be resumed, so nobody reads it."""
        return "tensor"
