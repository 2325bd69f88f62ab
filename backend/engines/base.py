"""Engine: what a strategy's implementation shards, offloads, loads, saves and supports.

No torch, no machine: `backend/train/engines` has the part that runs. Rules, launch plan and memory estimate use these
facts instead of comparing names, so that a new engine needs no change there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from backend.config import RunSpec
from backend.registry import Strategy


@dataclass(frozen=True)
class Engine:
    """One process, and the base of all engines. `strategy` is the registry row that selected the engine."""

    strategy: Strategy
    config_file: ClassVar[str] = ""  # in the run folder; parallel.extra_config overrides its keys
    uses_autocast: ClassVar[bool] = True  # in the forward pass; other engines cast the parameters beforehand
    has_buckets: ClassVar[bool] = False  # gradients are communicated in buckets of parallel.bucket_cap_mb
    needs_collectives: ClassVar[bool] = False  # a single process initializes torch.distributed too
    needs_several_processes: ClassVar[bool] = False  # refuses to start with a world size of 1
    resumes_with_optimizer: ClassVar[bool] = False  # loads a checkpoint only along with its optimizer state
    can_resume: ClassVar[bool] = True  # from a checkpoint, with the optimizer state
    supports_lora: ClassVar[bool] = True
    unsupported_precisions: ClassVar[frozenset[str]] = frozenset()  # accepted by the libraries, but not used
    separate_master_weights: ClassVar[bool] = False  # fp32 copies next to parameters in the compute dtype
    gathers_layers: ClassVar[bool] = False  # gathers sharded parameters layer by layer
    loads_reference_on_host: ClassVar[bool] = False  # TRL shards a reference model that every rank has in host RAM
    shards_from_host: ClassVar[bool] = False  # moves loaded weights to the device unit by unit, as it shards them
    waits_for_all_gradients: ClassVar[bool] = False  # a parameter without a gradient blocks or fails the next step

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

    @property
    def max_live_parameters(self) -> int:
        """The largest number of parameters that stay gathered between their uses."""
        return 0

    @property
    def offloads_gradients(self) -> bool:
        """Whether gradients are offloaded along with the optimizer state."""
        return False

    def keeps_parameters_gathered(self, spec: RunSpec) -> bool:
        """Whether sharded parameters stay gathered from the forward to the backward pass."""
        return False

    def reduces_each_batch(self, spec: RunSpec) -> bool:
        """Whether each batch of a gradient accumulation reduces its gradients, instead of the last batch only."""
        return False

    def reduces_in_compute_dtype(self, spec: RunSpec) -> bool:
        """Whether gradients are reduced in the compute dtype instead of the dtype of the parameters."""
        return False

    @property
    def is_recommended(self) -> bool:
        """False if another strategy does the same, and better. Comparison and suggestions leave such a strategy out."""
        return True

    @property
    def shards_optimizer(self) -> bool:
        """Whether the optimizer state is divided among processes, so that more devices need less memory each."""
        return False

    @property
    def can_generate(self) -> bool:
        """Whether the model generates text during training. Engines with sharded parameters gather them before."""
        return True

    @property
    def merges_adapters(self) -> bool:
        """Whether a LoRA adapter can be merged at the end of the run."""
        return not self.strategy.shards_weights

    @property
    def step_slowdown(self) -> int:
        """How much longer a step takes than with DDP, in percent; a rough figure, used for sorting only."""
        return 0

    @property
    def offload_slowdown(self) -> int:
        """Same as `step_slowdown`, with `offload_patch` applied."""
        return 0

    @property
    def offload_patch(self) -> Mapping[str, Any]:
        """Options that offload as much as the engine can to host RAM; empty if it cannot, or need not, offload."""
        return {}

    def configuration(self, spec: RunSpec) -> dict[str, Any]:
        """The content of `config_file`; empty for an engine without one."""
        return {}

    def normalize(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Extra config with the spelling of each key that `configuration` has."""
        return dict(extra)

    def accelerate_settings(self, spec: RunSpec, mixed_precision: str) -> dict[str, Any]:
        """The engine's keys of accelerate.yaml. Without distributed_type, device and number of processes decide it."""
        return {"mixed_precision": mixed_precision}

    def protected_values(self, spec: RunSpec) -> dict[str, Any]:
        """Dotted keys of `config_file` with the values that options set and rules and estimate rely on. Extra config
        must not change them."""
        return {}

    def earlier_spelling(self, written: Mapping[str, Any], path: str) -> str:
        """The deprecated key in extra config, as it is `written`, that `normalize` turns into `path`; '' if none."""
        return ""

    def protected_options(self) -> dict[str, str]:
        """Keys of `protected_values` that an option sets: dotted key -> option."""
        return {}

    def environment(self, device: str) -> dict[str, str]:
        """Environment variables that the engine needs on this type of device."""
        return {}

    def compiles_kernels(self, spec: RunSpec, device: str) -> bool:
        """Whether C++ kernels are compiled on first use."""
        return False

    def divisions(self, spec: RunSpec, per_node: int, nodes: int) -> list[tuple[str, dict[str, int]]]:
        """The ways to divide the processes of these nodes, the plain one first: what to add to the strategy's label,
        and the sizes that select it. Sizes that `spec` sets are kept."""
        return [("", {})]

    def mesh_divisor(self, spec: RunSpec) -> int:
        """The world size must be a multiple of this: the product of all mesh dimensions but the sharding."""
        return 1

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

    def restores_optimizer(self, spec: RunSpec) -> bool:
        """Whether the optimizer state can be saved and loaded again, so that a run can resume from its checkpoints."""
        return self.can_resume

    def resize_obstacle(self, spec: RunSpec) -> str:
        """What prevents resuming a checkpoint with a different number of processes; '' if nothing does."""
        return ""

    def can_resize_to(self, spec: RunSpec, nproc_per_node: int, nnodes: int) -> bool:
        """Whether a checkpoint can be resumed on this many nodes, each with this many processes."""
        return self.can_resume

    def step_elements(self, spec: RunSpec) -> float:
        """Elements of the flat parameters of a rank after which the optimizer steps; infinite if it steps once."""
        return math.inf

    def loads_on_rank0(self, spec: RunSpec) -> bool:
        """Whether only rank 0 reads the weights, and sends the other ranks their shards."""
        return False

    def checkpoint_share(self, spec: RunSpec, nproc_per_node: int, world_size: int) -> float:
        """Share of weights and optimizer state that a checkpoint copies to host RAM, on the node of rank 0."""
        return 0

    def saves_weights_twice(self, spec: RunSpec) -> bool:
        """Whether a checkpoint has the weights in the engine's own format too, next to model.safetensors."""
        return False

    def checkpoint_format(self, spec: RunSpec) -> str:
        """The format of a checkpoint's optimizer state, which decides which strategies can load it."""
        return "ddp"


