"""Fixes that several rules offer, each with its cost, and a violation that two rules have."""

from __future__ import annotations

from backend import registry, wording
from backend.rules.base import Fix, Violation

DDP = Fix("Use DDP", {"parallel.strategy": "ddp"}, cost="a full replica of the model on each device")
ZERO2 = Fix("Use ZeRO-2", {"parallel.strategy": "zero2"}, cost="all model weights on each device")
ZERO3 = Fix("Use ZeRO-3", {"parallel.strategy": "zero3"}, cost="slower: weights are gathered for every layer")
FSDP2 = Fix("Use FSDP2", {"parallel.strategy": "fsdp2"}, cost="slower than DDP: weights are gathered for every layer")
SINGLE_PROCESS = Fix(
    "Run a single process", {"parallel.strategy": "single"}, safe=False, cost="one device; smaller global batch size"
)
ADAMW = Fix(
    "Use AdamW", {"train.optim": "adamw_torch"}, safe=False, cost="two moments per trainable parameter in memory"
)
ATTENTION_ONLY = Fix(
    "Adapt only the attention layers", {"lora.targets": "attention"}, safe=False, cost="experts are not adapted"
)
BF16 = Fix("Use bf16", {"precision.compute": "bf16"}, safe=False, cost="7 mantissa bits; fp16 has 10, fp32 has 23")
OTHER_TEMPLATE = Fix(
    "Use the ChatML template", {"data.chat_template": "chatml"}, False, "a chat format different from the model's own"
)
NO_EVALUATION = {"data.validation": "none", "eval.strategy": "no"}
NO_PACKING = Fix(
    "Disable packing", {"data.packing": False}, safe=False, cost="more padding tokens; fewer tokens in each step"
)
WEIGHTS_ONLY = Fix("Save only the model weights", {"save.only_model": True}, cost="the run cannot be resumed")
NO_CHECKPOINTS = Fix("Save no checkpoints", {"save.strategy": "no"}, cost="nothing is saved before the end of the run")


def hub_id_violation(option: str, hub_id: str) -> Violation | None:
    """Why `hub_id`, the value of `option`, cannot be the id of a repository on the Hub; None if it can. The id in an
    address of the Hub is a fix."""
    if registry.is_hub_id(hub_id):
        return None
    if not hub_id.strip():
        return Violation(f"{option} is empty.")
    found = registry.hub_id_in(hub_id) or hub_id.strip().strip("/")
    fixes = (Fix(f"Use {found}", {option: found}),) if registry.is_hub_id(found) else ()
    return Violation(f"{option} is {hub_id!r}, which is not a valid repository id of the Hub.", fixes)


def unusual_rate(rate: float, rates: registry.Rates, what: str) -> Violation:
    """A learning rate that is far above or below what is usual for a method or stage."""
    comparison = "high" if rate > rates.usual[1] else "low"
    shown, least, most, first = map(wording.learning_rate, (rate, *rates.usual, rates.first))
    message = f"A learning rate of {shown} is {comparison} for {what}; {least} to {most} is usual."
    return Violation(message, (Fix(f"Set the learning rate to {first}", {"train.learning_rate": rates.first}, False),))
