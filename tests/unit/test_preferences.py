"""Preference data: every layout is detected and converted alike, and invalid examples are explained."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from specs import estimate, rule_finding, spec

from backend import registry
from backend.config import Data
from backend.data import convert, detect_format, example_problem, label_problem, unpair
from backend.data.chat import InvalidExample
from backend.data.copies import Seen
from backend.inspect import data_files, inspect_inputs
from backend.rules import check
from backend.rules.examples import H100, LAPTOP, LLAMA_8B
from backend.rules.stages import PAIRS_FACTS

DATA = Data()
MESSAGES = (("user", "When?"), ("assistant", "Nine."), ("assistant", "Ten."))
PROMPT, CHOSEN, REJECTED = ({"role": role, "content": content} for role, content in MESSAGES)
OTHER_PROMPT = {"role": "user", "content": "Where?"}
HUMAN, GPT, OTHER = ({"from": r, "value": c} for r, c in (("human", "When?"), ("gpt", "Nine."), ("gpt", "Ten.")))
PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "When?", "chosen": "Nine.", "rejected": "Ten."},
    "messages": {"prompt": [PROMPT], "chosen": [CHOSEN], "rejected": [REJECTED]},
    "one turn each": {"messages": [PROMPT], "chosen": CHOSEN, "rejected": REJECTED},
    "whole conversations": {"chosen": [PROMPT, CHOSEN], "rejected": [PROMPT, REJECTED]},
    "UltraFeedback": {"prompt": "When?", "messages": [], "chosen": [PROMPT, CHOSEN], "rejected": [PROMPT, REJECTED]},
    "ShareGPT ranking": {"conversations": [HUMAN], "chosen": GPT, "rejected": OTHER},
    "Alpaca ranking": {"instruction": "When?", "input": "", "chosen": "Nine.", "rejected": "Ten."},
    "axolotl's reward models": {"input": "When?", "chosen": "Nine.", "rejected": "Ten."},
    "a cell of JSON": {"prompt": "When?", "chosen": json.dumps([CHOSEN]), "rejected": json.dumps([REJECTED])},
}  # fmt: skip
LABELS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "When?", "completion": "Nine.", "label": True},
    "messages": {"prompt": [PROMPT], "completion": [CHOSEN], "label": 1},
    "ShareGPT": {"conversations": [HUMAN, GPT], "kto_tag": True},
    "OpenAI": {"messages": [PROMPT, CHOSEN], "label": "true"},
    "Alpaca": {"instruction": "When?", "output": "Nine.", "kto_tag": True},
}
STAGES = [name for name, row in registry.STAGES.items() if "pairs" in row.formats]


@pytest.mark.parametrize(("given", "found"), [(2, 2.0), ("0.5", 0.5), (None, None), ("", None), (math.nan, None)])
def test_the_margin_of_a_pair(given: Any, found: float | None) -> None:
    assert convert({**PAIRS["texts"], "margin": given}, "pairs", DATA).get("margin") == found


@pytest.mark.parametrize("given", ["large", "1,5", [1]])
def test_a_margin_that_is_no_number(given: Any) -> None:
    with pytest.raises(InvalidExample, match=r"column margin contains .* expected a number"):
        convert({**PAIRS["texts"], "margin": given}, "pairs", DATA)
    example = {**PAIRS["texts"], "margin": 1}
    seen = Seen()
    assert [seen.is_copy(convert(each, "pairs", DATA)) for each in (example, PAIRS["texts"])] == [False, True]


@pytest.mark.parametrize("name", PAIRS)
def test_every_layout_of_pairs_is_converted_alike(name: str) -> None:
    for stage in STAGES:
        assert detect_format(PAIRS[name], registry.STAGES[stage].formats) == "pairs"
    found = convert(PAIRS[name], "pairs", DATA)
    assert found == {"prompt": [PROMPT], "chosen": [CHOSEN], "rejected": [REJECTED]}
    assert [(row["completion"], row["label"]) for row in unpair(found)] == [([CHOSEN], True), ([REJECTED], False)]


@pytest.mark.parametrize("name", LABELS)
def test_every_layout_of_labeled_completions_is_converted_alike(name: str) -> None:
    assert detect_format(LABELS[name], registry.STAGES["kto"].formats) == "labels"
    found = convert(LABELS[name], "labels", DATA)
    assert found == {"prompt": [PROMPT], "completion": [CHOSEN], "label": True}
    assert unpair(found) == [found]


def test_the_stage_decides_between_two_matching_formats() -> None:
    both = {**PAIRS["UltraFeedback"], "messages": [PROMPT, CHOSEN]}
    assert detect_format(both, registry.STAGES["sft"].formats) == "messages"
    assert detect_format(LABELS["texts"], registry.STAGES["sft"].formats) == "prompt_completion"
    assert detect_format(PAIRS["texts"], registry.STAGES["sft"].formats) == "pairs", (
        "and a rule says that it does not fit"
    )


def test_conversations_share_an_implicit_prompt() -> None:
    later = {"role": "user", "content": "Sure?"}
    row = {"chosen": [PROMPT, CHOSEN, later, CHOSEN], "rejected": [PROMPT, CHOSEN, later, REJECTED]}
    assert convert(row, "pairs", DATA) == {
        "prompt": [PROMPT, CHOSEN, later],
        "chosen": [CHOSEN],
        "rejected": [REJECTED],
    }
    same = {"chosen": [PROMPT, CHOSEN], "rejected": [PROMPT, CHOSEN]}
    assert convert(same, "pairs", DATA)["rejected"] == [CHOSEN]
    for prompt, unused in ((PROMPT["content"], None), ([PROMPT], None), ("Context.", "prompt"), ("", None)):
        assert convert({"prompt": prompt, **same}, "pairs", DATA).get("unused_prompt") == unused
    unread = replace(PAIRS_FACTS, num_checked=3, unread_keys=(("the prompt in column prompt", 2),))
    finding = rule_finding("DAT024", {"train.stage": "dpo"}, LAPTOP, unread)
    assert finding and "both conversations begin with, so the prompt in column prompt is not" in finding.message


def test_a_system_column_next_to_conversations_with_their_own() -> None:
    """It is not used, also for KTO's completions, and the checks say so."""
    own = {"role": "system", "content": "Own."}
    row = {"chosen": [own, PROMPT, CHOSEN], "rejected": [own, PROMPT, REJECTED], "system": "Other."}
    found = convert(row, "pairs", DATA)
    assert found["unused_system"] == "system" and all("unused_system" in each for each in unpair(found))
    unread = replace(PAIRS_FACTS, num_checked=3, unread_keys=(("the system prompt in column system", 2),))
    finding = rule_finding("DAT024", {"train.stage": "dpo"}, LAPTOP, unread)
    assert finding and "own system prompts, so the system prompt in column system is not used" in finding.message


