"""FSDP2 and FSDP1: fully sharded data parallel, and its configuration file fsdp.json.

The Trainer reads the file as its `fsdp_config`; precision and mesh are the Trainer's own arguments
(`backend/train/engines`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from backend import registry
from backend.config import RunSpec, merge
from backend.config.processes import nproc_per_node
from backend.engines.base import Engine
from backend.engines.fsdp_keys import STATE_DICTS, unprefixed
from backend.runs import FSDP as CONFIG_FILE

LAUNCHER_KEYS = {"cpu_offload": "offload_params"}  # transformers' key -> accelerate's, where they differ


@dataclass(frozen=True)
class FSDP(Engine):
    """PyTorch's FSDP: parameters, gradients and optimizer state are sharded; layers are gathered one by one."""

    config_file: ClassVar[str] = CONFIG_FILE
    uses_autocast: ClassVar[bool] = False
    gathers_layers: ClassVar[bool] = True
    loads_reference_on_host: ClassVar[bool] = True
    shards_from_host: ClassVar[bool] = True
    needs_several_processes: ClassVar[bool] = True
    resumes_with_optimizer: ClassVar[bool] = True

    @property
    def uses_dtensor(self) -> bool:
        """FSDP2 shards each parameter as a DTensor; FSDP1 flattens them."""
        return self.fsdp_version == 2

    @property
    def flattens_parameters(self) -> bool:
        """FSDP1 concatenates the parameters of a unit into one flat tensor."""
        return self.fsdp_version == 1

    @property
    def offloads_gradients(self) -> bool:
        """Gradients are offloaded along with parameters and optimizer state."""
        return True

    def keeps_parameters_gathered(self, spec: RunSpec) -> bool:
        """True with SHARD_GRAD_OP, or without reshard_after_forward."""
        if self.fsdp_version == 1:
            return spec.parallel.sharding_strategy == "shard_grad_op"
        return not spec.parallel.reshard_after_forward

    def reduces_each_batch(self, spec: RunSpec) -> bool:
        """Always true, over shards and replicas: train/engines/fsdp.py sets sync_each_batch of accelerate."""
        return True

    def reduces_in_compute_dtype(self, spec: RunSpec) -> bool:
        """Whether parallel.reduce_dtype is the compute dtype."""
        return spec.parallel.reduce_dtype == "compute"

    @property
    def is_recommended(self) -> bool:
        """False for FSDP1, which is deprecated in favor of FSDP2."""
        return self.fsdp_version == 2

    @property
    def shards_optimizer(self) -> bool:
        """The optimizer state is sharded along with the parameters."""
        return True

    @property
    def can_generate(self) -> bool:
        """True for FSDP2 only: gathering all parameters for generation is not verified with FSDP1."""
        return self.fsdp_version == 2

    @property
    def merges_adapters(self) -> bool:
        """True for FSDP2, to whose DTensors peft adds the product of the sharded adapters. FSDP1 is not verified."""
        return self.fsdp_version == 2

    @property
    def step_slowdown(self) -> int:
        """The parameters of every layer are gathered twice in each step."""
        return 25

    @property
    def offload_slowdown(self) -> int:
        """Parameters are copied from host RAM for every layer, and the CPU updates them."""
        return 150

    @property
    def offload_patch(self) -> Mapping[str, Any]:
        """parallel.cpu_offload offloads parameters, gradients and optimizer state."""
        return {"parallel.cpu_offload": True}

    def configuration(self, spec: RunSpec) -> dict[str, Any]:
        """The keys of fsdp.json, overridden by the user's extra config; source: transformers 5.23 training_args.py,
        _process_fsdp_args."""
        parallel, version = spec.parallel, self.fsdp_version
        reshard = parallel.reshard_after_forward if version == 2 else parallel.sharding_strategy.upper()
        found: dict[str, Any] = {
            "version": version,  # explicit: accelerate's launcher defaults to 1, the Trainer to 2
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": reshard,
            "cpu_offload": parallel.cpu_offload,
            "cpu_ram_efficient_loading": self.loads_on_rank0(spec),
            "state_dict_type": STATE_DICTS[parallel.state_dict_type],
        }
        if parallel.transformer_layer_cls_to_wrap:
            found["transformer_layer_cls_to_wrap"] = list(parallel.transformer_layer_cls_to_wrap)
        return merge.override(found, self.normalize(merge.parse(parallel.extra_config)))

    def normalize(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """The Trainer removes accelerate's prefix fsdp_, and a prefixed key replaces one without it."""
        return unprefixed(extra)

    def accelerate_settings(self, spec: RunSpec, mixed_precision: str) -> dict[str, Any]:
        """fsdp.json with the launcher's names, because the launcher defaults to FSDP1 and to loading on rank 0."""
        config = self.configuration(spec)
        settings = {f"fsdp_{LAUNCHER_KEYS.get(key, key)}": value for key, value in config.items()}
        if layers := config.get("transformer_layer_cls_to_wrap"):
            settings["fsdp_transformer_layer_cls_to_wrap"] = ",".join(layers)
        return {"distributed_type": "FSDP", "fsdp_config": settings, "mixed_precision": mixed_precision}

    def protected_values(self, spec: RunSpec) -> dict[str, Any]:
        """Version, CPU offload and the format of checkpoints."""
        parallel = spec.parallel
        found = {"version": self.fsdp_version, "cpu_offload": parallel.cpu_offload}
        return {**found, "state_dict_type": STATE_DICTS[parallel.state_dict_type]}

    def protected_options(self) -> dict[str, str]:
        """CPU offload and the format of checkpoints."""
        return {"cpu_offload": "parallel.cpu_offload", "state_dict_type": "parallel.state_dict_type"}

    def divisions(self, spec: RunSpec, per_node: int, nodes: int) -> list[tuple[str, dict[str, int]]]:
        """With FSDP2: one group of shards, a replica per node (HSDP), or context parallel groups."""
        if self.fsdp_version == 1:
            return [("", {})]
        replicas = spec.parallel.replicate_size if spec.parallel.replicate_size > 1 else nodes
        plain = {"parallel.replicate_size": 1, "parallel.context_parallel_size": 1}
        found = [("", plain)]
        if replicas > 1:
            found.append((", replicated (HSDP)", {**plain, "parallel.replicate_size": replicas}))
        if per_node * nodes > 1:
            size = max(2, spec.parallel.context_parallel_size)
            found.append((" with context parallelism", {**plain, "parallel.context_parallel_size": size}))
        return found

    def mesh_divisor(self, spec: RunSpec) -> int:
        """With FSDP2, the product of replicas and context parallel size."""
        return spec.parallel.replicate_size * self.context_parallel_size(spec) if self.fsdp_version == 2 else 1

    def parameter_shards(self, spec: RunSpec, world_size: int) -> int:
        """The world size; with HSDP the processes of one replica, with HYBRID_SHARD those of a node (torch 2.13
        distributed/fsdp/_init_utils.py); 1 with NO_SHARD."""
        if self.fsdp_version == 1:
            sizes = {"no_shard": 1, "hybrid_shard": min(nproc_per_node(spec), world_size)}
            return max(1, sizes.get(spec.parallel.sharding_strategy, world_size))
        return max(1, world_size // spec.parallel.replicate_size)

    def optimizer_offload(self, spec: RunSpec) -> str:
        """cpu with parallel.cpu_offload, which offloads parameters, gradients and optimizer state."""
        return "cpu" if spec.parallel.cpu_offload else "none"

    def param_offload(self, spec: RunSpec) -> str:
        """cpu with parallel.cpu_offload, which offloads parameters, gradients and optimizer state."""
        return "cpu" if spec.parallel.cpu_offload else "none"

    def context_parallel_size(self, spec: RunSpec) -> int:
        """parallel.context_parallel_size, with FSDP2."""
        return spec.parallel.context_parallel_size if self.fsdp_version == 2 else 1

    def loads_on_rank0(self, spec: RunSpec) -> bool:
        """True with FSDP2, unless the other ranks need the weights (fp8, 8-bit, adapters initialized from them)."""
        return self.fsdp_version == 2 and not spec.needs_loaded_weights

    def restores_optimizer(self, spec: RunSpec) -> bool:
        """False with FSDP2 for optimizers whose state it cannot save, or cannot load from a full checkpoint (rules
        OPT028 and OPT031)."""
        row, sharded = registry.OPTIMIZERS[spec.train.optim], spec.parallel.state_dict_type == "sharded"
        is_loaded = sharded or not row.needs_sharded_state
        return self.fsdp_version == 1 or (row.is_saved_by_fsdp2(sharded) and is_loaded)

    def can_resize_to(self, spec: RunSpec, nproc_per_node: int, nnodes: int) -> bool:
        """True from two shards on, unless replicas or context parallel groups would span nodes unevenly."""
        divisor = self.mesh_divisor(spec)
        return nproc_per_node % divisor == 0 and nproc_per_node * nnodes // divisor > 1

    def checkpoint_share(self, spec: RunSpec, nproc_per_node: int, world_size: int) -> float:
        """With a full state dict, all of the state is copied on rank 0; else each rank copies its shard, unless it is
        offloaded (accelerate 1.15 utils/fsdp_utils.py, save_fsdp_optimizer)."""
        if spec.parallel.state_dict_type == "full":
            return 1
        return 0 if spec.parallel.cpu_offload else nproc_per_node / self.optimizer_shards(spec, world_size)

    def saves_weights_twice(self, spec: RunSpec) -> bool:
        """True with a full state dict (transformers 5.23 trainer.py, save_model and _save_optimizer_and_scheduler)."""
        return spec.parallel.state_dict_type == "full"

    def checkpoint_format(self, spec: RunSpec) -> str:
        """One file (full state dict), or a shard per rank."""
        return "sharded" if spec.parallel.state_dict_type == "sharded" else "fsdp"
