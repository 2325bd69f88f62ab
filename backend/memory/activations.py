"""Activations: what the forward pass saves for the backward pass, and what a layer's backward pass allocates.

Tested against the tensors that torch saves, architecture by architecture (tests/unit/test_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from backend import registry
from backend.config import Lora
from backend.memory.context import MemoryContext, Row, once
from backend.modelspec import ModelShape, ModuleSpec, lora_modules, matches_any, unfrozen_modules
from backend.resolve import before_ampere, selected_gpus

EXPERT_INDEX_BYTES = 32  # per token and active expert: indices that sort tokens by expert, and back
# Linear layers that write to the residual stream, and those that compute several projections at once.
OUTPUT_PROJECTIONS = ("o_proj", "dense", "c_proj", "down_proj", "fc2", "dense_4h_to_h")
FUSED_PROJECTIONS = ("qkv_proj", "query_key_value", "c_attn")
# Activation functions that are several operations in transformers, each of which saves a tensor.
COMPOSED_ACTIVATIONS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh_python")
# Their tensor-parallel plans leave the tensors between two linear layers sharded. Other plans gather some of them, for
# example of fused projections (transformers 5.23 models/*/configuration_*.py, base_model_tp_plan).
TENSOR_PARALLEL = ("llama", "mistral", "qwen2", "qwen3", "granite", "gemma", "gemma2", "phi", "gpt_neox")


@dataclass(frozen=True)
class LayerActivations:
    """One decoder layer, without activation checkpointing."""

    bytes_per_token: int  # saved for the backward pass
    attention_matrix_bytes: int  # saved for pairs of tokens: masks, and scores of attention that is not fused
    backward: Row  # temporary tensors of its backward pass
    adapted_experts: int  # elements of the experts that carry adapters
    writes_scores: bool  # torch computes attention without a fused kernel, although SDPA is used


def layer_activations(ctx: MemoryContext) -> LayerActivations:
    """The activations of one layer of this model in this run."""
    experts, writes_scores = _adapted_expert_count(ctx), _writes_scores(ctx, _has_mask(ctx))
    per_token = _bytes_per_token(ctx, experts, writes_scores)
    matrices = _attention_matrix_bytes(ctx, writes_scores)
    return LayerActivations(per_token, matrices, _backward_row(ctx, experts, writes_scores), experts, writes_scores)


def activation_row(ctx: MemoryContext, layer: LayerActivations, *, recompute: bool = True, done: int = 0) -> Row:
    """What the forward pass saved. With activation checkpointing and `recompute`, plus the layer that is recomputed.
    `done`: layers whose backward pass is finished; then the outputs after the last layer are freed too."""
    shape, checkpointing = ctx.shape, ctx.spec.train.activation_checkpointing
    layers = max(1, layers_with_gradients(ctx) - done)
    pairs = " x 2 sequences" if ctx.stage.sequences_per_example == 2 else ""
    size = f"{ctx.batch_size}{pairs} x {ctx.sequence_length} tokens{ctx.divided_by(ctx.run.token_shards)}"
    # The input of the final norm in fp32, its output, and the hidden states of the tokens that the loss is computed on.
    outputs = 2 if ctx.spec.method.kind == "full" else 1
    after_layers = 0 if done else ctx.tokens * shape.hidden * (4 + ctx.hidden_state_bytes * outputs)
    matrices, per_layer = layer.attention_matrix_bytes, shape.hidden * ctx.hidden_state_bytes
    if checkpointing:
        mask = _has_mask(ctx) * _token_pairs(ctx)  # the boolean mask, 1 byte per pair, shared by all layers
        recomputed = recompute * (ctx.tokens * layer.bytes_per_token + matrices)
        total = ctx.tokens * layers * per_layer + recomputed + mask + after_layers
        one_layer = f" + {layer.bytes_per_token:,} bytes of one recomputed layer" if recompute else ""
        formula = f"{size} x ({layers} layers x {per_layer:,} bytes{one_layer})"
    else:
        total = layers * (ctx.tokens * layer.bytes_per_token + matrices) + after_layers
        formula = f"{size} x {layers} layers x {layer.bytes_per_token:,} bytes"
    return Row("Activations", total, formula + (", and attention masks or scores" if matrices else ""))


def layer_shards(ctx: MemoryContext) -> int:
    """Devices that share the tensors between two linear layers (tensor parallelism)."""
    return ctx.run.tensor_parallel_size if ctx.shape.model_type in TENSOR_PARALLEL else 1


@once
def layers_with_gradients(ctx: MemoryContext) -> int:
    """Layers that the backward pass reaches: with checkpointing, all of them, because transformers 5.23 requires
    gradients of the embeddings' output, whatever is trainable (modeling_utils.py, enable_input_require_grads)."""
    method, unfrozen = ctx.spec.method, frozenset(unfrozen_modules(ctx.spec.method, ctx.shape))
    embeddings_are_trained = "embed" in " ".join(method.freeze_extra_modules) or matches_any(
        ctx.shape.embedding, unfrozen
    )
    if ctx.spec.train.activation_checkpointing or method.kind != "freeze" or embeddings_are_trained:
        return ctx.shape.layers
    return (
        min(ctx.shape.layers, method.freeze_trainable_layers)
        if method.freeze_trainable_layers > 0
        else ctx.shape.layers
    )


