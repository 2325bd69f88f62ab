"""Rules of DDP."""

from __future__ import annotations

import re
from dataclasses import replace

from backend.modelspec import ModuleSpec, trained_modules
from backend.rules.base import Case, Example, Fix, error
from backend.rules.common_fixes import FSDP2
from backend.rules.examples import DEMO, TWO_H100

assert DEMO.shape
TOWER = ModuleSpec("model.vision_tower.layers.0.mlp.fc1", 1024, 32, 32)
MULTIMODAL = replace(DEMO, shape=replace(DEMO.shape, non_layer_modules=(TOWER, *DEMO.shape.non_layer_modules)))
# Names of modules that a text example gives no gradient: vision and audio towers, cross-attention, the selection of
# tokens in sparse attention and Zamba 2's adapters of other layers. Measured for each type of
# transformers 5.23 in tests/process/test_architectures.py.
WITHOUT_GRADIENT = re.compile(
    r"(?:^|[._])(?:vision|visual|image|audio|multi_modal|cross_?att(?!n_layers)|encoder_attn|indexer|compressor"
    r"|adapter_list)"
)


@error(
    "STR045",
    fields=("parallel.ddp_find_unused_parameters", "parallel.strategy"),
    title="DDP would fail on parameters that get no gradient",
    source="verified with torch 2.13, Gemma 3, Fuyu and BART on two processes: the second step raises Expected to have "
    "finished reduction in the prior iteration",
    fixes=(
        Fix(
            "Find unused parameters",
            {"parallel.ddp_find_unused_parameters": True},
            cost="traverses the autograd graph in every step",
        ),
        FSDP2,
    ),
    fails_on=Example({"parallel.strategy": "ddp"}, TWO_H100, MULTIMODAL),
    passes_on=Example({"parallel.strategy": "ddp", "parallel.ddp_find_unused_parameters": True}, TWO_H100, MULTIMODAL),
)
def ddp_unused_parameters(case: Case) -> str | None:
    """Text examples give some modules no gradient: the vision and audio towers of a multimodal model, cross-attention
    of a decoder without its encoder, the selection of tokens in sparse attention, the scale of Gemma 3n's AltUp if
    altup_correct_scale is false. DDP reduces a bucket only once all of its gradients are ready, unless it searches for
    unused parameters in every step."""
    run, shape = case.run, case.shape
    waits = run.engine.waits_for_all_gradients and not case.spec.parallel.ddp_find_unused_parameters
    if not waits or run.world_size == 1 or shape is None:
        return None
    paths, names = (m.path for m in trained_modules(case.spec, shape)), case.facts.unused_modules
    unused = next((p for p in paths if WITHOUT_GRADIENT.search(p) or p.rpartition(".")[2] in names), "")
    if not unused:
        return None
    return (
        f"{unused} is trainable but gets no gradient from text examples. DDP raises an error in the second step "
        "unless parallel.ddp_find_unused_parameters is set."
    )
