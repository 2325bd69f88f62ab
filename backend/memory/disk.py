"""Disk space of checkpoints and the final model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from backend.memory.context import MIB, MemoryContext, Row
from backend.memory.steps import epoch_steps, run_steps
from backend.wording import counted

STORED_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
SMALL_FILES = 8 * MIB  # tokenizer, configuration and trainer state in each saved folder


def disk_rows(ctx: MemoryContext) -> list[Row]:
    """What the run leaves on disk at most."""
    spec, rows = ctx.spec, []
    if spec.save.strategy != "no":
        weights, state = checkpoint_bytes(ctx)
        (count, can_be_more), size = _checkpoint_count(ctx), weights + state + SMALL_FILES
        contents = "weights, optimizer state and tokenizer" if state else "weights and tokenizer"
        rows.append(
            Row(
                "Checkpoints",
                count * size,
                f"{'at least ' if can_be_more else ''}{counted(count, 'checkpoint')} x {size:,} bytes of {contents}",
                "disk",
            )
        )
    if spec.save.final_model:
        count, stored = _final_parameters(ctx)
        formula = f"{count:,} parameters x {stored} bytes, and tokenizer"
        rows.append(Row("Final model", final_model_bytes(ctx), formula, "disk"))
    return rows


def final_model_bytes(ctx: MemoryContext) -> int:
    """Bytes of the final model, with its tokenizer."""
    count, stored = _final_parameters(ctx)
    return count * stored + SMALL_FILES


def _final_parameters(ctx: MemoryContext) -> tuple[int, int]:
    """(parameters of the final model, bytes of each). The weights of DeepSpeed's model have 16 bits, if it computes in
    16 bits: its fp32 master weights are a part of the optimizer's state."""
    each = ctx.compute_bytes if ctx.engine.separate_master_weights else ctx.trainable_bytes
    if ctx.is_lora and not ctx.spec.save.merge_adapter:
        return ctx.trainable_count, each
    return ctx.shape.parameters, STORED_BYTES.get(ctx.shape.dtype, 4) if each == 4 else 2


def checkpoint_bytes(ctx: MemoryContext) -> tuple[int, int]:
    """(bytes of the weights in a checkpoint, bytes of what it has to resume from): the optimizer state, with master
    weights where the engine has them, and the weights in the engine's own format."""
    separate, count = ctx.engine.separate_master_weights, ctx.trainable_count
    trainable = count * (ctx.compute_bytes if separate else ctx.trainable_bytes)
    weights = trainable + (0 if ctx.is_lora else ctx.frozen_count * ctx.compute_bytes)
    reference = trainable if ctx.is_lora and ctx.stage.uses_reference_model else 0
    if ctx.spec.save.only_model:
        return weights + reference, 0
    own_format = weights if ctx.engine.saves_weights_twice(ctx.spec) else 0
    return weights + reference, ctx.optimizer.bytes + separate * count * 4 + own_format


def _checkpoint_count(ctx: MemoryContext) -> tuple[int, bool]:
    """Checkpoints that are on disk at the same time: those that are kept, and the one that is being written; and
    whether there can be more, since the number of steps is unknown."""
    save, written = ctx.spec.save, _written(ctx)
    if not save.total_limit:
        return written or 1, written is None
    retries = 2 * bool(ctx.spec.train.half_lr_retries or ctx.spec.train.stop_on_spike)  # they start from an earlier one
    kept = save.total_limit + save.keep_best + save.load_best_model_at_end + retries + 1
    return min(kept, written or kept), False


def _written(ctx: MemoryContext) -> int | None:
    """Checkpoints that the run saves; None if unknown."""
    save, train, lengths = ctx.spec.save, ctx.spec.train, ctx.token_lengths
    if save.strategy == "steps":
        steps = run_steps(ctx.spec, ctx.run, lengths)
        return None if steps is None else math.ceil(steps / save.steps)
    if train.duration == "epochs":
        return math.ceil(train.num_train_epochs)
    each = epoch_steps(ctx.spec, ctx.run, lengths)
    return None if each is None else math.ceil(train.max_steps / max(1, each))
