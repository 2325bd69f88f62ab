"""Tensor parallelism by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.distributed import DistributedConfig

from backend.train.engines.base import TrainEngine
from backend.train.patches import (
    accelerate_fsdp_on_cpu,
    transformers_parallel_plans,
    transformers_replicated_gradients,
)

# Otherwise FSDP2 keeps whole gradients on every rank until the last batch of an accumulation; and torch 2.13 fails
# there on an output layer in a unit of its own, whose weights TRL's loss uses without calling it (_fsdp_param.py).
SYNC_EACH_BATCH = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}


class TrainTensorParallel(TrainEngine):
    """Every layer is sharded over a group of devices while it loads; FSDP2 shards over the groups."""

    def trainer_arguments(self, folder: Path) -> dict[str, Any]:
        """The arguments of the process group."""
        found = super().trainer_arguments(folder)
        return found | self._process_group() | SYNC_EACH_BATCH if self.world_size > 1 else found

    def start(self, config: Any) -> None:
        """Let accelerate treat a CPU as an accelerator, and repair transformers; nothing else has to be started."""
        transformers_parallel_plans.apply()
        transformers_replicated_gradients.apply()
        if self.run.device == "cpu":
            accelerate_fsdp_on_cpu.apply()

    def load_arguments(self) -> dict[str, Any]:
        """The mesh that transformers shards the model over while loading."""
        size = self.run.tensor_parallel_size
        shards = self.world_size // size
        mixed = shards > 1 and self.run.compute_dtype == "bf16"
        return {"distributed_config": DistributedConfig(tp_size=size, fsdp_size=shards, fsdp_mixed_precision=mixed)}