@dataclass(frozen=True)
class DDP(Engine):
    """torch's DistributedDataParallel: a full replica on each device."""

    has_buckets: ClassVar[bool] = True
    waits_for_all_gradients: ClassVar[bool] = True  # unless ddp_find_unused_parameters is set


@dataclass(frozen=True)
class TensorParallel(Engine):
    """transformers' tensor parallelism; FSDP2 shards over the groups if there are several. peft creates adapters in the
    shapes of unsharded layers, and the Trainer cannot resume such a model."""

    needs_several_processes: ClassVar[bool] = True
    can_resume: ClassVar[bool] = False
    supports_lora: ClassVar[bool] = False
    unsupported_precisions: ClassVar[frozenset[str]] = frozenset({"fp8"})

    @property
    def uses_dtensor(self) -> bool:
        """Each sharded parameter is a DTensor."""
        return True

    @property
    def shards_optimizer(self) -> bool:
        """The optimizer state is sharded along with the parameters."""
        return True

    def reduces_each_batch(self, spec: RunSpec) -> bool:
        """Always true, for the groups that FSDP2 shards over: train/engines/tensor_parallel.py sets sync_each_batch."""
        return True

    @property
    def step_slowdown(self) -> int:
        """Both passes of each layer wait for all-reduces of activations."""
        return 40

    def divisions(self, spec: RunSpec, per_node: int, nodes: int) -> list[tuple[str, dict[str, int]]]:
        """One group of all processes of a node, and smaller groups that FSDP2 shards over."""
        world, size = per_node * nodes, spec.parallel.tensor_parallel_size
        inner = size if size < world else per_node if nodes > 1 else 2
        sizes = [("", world)] if nodes == 1 and world > 1 else []
        sizes += [(" with FSDP2", inner)] if 1 < inner < world else []
        return [(suffix, {"parallel.tensor_parallel_size": count}) for suffix, count in sizes]

    def mesh_divisor(self, spec: RunSpec) -> int:
        """The processes are divided into groups of tensor_parallel_size."""
        return spec.parallel.tensor_parallel_size

    def parameter_shards(self, spec: RunSpec, world_size: int) -> int:
        """Parameters are sharded over all processes."""
        return max(1, world_size)

    def tensor_parallel_size(self, spec: RunSpec) -> int:
        """parallel.tensor_parallel_size."""
        return spec.parallel.tensor_parallel_size

    def checkpoint_format(self, spec: RunSpec) -> str:
        """A format that no strategy can resume."""
        return "tensor"