def merged_expert_rows(ctx: MemoryContext, layer: LayerActivations, layers: int) -> list[Row]:
    """Copies of expert weights: peft adds the adapters to the weights before it uses them."""
    if not layer.adapted_experts:
        return []
    formula = f"{layers} layers x {layer.adapted_experts:,} parameters x {ctx.compute_bytes} bytes: weight plus adapter"
    return [Row("Expert weights with adapters", layers * layer.adapted_experts * ctx.compute_bytes, formula)]


# -- saved for the backward pass -------------------------------------------------------------------------------------


@lru_cache(maxsize=64)  # one check needs it dozens of times
def _target_names(lora: Lora, shape: ModelShape) -> frozenset[str]:
    """The names of the modules that get an adapter, without the path to their layer."""
    return frozenset(_name(leaf) for leaf in lora_modules(lora, shape))


def _bytes_per_token(ctx: MemoryContext, adapted_experts: int, writes_scores: bool) -> int:
    """Bytes that one layer saves for each token."""
    shape, each = ctx.shape, ctx.compute_bytes
    linear = [leaf for leaf in shape.layer if leaf.in_features and leaf.stacked < 2]
    targets = _target_names(ctx.spec.lora, shape) if ctx.is_lora else frozenset()
    trained = [leaf for leaf in linear if not ctx.is_lora or _name(leaf) in targets]
    inner = [leaf for leaf in trained if _name(leaf) not in OUTPUT_PROJECTIONS]
    reads_hidden = [leaf for leaf in inner if leaf.in_features == shape.hidden]
    # Under autocast every linear layer casts its own copy of the input; otherwise layers with the same input share it.
    inputs = (len(reads_hidden) if ctx.uses_autocast else min(2, len(reads_hidden))) * shape.hidden * each
    outputs = sum(leaf.in_features for leaf in trained if _name(leaf) in OUTPUT_PROJECTIONS) * each
    if not (ctx.is_lora and ctx.uses_autocast):
        outputs = shape.intermediate * each  # the attention's output is saved already
    saves = 3 if shape.gated_mlp else 4 if shape.activation in COMPOSED_ACTIVATIONS else 1
    mlp = saves * shape.intermediate * each
    if shape.experts:
        mlp, outputs = _expert_bytes(ctx, adapted_experts), outputs if ctx.is_lora and ctx.uses_autocast else 0
    lora = 0
    if ctx.is_lora:
        widths = sum(leaf.in_features for leaf in trained)
        if ctx.spec.lora.dropout:  # each adapter has its own dropped-out copy of the input, and a mask
            inputs, outputs = widths * each, widths * (4 if ctx.on_cpu else 1)
        lora = ctx.spec.lora.r * len(trained) * each
        if ctx.spec.lora.use_dora:  # outputs of base layer and adapter, for the gradient of the magnitude vector
            lora += 2 * sum(leaf.out_features for leaf in trained) * each
    sharded = _attention_bytes(ctx, writes_scores) + mlp + outputs
    return _norm_bytes(ctx) + inputs + sharded // layer_shards(ctx) + lora


def _attention_bytes(ctx: MemoryContext, writes_scores: bool) -> int:
    """Queries, keys, values and the output of attention."""
    shape = ctx.shape
    width = shape.heads * shape.head_dim
    repeats_kv = ctx.on_cpu or _has_mask(ctx) or writes_scores  # keys and values are copied for every query head
    kv = 2 * (width if repeats_kv else shape.kv_heads * shape.head_dim)
    fused = width if any(_name(leaf) in FUSED_PROJECTIONS for leaf in shape.layer) else 0
    return (2 * width + kv + fused) * ctx.compute_bytes


