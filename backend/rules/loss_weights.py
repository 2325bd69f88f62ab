"""Rules about turn weights: which losses ignore them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from backend.config import RunSpec
from backend.engines import engine_of
from backend.inspect.facts import DataIssue
from backend.rules.base import Case, Example, Fix, Violation, error, reasons
from backend.rules.data import SKIP
from backend.rules.data_issues import fields_of, rendered_issues, unrenderable_summary
from backend.rules.distributed.examples import LLAMA_8B_FACTS
from backend.rules.distributed.sequence_parallel import NO_CONTEXT_PARALLEL, NO_SEQUENCE_PARALLEL, SEQUENCE
from backend.rules.examples import TWO_H100, USER_DATA, USER_DATA_FACTS
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
    title="The loss of this run ignores turn weights",
    source="transformers 5.23 integrations/deepspeed.py, deepspeed_sp_compute_loss, and trainer.py, "
    "_prepare_context_parallel_inputs; Unsloth 2026.10.9 compiles the loss of the model; llamafactory 0.9.5 "
    "data/converter.py reads role and content of a turn only",
    manual_fix="To train without turn weights, remove them from the data.",
    fails_on=Example(SEQUENCE, TWO_H100, WEIGHTED),
    passes_on=Example({"parallel.strategy": "zero3"}, TWO_H100, WEIGHTED),
)
def loss_without_weights(case: Case) -> Violation | None:
    """Footplate's own trainer weights the loss of each token with the weight of its turn. With sequence parallelism,
    context parallelism, Unsloth and LLaMA-Factory, a library computes the loss, and counts every trained token alike.
    Only LLaMA-Factory also trains on turns with a weight of 0."""
    facts, reads_none = case.facts, case.spec.launch.trainer != "footplate"
    count, weights = (facts.num_with_weights, "1") if reads_none else (facts.num_weighted, "0 and 1")
    found = [each for each in conflicts(case.spec) if facts.num_weighted or each[0] == "launch.trainer"]
    if not count or not found or case.spec.train.stage != "sft":
        return None
    where = f"In {count:,} of {counted(facts.num_checked, 'checked example')}"
    message = f"{where}, a turn has a weight other than {weights}. {reasons((name, why) for name, why, _ in found)}"
    return Violation(message, tuple(fix for _, _, fix in found), tuple(name for name, _, _ in found))


WEIGHT_IN_PRETRAINING = DataIssue(
    "data.files", "data.jsonl, line 3", "a turn has a weight, and pretraining trains on the whole text", True
)
FACTS_IN_PRETRAINING = replace(USER_DATA_FACTS, unrenderable_examples=(WEIGHT_IN_PRETRAINING,))


@error(
    "DAT038",
    fields=("data.files", "train.stage"),
    title="Pretraining cannot use turn weights",
    source="the stage: pretraining has no chat template, which would show where the turns are",
    fixes=(SKIP,),
    fails_on=Example({**USER_DATA, "train.stage": "pretraining"}, facts=FACTS_IN_PRETRAINING),
    passes_on=Example({**USER_DATA, "train.stage": "pretraining"}, facts=USER_DATA_FACTS),
)
def weights_in_pretraining(case: Case) -> Violation | None:
    """Pretraining joins the texts of a conversation and trains on all of their tokens, so no turn can have a weight of
    its own."""
    issues = rendered_issues(case)
    if not issues or case.spec.train.stage != "pretraining":
        return None
    return Violation(unrenderable_summary(case, issues), fields=(*fields_of(issues), "train.stage"))


def conflicts(spec: RunSpec) -> Iterator[tuple[str, str, Fix]]:
    """(option, why the loss ignores turn weights with its value, how to change it)."""
    engine = engine_of(spec.parallel.strategy)
    for applies, option, why, fix in (
        (spec.train.use_unsloth, "train.use_unsloth", "Unsloth's loss ignores turn weights", WITHOUT_UNSLOTH),
        (
            engine.sequence_parallel_size(spec) > 1,
            "parallel.sequence_parallel_size",
            "the loss of sequence parallelism ignores turn weights",
            NO_SEQUENCE_PARALLEL,
        ),
        (
            engine.context_parallel_size(spec) > 1,
            "parallel.context_parallel_size",
            "context parallelism does not shard turn weights",
            NO_CONTEXT_PARALLEL,
        ),
        (spec.launch.trainer != "footplate", "launch.trainer", "LLaMA-Factory ignores turn weights", OURS),
    ):
        if applies:
            yield option, why, fix
