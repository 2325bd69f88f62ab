"""The rule about weights of turns in the loss: which losses have none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from backend.config import RunSpec
from backend.engines import engine_of
from backend.rules.base import Case, Example, Fix, Violation, error, reasons
from backend.rules.distributed.examples import LLAMA_8B_FACTS
from backend.rules.distributed.sequence_parallel import NO_CONTEXT_PARALLEL, NO_SEQUENCE_PARALLEL, SEQUENCE
from backend.rules.examples import TWO_H100
from backend.rules.llamafactory import OURS
from backend.rules.unsloth import WITHOUT_UNSLOTH
from backend.wording import counted

WEIGHTED = replace(LLAMA_8B_FACTS, num_checked=20, num_with_weights=9, num_weighted=8)


@error(
    "DAT037",
    fields=(
        "train.use_unsloth",
        "parallel.sequence_parallel_size",
        "parallel.context_parallel_size",
        "launch.trainer",
    ),
    title="The loss of this run has no weights for turns",
    source="transformers 5.23 integrations/deepspeed.py, deepspeed_sp_compute_loss, and trainer.py, "
    "_prepare_context_parallel_inputs; Unsloth 2026.10.9 compiles the loss of the model; llamafactory 0.9.5 "
    "data/converter.py reads role and content of a turn only",
    manual_fix="To train without weights, remove them from the data.",
    fails_on=Example(SEQUENCE, TWO_H100, WEIGHTED),
    passes_on=Example({"parallel.strategy": "zero3"}, TWO_H100, WEIGHTED),
)
def loss_without_weights(case: Case) -> Violation | None:
    """Footplate's own trainer weights the loss of each token with the weight of its turn. With sequence parallelism,
    context parallelism, Unsloth and LLaMA-Factory, a library computes the loss, and counts every trained token alike.
    Turns with a weight of 0 have no loss with any of them but LLaMA-Factory."""
    facts, found = case.facts, list(conflicts(case.spec))
    reads_none = case.spec.launch.trainer != "footplate"
    count, weights = (facts.num_with_weights, "1") if reads_none else (facts.num_weighted, "0 and 1")
    if not count or not found or case.spec.train.stage != "sft":
        return None
    where = f"In {count:,} of {counted(facts.num_checked, 'checked example')}"
    message = f"{where}, a turn has a weight other than {weights}. {reasons((name, why) for name, why, _ in found)}"
    return Violation(message, tuple(fix for _, _, fix in found), tuple(name for name, _, _ in found))


def conflicts(spec: RunSpec) -> Iterator[tuple[str, str, Fix]]:
    """(option, why the loss has no weights with its value, how to change it)."""
    engine = engine_of(spec.parallel.strategy)
    for applies, option, why, fix in (
        (spec.train.use_unsloth, "train.use_unsloth", "Unsloth's loss has no weights", WITHOUT_UNSLOTH),
        (
            engine.sequence_parallel_size(spec) > 1,
            "parallel.sequence_parallel_size",
            "the loss of sequence parallelism has no weights",
            NO_SEQUENCE_PARALLEL,
        ),
        (
            engine.context_parallel_size(spec) > 1,
            "parallel.context_parallel_size",
            "context parallelism does not divide weights among the ranks",
            NO_CONTEXT_PARALLEL,
        ),
        (spec.launch.trainer != "footplate", "launch.trainer", "LLaMA-Factory reads no weights of turns", OURS),
    ):
        if applies:
            yield option, why, fix
