"""Runs that others published: what fitted must not be refused, and what ran out of memory must not be called safe."""

from __future__ import annotations

import json

import pytest
from published_peaks import (
    ALL_LOGITS,
    FULL_32B,
    LOGITS,
    LONG_7B,
    LORA_32B,
    POINTS,
    QWEN_7B,
    WITHIN,
    Point,
    section,
)
from specs import memory_context, spec

from backend.machine import GIB
from backend.memory.fit import Fit
from backend.memory.loss import evaluation_bytes, loss_row
from backend.memory.peaks import optimizer_step
from backend.paths import HOME
from backend.rules.examples import H100, TWO_H100


def test_only_rank_0_holds_the_values_that_zero3_loads() -> None:
    """LoRA of Qwen2.5 32B ran on 2 x 8 GPUs with 360 GB of RAM per node, of which 39 GB were used after loading."""
    result = LORA_32B.estimate()
    assert result.host_fit(LORA_32B.machine.ram_free_bytes) == Fit.YES
    assert 39e9 < result.host_bytes < 80 * GIB


def test_zero3_steps_one_sub_group_at_a_time() -> None:
    """Full fine-tuning of Qwen2.5 32B ran for hours on 16 GPUs of 40 GB."""
    result = FULL_32B.estimate()
    assert result.fit == Fit.UNCERTAIN
    step = next(moment.bytes for moment in result.phases if moment.phase == "Optimizer step")
    assert step < next(moment.bytes for moment in result.phases if moment.phase == "Backward")


@pytest.mark.parametrize(
    ("strategy", "extra", "elements"),
    [
        ("zero3", {}, 10**9 + QWEN_7B.vocabulary * QWEN_7B.hidden // 2),
        ("zero3", {"zero_optimization": {"sub_group_size": 1e8}}, 10**8 + QWEN_7B.vocabulary * QWEN_7B.hidden // 2),
        ("zero3", {"zero_optimization": {"sub_group_size": 10**12}}, QWEN_7B.parameters // 2),
        ("zero2", {"zero_optimization": {"sub_group_size": 1e8}}, QWEN_7B.parameters // 2),
        ("fsdp2", {}, QWEN_7B.parameters // 2),
    ],
)
def test_temporary_tensors_of_a_sub_group(strategy: str, extra: dict[str, object], elements: int) -> None:
    """A group ends with the tensor that reaches the size: here the embeddings may be that tensor."""
    run_spec = spec(
        method__kind="full",
        parallel__strategy=strategy,
        parallel__extra_config=json.dumps(extra) if extra else "",
        launch__nproc_per_node=2,
    )
    rows = {row.name: row for row in optimizer_step(memory_context(run_spec, TWO_H100, QWEN_7B))}
    assert rows["Optimizer step"].bytes == 4 * elements
    assert ("sub_group_size" in rows["Optimizer step"].formula) == (elements < QWEN_7B.parameters // 2)


def test_llamafactory_upcasts_all_logits() -> None:
    """LoRA of 7B with 32,768 tokens ran out of memory on GPUs of 80 GB: 56 GiB for the logits alone."""
    assert LONG_7B.estimate().fit == Fit.YES
    result = LONG_7B.estimate(launch__trainer="llamafactory")
    assert result.fit in (Fit.UNCERTAIN, Fit.UNLIKELY, Fit.NO)
    logits = next(row for row in result.rows if row.name == "Logits and loss")
    assert logits.bytes == 32_768 * 152_064 * 12
    assert LONG_7B.estimate(launch__trainer="llamafactory", train__use_liger_kernel=True).fit == Fit.YES


def test_the_range_is_not_below_exact_arithmetic() -> None:
    """cross_entropy's log-probabilities and two gradients, in fp32, for 32,768 tokens and 152,064 words."""
    result = LONG_7B.estimate(launch__trainer="llamafactory")
    assert result.certain_bytes == 59_793_997_824
    assert result.low_bytes == 59_793_997_824 + round((result.device_bytes - 59_793_997_824) / 1.5)
    assert result.low_bytes < result.device_bytes < result.high_bytes
    assert LONG_7B.estimate().certain_bytes == 0
    assert LONG_7B.estimate(launch__trainer="llamafactory", train__use_liger_kernel=True).certain_bytes == 0


@pytest.mark.parametrize(
    ("stage", "liger", "precision", "upcasts_all", "in_evaluation"),
    [
        ("sft", False, "bf16", True, 10),
        ("sft", False, "fp32", True, 8),
        ("pretraining", False, "bf16", True, 10),
        ("dpo", False, "bf16", True, 10),
        ("dpo", True, "bf16", True, 10),
        ("orpo", False, "bf16", True, 10),
        ("sft", True, "bf16", False, 2),
        ("reward", False, "bf16", False, 0),
    ],
)
def test_bytes_per_logit_of_llamafactory(
    stage: str, liger: bool, precision: str, upcasts_all: bool, in_evaluation: int
) -> None:
    """Measured with torch's memory tracker for transformers' ForCausalLMLoss, 32,768 tokens: 12.0 bytes in the backward
    pass for bf16 and for fp32, and 10.0 and 8.0 at the end of the forward pass. Liger replaces only the loss of next
    tokens."""
    run_spec = spec(
        train__stage=stage,
        train__use_liger_kernel=liger,
        launch__trainer="llamafactory",
        precision__compute=precision,
        **({"data__builtin": "train-pairs"} if stage in ("dpo", "orpo", "reward") else {}),
    )
    ctx = memory_context(run_spec, H100, QWEN_7B)
    assert (loss_row(ctx).bytes == ctx.tokens * 152_064 * 12) == upcasts_all
    words = 152_064 if upcasts_all else 32_768
    assert evaluation_bytes(ctx, 1000) == 1000 * words * in_evaluation


def test_published_peaks_in_the_documentation() -> None:
    """If an estimate changed on purpose, replace the section in docs/memory.md."""
    assert section() in (HOME / "docs/memory.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_comparison_with_published_peaks(point: Point) -> None:
    result = point.run.estimate()
    assert (result.low_bytes <= point.value * GIB <= result.high_bytes) == (point.verdict == WITHIN)
    with_logits = point.run.estimate(**ALL_LOGITS)
    assert (point.value * GIB <= with_logits.high_bytes) == (point.verdict in (WITHIN, LOGITS))
