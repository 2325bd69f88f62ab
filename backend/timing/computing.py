"""Seconds that a device needs for the forward and backward pass of one batch, and for the optimizer step.

Products are counted in FLOPs, everything else in bytes that are read and written. The bytes and operations of a layer
are rough counts for the kernels of transformers, Liger, Unsloth and torch.compile.
"""

from __future__ import annotations

from typing import NamedTuple

from backend.modelspec import lora_modules, stored_weights
from backend.registry.gpus import TERA
from backend.timing.context import COMPILED, FUSED, STOCK, UNSLOTH, TimeContext

OPTIMIZER_LATENCY = 0.010  # seconds on GPUs: thousands of small kernels, learning rate, log line
STEP_OPERATIONS, TENSOR_OPERATIONS = 1500, 12  # operations on CPUs: of a step, and for each trained tensor
CHUNKED = 2  # times the work of a cross entropy: TRL computes entropy and accuracy too
UNFUSED = 2.2  # an optimizer that is a list of operations moves this many times the bytes of a fused kernel
SMALL_HEAD, SMALL_HEAD_RATE = 64, 0.8  # head dimensions up to this one leave a part of the tensor cores unused
# Bytes for each token and layer: per hidden feature, per feature of the MLP, of the projections of q, k and v, of the
# attention output.
ELEMENTWISE = {
    STOCK: (68, 10, 20, 8),
    FUSED: (24, 6, 4, 6),
    UNSLOTH: (24, 6, 4, 6),
    COMPILED: (16, 6, 4, 6),
}
ADAPTER_BYTES = {STOCK: (8, 10), FUSED: (8, 10), UNSLOTH: (2, 3), COMPILED: (3, 4)}  # per input and output feature
LOGIT_BYTES = {STOCK: 30, FUSED: 16, UNSLOTH: 14, COMPILED: 30}  # TRL computes the loss in chunks
OPERATIONS = {STOCK: 42, FUSED: 26, UNSLOTH: 26, COMPILED: 14}  # of a layer
ADAPTER_OPERATIONS = {STOCK: 7, FUSED: 7, UNSLOTH: 3, COMPILED: 3}  # of a module
QUANTIZED_OPERATIONS, DORA_OPERATIONS, FSDP_OPERATIONS, EXPERT_OPERATIONS, GATHER_OPERATIONS = 3, 12, 30, 20, 15
DORA_BYTES = 14  # per adapted weight, in each forward pass


class Part(NamedTuple):
    """A part of the time of one batch, in seconds, and how it follows."""

    label: str
    seconds: float
    formula: str


def batch_parts(ctx: TimeContext) -> list[Part]:
    """What the device computes for one batch, forward and backward."""
    found = [_linear(ctx), _head(ctx), _attention(ctx), _elementwise(ctx), _weight_reads(ctx)]
    found += [_adapters(ctx), _dequantization(ctx), _gradients(ctx), _reference(ctx)]
    return [part for part in found if part.seconds > 0]


def _linear(ctx: TimeContext) -> Part:
    weights, times = ctx.weights, 1 + ctx.reached + ctx.recomputed
    each = times + weights.trained / max(1, weights.layers)
    flops = 2 * ctx.tokens * weights.layers * each / ctx.model_shards
    passes = ["forward", "gradients of the inputs" + (" of the upper layers" if ctx.reached < 1 else "")]
    passes += ["recomputed by activation checkpointing"] * ctx.recomputed
    passes += ["gradients of the weights"] * (weights.trained > 0)
    formula = f"2 FLOPs x {ctx.tokens:,.0f} tokens x {weights.layers:,} weights x {each:.3g} ({', '.join(passes)})"
    return Part("Linear layers", flops / ctx.rates.matmul, f"{formula}, at {_rate(ctx.rates.matmul)}")


def _head(ctx: TimeContext) -> Part:
    weights, shape = ctx.weights, ctx.memory.shape
    again = ctx.kernels in (STOCK, COMPILED)  # TRL's chunks compute the logits a second time
    flops = 2 * ctx.head_tokens * (weights.head * (2 + again) + weights.trained_head) / ctx.model_shards
    logits = 0 if ctx.memory.stage.is_reward_model else ctx.head_tokens * shape.vocabulary
    each = CHUNKED * ctx.rates.logit or LOGIT_BYTES[ctx.kernels] / ctx.rates.memory
    seconds = flops / ctx.rates.matmul + logits * each / ctx.model_shards
    of_logit = f"{1e9 * each:.3g} ns" if ctx.rates.logit else f"{LOGIT_BYTES[ctx.kernels]} bytes"
    formula = f"{ctx.head_tokens:,.0f} tokens x {weights.head:,} weights, and {of_logit} per logit"
    return Part("Output layer and loss", seconds, formula)


