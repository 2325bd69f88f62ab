"""Rules of DDP."""

from __future__ import annotations

from dataclasses import replace

from backend.rules.base import Case, Example, Fix, rule
from backend.rules.common_fixes import FSDP2
from backend.rules.examples import DEMO, TWO_H100

MULTIMODAL = replace(DEMO, is_multimodal=True)


@rule(
    "STR045",
    "error",
    fields=("parallel.ddp_find_unused_parameters", "parallel.strategy"),
    title="DDP would fail on parameters that get no gradient",
    source="verified with torch 2.13 and Gemma 3 on two processes: the second step raises Expected to have finished "
    "reduction in the prior iteration",
    fixes=(
        Fix(
            "Set ddp_find_unused_parameters",
            {"parallel.ddp_find_unused_parameters": True},
            cost="traverses the autograd graph in every step",
        ),
        FSDP2,
    ),
    fails_on=Example({"parallel.strategy": "ddp"}, TWO_H100, MULTIMODAL),
    passes_on=Example({"parallel.strategy": "ddp", "parallel.ddp_find_unused_parameters": True}, TWO_H100, MULTIMODAL),
)
def ddp_unused_parameters(case: Case) -> str | None:
    """Text examples give the vision and audio towers of a multimodal model no gradient. DDP reduces a bucket only once
    all of its gradients are ready, unless it searches for unused parameters in every step."""
    method, run = case.spec.method, case.run
    # LoRA on custom modules, and freeze training, may leave the towers out.
    trains_towers = method.kind == "full" or (method.kind == "lora" and case.spec.lora.targets != "custom")
    waits = run.engine.waits_for_all_gradients and not case.spec.parallel.ddp_find_unused_parameters
    if not (case.facts.is_multimodal and trains_towers and waits and run.world_size > 1):
        return None
    return (
        "The model has vision or audio layers that text examples do not use. They get no gradient, so DDP raises an "
        "error in the second step unless parallel.ddp_find_unused_parameters is set."
    )