def test_system_prompt_tools_and_column_options() -> None:
    data = Data(system_prompt="Be brief.", prompt_column="q", chosen_column="a", rejected_column="b")
    found = convert({"q": "When?", "a": "Nine.", "b": "Ten.", "tools": '[{"name": "clock"}]'}, "pairs", data)
    assert found["prompt"] == [{"role": "system", "content": "Be brief."}, PROMPT]
    assert (found["chosen"], found["tools"]) == ([CHOSEN], [{"type": "function", "function": {"name": "clock"}}])
    row = {"question": "When?", "system": "Row's.", "chosen": "Nine.", "rejected": "Ten."}
    assert convert(row, "pairs", Data(system_prompt="Be brief."))["prompt"] == [
        {"role": "system", "content": "Row's."},
        PROMPT,
    ]
    marked = Data(label_column="ok", completion_column="said")
    assert convert({"prompt": "When?", "said": "Nine.", "ok": "0"}, "labels", marked)["label"] is False


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("pairs", {"prompt": "a", "chosen": "b"}, "no column rejected; its columns are: prompt, chosen"),
    ("pairs", {"chosen": "b", "rejected": "c"}, "no prompt column prompt; its columns are"),
    ("pairs", {"prompt": "a", "chosen": "", "rejected": "c"}, "column chosen is empty"),
    ("pairs", {"prompt": "a", "chosen": 3, "rejected": "c"}, "column chosen contains a number"),
    ("pairs", {"prompt": "a", "chosen": [PROMPT], "rejected": [REJECTED]}, "column chosen begins with a user turn"),
    ("pairs", {"chosen": [PROMPT, CHOSEN], "rejected": [OTHER_PROMPT, REJECTED]}, "different prompts"),
    ("labels", {"prompt": "a", "completion": "b", "label": "maybe"}, "'maybe'; expected true or false"),
    ("labels", {"prompt": "a", "completion": "b"}, "no column label"),
    ("labels", {"conversations": [HUMAN], "kto_tag": True}, "its prompt does not end with an assistant turn"),
    ("labels", {"conversations": [GPT], "kto_tag": True}, "a completion but no prompt"),
    ("labels", {"messages": [PROMPT, {**CHOSEN, "weight": 0}], "label": True}, "messages has a turn with a weight"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "row", "part"), BAD)
