"""With data.on_bad_example skip, bad examples change nothing for the others: in the run, the checks and the card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from training_runs import make_spec

from backend.config import RunSpec
from backend.config.options import edit
from backend.inspect import data_files, resolve_paths
from backend.inspect.data_files import inspect_data_files
from backend.inspect.examples import facts_from
from backend.inspect.facts import InputFacts
from backend.machine import Machine
from backend.preflight import build_case
from backend.rules import examine
from backend.rules.base import Case
from backend.train import data, model, show_examples, tokenize_examples
from backend.train.run_log import TrainError

NO_SYSTEM = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
[{{ message['role'] }}]{{ message['content'] }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}"""
GOOD = [{"prompt": f"When does train {n} leave?", "completion": f"At {n}."} for n in range(12)]
BAD = {
    "not JSON": "is not valid JSON",
    "12": "is a number; expected an object",
    '{"prompt": "When?"}': "has no column completion",
    '{"prompt": "When?", "completion": " "}': "column completion is empty",
}
UNRENDERABLE = {"prompt": "When?", "completion": "At nine.", "system": "Be brief."}
SKIP = {"data.on_bad_example": "skip"}


def spec_of(folder: Path, lines: list[str], **changes: Any) -> RunSpec:
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "template.jinja").write_text(NO_SYSTEM)
    template = {"data.chat_template": "file", "data.chat_template_file": str(folder / "template.jinja")}
    files = {"data.source": "files", "data.files": (str(folder / "rows.jsonl"),), "data.format": "prompt_completion"}
    return make_spec({**files, **template, "data.max_samples": 0, "eval.strategy": "epoch", **changes})


def mixed(*bad: str) -> list[str]:
    """The good examples, with bad ones before, between and after them."""
    lines = list(map(json.dumps, GOOD))
    return [bad[0], *lines[:5], *bad[1:], *lines[5:], bad[0]]


def prepare(tiny: Path, spec: RunSpec) -> tuple[data.PreparedData, list[str]]:
    lines: list[str] = []
    tokenizer = model.load_tokenizer(spec, model.ModelSource(str(tiny), {"local_files_only": True}))
    return data.prepare(spec, tokenizer, lambda done, of: True, lines.append), lines


def facts_of(tiny: Path, folder: Path, spec: RunSpec) -> InputFacts:
    found = tokenize_examples.inspect(spec.model_dump(mode="json"), str(folder), str(tiny))
    return InputFacts(**{**inspect_data_files(spec, folder), **facts_from(found, spec)})


def test_the_sequences_of_pretraining_are_those_of_the_training_files(tiny: Path, tmp_path: Path) -> None:
    """Validation examples are shorter here; with the mean of both, the run would have too few steps."""
    for name, count, words in (("train", 3, 200), ("validation", 20, 2)):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"text": "word " * words}) + "\n") * count)
    files = {"data.files": ("train.jsonl",), "data.validation_files": ("validation.jsonl",)}
    more = {"data.source": "files", "data.validation": "files", "train.stage": "pretraining", "data.max_length": 32}
    spec = edit(RunSpec(), {**files, **more})
    made, _ = prepare(tiny, resolve_paths(spec, tmp_path))
    assert facts_of(tiny, tmp_path, spec).num_in_epoch(spec) == len(made.train) > 3


def test_examples_that_are_dropped_do_not_count_in_the_estimate(tiny: Path, tmp_path: Path) -> None:
    """A prompt that fills max_length leaves no token to train on."""
    long = {"prompt": "When does the train leave? " * 200, "completion": "At nine."}
    spec = spec_of(tmp_path, list(map(json.dumps, [*GOOD, long])), **{"data.max_length": 256})
    prepared, _ = prepare(tiny, resolve_paths(spec, tmp_path))
    facts = facts_of(tiny, tmp_path, spec)
    assert facts.longest_example > 256 > facts.longest_used == prepared.longest and facts.num_dropped == 1
    [found] = [each for each in examine(Case(spec, Machine(), facts)) if each.code == "DAT045"]
    assert found.message.startswith("The run drops 1 of 13 checked examples: 1 without a trained token within")
    longer = edit(spec, found.fixes[0].patch)
    assert facts_of(tiny, tmp_path, longer).longest_used == facts.longest_example, "now it is trained on"


