"""FSDP2 and FSDP1 through accelerate."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

from backend.runs import FSDP
from backend.train import device
from backend.train.engines.base import TrainEngine
from backend.train.engines.tensor_parallel import SYNC_EACH_BATCH
from backend.train.patches import accelerate_fsdp2_absent_state, accelerate_fsdp_on_cpu
from backend.train.run_log import TrainError

RANK0_LOADING = "cpu_ram_efficient_loading"


class TrainFSDP(TrainEngine):
    """Parameters, gradients and optimizer state are sharded; layers are gathered one by one."""

    def trainer_arguments(self, folder: Path) -> dict[str, Any]:
        """The arguments for process group and fsdp.json, and for a mesh if there is more than one dimension."""
        found = super().trainer_arguments(folder)
        if self.world_size == 1:
            return found
        parallel = self.spec.parallel
        if parallel.cpu_offload and self.run.device != "cpu" and not dist.is_initialized():
            # Gradients in host RAM are summed there to be clipped; accelerate would start the device's backend only.
            both = f"{self.run.device}:{device.collective_backend(self.run.device)},cpu:gloo"
            dist.init_process_group(both, timeout=timedelta(seconds=parallel.ddp_timeout))
        found |= self._process_group() | SYNC_EACH_BATCH | {"fsdp": True, "fsdp_config": str(folder / FSDP)}
        if max(parallel.replicate_size, self.run.context_parallel_size) > 1:
            found["parallelism_config"] = self.mesh()
        if self.run.context_parallel_size > 1:  # each device takes a chunk from both ends of a sequence
            found["pad_to_multiple_of"] = 2 * self.run.context_parallel_size
        return found

    def mesh(self) -> ParallelismConfig:
        """How the ranks are arranged: replicas x shards x context."""
        replicas, context = self.spec.parallel.replicate_size, self.run.context_parallel_size
        shards = self.world_size // (replicas * context)
        return ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards, cp_size=context)

    def start(self, config: Any) -> None:
        """Complete accelerate's FSDP plugin."""
        if config.fsdp:
            self._complete_plugin(config)
            accelerate_fsdp2_absent_state.apply()
        if self.run.device == "cpu":
            accelerate_fsdp_on_cpu.apply()

    def _complete_plugin(self, config: Any) -> None:
        """What accelerate's FSDP plugin is told beyond fsdp.json: gradients are reduced in the chosen dtype (by default
        it would use the compute dtype), and memory is pinned only where there is a device to pin it for."""
        parallel, dtype = self.spec.parallel, device.DTYPES[self.run.compute_dtype]
        fsdp2 = self.run.fsdp_version == 2
        reduce_dtype = torch.float32 if parallel.reduce_dtype == "fp32" else dtype
        policy: Any = MixedPrecisionPolicy if fsdp2 else MixedPrecision
        config.fsdp_plugin_args["mixed_precision_policy"] = policy(param_dtype=dtype, reduce_dtype=reduce_dtype)
        # If this were "true", transformers would leave the buffers of all ranks but 0 at zero, and still read the file
        # on every rank.
        os.environ[f"FSDP_{RANK0_LOADING.upper()}"] = "false"
        if not fsdp2:  # accelerate prefers its own default over what the Trainer passes on
            os.environ["FSDP_SHARDING_STRATEGY"] = config.fsdp_plugin_args["reshard_after_forward"].upper()
        if parallel.transformer_layer_cls_to_wrap and not fsdp2:  # peft wraps an adapted model and reads only this
            os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(parallel.transformer_layer_cls_to_wrap)
        if parallel.cpu_offload and fsdp2:
            pin = parallel.pin_memory and self.run.device != "cpu"
            config.fsdp_plugin_args["cpu_offload"] = CPUOffloadPolicy(pin_memory=pin)

    def check_model(self, model: torch.nn.Module) -> None:
        """Raise TrainError for layers to wrap that the model does not have."""
        known = {type(module).__name__ for module in model.modules()}
        wanted = self.spec.parallel.transformer_layer_cls_to_wrap
        if missing := [name for name in wanted if name not in known]:
            layers = sorted(name for name in known if name.endswith(("Layer", "Block")))
            raise TrainError(
                f"parallel.transformer_layer_cls_to_wrap: the model has no class {', '.join(missing)}; its layer "
                f"classes are {', '.join(layers)}."
            )


def loads_on_rank0(config: Any) -> bool:
    """Whether rank 0 alone reads the weights, as fsdp.json says. `config` is TrainingArguments."""
    plugin = getattr(config, "fsdp_plugin_args", None) or {}
    return bool(plugin.get("fsdp_version") == 2 and plugin.get(RANK0_LOADING))


def load_on_every_rank(config: Any) -> None:
    """Tell accelerate that every rank has read the weights."""
    config.fsdp_plugin_args[RANK0_LOADING] = False
