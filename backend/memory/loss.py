"""Logits and loss: temporary tensors of the loss, in training and in evaluation.

TRL computes the loss in chunks of the logits (trl 1.16 kernels/chunked_logprob.py): with Triton in one fused kernel,
without Triton in torch operations that make several fp32 copies of a chunk. LLaMA-Factory 0.9 uses transformers' loss
(loss/loss_utils.py, ForCausalLMLoss) or, for preferences, its own: both upcast all logits to fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend import registry
from backend.memory.context import MemoryContext, Row, once

CHUNK_TOKENS, CHUNK_VOCABULARY = 4096, 32_768
UNFUSED_BYTES, UNFUSED_EVAL_BYTES = 29, 12  # per logit of a chunk without Triton, in training and in evaluation
# Per logit, of all tokens. In the backward pass: log-probabilities and two gradients in fp32; the logits themselves
# are freed. In evaluation, next to the logits: log-probabilities in fp32, and a copy in fp32 of logits in 16 bits.
ALL_LOGITS_BYTES, ALL_LOGITS_EVAL_BYTES = 12, 4
ORPO_BYTES = 8  # per logit: trl 1.16's ORPO needs all log-probabilities, and those of the chosen half, in fp32
NAME = "Logits and loss"


@once
def loss_row(ctx: MemoryContext) -> Row:
    """Temporary tensors of the loss in training."""
    shape, each = ctx.shape, ctx.compute_bytes
    if ctx.stage.is_reward_model:
        return Row(NAME, ctx.tokens * 4, f"{ctx.tokens:,} tokens x 4 bytes: one score per token")
    if upcasts_all_logits(ctx):
        formula = f"{ctx.tokens:,} tokens x {shape.vocabulary:,} vocabulary x {ALL_LOGITS_BYTES} bytes"
        formula += ": LLaMA-Factory upcasts all logits to fp32"
        return Row(NAME, ctx.tokens * shape.vocabulary * ALL_LOGITS_BYTES, formula)
    if ctx.spec.train.stage == "orpo":
        each = ORPO_BYTES + 2 * each
        formula = f"{ctx.tokens:,} tokens x {shape.vocabulary:,} vocabulary x {each} bytes: ORPO keeps all logits"
        return Row(NAME, ctx.tokens * shape.vocabulary * each, formula)
    tokens, words = min(ctx.tokens, CHUNK_TOKENS), min(shape.vocabulary, CHUNK_VOCABULARY)
    if has_fused_loss(ctx):
        return _fused_loss_row(ctx, tokens)
    weight = words * shape.hidden * ((2 + 4 * ctx.on_cpu) if each == 2 else 0)
    each += UNFUSED_BYTES
    of_all = f" of {shape.vocabulary:,}" if words < shape.vocabulary else ""
    formula = f"{tokens:,} tokens x {words:,}{of_all} vocabulary entries x {each} bytes, one chunk"
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
        f"{tokens:,} tokens x {CHUNK_VOCABULARY:,} vocabulary entries x {each} bytes, one chunk, and {hidden:,} bytes "
        "for the"
    )
    return Row(NAME, tokens * CHUNK_VOCABULARY * each + weights + hidden, f"{formula} gradient of the hidden states")


def certain_bytes(ctx: MemoryContext, peak: Sequence[Row]) -> int:
    """The bytes of the loss at the peak that are exact arithmetic: three fp32 tensors of all logits, which
    cross_entropy holds at the same time in its backward pass. LLaMA-Factory's losses of preferences were not measured,
    and TRL's chunks are temporary."""
    is_measured = upcasts_all_logits(ctx) and ctx.spec.train.stage in registry.NEXT_TOKEN_STAGES
    return sum(row.bytes for row in peak if row.name == NAME) if is_measured else 0


def evaluation_bytes(ctx: MemoryContext, tokens: int) -> int:
    """Temporary tensors of the loss in evaluation, for a batch of `tokens`."""
    if ctx.stage.is_reward_model:
        return 0
    if upcasts_all_logits(ctx):
        copies = ALL_LOGITS_EVAL_BYTES + (4 if ctx.compute_bytes == 2 else 0)
        return tokens * ctx.shape.vocabulary * (ctx.compute_bytes + copies)
    if ctx.spec.train.stage == "orpo":
        return tokens * ctx.shape.vocabulary * (ctx.compute_bytes + ORPO_BYTES)
    each = ctx.compute_bytes + (0 if has_fused_loss(ctx) else UNFUSED_EVAL_BYTES)
    return min(tokens, CHUNK_TOKENS) * min(ctx.shape.vocabulary, CHUNK_VOCABULARY) * each


def upcasts_all_logits(ctx: MemoryContext) -> bool:
    """Whether the loss has all logits in fp32. Liger and Unsloth compute the loss of next tokens in chunks; for other
    losses, LLaMA-Factory turns this off (llamafactory 0.9 model/model_utils/liger_kernel.py, require_logits)."""
    train = ctx.spec.train
    in_chunks = (train.use_liger_kernel or train.use_unsloth) and train.stage in registry.NEXT_TOKEN_STAGES
    return ctx.spec.launch.trainer == "llamafactory" and not in_chunks


def has_fused_loss(ctx: MemoryContext) -> bool:
    """Whether TRL's loss runs in Triton kernels."""
    return ctx.run.device in ("cuda", "xpu")
