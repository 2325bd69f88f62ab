"""Bytes that a device sends over the network, and exchanges with host RAM, in each optimizer step.

Imports context. Ring collectives: an all-gather or reduce-scatter of B bytes over n devices sends B (n - 1) / n from
each device, an all-reduce twice that. DDP therefore sends twice the gradients, and fully sharded training three times
the parameters in each batch (arXiv 1910.02054, section 7.2).
"""

from __future__ import annotations

from backend.memory.context import MemoryContext


def network_bytes(ctx: MemoryContext, tokens: int) -> int:
    """Bytes that a device sends to other devices. `tokens`: of one per-device batch."""
    run, batches = ctx.run, ctx.spec.train.gradient_accumulation_steps
    gradients = ctx.trainable_count * _reduced_gradient_bytes(ctx)
    if run.world_size == 1:
        return 0
    if run.tensor_parallel_size > 1:
        size = run.tensor_parallel_size
        activations = 4 * ctx.shape.layers * tokens * ctx.shape.hidden * ctx.compute_bytes  # all-reduces: 2 + 2 a layer
        data_parallel = _sharded_bytes(ctx, run.world_size // size, gradients, batches) // size
        return batches * 2 * _ring(activations, size) + data_parallel
    if run.parameter_shards == 1:
        return 2 * _ring(gradients, run.world_size)
    replicas = run.world_size // run.parameter_shards
    sharded = _sharded_bytes(ctx, run.parameter_shards, gradients, batches)
    return sharded + 2 * _ring(gradients // run.parameter_shards, replicas)


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
