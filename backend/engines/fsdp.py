"""FSDP2 and FSDP1: fully sharded data parallel, and its configuration file fsdp.json.

Imports registry, config, runs. Pure. The Trainer reads the file as its `fsdp_config`; precision and mesh are the
Trainer's own arguments (`backend/train/engines`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from backend.config import RunSpec, merge
from backend.engines.base import Engine
from backend.runs import FSDP as CONFIG_FILE

STATE_DICTS = {"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"}


@dataclass(frozen=True)
class FSDP(Engine):
    """PyTorch's FSDP: parameters, gradients and optimizer state are sharded; layers are gathered one by one."""

    config_file: ClassVar[str] = CONFIG_FILE
    accelerate_type: ClassVar[str] = "FSDP"
    uses_autocast: ClassVar[bool] = False

    @property
    def uses_dtensor(self) -> bool:
        """FSDP2 shards each parameter as a DTensor; FSDP1 flattens them."""
        return self.fsdp_version == 2

    @property
    def flattens_parameters(self) -> bool:
        """FSDP1 puts the parameters of a unit into one flat tensor."""
        return self.fsdp_version == 1

    def configuration(self, spec: RunSpec) -> dict[str, Any]:
        """The keys of fsdp.json, with the user's extra configuration merged over them; source: transformers 5.23
        training_args.py, _process_fsdp_args."""
        parallel, version = spec.parallel, self.fsdp_version
        reshard = parallel.reshard_after_forward if version == 2 else parallel.sharding_strategy.upper()
        found: dict[str, Any] = {
            "version": version,  # always written: accelerate's launcher defaults to 1, the Trainer to 2
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": reshard,
            "cpu_offload": parallel.cpu_offload,
            "cpu_ram_efficient_loading": self.loads_on_rank0(spec),
            "state_dict_type": STATE_DICTS[parallel.state_dict_type],
        }
        if parallel.transformer_layer_cls_to_wrap:
            found["transformer_layer_cls_to_wrap"] = list(parallel.transformer_layer_cls_to_wrap)
        return merge.over(found, merge.parse(parallel.extra_config))

    def parameter_shards(self, spec: RunSpec, world_size: int) -> int:
        """All processes; with HSDP those of one replica; with NO_SHARD none."""
        if self.fsdp_version == 1:
            return 1 if spec.parallel.sharding_strategy == "no_shard" else max(1, world_size)
        return max(1, world_size // spec.parallel.replicate_size)

    def optimizer_offload(self, spec: RunSpec) -> str:
        """With CPU offload everything is kept in host RAM."""
        return "cpu" if spec.parallel.cpu_offload else "none"

    def param_offload(self, spec: RunSpec) -> str:
        """With CPU offload everything is kept in host RAM."""
        return "cpu" if spec.parallel.cpu_offload else "none"

    def context_parallel_size(self, spec: RunSpec) -> int:
        """As set, with FSDP2."""
        return spec.parallel.context_parallel_size if self.fsdp_version == 2 else 1

    def loads_on_rank0(self, spec: RunSpec) -> bool:
        """FSDP2 does, unless loading modifies the weights (quantization, fp8, adapters initialized from them)."""
        return self.fsdp_version == 2 and not spec.modifies_loaded_weights

    def checkpoint_format(self, spec: RunSpec) -> str:
        """One file, or a shard per rank."""
        return "sharded" if spec.parallel.state_dict_type == "sharded" else "fsdp"
