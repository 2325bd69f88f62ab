"""The moments of a step at which device memory may peak.

Between these moments memory changes monotonically, layer by layer, so one of them is the peak of forward and backward
pass. Tested with torch's memory tracker (tests/process/test_memory_estimate.py). On a CPU, the resident memory of the
process was measured instead, which includes what the allocator keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from backend.memory.activations import (
    LayerActivations,
    activation_row,
    dequantized_row,
    dora_row,
    evaluation_attention_bytes,
    layer_shards,
    layers_with_gradients,
    merged_expert_rows,
)
from backend.memory.context import MemoryContext, Row, once
from backend.memory.gradients import (
    accumulated_gradients,
    all_gradients,
    first_gradients,
    head_gradient_count,
    layer_gradient_count,
    merged_embedding_count,
    merged_head_count,
    reduce_scatter_row,
)
from backend.memory.loss import evaluation_bytes, loss_row
from backend.memory.sharding import (
    PREFETCHED_LAYERS,
    end_counts,
    gathered_rows,
    loss_weight_rows,
    persistent_gathered_rows,
)

# glibc keeps freed activations: this share of what a step without checkpointing saves, measured on a CPU. With adapters
# there are more short-lived tensors between the long-lived ones.
FRAGMENTATION: Mapping[str, float] = {"lora": 0.55, "full": 0.2, "freeze": 0.2}


@dataclass(frozen=True)
class Peak:
    """A moment of a run: its phase, when in the phase it is, and what a device holds only then."""

    phase: str
    at: str
    rows: list[Row]

    @cached_property
    def bytes(self) -> int:
        """The bytes of all rows."""
        return sum([row.bytes for row in self.rows])


def step_moments(ctx: MemoryContext, layer: LayerActivations) -> list[Peak]:
    """The moments of forward and backward pass."""
    if ctx.on_cpu:
        return [Peak("Forward and backward", "at the end of the forward pass", end_of_forward_on_cpu(ctx, layer))]
    return [
        *(
            Peak("Forward", "while parameters are gathered in the forward pass", rows)
            for rows in all_gathers(ctx, layer)
        ),
        Peak("Forward", "in the loss at the end of the forward pass", loss_forward(ctx, layer)),
        Peak("Backward", "in the backward pass of the loss", loss_backward(ctx, layer)),
        Peak("Backward", "in the backward pass of the last layer", upper_layer_backward(ctx, layer, 0)),
        Peak("Backward", "in the backward pass of the last layers", upper_layer_backward(ctx, layer, 1)),
        Peak("Backward", "in the backward pass of the first layer", first_layer_backward(ctx, layer)),
        Peak("Backward", "in the backward pass of the embeddings", embeddings_backward(ctx)),
    ]


def end_of_forward_on_cpu(ctx: MemoryContext, layer: LayerActivations) -> list[Row]:
    """The end of the forward pass, and the first gradients, on a CPU."""
    share = FRAGMENTATION[ctx.spec.method.kind]
    kept = round(share * layers_with_gradients(ctx) * ctx.tokens * layer.bytes_per_token)
    return [
        activation_row(ctx, layer),
        dora_row(ctx),
        dequantized_row(ctx),
        loss_row(ctx),
        _autocast_row(ctx, 1),
        *gathered_rows(ctx, 2, 1),
        *loss_weight_rows(ctx),
        *merged_expert_rows(ctx, layer, _merged_layers(ctx)),
        *_unsharded_gradient_rows(ctx, layer, 0),
        *first_gradients(ctx, head_gradient_count(ctx)),
        *_merged_rows(ctx, merged_head_count(ctx), 2),
        Row("Allocator fragmentation", kept, f"{share:.0%} of the activations without checkpointing (measured share)"),
    ]


def loss_forward(ctx: MemoryContext, layer: LayerActivations) -> list[Row]:
    """The forward pass of the loss. Autocast has a copy of every weight; FSDP still holds what it gathered last."""
    tied = ctx.shape.tied
    return [
        activation_row(ctx, layer, recompute=False),
        dora_row(ctx),
        dequantized_row(ctx),
        loss_row(ctx),
        _autocast_row(ctx, 1),
        *merged_expert_rows(ctx, layer, _merged_layers(ctx)),
        *gathered_rows(ctx, 1 if tied else 0, 1 if tied else 2),
        *loss_weight_rows(ctx),
        *_merged_rows(ctx, merged_head_count(ctx)),
        *accumulated_gradients(ctx),
    ]


def all_gathers(ctx: MemoryContext, layer: LayerActivations) -> list[list[Row]]:
    """FSDP's largest all-gathers: of the output layer, which comes last, or first if it is tied to the embeddings, and
    of the last layer. During a copy-out there are two copies of what was gathered."""
    if not ctx.gathers_layers:
        return []
    gradients = accumulated_gradients(ctx)
    last_layer = [
        activation_row(ctx, layer, recompute=False, done=1), *gathered_rows(ctx, 1, 0, in_flight=2), *gradients
    ]  # fmt: skip
    if ctx.shape.tied:
        return [gathered_rows(ctx, PREFETCHED_LAYERS, 2), last_layer]
    merged = merged_expert_rows(ctx, layer, _merged_layers_after_forward(ctx))
    head = [activation_row(ctx, layer, recompute=False), *merged, *gathered_rows(ctx, 1, 2), *gradients]
    return [head, last_layer]


def loss_backward(ctx: MemoryContext, layer: LayerActivations) -> list[Row]:
    """The backward pass of the loss, which accumulates the gradient of the output layer in fp32."""
    count, cast = head_gradient_count(ctx) + merged_head_count(ctx), 2 if ctx.hidden_state_bytes == 2 else 0
    formula = f"{count:,} parameters x {4 + cast} bytes: accumulated in fp32{', and cast' if cast else ''}"
    return [
        activation_row(ctx, layer, recompute=False),
        loss_row(ctx),
        _autocast_row(ctx, 0 if ctx.spec.train.activation_checkpointing else 1),
        *merged_expert_rows(ctx, layer, _merged_layers_after_forward(ctx)),
        *gathered_rows(ctx, 1, 1),
        *loss_weight_rows(ctx),
        Row("Gradient of the output layer", count * (4 + cast), formula),
        *_merged_rows(ctx, merged_head_count(ctx)),
        *accumulated_gradients(ctx),
    ]


def upper_layer_backward(ctx: MemoryContext, layer: LayerActivations, done: int) -> list[Row]:
    """The backward pass of the last layer (`done` 0), with all activations, or of the one before it (`done` 1), with
    the last layer's gradients."""
    checkpointing, head, each = (
        ctx.spec.train.activation_checkpointing, head_gradient_count(ctx), layer_gradient_count(ctx)
    )  # fmt: skip
    return [
        activation_row(ctx, layer, done=done),
        dora_row(ctx),
        dequantized_row(ctx),
        layer.backward,
        _autocast_row(ctx, 1 / ctx.shape.layers if checkpointing else 1),
        *gathered_rows(ctx, PREFETCHED_LAYERS, 0),
        *first_gradients(ctx, head + done * each),
        *merged_expert_rows(ctx, layer, _merged_layers(ctx) - (0 if checkpointing else done)),
        *_unsharded_gradient_rows(ctx, layer, each if done else head),
    ]


