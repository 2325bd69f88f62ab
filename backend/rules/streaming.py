"""The rule about data.streaming: what needs all examples before training."""

from __future__ import annotations

from collections.abc import Iterator

from backend.rules.base import Case, Example, Fix, Patch, Violation, error, reasons
from backend.rules.examples import H100, USER_DATA, USER_DATA_FACTS

STREAMED = {**USER_DATA, "data.streaming": True, "train.duration": "steps"}
IN_STEPS = {"eval.strategy": "steps", "save.strategy": "steps"}
PREPARED = Fix("Prepare all examples before training", {"data.streaming": False}, False, "training starts later")


@error(
    "DAT035",
    fields=(
        "data.streaming", "train.duration", "eval.strategy", "save.strategy", "data.sources", "data.drop_duplicates",
        "data.hub_split", "data.validation_split", "train.train_sampling_strategy", "train.dataloader_num_workers",
        "parallel.context_parallel_size", "parallel.sequence_parallel_size", "train.use_unsloth", "launch.trainer",
    ),
    title="Streaming does not support these options",
    source="Footplate's own trainer: the examples are read once for each pass, and their number is not known",
    fails_on=Example({**STREAMED, **IN_STEPS, "train.duration": "epochs"}, H100, USER_DATA_FACTS),
    passes_on=Example({**STREAMED, **IN_STEPS}, H100, USER_DATA_FACTS),
)  # fmt: skip
def streaming_conflict(case: Case) -> Violation | None:
    """With streaming, a run sees only the examples that it is about to train on. Their number is not known, so there
    are no epochs, and whatever needs all of them, such as sorting or mixing, is not possible."""
    found = list(_conflicts(case)) if case.spec.data.streaming else []
    if not found:
        return None
    message = "data.streaming is on. " + reasons((option, why) for option, why, _ in found)
    patch = {name: value for _, _, changed in found for name, value in changed.items()}
    fixes = (Fix("Change these options", patch, False, "other settings"), PREPARED)
    return Violation(message, fixes if all(changed for _, _, changed in found) else (PREPARED,))


def _conflicts(case: Case) -> Iterator[tuple[str, str, Patch]]:
    """(option, why streaming does not support its value, what to change); the last is empty if no change helps."""
    spec, run = case.spec, case.run
    data, train = spec.data, spec.train
    steps = {"train.duration": "steps", "train.max_steps": run.total_steps or train.max_steps}
    conflicts: tuple[tuple[bool, str, str, Patch], ...] = (
        (train.duration == "epochs", "train.duration", "an epoch has no known length", steps),
        (spec.eval.strategy == "epoch", "eval.strategy", "there are no epochs", {"eval.strategy": "steps"}),
        (spec.save.strategy == "epoch", "save.strategy", "there are no epochs", {"save.strategy": "steps"}),
        (bool(data.sources), "data.sources", "a mixture needs the number of examples of each dataset", {}),
        (
            data.drop_duplicates,
            "data.drop_duplicates",
            "finding copies needs all examples",
            {"data.drop_duplicates": False},
        ),
        (_lacks_a_part(case), "data.validation_split", _why_a_part_is_empty(case), {}),
        (
            data.source == "hub" and "[" in data.hub_split,
            "data.hub_split",
            "a slice needs the number of examples; set data.max_samples instead",
            {"data.hub_split": data.hub_split.partition("[")[0]},
        ),
        (
            train.train_sampling_strategy != "random",
            "train.train_sampling_strategy",
            "lengths are not known in advance",
            {"train.train_sampling_strategy": "random"},
        ),
        (
            train.dataloader_num_workers > 1,
            "train.dataloader_num_workers",
            "at most 1 worker is allowed",
            {"train.dataloader_num_workers": 1},
        ),
        (run.context_parallel_size > 1, "parallel.context_parallel_size", "not supported", {}),
        (run.sequence_parallel_size > 1, "parallel.sequence_parallel_size", "not supported", {}),
        (train.use_unsloth, "train.use_unsloth", "not supported", {"train.use_unsloth": False}),
        (spec.launch.trainer != "footplate", "launch.trainer", "only Footplate's own trainer streams", {}),
    )
    yield from ((option, why, patch) for applies, option, why, patch in conflicts if applies)


def _lacks_a_part(case: Case) -> bool:
    """Whether the content of the examples, which were all read, puts none of them into one of the parts."""
    facts = case.facts
    return case.spec.data.splits and facts.all_checked and facts.num_held_out in (0, facts.num_checked)


def _why_a_part_is_empty(case: Case) -> str:
    facts = case.facts
    part = "training" if facts.num_held_out else "validation"
    return (
        f"a hash of each example assigns it to training or validation, and none of the {facts.num_checked:,} examples "
        f"is a {part} example; set another fraction, or use validation files"
    )
