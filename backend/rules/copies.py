"""Rules about examples that are equal, or contradict each other."""

from __future__ import annotations

from dataclasses import replace

from backend.rules.base import Case, Example, Fix, Violation, advice, warning
from backend.rules.examples import USER_DATA, USER_DATA_FACTS
from backend.wording import counted

DROP = Fix("Drop duplicates", {"data.drop_duplicates": True}, safe=False, cost="fewer training examples")
CHECKED = replace(USER_DATA_FACTS, num_checked=20)


@warning(
    "DAT028",
    fields=("data.drop_duplicates",),
    title="Examples occur more than once",
    source="the examples: equal after their conversion to the turns that are rendered",
    fails_on=Example(USER_DATA, facts=replace(CHECKED, num_copies=3)),
    passes_on=Example({**USER_DATA, "data.drop_duplicates": True}, facts=replace(CHECKED, num_copies=3)),
)
def copies_of_examples(case: Case) -> Violation | None:
    """The model sees copies more often than other examples, and is more likely to repeat them word by word. With a
    validation split, the copy of a training example can be a validation example, so that the eval loss is too low."""
    facts, data = case.facts, case.spec.data
    if data.drop_duplicates or data.source == "builtin" or not (facts.num_copies or facts.num_copies_in_validation):
        return None
    found = []
    if facts.num_copies:
        found.append(f"{facts.num_copies:,} of {counted(facts.num_checked, 'checked example')} repeat an earlier one.")
    if facts.num_copies_in_validation:
        found.append(f"{counted(facts.num_copies_in_validation, 'validation example')} also in the training data.")
    return Violation(" ".join(found), (DROP,))


@advice(
    "DAT029",
    fields=("data.files", "data.hub_id"),
    title="Examples contradict each other",
    source="the examples: equal prompts after their conversion, with another completion, preference or label",
    manual_fix="Remove the completions, preferences or labels that are wrong. Several right completions may stay.",
    fails_on=Example(USER_DATA, facts=replace(CHECKED, num_contradictions=3)),
    passes_on=Example(USER_DATA, facts=CHECKED),
)
def contradictory_examples(case: Case) -> str | None:
    """If the same prompt has several completions, training divides the probability among them. In pairs, the
    preferences for and against the same completion cancel each other."""
    found = case.facts.num_contradictions
    if not found or case.spec.data.source == "builtin":
        return None
    what = {
        "pairs": "prefer the other completion of an earlier pair",
        "labels": "have the other label of an earlier one",
    }
    which = what.get(case.facts.format or "", "have the prompt of an earlier one, but another completion")
    return f"{found:,} of {counted(case.facts.num_checked, 'checked example')} {which}."
