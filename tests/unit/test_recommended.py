"""Values of a demo preset that should not stay when model or data are replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend.config import RunSpec
from backend.config.options import edit, effective
from backend.inspect import inspect_inputs, wait_for_worker
from backend.machine import machines
from backend.preflight import preflight
from backend.presets import presets
from backend.recommended import recommended_values
from backend.resolve import resolve
from backend.rules.base import Finding

PRESETS = {preset.name: preset.spec for preset in presets()}
DEMO = PRESETS["first-run"]


def changed(**changes: object) -> RunSpec:
    return effective(edit(DEMO, {key.replace("__", "."): value for key, value in changes.items()}))


def test_the_demo_itself_keeps_its_values() -> None:
    assert recommended_values(effective(DEMO), DEMO) == {}


def test_own_data_get_usual_values() -> None:
    found = recommended_values(changed(data__source="files", data__files=("mine.jsonl",)), DEMO)
    assert found["train.learning_rate"] == 2e-4
    assert found["train.duration"] == "epochs"
    assert found["data.max_length"] == RunSpec().data.max_length
    assert set(found) >= {"eval.steps", "save.steps"}


def test_another_dataset_next_to_that_of_the_demo_counts_as_other_data() -> None:
    found = recommended_values(changed(data__sources=[{}, {"source": "files", "files": ["mine.jsonl"]}]), DEMO)
    assert found["train.learning_rate"] == 2e-4


def test_learning_rate_follows_method_and_stage() -> None:
    full = changed(model__builtin="tiny-llama", method__kind="full")
    assert recommended_values(full, DEMO)["train.learning_rate"] == 2e-5
    dpo = changed(model__builtin="tiny-llama", train__stage="dpo")
    assert recommended_values(dpo, DEMO)["train.learning_rate"] == 5e-6


def test_values_that_were_changed_stay() -> None:
    found = recommended_values(changed(model__builtin="tiny-llama", train__learning_rate=1e-4), DEMO)
    assert "train.learning_rate" not in found
    assert found


def test_generations_fit_the_validation_set() -> None:
    own = changed(data__source="files", data__files=("mine.jsonl",))
    assert "eval.num_generations" not in recommended_values(own, DEMO)
    assert "eval.num_generations" not in recommended_values(own, DEMO, DEMO.eval.num_generations)
    assert recommended_values(own, DEMO, 3)["eval.num_generations"] == 3
    few = changed(data__source="files", data__files=("mine.jsonl",), eval__num_generations=20)
    assert "eval.num_generations" not in recommended_values(few, DEMO, 3), "a value that was changed"


@pytest.mark.parametrize("count", [3, 30, 3000])
def test_recommended_values_add_no_finding(tmp_path: Path, count: int) -> None:
    data = tmp_path / "mine.jsonl"
    example = {"prompt": "Which train goes to Basel?", "completion": "The 7:32."}
    data.write_text("".join(json.dumps({**example, "id": i}) + "\n" for i in range(count)))
    spec, here = changed(data__source="files", data__files=(str(data),)), machines()["laptop"]
    before = preflight(spec, here, tmp_path, 60)
    run = before.run
    patch = recommended_values(
        spec, DEMO, run.num_eval_examples, lambda spec: resolve(spec, here, before.facts).total_steps
    )
    after = preflight(edit(spec, patch), here, tmp_path, 60)
    assert after.run.total_steps == resolve(edit(spec, patch), here, before.facts).total_steps
    assert {f.code for f in after.findings} <= {f.code for f in before.findings}, patch


def test_presets_for_real_data_are_no_demos() -> None:
    for name, spec in PRESETS.items():
        other = effective(edit(spec, {"model.source": "hub", "model.hub_id": "somebody/else"}))
        assert bool(recommended_values(other, spec)) == (spec.data.source == "builtin"), name


def test_a_file_without_a_known_format_has_one_finding(tmp_path: Path) -> None:
    """The number of examples is unknown, so no finding may depend on it; and no safe fix can help."""
    file = tmp_path / "wrong.jsonl"
    file.write_text("".join(f'{{"kunde": "Frage {i}", "meldung": "Antwort {i}"}}\n' for i in range(100)))
    for name, machine in (("first-run", "laptop"), ("lora-80gb", "1x80gb"), ("dpo", "1x80gb")):
        spec = edit(PRESETS[name], {"data.source": "files", "data.files": (str(file),)})
        wait_for_worker(effective(spec), tmp_path, 60)
        assert inspect_inputs(effective(spec), tmp_path).num_examples is None
        report = preflight(spec, machines()[machine], tmp_path)
        assert [finding.code for finding in report.findings] == ["DAT002"], name
        assert not any(fix.safe for fix in report.findings[0].fixes)


def with_file(file: Path, **options: str) -> RunSpec:
    options = {f"data.{name}": value for name, value in options.items()}
    return edit(DEMO, {"data.source": "files", "data.files": (str(file),), **options})


def data_findings(spec: RunSpec, folder: Path) -> list[Finding]:
    report = preflight(spec, machines()["laptop"], folder, 60)
    return [finding for finding in report.findings if finding.code in ("DAT002", "DAT003")]


def test_columns_with_unknown_names_can_be_used_with_one_fix(tmp_path: Path) -> None:
    """Whether the format is detected or was chosen without its columns: the fixes lead to a run, not to one another."""
    file = tmp_path / "mine.csv"
    file.write_text("lfd. Nr.,Ticket,Frage,Antwort\n" + "".join(f"{i},T-{i},Wann {i}?,Um {i}.\n" for i in range(100)))
    for options in ({}, {"format": "prompt_completion"}, {"format": "alpaca"}, {"format": "text"}):
        spec = with_file(file, **options)
        (finding,) = data_findings(spec, tmp_path)
        assert finding.fixes[0].label == "Use column Frage as the prompt and Antwort as the completion"
        assert finding.fixes[1].label == "Use column Frage as plain text"
        assert "Detect the format automatically" not in [fix.label for fix in finding.fixes]
        assert not data_findings(edit(spec, finding.fixes[0].patch), tmp_path), options


TURNS = [{"role": "user", "content": "Wann?"}, {"role": "assistant", "content": "Um 9."}]
SHAREGPT = [{"from": "human", "value": "Wann?"}, {"from": "gpt", "value": "Um 9."}]


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({"id": "a", "conversations": TURNS}, "Use column conversations as the conversation"),
        ({"messages": SHAREGPT}, "Use column messages as the conversation"),
        ({"dialog": json.dumps(TURNS)}, "Use column dialog as the conversation"),
        ({"question": "Wann?", "answer": "Um 9.", "label": 1}, "Use column question as the prompt and answer as the"),
        ({"input": "Wann?", "output": "Um 9.", "label": 1}, "Use column input as the prompt and output as the"),
        ({"hours": 9, "minutes": 30}, ""),
    ],
)
def test_columns_of_other_kinds_can_be_used_with_one_fix(tmp_path: Path, row: dict[str, Any], label: str) -> None:
    """Conversations under another name, and labels that are classes, not those of KTO; numbers are no text."""
    file = tmp_path / "mine.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 40)
    spec = with_file(file)
    fixes = [fix for each in preflight(spec, machines()["laptop"], tmp_path, 60).findings for fix in each.fixes]
    if label:
        assert fixes[0].label.startswith(label)
        report = preflight(edit(spec, fixes[0].patch), machines()["laptop"], tmp_path, 60)
        assert not any(
            finding.code.startswith(("DAT", "STG")) for finding in report.findings if finding.level == "error"
        )
    else:
        assert not any("Use column" in fix.label for fix in fixes)


@pytest.mark.parametrize("head", ["nr,frage,gut,schlecht", "id,worse,question,better"])
@pytest.mark.parametrize("format", ["auto", "prompt_completion", "pairs"])
def test_pairs_with_unknown_names_can_be_used_with_one_fix(tmp_path: Path, head: str, format: str) -> None:
    """Also where another format was chosen for an earlier stage. Names such as "better" say which one is preferred."""
    file = tmp_path / "pairs.csv"
    file.write_text(f"{head}\n" + "".join(f"{i},Wann {i}?,Um {i}.,Nie {i}.\n" for i in range(40)))
    spec = edit(with_file(file, format=format), {"train.stage": "dpo"})
    fix = preflight(spec, machines()["laptop"], tmp_path, 60).findings[0].fixes[0]
    prompt, chosen, rejected = ("frage", "gut", "schlecht") if "frage" in head else ("question", "better", "worse")
    assert fix.label == (
        f"Use column {prompt} as the prompt, {chosen} as the chosen and {rejected} as the rejected completion"
    )
    report = preflight(edit(spec, fix.patch), machines()["laptop"], tmp_path, 60)
    assert not any(finding.code.startswith(("DAT", "STG")) for finding in report.findings if finding.level == "error")


@pytest.mark.parametrize("head", ["prompt,answer,label", "answer,frage,thumbs_up"])
@pytest.mark.parametrize("format", ["auto", "labels"])
def test_labels_with_unknown_columns_can_be_used_with_one_fix(tmp_path: Path, head: str, format: str) -> None:
    """Skipping examples without the usual columns would leave nothing."""
    file = tmp_path / "feedback.csv"
    file.write_text(f"{head}\n" + "".join(f"Wann {i}?,Um {i}.,{i % 2}\n" for i in range(40)))
    spec = edit(with_file(file, format=format), {"train.stage": "kto"})
    first = next(each for each in preflight(spec, machines()["laptop"], tmp_path, 60).findings if each.level == "error")
    prompt, label = ("prompt", "label") if "prompt" in head else ("frage", "thumbs_up")
    text = f"Use column {prompt} as the prompt, answer as the completion and {label} as its label"
    assert first.fixes[0].label == text
    assert "data.on_bad_example" not in {name for fix in first.fixes for name in fix.patch}
    report = preflight(edit(spec, first.fixes[0].patch), machines()["laptop"], tmp_path, 60)
    assert not any(each.code.startswith(("DAT", "STG")) for each in report.findings if each.level == "error")


def test_pairs_without_a_prompt_column_get_no_fix_for_one(tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text("id,better,worse\n" + "".join(f"{i},Um {i}.,Nie {i}.\n" for i in range(40)))
    spec = edit(with_file(file), {"train.stage": "dpo"})
    fixes = [fix for finding in preflight(spec, machines()["laptop"], tmp_path, 60).findings for fix in finding.fixes]
    assert fixes and not any("data.prompt_column" in fix.patch for fix in fixes)


def test_a_missing_column_is_reported_once_with_the_options_to_set(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("Frage,Antwort\n" + "".join(f"Wann {i}?,Um {i}.\n" for i in range(100)))
    spec = with_file(file, format="prompt_completion", prompt_column="Frage", completion_column="Reply")
    (finding,) = data_findings(spec, tmp_path)
    assert finding.title == "The data files do not have the columns of the data format"
    assert finding.message.count("has no column Reply") == 1
    assert "Line 3 and line 4 have the same error. In total, 100 examples have errors." in finding.message
    assert "Set data.prompt_column and data.completion_column to the names of columns in the file." in finding.message
    assert "data.completion_column" in finding.fields


@pytest.mark.parametrize("on_bad_example", ["stop", "skip"])
def test_columns_are_offered_although_one_line_is_broken(tmp_path: Path, on_bad_example: str) -> None:
    """Skipping would leave nothing: no example has the columns that are set."""
    file = tmp_path / "mine.jsonl"
    lines = [json.dumps({"question": f"Wann {i}?", "reply": f"Um {i}."}) for i in range(40)]
    file.write_text("\n".join([*lines[:7], '{"question": "Wann', *lines[8:]]) + "\n")
    columns = {"format": "prompt_completion", "prompt_column": "Frage", "completion_column": "Antwort"}
    finding = data_findings(with_file(file, **columns, on_bad_example=on_bad_example), tmp_path)[0]
    assert finding.level == "error"
    assert ("contains no examples that can be used" in finding.message) == (on_bad_example == "skip")
    labels = [fix.label for fix in finding.fixes]
    as_pair = "Use column question as the prompt and reply as the completion"
    assert labels == [as_pair, "Use column question as plain text"]


def test_examples_without_a_column_that_the_others_have_can_be_skipped(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    examples = [{"question": f"Wann {i}?", "reply": f"Um {i}."} for i in range(40)]
    examples[20] = {"query": "Wann?", "reply": "Um 7."}
    file.write_text("".join(f"{json.dumps(example)}\n" for example in examples))
    spec = with_file(file, format="prompt_completion", prompt_column="question", completion_column="reply")
    (finding,) = data_findings(spec, tmp_path)
    assert finding.title == "Some examples do not match the data format"
    assert [fix.label for fix in finding.fixes] == ["Skip such examples"]


def test_another_format_is_detected_only_if_the_columns_have_one(tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    turns = [{"from": "human", "value": "When?"}, {"from": "gpt", "value": "At 7."}]
    file.write_text((json.dumps({"conversations": turns}) + "\n") * 40)
    (finding,) = data_findings(with_file(file, format="messages"), tmp_path)
    assert [fix.label for fix in finding.fixes] == ["Detect the format automatically"]


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_file_has_one_finding(tmp_path: Path, text: str) -> None:
    file = tmp_path / "empty.jsonl"
    file.write_text(text)
    spec = edit(DEMO, {"data.source": "files", "data.files": (str(file),)})
    wait_for_worker(effective(spec), tmp_path, 60)
    report = preflight(spec, machines()["laptop"], tmp_path)
    assert [finding.code for finding in report.findings] == ["DAT002"]
    assert "contains no examples" in report.findings[0].message
