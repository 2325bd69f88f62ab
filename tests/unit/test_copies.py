"""Which examples are copies of others, and which contradict them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from specs import rule_finding

from backend.config import Data
from backend.data import convert
from backend.data.copies import Seen
from backend.rules.examples import H100, USER_DATA, USER_DATA_FACTS


def talk(*contents: str, system: str = "") -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


PAIR = {"prompt": "A?", "chosen": "Yes.", "rejected": "No."}
CASES: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any], str]] = [
    ("messages", {"messages": talk("A?", "Yes.")}, {"messages": talk("A?", "Yes."), "id": 7}, "copy"),
    ("messages", {"messages": talk("A?", "Yes.")}, {"messages": talk("A?", "No.")}, "contradiction"),
    ("messages", {"messages": talk("A?", "Yes.")}, {"messages": talk("A?", "Yes.", system="Be brief.")}, ""),
    ("messages", {"messages": talk("A?", "Yes.", "B?", "No.")}, {"messages": talk("C?", "Yes.", "B?", "Yes.")}, ""),
    ("messages", {"messages": talk("A?", "Yes.")}, {"messages": talk("A?", "Yes."), "tools": [{"name": "f"}]}, ""),
    ("messages", {"messages": [*talk("A?"), {"role": "assistant", "content": "Yes.", "margin": 1}]},
     {"messages": [*talk("A?"), {"role": "assistant", "content": "Yes.", "margin": 2}]}, "contradiction"),
    ("pairs", {**PAIR, "margin": 1}, {**PAIR, "margin": 2}, "copy"),
    ("alpaca", {"instruction": "A?", "output": "Yes."}, {"instruction": "A?", "input": "", "output": "Yes."}, "copy"),
    ("text", {"text": "A."}, {"text": "A."}, "copy"),
    ("text", {"text": "A."}, {"text": "B."}, ""),
    ("pairs", PAIR, {**PAIR, "chosen": "No.", "rejected": "Yes."}, "contradiction"),
    ("pairs", PAIR, {**PAIR, "rejected": "Maybe."}, ""),
    ("labels", {"prompt": "A?", "completion": "Yes.", "label": True},
     {"prompt": "A?", "completion": "Yes.", "label": False}, "contradiction"),
    ("labels", {"prompt": "A?", "completion": "Yes.", "label": True},
     {"prompt": "A?", "completion": "No.", "label": False}, ""),
    ("pairs", {"prompt": "A?", "chosen": "Yes.", "rejected": "Yes."},
     {"prompt": "B?", "chosen": "Yes.", "rejected": "Yes."}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("format", "first", "second", "relation"), CASES)
def test_relation_of_two_examples(
    format: str, first: Mapping[str, Any], second: Mapping[str, Any], relation: str
) -> None:
    seen = Seen()
    one, other = (convert(row, format, Data()) for row in (first, second))
    assert not seen.is_copy(one, place=7) and not seen.contradicts(one, 7)
    assert seen.is_copy(other, place=8) == (relation == "copy")
    assert relation == "copy" or seen.contradicts(other, 8) == (relation == "contradiction")
    assert seen.earlier == 7 or not relation


def test_the_findings_name_the_first_place() -> None:
    facts = replace(USER_DATA_FACTS, num_checked=9, num_copies=3, equal_places=(("copies", "a, line 7", "a, line 2"),))
    finding = rule_finding("DAT028", USER_DATA, H100, facts)
    assert finding and "repeat an earlier one. The first is a, line 7; compare a, line 2." in finding.message
    assert [fix.patch for fix in finding.fixes] == [{"data.drop_duplicates": True}]
    streamed = rule_finding("DAT028", {**USER_DATA, "data.streaming": True}, H100, facts)
    assert streamed and not streamed.fixes and "turn data.streaming off" in streamed.message
    for code, name, words in (("DAT028", "num_copies", "repeats"), ("DAT029", "num_contradictions", "repeats")):
        finding = rule_finding(code, USER_DATA, H100, replace(USER_DATA_FACTS, num_checked=9, **{name: 1}))
        assert finding and f"1 of 9 checked examples {words}" in finding.message
    for count, words in ((1, "1 validation example is also"), (2, "2 validation examples are also")):
        finding = rule_finding("DAT028", USER_DATA, H100, replace(USER_DATA_FACTS, num_copies_in_validation=count))
        assert finding and finding.message == f"{words} in the training data."


def test_an_example_that_is_not_remembered() -> None:
    seen = Seen()
    assert not seen.is_copy({"text": "A"}, remember=False) and not seen.is_copy({"text": "A"})
    assert seen.is_copy({"text": "A"}, remember=False)
