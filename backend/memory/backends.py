"""Parameters, gradients and optimizer state where LLaMA-Factory trains with Megatron-Core or KTransformers.

Activations are not estimated, so that the sum is a lower bound. Source: megatron-core 0.15
distributed/param_and_grad_buffer.py and optimizer/distrib_optimizer.py; KTransformers, doc/en/SFT.
"""

from __future__ import annotations

from backend.memory.context import MemoryContext, Row

MASTER_AND_ADAM_BYTES = 12  # fp32 weights and two moments
ADAPTER_BYTES = 16  # fp32 weights, gradients and two moments
EXPERT_BYTES = {"AMXBF16": 2.0, "AMXINT8": 1.0, "AMXINT4": 0.5}
UNKNOWN = {
    "megatron": "activations in Megatron-Core were not measured",
    "ktransformers": "activations with KTransformers were not measured",
}


def backend_rows(ctx: MemoryContext) -> list[Row]:
    """What each device and the RAM of a node hold all the time."""
    return _megatron(ctx) if ctx.spec.other_backend == "megatron" else _ktransformers(ctx)


def expert_parameters(ctx: MemoryContext) -> int:
    """Parameters of the experts in all layers."""
    return sum(leaf.parameters * leaf.count for leaf in ctx.shape.modules() if leaf.stacked)


def _megatron(ctx: MemoryContext) -> list[Row]:
    """bf16 weights and gradients of a part of the layers, and a part of the distributed optimizer's state."""
    shards, experts = ctx.run.parameter_shards, expert_parameters(ctx)
    spread = min(ctx.spec.llamafactory.expert_parallel_size, max(1, ctx.shape.most_experts))
    count = (ctx.shape.parameters - experts) // shards + experts // (shards * spread)
    replicas = max(1, ctx.run.world_size // shards)
    parts = f"{ctx.shape.parameters:,} parameters / {shards} tensor and pipeline parallel GPUs"
    parts += f", {experts:,} of them / {spread} expert parallel GPUs" if spread > 1 else ""
    state = ctx.shape.parameters // shards * MASTER_AND_ADAM_BYTES // replicas
    return [
        Row("Parameters", count * 2, f"({parts}) x 2 bytes"),
        Row("Gradients", count * 2, f"({parts}) x 2 bytes"),
        Row("Optimizer state", state, f"{ctx.shape.parameters:,} parameters x 12 bytes / {shards * replicas} GPUs"),
    ]


def _ktransformers(ctx: MemoryContext) -> list[Row]:
    """The experts are in RAM, once per node; everything else is sharded over the GPUs."""
    shards, experts = max(1, ctx.run.world_size), expert_parameters(ctx)
    rest, each = ctx.shape.parameters - experts, EXPERT_BYTES[ctx.spec.llamafactory.kt_backend]
    adapter = ctx.trainable_count
    return [
        Row("Frozen parameters", rest * 2 // shards, f"{rest:,} parameters x 2 bytes / {shards}"),
        Row("Adapter with optimizer state", adapter * ADAPTER_BYTES // shards, f"{adapter:,} x 16 bytes / {shards}"),
        Row("Experts", round(experts * each), f"{experts:,} parameters x {each:g} bytes", "host"),
    ]
