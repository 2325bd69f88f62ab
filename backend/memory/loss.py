"""Logits and loss: temporary tensors of the loss, in training and in evaluation. Imports context.

TRL computes the loss in chunks of the logits (trl 1.16 kernels/chunked_logprob.py): with Triton in one fused kernel,
without Triton in torch operations that make several fp32 copies of a chunk.
"""

from __future__ import annotations

from backend.memory.context import MemoryContext, Row, once

CHUNK_TOKENS, CHUNK_VOCABULARY = 4096, 32_768
UNFUSED_BYTES, UNFUSED_EVAL_BYTES = 29, 12  # per logit of a chunk without Triton, in training and in evaluation
ORPO_BYTES = 8  # per logit: trl 1.16's ORPO needs all log-probabilities, and those of the chosen half, in fp32
NAME = "Logits and loss"


@once
def loss_row(ctx: MemoryContext) -> Row:
    """Temporary tensors of the loss in training."""
    shape, each = ctx.shape, ctx.compute_bytes
    if ctx.stage.is_reward_model:
        return Row(NAME, ctx.tokens * 4, f"{ctx.tokens:,} tokens x 4 bytes: one score per token")
    if ctx.spec.train.stage == "orpo":
        each = ORPO_BYTES + 2 * each
        formula = f"{ctx.tokens:,} tokens x {shape.vocabulary:,} vocabulary x {each} bytes: ORPO keeps all logits"
        return Row(NAME, ctx.tokens * shape.vocabulary * each, formula)
    tokens, words = min(ctx.tokens, CHUNK_TOKENS), min(shape.vocabulary, CHUNK_VOCABULARY)
    if has_fused_loss(ctx):
        return _fused_loss_row(ctx, tokens)
    weight = words * shape.hidden * ((2 + 4 * ctx.on_cpu) if each == 2 else 0)
    each += UNFUSED_BYTES
    formula = f"{tokens:,} tokens x {words:,} vocabulary x {each} bytes, one chunk"
    return Row(NAME, tokens * words * each + weight, formula)


def _fused_loss_row(ctx: MemoryContext, tokens: int) -> Row:
    """With Triton: a chunk of logits; its weights if they are cast, next to those of the previous chunk; the gradient
    of the hidden states in fp32, and cast."""
    shape, each = ctx.shape, ctx.compute_bytes
    chunks = -(-ctx.tokens // CHUNK_TOKENS) * -(-shape.vocabulary // CHUNK_VOCABULARY)
    casts = ctx.hidden_state_bytes > each
    weights = min(2, chunks) * min(shape.vocabulary, CHUNK_VOCABULARY) * shape.hidden * each if casts else 0
    hidden = ctx.tokens * shape.hidden * (4 + (each if ctx.hidden_state_bytes == 2 else 0))
    formula = (
        f"{tokens:,} tokens x {CHUNK_VOCABULARY:,} vocabulary x {each} bytes, one chunk, and {hidden:,} bytes for the"
    )
    return Row(NAME, tokens * CHUNK_VOCABULARY * each + weights + hidden, f"{formula} gradient of the hidden states")


def evaluation_bytes(ctx: MemoryContext, tokens: int) -> int:
    """Temporary tensors of the loss in evaluation, for a batch of `tokens`."""
    if ctx.stage.is_reward_model:
        return 0
    if ctx.spec.train.stage == "orpo":
        return tokens * ctx.shape.vocabulary * (ctx.compute_bytes + ORPO_BYTES)
    each = ctx.compute_bytes + (0 if has_fused_loss(ctx) else UNFUSED_EVAL_BYTES)
    return min(tokens, CHUNK_TOKENS) * min(ctx.shape.vocabulary, CHUNK_VOCABULARY) * each


def has_fused_loss(ctx: MemoryContext) -> bool:
    """Whether TRL's loss runs in Triton kernels."""
    return ctx.run.device in ("cuda", "xpu")
