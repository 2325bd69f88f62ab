"""Disk space of checkpoints and the final model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from backend.memory.context import MIB, MemoryContext, Row

STORED_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
SMALL_FILES = 8 * MIB  # tokenizer, configuration and trainer state in each saved folder


def disk_rows(ctx: MemoryContext) -> list[Row]:
    """What the run leaves on disk at most."""
    spec, rows = ctx.spec, []
    if spec.save.strategy != "no":
        weights, state = checkpoint_bytes(ctx)
        count, size = _checkpoint_count(ctx), weights + state + SMALL_FILES
        contents = "weights, optimizer state and tokenizer" if state else "weights and tokenizer"
        rows.append(
            Row(
                "Checkpoints",
                count * size,
                f"{count} checkpoint{'s' if count > 1 else ''} x {size:,} bytes of {contents}",
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


def _checkpoint_count(ctx: MemoryContext) -> int:
    """Checkpoints that are on disk at the same time: those that are kept, and the one that is being written."""
    save, train, written = ctx.spec.save, ctx.spec.train, None
    if save.strategy == "steps" and ctx.run.total_steps is not None:
        written = math.ceil(ctx.run.total_steps / save.steps)
    elif save.strategy == "epoch" and train.duration == "epochs":
        written = math.ceil(train.num_train_epochs)
    elif save.strategy == "epoch" and ctx.run.steps_per_epoch:
        written = math.ceil(train.max_steps / ctx.run.steps_per_epoch)
    if save.total_limit:
        retries = 2 * bool(train.half_lr_retries or train.stop_on_spike)  # retries start from an earlier checkpoint
        kept = save.total_limit + save.keep_best + save.load_best_model_at_end + retries + 1
        return min(kept, written or kept)
    return written or 1
