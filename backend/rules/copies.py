"""Rules about examples that are equal, or contradict each other."""

from __future__ import annotations

from dataclasses import replace

from backend.rules.base import Case, Example, Fix, Violation, advice, warning
from backend.rules.examples import USER_DATA, USER_DATA_FACTS
from backend.wording import counted

DROP = Fix("Drop duplicates", {"data.drop_duplicates": True}, safe=False, cost="fewer training examples")
CHECKED = replace(USER_DATA_FACTS, num_checked=20)


def _first(case: Case, kind: str) -> str:
    """Where the first example of this kind is, and the earlier one: a sentence, after a space."""
    found = next(((place, earlier) for name, place, earlier in case.facts.equal_places if name == kind), None)
    return f" The first is {found[0]}; compare {found[1]}." if found else ""


@warning(
    "DAT028",
    fields=("data.drop_duplicates",),
    title="Examples occur more than once",
    source="the examples: identical after their conversion to messages",
    fails_on=Example(USER_DATA, facts=replace(CHECKED, num_copies=3)),
    passes_on=Example({**USER_DATA, "data.drop_duplicates": True}, facts=replace(CHECKED, num_copies=3)),
)
def copies_of_examples(case: Case) -> Violation | None:
    """The model is trained on copies more often, and is more likely to reproduce them verbatim. With a validation
    split, copies of training examples can become validation examples, which makes the eval loss too low."""
    facts, data = case.facts, case.spec.data
    if data.drop_duplicates or data.source == "builtin" or not (facts.num_copies or facts.num_copies_in_validation):
        return None
    found = []
    if facts.num_copies:
        repeat = "repeats" if facts.num_copies == 1 else "repeat"
        what = f"{facts.num_copies:,} of {counted(facts.num_checked, 'checked example')} {repeat} an earlier one"
        found.append(f"{what}.{_first(case, 'copies')}")
    if facts.num_copies_in_validation:
        verb = "is" if facts.num_copies_in_validation == 1 else "are"
        what = f"{counted(facts.num_copies_in_validation, 'validation example')} {verb} also in the training data"
        found.append(f"{what}.{_first(case, 'copies_in_validation')}")
    if data.streaming:
        found.append("Streaming cannot drop them: remove the copies from the data files, or turn data.streaming off.")
    return Violation(" ".join(found), () if data.streaming else (DROP,))


@advice(
    "DAT029",
    fields=("data.files", "data.hub_id"),
    title="Examples may contradict each other",
    source="the examples: after conversion, some have the same prompt but another completion, preference or label",
    manual_fix="Remove the completions, preferences or labels that are wrong. Several correct completions of a prompt "
    "may stay.",
    fails_on=Example(USER_DATA, facts=replace(CHECKED, num_contradictions=3)),
    passes_on=Example(USER_DATA, facts=CHECKED),
)
def contradictory_examples(case: Case) -> str | None:
    """If the same prompt has several completions, training divides the probability among them. Preference pairs that
    are reversed (A over B, then B over A) cancel each other out."""
    found = case.facts.num_contradictions
    if not found or case.spec.data.source == "builtin":
        return None
    s = "s" if found == 1 else ""
    what = {"pairs": f"reverse{s} an earlier pair", "labels": f"repeat{s} an earlier one with the other label"}
    which = what.get(case.facts.format, f"repeat{s} an earlier prompt with a different completion")
    where = _first(case, "contradictions")
    return f"{found:,} of {counted(case.facts.num_checked, 'checked example')} {which}.{where}"