def first_layer_backward(ctx: MemoryContext, layer: LayerActivations) -> list[Row]:
    """The backward pass of the first layer, with few activations and nearly all gradients."""
    size = ctx.tokens * layer.bytes_per_token + layer.attention_matrix_bytes
    formula = f"{ctx.tokens:,} tokens x {layer.bytes_per_token:,} bytes of one layer"
    each, embeddings = layer_gradient_count(ctx), end_counts(ctx)[0] if ctx.spec.method.kind == "full" else 0
    return [
        Row("Activations", size, formula),
        dora_row(ctx),
        dequantized_row(ctx),
        layer.backward,
        _autocast_row(ctx, 1 / ctx.shape.layers),
        *gathered_rows(ctx, PREFETCHED_LAYERS, 0, freed=True),
        *first_gradients(ctx, ctx.trainable_count - each - embeddings),
        *merged_expert_rows(ctx, layer, 1),
        *_unsharded_gradient_rows(ctx, layer, each),
    ]


def embeddings_backward(ctx: MemoryContext) -> list[Row]:
    """The end of the backward pass: the gradient of the embeddings."""
    gradients = (accumulated_gradients(ctx) or [all_gradients(ctx)])[0]
    optimizer = ctx.optimizer.row
    if ctx.spec.method.kind != "full" or optimizer.state_layout == "one_block" or optimizer.steps_in_backward:
        return [gradients, *_merged_rows(ctx, merged_embedding_count(ctx))]
    size, copies = ctx.shape.vocabulary * ctx.shape.hidden, 2 if ctx.shape.tied else 1
    name = "Gradient of the embeddings"
    if not ctx.gathers_layers:
        each = ctx.trainable_bytes
        formula = f"{size:,} parameters x {each} bytes, to be added to that of the tied output layer"
        return [gradients, Row(name, (copies - 1) * size * each, formula)]
    formula = f"{size:,} parameters x {copies} x {ctx.compute_bytes} bytes, unsharded"
    return [
        gradients,
        *gathered_rows(ctx, 0, 1, freed=True),
        Row(name, size * copies * ctx.compute_bytes, formula),
        reduce_scatter_row(ctx, size),
    ]


