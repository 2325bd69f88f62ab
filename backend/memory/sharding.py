"""Parameters on a device: sharded, gathered for use, and in communication buckets."""

from __future__ import annotations

from backend.memory import quantized
from backend.memory.context import MIB, MemoryContext, Row, once
from backend.wording import counted

PREFETCHED_LAYERS = 2  # the layer that is computed and the next one, already gathered (torch 2.13 fsdp/_fully_shard)
DEEPSPEED_BUCKETS = 3  # two to reduce gradients, one to gather parameters


def parameter_rows(ctx: MemoryContext) -> list[Row]:
    """Parameters that each device holds all the time. DeepSpeed computes with parameters in the compute dtype and keeps
    fp32 master weights with the optimizer state."""
    run, on_device = ctx.run, not ctx.param_offload
    shards, suffix = run.parameter_shards, ctx.divided_by(run.parameter_shards)
    frozen, trainable = ctx.unquantized_count, ctx.trainable_count
    each = ctx.compute_bytes if ctx.engine.separate_master_weights else ctx.trainable_bytes
    return [
        *(_quantized_rows(ctx) if ctx.quantized_matrices else []),
        Row(
            "Frozen parameters",
            on_device * frozen * ctx.compute_bytes // shards,
            f"{frozen:,} parameters x {ctx.compute_bytes} bytes{suffix}",
        ),
        Row(
            "Trainable parameters",
            on_device * trainable * each // shards,
            f"{trainable:,} parameters x {each} bytes{suffix}",
        ),
    ]


def _quantized_rows(ctx: MemoryContext) -> list[Row]:
    """The quantized base model of QLoRA. Scales are not sharded with the weights."""
    shards, bits = ctx.run.parameter_shards, quantized.bits(ctx.spec, ctx.shape)
    count = ctx.quantized_count
    return [
        Row(
            "Quantized parameters",
            (not ctx.param_offload) * count * bits // 8 // shards,
            f"{count:,} parameters x {bits} bits{ctx.divided_by(shards)}",
        ),
        Row(
            "Quantization scales",
            quantized.scale_bytes(ctx.spec, ctx.shape, ctx.quantized_matrices),
            quantized.scale_formula(ctx.spec, ctx.shape),
        ),
    ]


@once
def reference_rows(ctx: MemoryContext) -> list[Row]:
    """The reference model; with LoRA a copy of the initial adapter, because the base model is unchanged."""
    if not ctx.stage.uses_reference_model or ctx.param_offload:
        return []
    if ctx.is_lora and not ctx.spec.needs_reference_model:
        formula = f"{ctx.trainable_count:,} parameters x 4 bytes: copy of the initial adapter"
        return [Row("Reference adapter", ctx.trainable_count * 4, formula)]
    if ctx.spec.preference.precompute_ref_log_probs:
        return []
    count, each, shards = ctx.shape.parameters, ctx.compute_bytes, ctx.run.parameter_shards
    formula = f"{count:,} parameters x {each} bytes{ctx.divided_by(shards)}"
    return [Row("Reference model", count * each // shards, formula)]


@once
def persistent_gathered_rows(ctx: MemoryContext) -> list[Row]:
    """Parameters that DeepSpeed's ZeRO-3 keeps gathered (stage3_max_live_parameters)."""
    limit = ctx.engine.max_live_parameters
    if not limit:
        return []
    count = min(ctx.unquantized_count + ctx.trainable_count + ctx.quantized_bytes // ctx.compute_bytes, limit)
    formula = f"{count:,} parameters x {ctx.compute_bytes} bytes (stage3_max_live_parameters: {limit:,})"
    return [Row("Gathered parameters", count * ctx.compute_bytes, formula)]


@once
def end_counts(ctx: MemoryContext) -> tuple[int, int]:
    """Parameters outside the layers: (embeddings and others, unless tied to the output layer; the output layer)."""
    shape = ctx.shape
    outside = sum(leaf.parameters for leaf in shape.non_layer_modules)
    head = shape.vocabulary * shape.hidden if shape.tied else shape.non_layer_modules[-1].parameters
    return outside - head, head


def gathered_rows(ctx: MemoryContext, layers: int, heads: int, *, freed: bool = False, in_flight: int = 0) -> list[Row]:
    """Parameters that FSDP has gathered: `layers` layers, `heads` times the output layer, and `in_flight` layers whose
    all-gather is not copied out or not freed yet. `freed`: the backward pass is done with the other layers, which
    reshard_after_forward=False would otherwise keep gathered."""
    if not ctx.gathers_layers:
        return []
    shape, embeddings, head = ctx.shape, *end_counts(ctx)
    keeps_all = ctx.engine.keeps_parameters_gathered(ctx.spec) and not freed
    count_layers = (shape.layers if keeps_all else min(layers, shape.layers)) + in_flight
    count_embeddings = embeddings if keeps_all else 0
    saved = ctx.quantized_count - ctx.quantized_bytes // ctx.compute_bytes
    heads = max(heads, 1) if shape.tied else heads
    count = count_layers * (shape.layer_parameters - saved // shape.layers) + count_embeddings + heads * head
    both = "and" if heads + bool(count_embeddings) > 1 else "or"
    ends = f" and embeddings {both} output layer" if heads or count_embeddings else ""
    formula = f"{counted(count_layers, 'layer')}{ends}: {count:,} parameters x {ctx.compute_bytes} bytes"
    return [Row("Gathered parameters", count * ctx.compute_bytes, formula)]


@once
def loss_weight_rows(ctx: MemoryContext) -> list[Row]:
    """With tensor parallelism, the output layer, which the loss gathers (trl 1.16 trainer/utils.py, full_tensor)."""
    if ctx.run.tensor_parallel_size == 1 or ctx.stage.is_reward_model:
        return []
    count, each = ctx.shape.vocabulary * ctx.shape.hidden, ctx.trainable_bytes
    return [Row("Gathered parameters", count * each, f"output layer: {count:,} parameters x {each} bytes")]


def bucket_rows(ctx: MemoryContext) -> list[Row]:
    """Communication buckets of DDP and DeepSpeed."""
    if not ctx.engine.has_buckets:
        return []
    if ctx.engine.separate_master_weights:
        mb = ctx.spec.parallel.bucket_cap_mb
        formula = f"{DEEPSPEED_BUCKETS} buckets x {mb} MiB: two to reduce gradients, one to gather parameters"
        return [Row("DeepSpeed buckets", DEEPSPEED_BUCKETS * mb * MIB, formula)]
    if ctx.run.world_size == 1:
        return []
    each = 4 if ctx.run.fp32_master_weights else ctx.compute_bytes
    formula = f"{ctx.trainable_count:,} parameters x {each} bytes"
    return [Row("DDP gradient buckets", ctx.trainable_count * each, formula)]
