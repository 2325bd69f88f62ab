"""How sure the estimate is: from which share of it to which the real peak may be. Floor 2. Imports catalog and spread.

What is held against torch's tracker is at most 5 % too little and 10 % too much (docs/memory.md). torch's own tests
hold that tracker to 10 % of a GPU's peak (test_fsdp2_mem_tracker.py), and both may come together. A CPU's is held to
8 % of real peaks (tests/unit/test_memory.py). Of the rest no more is known than what proofs on GPUs put up with: from
20 % too little to 50 % too much (tests/process/devices.py).
"""

from __future__ import annotations

from backend import registry
from backend.memory.sharding import Spread

TRACKED = (0.9 / 1.10, 1.1 / 0.95)
PROCESS = (1 / 1.08, 1 / 0.92)
REST = (1 / 1.5, 1 / 0.8)
# Models that were followed, and ways to take them: rows filled up, AdamW, adapters as LoRA has them.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "olmoe")
ENGINES = ("", "ddp", "fsdp")


def shares(it: Spread) -> tuple[float, float]:
    """(least, most) of a device's estimated peak that the real one may come to."""
    if not _followed(it):
        return REST
    return PROCESS if it.cpu else TRACKED


def _followed(it: Spread) -> bool:
    """Whether it is like what was held to a tracker or to real runs."""
    spec, parallel = it.spec, it.spec.parallel
    usual = spec.train.stage in registry.NEXT_TOKEN_STAGES and spec.train.optim == "adamw_torch" and not spec.data.packing
    plain = not (
        it.packed or spec.lora.use_dora or spec.lora.dropout or spec.train.use_liger_kernel or spec.train.use_unsloth
    )
    engine = it.strategy.engine in ENGINES and it.strategy.fsdp_version != 1 and it.strategy.zero_stage == 0
    whole = not (
        parallel.cpu_offload or it.run.token_shards > 1 or spec.train.torch_compile or spec.precision.compute == "fp8"
    )
    attention = spec.model.attn_implementation in ("auto", "sdpa", *registry.FLASH_ATTENTIONS)
    known = it.shape.model_type in FAMILIES and not (it.cpu and it.shape.experts)
    return usual and plain and engine and whole and attention and known
