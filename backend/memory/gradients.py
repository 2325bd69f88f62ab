"""Gradients on a device at different moments of a step."""

from __future__ import annotations

from backend.memory.context import MemoryContext, Row, once
from backend.modelspec import TOKEN_ROWS, matches_any, token_rows


def gradient_size(ctx: MemoryContext, count: int) -> tuple[int, str]:
    """(bytes, formula) of the gradients of `count` parameters; 0 bytes if they are offloaded."""
    each = ctx.compute_bytes if ctx.engine.separate_master_weights else ctx.trainable_bytes
    shards = ctx.run.gradient_shards
    formula = f"{count:,} parameters x {each} bytes{ctx.divided_by(shards)}"
    offloaded = ctx.optimizer_offload and ctx.engine.offloads_gradients
    return (0, f"{formula}, offloaded") if offloaded else (count * each // shards, formula)


@once
def all_gradients(ctx: MemoryContext) -> Row:
    """Gradients at the end of the backward pass; if the optimizer updates during that pass, the most that exist at the
    same time."""
    optimizer = ctx.optimizer
    if optimizer.row.steps_in_backward:
        size, formula = gradient_size(ctx, optimizer.largest_tensor)
        return Row("Gradients", size, f"{formula}: the largest tensor, because each gradient is freed after its update")
    if optimizer.row.state_layout == "one_block":
        size, formula = gradient_size(ctx, optimizer.largest_layer)
        return Row("Gradients", size, f"{formula}: one layer")
    return Row("Gradients", *gradient_size(ctx, ctx.trainable_count))


def first_gradients(ctx: MemoryContext, count: int) -> list[Row]:
    """Gradients of the `count` parameters that the backward pass reaches first; with accumulation, all of them."""
    if accumulated := accumulated_gradients(ctx):
        return accumulated
    size, formula = gradient_size(ctx, max(0, count))
    return [Row("Gradients", min(size, all_gradients(ctx).bytes), f"{formula}, computed so far")]


@once
def accumulated_gradients(ctx: MemoryContext) -> list[Row]:
    """All gradients, which gradient accumulation keeps from batch to batch."""
    if ctx.spec.train.gradient_accumulation_steps == 1:
        return []
    full = all_gradients(ctx)
    return [Row("Gradients", full.bytes, f"{full.formula}, kept by gradient accumulation")]


def reduce_scatter_row(ctx: MemoryContext, count: int) -> Row:
    """FSDP's input of a reduce-scatter: unsharded gradients in the reduce dtype."""
    each = 4 if ctx.spec.parallel.reduce_dtype == "fp32" else ctx.compute_bytes
    return Row("Gradients in reduce-scatter", count * each, f"{count:,} parameters x {each} bytes, unsharded")


@once
def head_gradient_count(ctx: MemoryContext) -> int:
    """Parameters of the output layer if it is trainable: its gradient exists while activations are at their peak."""
    size = ctx.shape.vocabulary * ctx.shape.hidden
    if ctx.stage.is_reward_model:
        return ctx.shape.hidden
    if ctx.spec.method.kind == "full":
        return 0 if ctx.optimizer.row.state_layout == "one_block" else size
    names = frozenset(ctx.spec.lora.modules_to_save if ctx.is_lora else ctx.spec.method.freeze_extra_modules)
    is_trained = matches_any(ctx.shape.head, names) or (ctx.shape.tied and matches_any(ctx.shape.embedding, names))
    return size if is_trained else 0


@once
def merged_embedding_count(ctx: MemoryContext) -> int:
    """Elements of an embedding of which an adapter trains some rows: peft puts them into a copy of all rows."""
    return ctx.shape.vocabulary * ctx.shape.hidden if token_rows(ctx.spec, ctx.shape) else 0


@once
def merged_head_count(ctx: MemoryContext) -> int:
    """Same as `merged_embedding_count`, for the output layer."""
    paths = {rows.path.removesuffix(TOKEN_ROWS) for rows in token_rows(ctx.spec, ctx.shape)}
    has_rows = not ctx.stage.is_reward_model and (ctx.shape.head in paths or (ctx.shape.tied and bool(paths)))
    return merged_embedding_count(ctx) if has_rows else 0


@once
def layer_gradient_count(ctx: MemoryContext) -> int:
    """Trainable parameters of one layer."""
    method = ctx.spec.method
    if method.kind == "lora":
        return ctx.trainable_count // ctx.shape.layers
    return ctx.shape.layer_parameters if method.kind == "full" or method.freeze_trainable_layers else 0
