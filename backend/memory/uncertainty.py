"""How far the real peak may be from the estimate.

The estimate is compared with torch's memory tracker (docs/memory.md): it is at most 5 % too low and 10 % too high.
torch tests that tracker to 10 % of a GPU's peak (test_fsdp2_mem_tracker.py), and both errors may add up. Architectures
without a closed formula were compared with the tracker on one device only: at most 8 % too low and 12 % too high
(tests/process/test_module_table_memory.py). CPU runs are within 8 % of measured peaks (tests/unit/test_memory.py). For
everything else the range is what the tests on GPUs accept: 20 % too low to 50 % too high (tests/process/gpu_cases.py).
"""

from __future__ import annotations

from backend import registry
from backend.memory.context import MemoryContext

# (lowest, highest) ratio of the real peak to the estimate
TRACKED = (0.9 / 1.10, 1.1 / 0.95)
TRACKED_FROM_TABLE = (0.9 / 1.12, 1.1 / 0.92)
MEASURED_ON_CPU = (1 / 1.08, 1 / 0.92)
UNVERIFIED = (1 / 1.5, 1 / 0.8)
# What was compared: model types with a closed formula, model types of a module table, and strategies.
TRACKED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "olmoe")
TABLE_MODEL_TYPES = (
    "starcoder2", "cohere2", "glm4", "ernie4_5", "diffllama", "nemotron", "glm4_moe", "deepseek_v3",
)  # fmt: skip
TRACKED_STRATEGIES = ("single", "ddp", "fsdp2")


def peak_ratios(ctx: MemoryContext) -> tuple[float, float]:
    """(lowest, highest) ratio of the real peak of a device to its estimate."""
    model_type = ctx.shape.model_type
    if not _has_verified_settings(ctx):
        return UNVERIFIED
    if ctx.on_cpu:
        return MEASURED_ON_CPU if model_type in TRACKED_MODEL_TYPES and not ctx.shape.experts else UNVERIFIED
    if model_type in TRACKED_MODEL_TYPES:
        return TRACKED
    one_device = ctx.run.strategy == "single" and ctx.spec.method.kind != "freeze" and ctx.uses_autocast
    return TRACKED_FROM_TABLE if model_type in TABLE_MODEL_TYPES and one_device else UNVERIFIED


def _has_verified_settings(ctx: MemoryContext) -> bool:
    """Whether the settings are among those that were compared with the tracker or with measured peaks."""
    spec = ctx.spec
    return (
        spec.launch.trainer == "footplate"  # LLaMA-Factory's loss and libraries were not compared
        and spec.train.stage in registry.NEXT_TOKEN_STAGES
        and spec.train.optim == "adamw_torch"
        and ctx.run.strategy in TRACKED_STRATEGIES
        and spec.model.attn_implementation in ("auto", "sdpa", *registry.FLASH_ATTENTIONS)
        and spec.precision.compute != "fp8"
        and ctx.run.token_shards == 1
        and not ctx.quantized_matrices
        and not (spec.data.packing or spec.lora.use_dora or spec.lora.dropout or spec.parallel.cpu_offload)
        and not (spec.train.use_liger_kernel or spec.train.use_unsloth or spec.train.torch_compile)
    )