def test_an_invalid_example_is_explained(format: str, row: dict[str, Any], part: str) -> None:
    problem = example_problem(row, format, DATA)
    assert problem is not None
    assert part in problem


def test_inspection_knows_pairs_and_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"data__source": "files", "data__files": (name,), "data__validation": "none"}

    long = {"prompt": "When?", "chosen": "word " * 50, "rejected": "no"}
    pairs = write("pairs.jsonl", [PAIRS["texts"], long, {"prompt": "x", "chosen": "y", "rejected": 3}])
    found = inspect_inputs(spec(train__stage="dpo", **pairs), tmp_path)
    assert (found.format, found.num_examples) == ("pairs", 3)
    assert 50 < found.longest_example < 70, "the longer completion counts, not both"
    assert "line 3" in str(found.data_issues[0])
    assert inspect_inputs(spec(train__stage="kto", **pairs), tmp_path).num_examples == 6, (
        "each pair is two labeled completions"
    )
    labels = write("labels.jsonl", [LABELS["texts"], LABELS["ShareGPT"], {**LABELS["texts"], "label": False}])
    monkeypatch.setattr(data_files, "MAX_LENGTHS", 1)
    assert inspect_inputs(spec(train__stage="kto", **labels), tmp_path).label_counts == (2, 1), "all are counted"
    unbalanced = replace(inspect_inputs(spec(train__stage="kto", **labels), tmp_path), label_counts=(1490, 10))
    found_fixes = {f.code: f.fixes for f in check(spec(train__stage="kto", **labels), LAPTOP, unbalanced)}["STG007"]
    assert found_fixes[0].label.endswith("weight to 129.57"), "as in the patch"
    wrong = check(
        spec(train__stage="dpo", **labels), LAPTOP, inspect_inputs(spec(train__stage="dpo", **labels), tmp_path)
    )
    assert [f.code for f in wrong if f.level == "error"] == ["STG002"]


def device(**values: Any) -> dict[str, int]:
    asked = spec(train__per_device_train_batch_size=1, eval__strategy="no", **values)
    return {row.name: row.bytes for row in estimate(asked, H100, LLAMA_8B).rows}


def test_memory_of_preference_stages() -> None:
    sft, dpo, full = device(), device(train__stage="dpo"), {"method__kind": "full"}
    assert dpo["Activations"] == pytest.approx(2 * sft["Activations"], rel=0.1), "two sequences for each example"
    assert dpo["Reference adapter"] == dpo["Trainable parameters"]
    assert device(train__stage="dpo", **full)["Reference model"] == 2 * LLAMA_8B.parameters
    assert "Reference model" not in device(train__stage="dpo", preference__precompute_ref_log_probs=True, **full)
    assert "Reference model" not in device(train__stage="orpo", **full)
    assert "Logits and loss" not in dpo, "the backward pass takes more"
    assert device(train__stage="orpo")["Logits and loss"] > 2**30, "whole logits"
    assert "Logits and loss" not in device(train__stage="reward")
    assert LLAMA_8B.with_score_head.parameters == LLAMA_8B.parameters - 128_256 * 4096 + 4096


@pytest.mark.parametrize(("label", "expected"), [(1.0, True), (0.0, False), ("1.0", True), (1, True), ("False", False)])
def test_numbers_of_a_table_are_labels(label: object, expected: bool) -> None:
    example = {"prompt": "a", "completion": "b", "label": label}
    assert detect_format(example, ("labels",)) == "labels"
    assert convert(example, "labels", Data())["label"] is expected


@pytest.mark.parametrize("label", ["good", 2, None])
def test_another_label_is_named(label: object) -> None:
    assert "expected true or false" in label_problem({"prompt": "a", "completion": "b", "label": label})
    assert not label_problem({"prompt": "a", "completion": "b", "category": label})