@pytest.mark.parametrize("selection", [{"data.validation_split": 0.3}, {"data.max_samples": 5}, {}])
def test_the_sequences_of_pretraining_are_those_of_the_selected_examples(
    selection: dict[str, Any], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of texts with very different lengths: with their mean, the run would have other steps. Without a selection, they
    are also exact if there are too many examples to know the length of each."""
    if not selection:
        monkeypatch.setattr(tokenize_examples, "MAX_LENGTHS", 3)
        selection = {"data.validation": "none"}
    texts = ["word " * words for words in (1, 300, 2, 31, 32, 33, 64, 65, 5, 400)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    more = {"train.stage": "pretraining", "data.max_length": 32, **selection}
    spec = edit(RunSpec(), {"data.source": "files", "data.files": ("rows.jsonl",), **more})
    made, _ = prepare(tiny, resolve_paths(spec, tmp_path))
    assert facts_of(tiny, tmp_path, spec).num_in_epoch(spec) == len(made.train)


def test_labels_count_where_they_are_trained(tiny: Path, tmp_path: Path) -> None:
    """A prompt that leaves no room for its completion, a copy and a bad example are dropped."""
    row = {"prompt": "When?", "completion": "At nine.", "label": True}
    rows = [row, row, {**row, "prompt": "word " * 600}, {**row, "label": False}, {**row, "label": "maybe"}]
    kto = {"train.stage": "kto", "data.format": "labels", "data.validation": "none", "data.drop_duplicates": True}
    spec = spec_of(tmp_path, list(map(json.dumps, rows)), **SKIP, **kto)
    made, _ = prepare(tiny, spec)
    assert sorted(made.train["label"]) == [False, True] and facts_of(tiny, tmp_path, spec).label_counts == (1, 1)


@pytest.mark.parametrize("processes", [1, 2])
def test_bad_examples_change_nothing_for_the_others(tiny: Path, tmp_path: Path, processes: int) -> None:
    expected, _ = prepare(tiny, spec_of(tmp_path, list(map(json.dumps, GOOD))))
    spec = spec_of(tmp_path, mixed(*BAD), **SKIP, **{"data.dataset_num_proc": processes})
    made, lines = prepare(tiny, spec)
    assert made.validation and expected.validation
    assert (made.train[:], made.validation[:]) == (expected.train[:], expected.validation[:])
    assert [e.value for e in made.eval_examples] == [e.value for e in expected.eval_examples]
    assert lines[0] == "5 training examples skipped (data.on_bad_example), for these reasons:"
    for number, (bad, reason) in zip((1, 7, 8, 9), BAD.items(), strict=True):
        assert any(f"rows.jsonl, line {number}: {reason}" in line for line in lines), bad
    facts = facts_of(tiny, tmp_path, spec)
    assert (facts.num_examples, facts.num_skipped, facts.num_usable) == (12, 5, 12)
    assert not facts.data_issues and len(facts.skipped) == 3
    facts = facts_of(tiny, tmp_path, spec_of(tmp_path, mixed(*BAD)))
    assert (facts.num_invalid, facts.num_checked, facts.all_checked) == (5, 17, True)
    assert len(facts.data_issues) == 3 and facts.data_issues[0].location.endswith("rows.jsonl, line 1")


def test_an_example_that_the_template_refuses_is_skipped(tiny: Path, tmp_path: Path) -> None:
    """In training and validation. It has a place in the split, which is drawn before the template is known."""
    files = {"data.validation": "files", "data.validation_files": (str(tmp_path / "rows.jsonl"),)}
    expected, _ = prepare(tiny, spec_of(tmp_path, list(map(json.dumps, GOOD)), **files))
    spec = spec_of(tmp_path, mixed(json.dumps(UNRENDERABLE)), **files, **SKIP)
    made, lines = prepare(tiny, spec)
    assert made.validation and expected.validation
    assert (made.train[:], made.validation[:]) == (expected.train[:], expected.validation[:])
    assert len(made.eval_examples) == len(expected.eval_examples)
    assert lines[0].startswith("2 training examples skipped") and "System role not supported" in lines[1]
    assert any(line.startswith("12 training examples, ") for line in lines)
    facts = facts_of(tiny, tmp_path, spec)
    assert (facts.num_skipped, facts.num_usable, facts.num_usable_validation) == (4, 12, 12)
    assert not facts.unrenderable_examples


@pytest.mark.parametrize("bad", [*BAD, json.dumps(UNRENDERABLE)])
def test_they_stop_the_run_otherwise(tiny: Path, tmp_path: Path, bad: str) -> None:
    """The finding offers to skip them, and says afterwards what is skipped."""
    spec = spec_of(tmp_path, mixed(bad))
    with pytest.raises(TrainError, match=r"rows\.jsonl, line 1: "):
        prepare(tiny, spec)
    found = {finding.code: finding for finding in examine(build_case(spec, Machine(), tmp_path))}
    if bad in BAD:
        assert "Skip such examples" in [fix.label for fix in found["DAT003"].fixes] or "has no column" in BAD[bad]
        skipping = spec_of(tmp_path, mixed(bad), **SKIP)
        found = {finding.code: finding for finding in examine(build_case(skipping, Machine(), tmp_path))}
        assert "DAT003" not in found and "rows.jsonl, line 1: " in found["DAT031"].message


def test_the_labels_of_all_usable_completions_are_counted(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first examples of a sorted file all have the same label."""
    monkeypatch.setattr(data_files, "MAX_LENGTHS", 2)
    rows = [{"prompt": f"When? {n}", "completion": "At nine.", "label": n < 5} for n in range(9)]
    long = {"prompt": "When? " * 500, "completion": "At nine.", "label": False}  # no completion within max_length
    lines = list(map(json.dumps, [*rows, long]))
    spec = spec_of(tmp_path, lines, **{"train.stage": "kto", "data.format": "labels", "data.max_length": 64})
    assert inspect_data_files(spec, tmp_path)["label_counts"] == (5, 5)
    assert facts_of(tiny, tmp_path, spec).label_counts == (5, 4)


def test_the_checks_name_the_option_of_the_file_that_cannot_be_rendered(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "validation.jsonl").write_text(json.dumps(UNRENDERABLE) + "\n")
    files = {"data.validation": "files", "data.validation_files": (str(tmp_path / "validation.jsonl"),)}
    spec = spec_of(tmp_path, list(map(json.dumps, GOOD)), **files)
    findings = examine(Case(spec, Machine(), facts_of(tiny, tmp_path, spec)))
    (found,) = (each for each in findings if each.code == "DAT018")
    assert found.fields == ("data.validation_files", "data.chat_template")


def test_no_example_is_left(tiny: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, list(BAD), **SKIP)
    with pytest.raises(TrainError, match="The dataset has no usable examples"):
        prepare(tiny, spec)
    found = {finding.code: finding for finding in examine(build_case(spec, Machine(), tmp_path))}
    assert "DAT002" in found and "DAT031" in found


def test_the_card_counts_as_the_checks_do(tiny: Path, tmp_path: Path) -> None:
    """The position of an example counts all rows, also those that cannot be read."""
    spec = spec_of(tmp_path, mixed(*BAD), **SKIP)
    found = tokenize_examples.inspect(spec.model_dump(mode="json"), str(tmp_path), str(tiny))
    positions = found["places"]["unusable"]
    shown = show_examples.show(spec.model_dump(mode="json"), str(tmp_path), str(tiny), 0, 50)["examples"]
    assert [n for n, example in enumerate(shown) if example["problem"]] == positions == [0, 6, 7, 8, 16]
    assert shown[6]["problem"] == "This example is a number; expected an object with named columns."
    assert found["rows"] == len(shown) == 17 and shown[1]["location"].endswith("line 2")


def test_rows_of_a_table_are_skipped(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion\n" + "When?,At nine.\n" * 3 + "When?\n,x\nWhen?,a,b\n")
    spec = spec_of(tmp_path, [], **SKIP, **{"data.files": (str(tmp_path / "a.csv"),), "data.validation": "none"})
    made, lines = prepare(tiny, spec)
    assert len(made.train) == 3 and lines[0].startswith("3 training examples skipped")
