"""The rule about architectures whose weights Adam-mini cannot divide."""

from __future__ import annotations

from dataclasses import replace

from backend.modelspec import ModuleSpec, trained_modules
from backend.registry import adam_mini
from backend.rules.base import Case, Example, error
from backend.rules.common_fixes import ADAMW
from backend.rules.examples import DEMO, EQUIPPED, TINY

ADAM_MINI = {"method.kind": "full", "train.learning_rate": 2e-5, "train.optim": "adam_mini"}
EXPERTS = ModuleSpec("mlp.experts.gate_up_proj", 2 * 64 * 64, 64, 64, stacked=2)
STACKED = replace(TINY, layer=(*TINY.layer, EXPERTS))


@error(
    "OPT029",
    fields=("train.optim", "method.kind"),
    title="Adam-mini cannot divide the weights of this architecture",
    source="adam-mini 1.1.1 adam_mini.py, step(): views weights as heads or rows, chosen by their names",
    fixes=(ADAMW,),
    fails_on=Example(ADAM_MINI, EQUIPPED, replace(DEMO, shape=STACKED)),
    passes_on=Example(ADAM_MINI, EQUIPPED),
)
def adam_mini_indivisible_weights(case: Case) -> str | None:
    """Adam-mini keeps one second moment for each attention head of query and key weights, and for each row of other
    matrices. It cannot divide the stacked experts of a mixture, convolutions, and query or key weights whose size is
    not a multiple of the attention head dimension; the first step fails. Nor does it know heads of several sizes."""
    row, shape = case.optimizer, case.shape
    if row.state_layout != "per_head":
        return None
    if differing := case.model_types & adam_mini.HEADS_DIFFER:
        return f"The attention heads of {min(differing)} differ in size."
    if shape is None or case.spec.method.kind == "lora":
        return None
    head = shape.hidden * (shape.head_dim or shape.hidden)
    for leaf in trained_modules(case.spec, shape):
        dimensions = 3 if leaf.stacked > 1 or leaf.path.endswith("conv1d") else 2 if leaf.out_features else 1
        elements = leaf.in_features * leaf.out_features
        if found := adam_mini.problem(leaf.path, dimensions, elements, head):
            return f"{leaf.path} {found}."
    return None