def attention_flops(ctx: TimeContext, passes: float) -> float:
    """FLOPs of queries times keys and of scores times values of one device."""
    shape = ctx.memory.shape
    width = shape.heads * shape.head_dim
    pairs = ctx.tokens * ctx.batch.attended * ctx.attention_pairs
    return 4 * pairs * width * shape.layers * passes / ctx.model_shards


def _attention(ctx: TimeContext) -> Part:
    rate = ctx.rates.attention * (SMALL_HEAD_RATE if ctx.memory.shape.head_dim <= SMALL_HEAD else 1)
    seconds = attention_flops(ctx, 1 + 2.5 * ctx.reached + ctx.recomputed) / rate
    formula = f"{ctx.tokens:,.0f} tokens x {ctx.batch.attended:,.0f} tokens x {ctx.memory.shape.layers} layers"
    return Part("Attention", seconds, f"{formula}, at {_rate(rate)}")


def _elementwise(ctx: TimeContext) -> Part:
    """Norms, rotary embeddings, activation functions and residuals. What fits into the cache costs a third."""
    shape, memory = ctx.memory.shape, ctx.memory
    hidden, inner, projections, output = ELEMENTWISE[ctx.kernels]
    width, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    intermediate = shape.intermediate * max(1, shape.experts_per_token)
    fp32_states = memory.hidden_state_bytes / memory.compute_bytes
    each = hidden * shape.hidden * fp32_states + inner * intermediate + projections * (width + kv) + output * width
    if ctx.writes_scores:
        each += 18 * shape.heads * ctx.batch.attended
    size = 3 * ctx.tokens * (shape.hidden + intermediate)
    cached = 1 / (1 + (size / ctx.rates.cache) ** 2) if ctx.rates.cache else 0
    each *= ctx.element_scale
    moved = ctx.tokens * shape.layers * each * (1 - 0.67 * cached) / ctx.model_shards
    formula = f"{ctx.tokens:,.0f} tokens x {shape.layers} layers x {each:,.0f} bytes x {ctx.passes:.3g} passes"
    return Part("Norms, activations and residuals", _passes_seconds(ctx, moved), f"{formula}, at {_pass_rates(ctx)}")


def _passes_seconds(ctx: TimeContext, moved: float) -> float:
    """Seconds of all passes over activations, each of which moves `moved` bytes: the forward pass writes new memory,
    the others reuse it."""
    return moved / ctx.rates.activations + moved * (ctx.passes - 1) / ctx.rates.memory


def _pass_rates(ctx: TimeContext) -> str:
    first, others = _giga(ctx.rates.activations), _giga(ctx.rates.memory)
    return others if first == others else f"{first} forward and {others} backward"


def _weight_reads(ctx: TimeContext) -> Part:
    times = 2 + ctx.recomputed + (ctx.weights.trained > 0)
    size = ctx.memory.compute_bytes
    moved = size * stored_weights(ctx.memory.shape) * times + 4 * ctx.weights.head
    formula = f"{size} bytes x all weights x {times}, at {_giga(ctx.rates.memory)}"
    return Part("Reading the weights", moved / ctx.model_shards / ctx.rates.memory, formula)


def _adapters(ctx: TimeContext) -> Part:
    """LoRA's two small products next to each adapted layer, and what it reads and writes for them."""
    memory, passes = ctx.memory, ctx.passes
    if not memory.is_lora:
        return Part("", 0, "")
    flops = 2 * ctx.tokens * ctx.weights.adapters * passes
    inputs, outputs = ADAPTER_BYTES[ctx.kernels]
    widths = _adapted_widths(ctx)
    seconds = _passes_seconds(ctx, ctx.tokens * (inputs * widths[0] + outputs * widths[1]) * ctx.element_scale)
    if memory.spec.lora.use_dora:
        seconds += DORA_BYTES * ctx.element_scale * widths[2] * (1 + ctx.recomputed) / ctx.rates.memory
    seconds += flops / ctx.rates.small
    formula = (
        f"2 FLOPs x {ctx.tokens:,.0f} tokens x {ctx.weights.adapters:,} weights x {passes:.3g}, in small matrix "
        "products"
    )
    return Part("LoRA adapters", seconds / ctx.model_shards, formula)


def _adapted_widths(ctx: TimeContext) -> tuple[int, int, int]:
    """Input features, output features and weights of all modules with an adapter."""
    adapted = lora_modules(ctx.memory.spec.lora, ctx.memory.shape)
    return (
        sum(leaf.in_features * leaf.count for leaf in adapted),
        sum(leaf.out_features * leaf.count for leaf in adapted),
        sum(leaf.in_features * leaf.out_features * leaf.count for leaf in adapted),
    )