def _norm_bytes(ctx: MemoryContext) -> int:
    """The inputs of a layer's norms in fp32, and with a trainable weight the normalized values."""
    shape, total = ctx.shape, 0
    for leaf in shape.layer:
        if leaf.in_features:
            continue
        if not shape.gated_mlp:  # LayerNorm: one fused kernel
            total += shape.hidden * 4
            continue
        per_head = _name(leaf) in ("q_norm", "k_norm")
        heads = shape.heads if _name(leaf) == "q_norm" else shape.kv_heads
        size = heads * shape.head_dim // layer_shards(ctx) if per_head else shape.hidden
        normalized = 0 if ctx.is_lora else ctx.compute_bytes if per_head else ctx.hidden_state_bytes
        total += size * (4 + normalized)
    return total


def _expert_bytes(ctx: MemoryContext, adapted_experts: int) -> int:
    """The intermediate tensors of the active experts, their inputs if they are trained, and the router's logits and
    probabilities in fp32."""
    shape, trained = ctx.shape, not ctx.is_lora or adapted_experts > 0
    elements = (3 + trained) * shape.intermediate + (1 + trained) * shape.hidden
    return shape.experts_per_token * (elements * _expert_element_bytes(ctx) + EXPERT_INDEX_BYTES) + shape.experts * 8


def _expert_element_bytes(ctx: MemoryContext) -> int:
    """Bytes of an element in the experts: autocast does not cast stacked expert weights."""
    return 4 if ctx.uses_autocast and not ctx.is_lora else ctx.compute_bytes


def _adapted_expert_count(ctx: MemoryContext) -> int:
    """Elements of one layer's expert weights that carry adapters."""
    modules = lora_modules(ctx.spec.lora, ctx.shape) if ctx.is_lora and ctx.shape.experts else []
    return sum(leaf.parameters * leaf.count for leaf in modules if leaf.stacked > 1) // ctx.shape.layers


# -- attention masks and scores --------------------------------------------------------------------------------------


def evaluation_attention_bytes(ctx: MemoryContext, sequences: int) -> int:
    """Bytes for pairs of tokens in one layer of an evaluation batch, which is not packed: the boolean mask and its copy
    in the compute dtype, and without a fused kernel the scores twice, of which softmax makes an fp32 copy."""
    has_mask = sequences > 1 and _may_have_mask(ctx) and ctx.run.token_shards == 1
    scores = 8 if _is_eager(ctx) else 9 if _writes_scores(ctx, has_mask) else 0
    scores *= ctx.shape.heads // layer_shards(ctx)
    return sequences * ctx.sequence_length**2 * (has_mask * (1 + ctx.compute_bytes) + scores)


@once
def _has_mask(ctx: MemoryContext) -> bool:
    """Whether attention gets a mask of all pairs of tokens, for padding or for packed sequences. Context and sequence
    parallelism drop masks (accelerate 1.15 big_modeling.py, _attach_context_parallel_hooks; deepspeed 0.19
    runtime/sequence_parallel/ulysses_sp.py, uattn_wrapper)."""
    return (ctx.spec.data.packing or ctx.sequences > 1) and _may_have_mask(ctx) and ctx.run.token_shards == 1


def _may_have_mask(ctx: MemoryContext) -> bool:
    """Whether padding needs a mask of pairs of tokens."""
    return ctx.spec.model.attn_implementation not in (*registry.FLASH_ATTENTIONS, "flex_attention")


@once
def _is_eager(ctx: MemoryContext) -> bool:
    """Whether transformers computes attention step by step: as requested, or because the model has no SDPA."""
    requested = ctx.spec.model.attn_implementation
    return requested == "eager" or (requested in ("auto", "sdpa") and not ctx.shape.supports_sdpa)


def _writes_scores(ctx: MemoryContext, has_mask: bool) -> bool:
    """Whether SDPA falls back to its math kernel, which saves the scores: on NVIDIA GPUs, grouped-query attention
    without a mask has a fused kernel only in 16 bits and from Ampere on (torch 2.13 sdp_utils.cpp; PR 181528)."""
    uses_sdpa = ctx.spec.model.attn_implementation in ("auto", "sdpa") and not has_mask and not _is_eager(ctx)
    gpus = selected_gpus(ctx.run, ctx.machine) or ctx.machine.gpus
    has_kernel = ctx.compute_bytes == 2 and not any(before_ampere(gpu.capability) for gpu in gpus)
    return ctx.run.device == "cuda" and uses_sdpa and ctx.shape.kv_heads < ctx.shape.heads and not has_kernel