def optimizer_step(ctx: MemoryContext) -> list[Row]:
    """The optimizer's update: all gradients and its temporary tensors; activations are freed."""
    modules = (*ctx.shape.layer, *ctx.shape.non_layer_modules)
    largest = max((leaf.parameters for leaf in modules), default=0)
    row = ctx.optimizer.row
    temporaries = row.temporaries + (row.copies_decayed and ctx.spec.train.weight_decay > 0)
    stepped, shards = ctx.trainable_count, ctx.run.optimizer_shards
    # DeepSpeed adds tensors to a group until it reaches its size; the last one may exceed it.
    group = ctx.engine.step_elements(ctx.spec) * shards + ctx.optimizer.largest_tensor
    in_groups = group < stepped and not ctx.on_cpu
    count = min(stepped, largest) * 2 if ctx.on_cpu else int(min(stepped, group)) * temporaries
    count = 0 if ctx.optimizer_offload else count // shards
    formula = f"{count:,} elements x {ctx.trainable_bytes} bytes of temporary tensors"
    formula += ", for one sub_group_size of parameters at a time" if in_groups else ""
    return [all_gradients(ctx), Row("Optimizer step", count * ctx.trainable_bytes, formula)]


def evaluation(ctx: MemoryContext, layer: LayerActivations) -> list[Row]:
    """The loss of an evaluation batch, which may be larger than a training batch."""
    if ctx.spec.eval.strategy == "no":
        return []
    batch = _eval_batch_size(ctx) * ctx.stage.sequences_per_example
    tokens, matrices = batch * ctx.sequence_length, evaluation_attention_bytes(ctx, batch)
    size = evaluation_bytes(ctx, tokens) + tokens * layer.bytes_per_token + matrices
    formula = f"{batch} x {ctx.sequence_length} tokens: activations of one layer, and one chunk of the logits"
    formula += f", and {matrices:,} bytes of attention masks or scores" if matrices else ""
    return [
        Row("Evaluation batch", size, formula),
        *merged_expert_rows(ctx, layer, 1),
        *gathered_rows(ctx, 1, 2),
        *loss_weight_rows(ctx),
    ]


def _eval_batch_size(ctx: MemoryContext) -> int:
    """Examples in an evaluation batch of a device, as MemoryContext.batch_size in training."""
    size, examples = ctx.spec.eval.per_device_eval_batch_size, ctx.run.num_eval_examples
    is_smaller = ctx.run.world_size == 1 and ctx.spec.train.stage != "pretraining"
    return min(size, examples) if is_smaller and examples else size


