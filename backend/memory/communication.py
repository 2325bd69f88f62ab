"""Bytes that a device sends over the network, and exchanges with host RAM, in each optimizer step.

Ring collectives: an all-gather or reduce-scatter of B bytes over n devices sends B (n - 1) / n from each device, an
all-reduce twice that. DDP therefore sends twice the gradients, and fully sharded training three times the parameters in
each batch (arXiv 1910.02054, section 7.2). ZeRO-1 and ZeRO-2 all-reduce the gradients too, and gather the updated
parameters after the step (deepspeed 0.19 runtime/zero/stage_1_and_2.py: use_multi_rank_bucket_allreduce,
all_gather_dp_groups).
"""

from __future__ import annotations

from backend.memory.context import MemoryContext


def network_bytes(ctx: MemoryContext) -> dict[str, int]:
    """Bytes that a device sends to the other devices of each process group (a name of `groups`)."""
    run, batches = ctx.run, ctx.spec.train.gradient_accumulation_steps
    gradients = ctx.trainable_count * _reduced_gradient_bytes(ctx)
    if run.world_size == 1:
        return {}
    if (size := run.tensor_parallel_size) > 1:
        sharded = _sharded_bytes(ctx, run.world_size // size, gradients, batches) // size
        return {"tensor": batches * _tensor_bytes(ctx), "shard": sharded}
    found = {"context": batches * _context_bytes(ctx), "sequence": batches * _sequence_bytes(ctx)}
    reductions = batches if ctx.engine.reduces_each_batch(ctx.spec) else 1
    if run.parameter_shards == 1:
        averaged = reductions * 2 * _ring(gradients, run.world_size)
        updated = _ring(ctx.trainable_count * ctx.compute_bytes, run.optimizer_shards)
        return {**found, "shard" if run.optimizer_shards > 1 else "replicate": averaged + updated}
    replicas = run.world_size // run.parameter_shards
    found["shard"] = _sharded_bytes(ctx, run.parameter_shards, gradients, batches)
    found["replicate"] = reductions * 2 * _ring(gradients // run.parameter_shards, replicas)
    return found


def _tensor_bytes(ctx: MemoryContext) -> int:
    """All-reduces of hidden states: of the output of each row-wise sharded linear layer in the forward pass, of the
    gradient of the input of each column-wise sharded one in the backward pass (transformers 5.23
    distributed/tensor_parallel.py), and of the attention output in a recomputation, which stops before the last linear
    layer (torch 2.13 utils/checkpoint.py). Embeddings and output layer are not counted."""
    experts = any(leaf.stacked > 1 for leaf in ctx.shape.layer)
    count = sum(leaf.is_linear for leaf in ctx.shape.layer) + 2 * experts + ctx.spec.train.activation_checkpointing
    each = ctx.tokens * ctx.shape.hidden * ctx.compute_bytes
    return 2 * _ring(ctx.shape.layers * count * each, ctx.run.tensor_parallel_size)


def _context_bytes(ctx: MemoryContext) -> int:
    """Keys and values, which every device sends to all others for attention, for its backward pass and for its
    recomputation, and their gradients (torch 2.13 distributed/tensor/experimental/_context_parallel)."""
    size = ctx.run.context_parallel_size
    each = ctx.shape.layers * ctx.tokens * _key_value_elements(ctx) * ctx.compute_bytes
    return (3 + ctx.spec.train.activation_checkpointing) * each * (size - 1)


def _sequence_bytes(ctx: MemoryContext) -> int:
    """All-to-alls of queries, keys, values and the output of attention, in the forward pass, its recomputation and the
    backward pass (arXiv 2309.14509, section 3.2)."""
    size = ctx.run.sequence_parallel_size
    elements = 2 * ctx.shape.hidden + _key_value_elements(ctx)
    each = ctx.shape.layers * ctx.tokens * elements * ctx.compute_bytes
    return (2 + ctx.spec.train.activation_checkpointing) * _ring(each, size)


def _key_value_elements(ctx: MemoryContext) -> int:
    return 2 * ctx.shape.kv_heads * ctx.shape.head_dim


def _sharded_bytes(ctx: MemoryContext, shards: int, gradients: int, batches: int) -> int:
    """All-gathers of the parameters before forward and backward, and the reduce-scatter of the gradients."""
    gathers = 1 if ctx.engine.keeps_parameters_gathered(ctx.spec) else 2
    return batches * _ring(gathers * _parameter_bytes(ctx) + gradients, shards)


def host_bytes(ctx: MemoryContext) -> int:
    """Bytes between a device and host RAM, for what is offloaded."""
    batches = ctx.spec.train.gradient_accumulation_steps
    moved = 2 * ctx.trainable_count * ctx.compute_bytes // ctx.run.optimizer_shards if ctx.optimizer_offload else 0
    parameters = _parameter_bytes(ctx) // ctx.run.parameter_shards
    return moved + (batches * 2 * parameters if ctx.param_offload else 0)


def _parameter_bytes(ctx: MemoryContext) -> int:
    return (ctx.unquantized_count + ctx.trainable_count) * ctx.compute_bytes + ctx.quantized_bytes


def _reduced_gradient_bytes(ctx: MemoryContext) -> int:
    """Bytes of an element of the gradients that are reduced."""
    in_compute_dtype = not ctx.run.fp32_master_weights or ctx.engine.reduces_in_compute_dtype(ctx.spec)
    return ctx.compute_bytes if in_compute_dtype else 4


def _ring(count: int, devices: int) -> int:
    return count * (devices - 1) // max(1, devices)