def _attention_matrix_bytes(ctx: MemoryContext, writes_scores: bool) -> int:
    """Bytes that a layer saves for pairs of tokens: the expanded mask, and scores without a fused kernel."""
    shape, mask = ctx.shape, ctx.compute_bytes if _has_mask(ctx) else 0
    scores = 12 if ctx.on_cpu and shape.model_type == "gpt2" else 0
    if _is_eager(ctx):
        capped = shape.model_type == "gemma2"  # soft capping saves another copy of the scores
        scores, mask = 4 + (ctx.compute_bytes if ctx.compute_bytes == 2 else 0) + capped * ctx.compute_bytes, 0
    if writes_scores:
        scores = 4
    return _token_pairs(ctx) * (mask + scores * shape.heads // layer_shards(ctx))


@once
def _token_pairs(ctx: MemoryContext) -> int:
    """Pairs of tokens in attention; packed sequences are concatenated to one."""
    length = ctx.sequence_length
    return (ctx.sequences * length) ** 2 if ctx.spec.data.packing else ctx.sequences * length**2


# -- temporary tensors -----------------------------------------------------------------------------------------------


def _backward_row(ctx: MemoryContext, adapted_experts: int, writes_scores: bool) -> Row:
    """Temporary tensors of a layer's backward pass: those of its MLP or, in attention without a fused kernel, twice the
    gradients of the scores, when the MLP's activations are already freed."""
    shape = ctx.shape
    row = _expert_backward_row(ctx, adapted_experts) if shape.experts else _mlp_backward_row(ctx)
    if not (writes_scores or _is_eager(ctx)):
        return row
    freed = _expert_bytes(ctx, adapted_experts) if shape.experts else 4 * shape.intermediate * ctx.compute_bytes
    freed //= layer_shards(ctx)
    scores = 2 * _token_pairs(ctx) * shape.heads // layer_shards(ctx) * 4
    formula = f"{scores:,} bytes of attention scores and their gradients, less {ctx.tokens * freed:,} freed by the MLP"
    return row if row.bytes > scores - ctx.tokens * freed else Row(row.name, scores - ctx.tokens * freed, formula)


def _mlp_backward_row(ctx: MemoryContext) -> Row:
    """Gradients of two intermediate tensors, of the hidden states and of one weight matrix."""
    shape, each, inner = ctx.shape, ctx.compute_bytes, ctx.shape.intermediate // layer_shards(ctx)
    weight = 0 if ctx.is_lora else inner * shape.hidden * each
    # LoRA in fp32 under autocast: there is another cast of the input to fp32.
    count, hidden = (3, 4) if ctx.is_lora and ctx.uses_autocast else (2, ctx.hidden_state_bytes)
    size = ctx.tokens * (count * inner * each + shape.hidden * hidden) + weight
    formula = f"{ctx.tokens:,} tokens x ({count} x {inner:,} x {each} + {shape.hidden:,} x {hidden}) bytes"
    matrix = f" + {inner:,} x {shape.hidden:,} x {each} bytes" if weight else ""
    return Row("Backward pass of one layer", size, formula + matrix)


def _expert_backward_row(ctx: MemoryContext, adapted_experts: int) -> Row:
    """Gradients of intermediate tensors of the active experts; with adapters on the experts, those of a merged
    weight."""
    shape, each = ctx.shape, _expert_element_bytes(ctx)
    inside = max(2 * shape.intermediate, shape.intermediate + 2 * shape.hidden) * shape.experts_per_token * each
    weight = shape.experts * shape.intermediate * shape.hidden * ctx.compute_bytes * (adapted_experts > 0)
    size = max(ctx.tokens * inside, weight) + ctx.tokens * shape.hidden * ctx.hidden_state_bytes
    hidden = f"{shape.hidden:,} x {ctx.hidden_state_bytes}"
    formula = f"{ctx.tokens:,} tokens x ({inside:,} in {shape.experts_per_token} experts + {hidden}) bytes"
    return Row("Backward pass of one layer", size, formula)


@once
def dora_row(ctx: MemoryContext) -> Row:
    """Temporary tensors of DoRA's weight norm in every layer."""
    modules = lora_modules(ctx.spec.lora, ctx.shape) if ctx.is_lora and ctx.spec.lora.use_dora else []
    widths = [(leaf.in_features, leaf.out_features) for leaf in modules]
    inputs, outputs = max(widths, key=lambda width: width[0] * (3 * width[1] + width[0]), default=(0, 0))
    formula = f"(3 x {inputs} x {outputs} + {inputs} x {inputs}) elements x 4 bytes"
    return Row("DoRA weight norm", inputs * (3 * outputs + inputs) * 4, formula)


@once
def dequantized_row(ctx: MemoryContext) -> Row:
    """The weight of the quantized layer that is computed, dequantized to the compute dtype."""
    largest = max((rows * columns for rows, columns in ctx.quantized_matrices), default=0)
    return Row("Dequantized weight", largest * ctx.compute_bytes, f"{largest:,} elements x {ctx.compute_bytes} bytes")


def _name(leaf: ModuleSpec) -> str:
    return leaf.path.rpartition(".")[2]