def _dequantization(ctx: TimeContext) -> Part:
    count, times = ctx.memory.quantized_count, 2 + ctx.recomputed
    moved = ctx.calibration.dequantization * 2.6 * count * times
    formula = f"{count:,} quantized weights are converted to 16 bits {times} times"
    return Part("Dequantization", moved / ctx.rates.memory, formula)


def _gradients(ctx: TimeContext) -> Part:
    """Writing and adding gradients, and the casts of autocast."""
    memory = ctx.memory
    if memory.is_lora:
        return Part("", 0, "")
    count = memory.trainable_count
    moved = count * (6 if memory.spec.train.gradient_accumulation_steps > 1 else 3)
    if memory.uses_autocast and memory.run.parameter_shards == 1:
        moved += 6 * count * (1 + ctx.recomputed)
    formula = f"{count:,} trained weights: gradients, and casts to 16 bits"
    seconds = moved * ctx.element_scale / ctx.model_shards / ctx.rates.activations
    return Part("Gradients", seconds, formula)


def _reference(ctx: TimeContext) -> Part:
    """The forward passes of preference losses without gradients."""
    count = reference_passes(ctx)
    formula = f"{count} forward pass{'es' if count > 1 else ''} of a batch without gradients"
    return Part("Reference model", count * forward_seconds(ctx), formula)


def reference_passes(ctx: TimeContext) -> int:
    """Forward passes of a batch besides that of the loss: DPO and KTO compare with the initial model, also where that
    is the model without its adapter, and KTO estimates the KL divergence with other completions, of both models."""
    if not ctx.memory.stage.uses_reference_model:
        return 0
    with_kl, preference = estimates_kl(ctx), ctx.memory.spec.preference
    return with_kl + (0 if preference.precompute_ref_log_probs else 1 + with_kl)


def estimates_kl(ctx: TimeContext) -> bool:
    """Whether the loss is that of KTO with its KL estimate."""
    spec = ctx.memory.spec
    return spec.train.stage == "kto" and spec.preference.kto_loss_type == "kto"


def forward_seconds(ctx: TimeContext) -> float:
    """One forward pass of a batch, without gradients."""
    linear = 2 * ctx.tokens * (ctx.weights.layers + ctx.weights.head) / ctx.model_shards / ctx.rates.matmul
    others = _elementwise(ctx).seconds / ctx.passes
    reads = ctx.memory.compute_bytes * stored_weights(ctx.memory.shape) / ctx.model_shards / ctx.rates.memory
    dequantized = _dequantization(ctx).seconds / (2 + ctx.recomputed)
    return linear + attention_flops(ctx, 1) / ctx.rates.attention + others + reads + dequantized


def host_seconds(ctx: TimeContext) -> float:
    """What the CPU needs to start the operations of one batch."""
    memory, shape = ctx.memory, ctx.memory.shape
    operations = OPERATIONS[ctx.kernels] + ADAPTER_OPERATIONS[ctx.kernels] * ctx.adapters_per_layer
    operations += QUANTIZED_OPERATIONS * ctx.quantized_per_layer
    operations += DORA_OPERATIONS * ctx.adapters_per_layer * memory.spec.lora.use_dora
    operations += FSDP_OPERATIONS * memory.gathers_layers + EXPERT_OPERATIONS * (shape.experts > 0)
    found = shape.layers * operations * (1.9 + ctx.recomputed)
    if memory.run.parameter_shards > 1 and not memory.gathers_layers and ctx.model_shards == 1:  # ZeRO-3
        found += shape.layers * len(shape.layer) * (2 + ctx.recomputed) * GATHER_OPERATIONS
    return found * ctx.calibration.operation_seconds


def optimizer_part(ctx: TimeContext) -> Part:
    """Gradient clipping and the update of the trained weights."""
    memory, row = ctx.memory, ctx.memory.optimizer.row
    count = memory.trainable_count
    state = memory.optimizer.bytes
    weights = 4 if memory.engine.separate_master_weights else memory.trainable_bytes
    fused = row.temporaries == 0 or memory.engine.separate_master_weights
    moved = (3 * count * weights + 2 * state) * (1 if fused else UNFUSED) / memory.run.optimizer_shards
    formula = f"{count:,} trained weights and {state:,} bytes of state are read and written"
    latency = OPTIMIZER_LATENCY
    if ctx.cpu:
        latency = (STEP_OPERATIONS + TENSOR_OPERATIONS * ctx.trained_tensors) * ctx.calibration.operation_seconds
    return Part("Optimizer step", moved / ctx.rates.memory + latency, f"{formula}, at {_giga(ctx.rates.memory)}")


def _rate(flops: float) -> str:
    return f"{flops / 1e12:,.0f} TFLOP/s" if flops >= TERA else f"{flops / 1e9:,.0f} GFLOP/s"


def _giga(rate: float) -> str:
    return f"{rate / 1e9:,.0f} GB/s"
