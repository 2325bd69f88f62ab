"""DeepSpeed: ZeRO stages 0 to 3 with CPU and NVMe offload, and its configuration file deepspeed.json.

Imports registry, config, runs. Pure. "auto" is filled in by the Trainer from its own arguments, so that batch size,
clipping and precision are written in one place only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from backend import registry
from backend.config import RunSpec, merge
from backend.engines.base import Engine
from backend.runs import DEEPSPEED

MIB = 1024**2
NONE, NVME = "none", "nvme"


@dataclass(frozen=True)
class DeepSpeed(Engine):
    """ZeRO: stage 1 shards the optimizer state, stage 2 the gradients too, stage 3 the parameters too."""

    config_file: ClassVar[str] = DEEPSPEED
    accelerate_type: ClassVar[str] = "DEEPSPEED"
    uses_autocast: ClassVar[bool] = False
    has_buckets: ClassVar[bool] = True

    @property
    def flattens_parameters(self) -> bool:
        """At every stage: deepspeed 0.19 runtime/zero and bf16_optimizer.py."""
        return True

    def configuration(self, spec: RunSpec) -> dict[str, Any]:
        """The keys of deepspeed.json, with the user's extra configuration merged over them."""
        return configuration(self, spec)

    def parameter_shards(self, spec: RunSpec, world_size: int) -> int:
        """All processes at stage 3."""
        return max(1, world_size) if self.zero_stage == 3 else 1

    def gradient_shards(self, spec: RunSpec, world_size: int) -> int:
        """All processes from stage 2 on."""
        return max(1, world_size) if self.zero_stage >= 2 else 1

    def optimizer_shards(self, spec: RunSpec, world_size: int) -> int:
        """All processes from stage 1 on."""
        return max(1, world_size) if self.zero_stage else 1

    def optimizer_offload(self, spec: RunSpec) -> str:
        """From stage 1 on as set."""
        return spec.parallel.offload_optimizer if self.zero_stage else NONE

    def param_offload(self, spec: RunSpec) -> str:
        """At stage 3 as set."""
        return spec.parallel.offload_param if self.zero_stage == 3 else NONE

    def sequence_parallel_size(self, spec: RunSpec) -> int:
        """As set."""
        return spec.parallel.sequence_parallel_size

    def resize_obstacle(self, spec: RunSpec) -> str:
        """What DeepSpeed's universal checkpoints cannot convert; source: deepspeed 0.19 checkpoint/ds_to_universal.py,
        runtime/engine.py and runtime/sequence_parallel."""
        if not self.zero_stage:
            return self.strategy.label
        if self.zero_stage == 3 and NVME in (spec.parallel.offload_optimizer, spec.parallel.offload_param):
            return "state offloaded to NVMe"
        if spec.parallel.sequence_parallel_size > 1:
            return "sequence parallelism"
        return "" if registry.OPTIMIZERS[spec.train.optim].moments else "an optimizer other than AdamW"

    def checkpoint_format(self, spec: RunSpec) -> str:
        """Its own: a shard per rank."""
        return "deepspeed"


def configuration(engine: DeepSpeed, spec: RunSpec) -> dict[str, Any]:
    """The keys that DeepSpeed reads; sources: deepspeed 0.19 runtime/zero/config.py, transformers 5.23
    integrations/deepspeed.py."""
    bucket = spec.parallel.bucket_cap_mb * MIB // 2  # DeepSpeed counts numbers; they travel in two bytes each
    zero: dict[str, Any] = {
        "stage": engine.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if zero["stage"] == 3:
        zero |= {"stage3_gather_16bit_weights_on_model_save": True}
    zero |= _offload(engine, spec)
    found: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # any of the Trainer's optimizers
    }
    if NVME in (engine.optimizer_offload(spec), engine.param_offload(spec)):
        found["aio"] = _aio(spec)
    return merge.over(found, merge.parse(spec.parallel.extra_config))


def _offload(engine: DeepSpeed, spec: RunSpec) -> dict[str, Any]:
    """Where state and weights lie; source: deepspeed 0.19 runtime/zero/offload_config.py."""
    found: dict[str, Any] = {}
    parallel = spec.parallel
    disk = {"nvme_path": parallel.nvme_path, "buffer_count": parallel.nvme_buffer_count}
    for key, device in (
        ("offload_optimizer", engine.optimizer_offload(spec)),
        ("offload_param", engine.param_offload(spec)),
    ):
        if device != NONE:
            found[key] = {"device": device, "pin_memory": parallel.pin_memory, **(disk if device == NVME else {})}
    if engine.param_offload(spec) == NVME:
        found["offload_param"]["buffer_size"] = parallel.nvme_buffer_size_mb * MIB // 2  # numbers of two bytes
    return found


def _aio(spec: RunSpec) -> dict[str, Any]:
    """How the disk is asked; source: deepspeed 0.19 runtime/swap_tensor/constants.py."""
    parallel = spec.parallel
    return {
        "block_size": parallel.aio_block_size_kb * 1024,
        "queue_depth": parallel.aio_queue_depth,
        "intra_op_parallelism": parallel.aio_intra_op_parallelism,
        "single_submit": False,
        "overlap_events": True,
    }
