"""DeepSpeed: ZeRO stages 0 to 3 with CPU and NVMe offload, and its configuration file deepspeed.json.

The Trainer fills in "auto" from its own arguments, so that batch size, gradient clipping and precision are set in one
place only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from backend import registry
from backend.config import RunSpec, merge
from backend.engines import deepspeed_keys
from backend.engines.base import Engine
from backend.runs import DEEPSPEED

MIB = 1024**2
NONE, NVME = "none", "nvme"
SUB_GROUP_SIZE = 10**9  # elements: DeepSpeed's default


@dataclass(frozen=True)
class DeepSpeed(Engine):
    """ZeRO: stage 1 shards the optimizer state, stage 2 the gradients too, stage 3 the parameters too."""

    config_file: ClassVar[str] = DEEPSPEED
    uses_autocast: ClassVar[bool] = False
    unsupported_precisions: ClassVar[frozenset[str]] = frozenset({"fp8", "pure_bf16"})
    separate_master_weights: ClassVar[bool] = True
    has_buckets: ClassVar[bool] = True
    needs_collectives: ClassVar[bool] = True
    resumes_with_optimizer: ClassVar[bool] = True

    @property
    def flattens_parameters(self) -> bool:
        """True at every ZeRO stage: deepspeed 0.19 runtime/zero and bf16_optimizer.py."""
        return True

    @property
    def max_live_parameters(self) -> int:
        """Stage 3: the default of stage3_max_live_parameters (deepspeed 0.19 runtime/zero/config.py)."""
        return 10**9 if self.zero_stage == 3 else 0

    def step_elements(self, spec: RunSpec) -> float:
        """Stage 3: zero_optimization.sub_group_size (deepspeed 0.19 runtime/zero/stage3.py, step)."""
        extra = merge.parse(spec.parallel.extra_config).get("zero_optimization")
        written = extra.get("sub_group_size", SUB_GROUP_SIZE) if isinstance(extra, Mapping) else SUB_GROUP_SIZE
        is_size = isinstance(written, int | float) and self.zero_stage == 3
        return written if is_size else super().step_elements(spec)

    @property
    def offloads_gradients(self) -> bool:
        """True from stage 2 on."""
        return self.zero_stage >= 2

    def reduces_each_batch(self, spec: RunSpec) -> bool:
        """True from stage 2 on: deepspeed 0.19 runtime/engine.py, allreduce_gradients."""
        return self.zero_stage >= 2

    def reduces_in_compute_dtype(self, spec: RunSpec) -> bool:
        """False with sequence parallelism only: deepspeed 0.19 seq_parallel_communication_data_type is fp32."""
        return spec.parallel.sequence_parallel_size == 1

    @property
    def is_recommended(self) -> bool:
        """False for stage 0, which does what DDP does."""
        return self.zero_stage > 0

    @property
    def shards_optimizer(self) -> bool:
        """True from stage 1 on."""
        return self.zero_stage > 0

    @property
    def step_slowdown(self) -> int:
        """Stage 3 gathers the parameters of every layer twice in each step."""
        return {0: 0, 1: 4, 2: 6, 3: 30}[self.zero_stage]

    @property
    def offload_slowdown(self) -> int:
        """The CPU updates the parameters; at stage 3 the parameters are also copied from host RAM for every layer."""
        return {0: 0, 1: 80, 2: 80, 3: 200}[self.zero_stage]

    @property
    def offload_patch(self) -> Mapping[str, Any]:
        """The options that offload to the CPU; none for stage 1, since stage 2 offloads the gradients too."""
        optimizer = {"parallel.offload_optimizer": "cpu"}
        return {2: optimizer, 3: {**optimizer, "parallel.offload_param": "cpu"}}.get(self.zero_stage, {})

    def configuration(self, spec: RunSpec) -> dict[str, Any]:
        """The keys of deepspeed.json, overridden by the user's extra config."""
        return configuration(self, spec)

    def normalize(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """DeepSpeed refuses two spellings of a key, such as a deprecated one."""
        return deepspeed_keys.normalize(extra)

    def accelerate_settings(self, spec: RunSpec, mixed_precision: str) -> dict[str, Any]:
        """accelerate refuses settings that are in deepspeed.json too, precision among them."""
        config = {"deepspeed_config_file": DEEPSPEED, "deepspeed_multinode_launcher": "standard"}
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": config}

    def protected_values(self, spec: RunSpec) -> dict[str, Any]:
        """ZeRO stage and offload devices."""
        return {
            "zero_optimization.stage": self.zero_stage,
            "zero_optimization.offload_optimizer.device": self.optimizer_offload(spec),
            "zero_optimization.offload_param.device": self.param_offload(spec),
        }

    def earlier_spelling(self, written: Mapping[str, Any], path: str) -> str:
        """A switch such as cpu_offload, which became a block."""
        return deepspeed_keys.earlier_spelling(written, path)

    def protected_options(self) -> dict[str, str]:
        """The offload devices."""
        return {f"zero_optimization.{key}.device": f"parallel.{key}" for key in ("offload_optimizer", "offload_param")}

    def environment(self, device: str) -> dict[str, str]:
        """Without the variable, DeepSpeed uses an accelerator if the machine has one."""
        return {"DS_ACCELERATOR": "cpu"} if device == "cpu" else {}

    def compiles_kernels(self, spec: RunSpec, device: str) -> bool:
        """True for shared-memory collectives on a CPU, and for the CPU Adam of an offloaded optimizer; source:
        deepspeed 0.19 comm/torch.py, build_shm_op, and ops/op_builder/cpu/cpu_adam.py."""
        return device == "cpu" or self.optimizer_offload(spec) != NONE

    def divisions(self, spec: RunSpec, per_node: int, nodes: int) -> list[tuple[str, dict[str, int]]]:
        """Data parallelism; at stage 3, which trains long sequences, also with sequence parallel groups."""
        option = "parallel.sequence_parallel_size"
        several = {option: max(2, spec.parallel.sequence_parallel_size)}
        groups = [(" with sequence parallelism", several)] if self.zero_stage == 3 and per_node * nodes > 1 else []
        return [("", {option: 1}), *groups]

    def parameter_shards(self, spec: RunSpec, world_size: int) -> int:
        """The world size at stage 3."""
        return max(1, world_size) if self.zero_stage == 3 else 1

    def gradient_shards(self, spec: RunSpec, world_size: int) -> int:
        """The world size from stage 2 on."""
        return max(1, world_size) if self.zero_stage >= 2 else 1

    def optimizer_shards(self, spec: RunSpec, world_size: int) -> int:
        """The world size from stage 1 on."""
        return max(1, world_size) if self.zero_stage else 1

    def optimizer_offload(self, spec: RunSpec) -> str:
        """parallel.offload_optimizer, from stage 1 on."""
        return spec.parallel.offload_optimizer if self.zero_stage else NONE

    def param_offload(self, spec: RunSpec) -> str:
        """parallel.offload_param, at stage 3."""
        return spec.parallel.offload_param if self.zero_stage == 3 else NONE

    def sequence_parallel_size(self, spec: RunSpec) -> int:
        """parallel.sequence_parallel_size."""
        return spec.parallel.sequence_parallel_size

    def restores_optimizer(self, spec: RunSpec) -> bool:
        """False with the optimizer on NVMe, whose state DeepSpeed does not load (rule STR058)."""
        return self.zero_stage < 3 or self.optimizer_offload(spec) != NVME

    def resize_obstacle(self, spec: RunSpec) -> str:
        """What universal checkpoints do not support; source: deepspeed 0.19 checkpoint/ds_to_universal.py,
        runtime/engine.py and runtime/sequence_parallel."""
        if not self.zero_stage:
            return self.strategy.label
        if self.zero_stage == 3 and NVME in (spec.parallel.offload_optimizer, spec.parallel.offload_param):
            return "state offloaded to NVMe"
        if spec.parallel.sequence_parallel_size > 1:
            return "sequence parallelism"
        return "" if registry.OPTIMIZERS[spec.train.optim].has_adamw_state else "an optimizer other than AdamW"

    def can_resize_to(self, spec: RunSpec, nproc_per_node: int, nnodes: int) -> bool:
        """Universal checkpoints load with any world size."""
        return not self.resize_obstacle(spec)

    def loads_on_rank0(self, spec: RunSpec) -> bool:
        """True at stage 3, unless the model is quantized (transformers 5.23 modeling_utils.py,
        _load_pretrained_model)."""
        return self.zero_stage == 3 and spec.method.quantization == "none"

    def saves_weights_twice(self, spec: RunSpec) -> bool:
        """True below stage 3; at stage 3, DeepSpeed saves only the fp32 master weights."""
        return self.zero_stage < 3

    def checkpoint_format(self, spec: RunSpec) -> str:
        """DeepSpeed's own format, with a shard per rank."""
        return "deepspeed"


def configuration(engine: DeepSpeed, spec: RunSpec) -> dict[str, Any]:
    """The keys that DeepSpeed reads; sources: deepspeed 0.19 runtime/zero/config.py, transformers 5.23
    integrations/deepspeed.py."""
    bucket = spec.parallel.bucket_cap_mb * MIB // 2  # in elements of two bytes
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
        "zero_allow_untested_optimizer": True,  # otherwise DeepSpeed accepts Adam, AdamW and Adagrad only
    }
    if NVME in (engine.optimizer_offload(spec), engine.param_offload(spec)):
        found["aio"] = _aio(spec)
    return merge.override(found, engine.normalize(merge.parse(spec.parallel.extra_config)))


def _offload(engine: DeepSpeed, spec: RunSpec) -> dict[str, Any]:
    """Where optimizer state and parameters are kept; source: deepspeed 0.19 runtime/zero/offload_config.py."""
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
        found["offload_param"]["buffer_size"] = parallel.nvme_buffer_size_mb * MIB // 2  # elements of two bytes
    return found


def _aio(spec: RunSpec) -> dict[str, Any]:
    """Settings of asynchronous disk I/O; source: deepspeed 0.19 runtime/swap_tensor/constants.py."""
    parallel = spec.parallel
    return {
        "block_size": parallel.aio_block_size_kb * 1024,
        "queue_depth": parallel.aio_queue_depth,
        "intra_op_parallelism": parallel.aio_intra_op_parallelism,
        "single_submit": False,
        "overlap_events": True,
    }