def generation(ctx: MemoryContext) -> list[Row]:
    """Generation for evaluation: each device has all parameters, or its tensor-parallel shard of them. The ranks share
    the prompts."""
    spec, shape, each, shards = ctx.spec, ctx.shape, ctx.compute_bytes, ctx.run.tensor_parallel_size
    if not spec.eval.num_generations or not ctx.stage.generates:
        return []
    prompts = -(-spec.eval.num_generations * shards // ctx.run.world_size)
    batch = min(spec.eval.per_device_eval_batch_size, prompts)
    tokens = batch * (ctx.sequence_length + spec.eval.max_new_tokens)
    elements = 2 * shape.layers * shape.kv_heads * shape.head_dim // layer_shards(ctx)
    rows = [
        Row("KV cache for generation", tokens * elements * each, f"{tokens:,} tokens x {elements:,} x {each} bytes")
    ]
    if ctx.run.parameter_shards > shards:
        whole = ((ctx.unquantized_count + ctx.trainable_count) * each + ctx.quantized_bytes) // shards
        more = max(0, whole - sum(row.bytes for row in persistent_gathered_rows(ctx)))
        formula = f"{whole:,} bytes of all parameters, minus those that are already gathered"
        rows.append(Row("Parameters gathered for generation", more, formula))
    return rows


def _merged_layers(ctx: MemoryContext) -> int:
    """Layers whose expert weights with adapters exist at the end of the forward pass."""
    return 1 if ctx.spec.train.activation_checkpointing else layers_with_gradients(ctx)


def _merged_layers_after_forward(ctx: MemoryContext) -> int:
    return 0 if ctx.spec.train.activation_checkpointing else layers_with_gradients(ctx)


def _merged_rows(ctx: MemoryContext, count: int, copies: int = 1) -> list[Row]:
    """Copies of an embedding with `count` elements, or its gradient, of which only the rows of added tokens are
    trained."""
    times = f"{copies} x " if copies > 1 else ""
    formula = f"{times}{count:,} elements x {ctx.compute_bytes} bytes: all rows; only those of added tokens are trained"
    return [Row("Embedding with trained rows", copies * count * ctx.compute_bytes, formula)] if count else []


def _autocast_row(ctx: MemoryContext, share: float) -> Row:
    """Autocast's copies of trainable linear weights: kept to the end of the forward pass, and longer for backward."""
    count = round(share * _cast_parameters(ctx))
    return Row("Autocast copies of parameters", count * 2, f"{count:,} trainable parameters x 2 bytes")


@once
def _cast_parameters(ctx: MemoryContext) -> int:
    """Trainable parameters that autocast casts."""
    if not ctx.uses_autocast:
        return 0
    linear = sum(leaf.parameters for leaf in ctx.shape.layer if leaf.is_linear) * layers_with_gradients(ctx)
    linear //= ctx.run.tensor_parallel_size
    return ctx.trainable_count if ctx.is_lora else min(linear, ctx.trainable_count)


def _unsharded_gradient_rows(ctx: MemoryContext, layer: LayerActivations, reduced: int) -> list[Row]:
    """With FSDP: a layer's unsharded gradients, as far as they exceed the activations and temporary tensors that are
    freed meanwhile, and `reduced` gradients in reduce-scatter. The gradient of a tied output layer waits for that of
    the embeddings."""
    if not ctx.gathers_layers:
        return []
    tied, head, each = ctx.shape.tied and ctx.spec.method.kind == "full", end_counts(ctx)[1], layer_gradient_count(ctx)
    waiting = head * ctx.compute_bytes if tied else 0
    freed = 0 if layer.writes_scores else layer.backward.bytes + ctx.tokens * layer.bytes_per_token // 2
    size = waiting + max(0, each * ctx.compute_bytes - freed)
    output_layer = f", and {head:,} of the tied output layer" if waiting else ""
    formula = f"{each:,} parameters of one layer x {ctx.compute_bytes} bytes, less freed activations{output_layer}"
    return [
        Row("Unsharded gradients", size, formula),
        reduce_scatter_row(ctx, 0 if tied and reduced == head else reduced),
    ]
