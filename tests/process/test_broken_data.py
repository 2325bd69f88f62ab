"""Broken data files are named before the run, by file and line, and the run fails without the checks; the others are
harmless: the run prepares the expected number of examples."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import skip_checks
from broken_data import BREAKAGES, COUNT, LONG, Breakage, assistant, encode, turns, user
from fork_server import ForkServer
from parameters import soak_except
from training_runs import make_spec

import backend.inspect.datasets
from backend.config import RunSpec
from backend.config.options import edit
from backend.data import is_held_out, place
from backend.inspect import data_files, examples, inspect_inputs
from backend.machine import Machine
from backend.rules import Case, Finding, examine
from backend.train import model, tokenize_examples
from backend.train.data import PreparedData, prepare
from backend.train.examples import training_rows
from backend.train.run_log import TrainError

DEEP = [name for name, case in BREAKAGES.items() if case.example]
# In `make test` too: text, turns and labels, and an error of the reader.
QUICK = {
    "text is null",
    "half of a surrogate pair",
    ".json with an invalid example",
    "one label is good",
}


def inspect_in_this_process(spec: RunSpec, base: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the worker process finds, without starting one."""
    request = examples._request(spec, base, environment)
    if request is None:
        return {}
    sections = json.loads(spec.model_dump_json(include={"model", "data", "train"}))
    found = tokenize_examples.inspect(sections, str(base), request["folder"])
    return examples.facts_from(json.loads(json.dumps(found)), spec)


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.inspect.datasets, "inspect_examples", inspect_in_this_process)


def spec_of(case: Breakage, files: tuple[str, ...], tiny: Path) -> RunSpec:
    options: dict[str, Any] = {
        "model.source": "path",
        "model.path": str(tiny),
        "data.source": "files",
        "data.files": files,
        "data.validation": "none",
        "data.max_samples": 0,
        "data.max_length": 256,
        "train.stage": case.stage,
    }
    return make_spec({**options, **case.options})


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return model.load_tokenizer(make_spec(), model.ModelSource(str(tiny), {"local_files_only": True}))


def findings_of(spec: RunSpec, folder: Path) -> dict[str, Finding]:
    found = examine(Case(spec, Machine(), inspect_inputs(spec, folder)))
    json.dumps([finding.message for finding in found], ensure_ascii=False).encode()  # the page's JSON has no surrogates
    return {finding.code: finding for finding in found}


def errors_of(spec: RunSpec, folder: Path) -> dict[str, Finding]:
    return {code: finding for code, finding in findings_of(spec, folder).items() if finding.level == "error"}


def prepared(spec: RunSpec, tokenizer: Any) -> PreparedData:
    return prepare(spec, tokenizer, lambda done, total: True, lambda line: None)


def check(case: Breakage, files: tuple[str, ...], folder: Path, tiny: Path, tokenizer: Any, line: int) -> None:
    """Assert that the breakage is named before the run, which fails, or that the run prepares all usable examples."""
    spec = spec_of(case, files, tiny)
    errors = errors_of(spec, folder)
    if not case.code:
        assert not errors
        assert len(prepared(spec, tokenizer).train) == case.usable
        return
    assert [*errors] == [case.code], errors
    message = errors[case.code].message
    assert re.search(case.words, message), message
    assert len(message) < 1000
    assert not line or place(case.suffix, line) + ": " in message, message
    with pytest.raises(TrainError) as failed:
        prepared(spec, tokenizer)
    assert re.search(case.run_words or case.words, str(failed.value)), str(failed.value)


@pytest.mark.parametrize("name", BREAKAGES)
def test_breakage_is_named_or_harmless(name: str, tmp_path: Path, tiny: Path, tokenizer: Any) -> None:
    case = BREAKAGES[name]
    if name == "unreadable permissions" and os.geteuid() == 0:
        pytest.skip("root may read every file")
    check(case, case.write(tmp_path), tmp_path, tiny, tokenizer, case.named_line())


@pytest.mark.parametrize("name", soak_except(DEEP, QUICK))
def test_breakage_deep_in_a_file(
    name: str, tmp_path: Path, tiny: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Example 1,200 of 1,500 is broken, in the second batch. The inspection that the form waits for has no time to
    reach it."""
    monkeypatch.setattr(data_files, "MAX_SECONDS", 0)
    case = BREAKAGES[name]
    case = replace(case, usable=case.usable + 1496 * max(1, case.usable // COUNT))  # KTO trains on both of a pair
    files = case.write(tmp_path, 1500, 1199)
    check(case, files, tmp_path, tiny, tokenizer, case.named_line(1199))


@pytest.mark.parametrize("name", ["last line truncated", "no assistant turn", "UTF-16", "empty file", "Latin-1"])
def test_broken_validation_file_is_named(name: str, tmp_path: Path, tiny: Path, tokenizer: Any) -> None:
    case = BREAKAGES[name]
    (tmp_path / "train").mkdir()
    train = Breakage().write(tmp_path / "train")
    options = {"data.validation": "files", "data.validation_files": case.write(tmp_path)}
    spec = spec_of(replace(case, options=options), train, tiny)
    errors = errors_of(spec, tmp_path)
    assert [*errors] == ["DAT005"]
    assert re.search(case.words, errors["DAT005"].message)
    with pytest.raises(TrainError, match=case.run_words or case.words):
        prepared(spec, tokenizer)


@pytest.mark.parametrize("change", ["deleted", "truncated", "replaced by another format"])
def test_file_that_changes_after_the_check(change: str, tmp_path: Path, tiny: Path, tokenizer: Any) -> None:
    """The run names the file, and the line where there is one."""
    files = Breakage().write(tmp_path)
    spec, path = spec_of(Breakage(), files, tiny), Path(files[0])
    assert not errors_of(spec, tmp_path)
    if change == "deleted":
        path.unlink()
    elif change == "truncated":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        path.write_text('{"prompt": "a", "rejected": "b", "chosen": "c"}\n')
    words = {"deleted": "does not exist", "truncated": "line 4: is not valid JSON"}
    with pytest.raises(
        TrainError, match=rf"data\.jsonl.*{words.get(change, 'line 1: .*Supervised fine-tuning needs')}"
    ):
        prepared(spec, tokenizer)
    assert errors_of(spec, tmp_path), "the next check reads the file again"


def test_conversation_that_begins_with_its_only_completion(tmp_path: Path, tiny: Path, tokenizer: Any) -> None:
    """It has no prompt to complete in the generation evaluation."""
    rows = [{"messages": [assistant()]}, {"messages": [user(), assistant()]}]
    (tmp_path / "validation.jsonl").write_bytes(encode(rows, ".jsonl"))
    validation = {"data.validation": "files", "data.validation_files": (str(tmp_path / "validation.jsonl"),)}
    options = {**validation, "eval.strategy": "epoch", "eval.num_generations": 2}
    spec = spec_of(Breakage(options=options), Breakage().write(tmp_path), tiny)
    assert not errors_of(spec, tmp_path)
    found = prepared(spec, tokenizer)
    assert found.validation is not None
    assert (len(found.validation), [len(example.value["messages"]) for example in found.eval_examples]) == (2, [2])


def test_assistant_turn_first_with_a_template_without_generation_markers(tmp_path: Path, tiny: Path) -> None:
    """The message is about the conversation, not about the template."""
    (tmp_path / "template.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    options = {"data.chat_template": "file", "data.chat_template_file": str(tmp_path / "template.jinja")}
    case = replace(BREAKAGES["assistant turn first"], options=options)
    spec = spec_of(case, case.write(tmp_path), tiny)
    errors = errors_of(spec, tmp_path)
    assert [*errors] == ["DAT018"]
    assert "line 3: begins with an assistant turn; add a user or system turn" in errors["DAT018"].message
    with pytest.raises(TrainError, match="line 3: begins with an assistant turn"):
        prepared(spec, model.load_tokenizer(spec, model.ModelSource(str(tiny), {"local_files_only": True})))


def test_conversational_completion_is_a_reference_of_the_generation_evaluation(
    tmp_path: Path, tiny: Path, tokenizer: Any
) -> None:
    case = replace(BREAKAGES["conversational prompt and completion"], options={"data.validation": "split"})
    found = prepared(edit(spec_of(case, case.write(tmp_path), tiny), {"eval.num_generations": 1}), tokenizer)
    assert [turn["role"] for turn in found.eval_examples[0].value["messages"]] == ["user", "assistant"]


LAUNCHED = [
    "conversational prompt and completion",
    "Latin-1",
    "tool call without a function",
    "special tokens in the text",
    "one prompt longer than max_length",
    "all labels equal",
]
LIKE_OTHERS = {"special tokens in the text", "one prompt longer than max_length"}  # other runs prove as much


@pytest.mark.parametrize("name", soak_except(LAUNCHED, {*LAUNCHED} - LIKE_OTHERS))
def test_breakage_in_a_run(name: str, tmp_path: Path, tiny: Path, fork_server: ForkServer) -> None:
    case = BREAKAGES[name]
    spec = edit(spec_of(case, case.write(tmp_path), tiny), {"train.max_steps": 1})
    code, log = skip_checks.run(tmp_path / "run", spec, fork_server)
    assert code == bool(case.code), log
    assert re.search(case.words or "Preparing data", log), log
    assert ("Traceback" in log) is False, log


@pytest.mark.parametrize("format", soak_except(["messages", "text", "pairs", "labels"], ("messages", "labels")))
def test_tokenizer_without_eos_and_pad_token(format: str, tmp_path: Path, tiny: Path, fork_server: ForkServer) -> None:
    """Another special token pads."""
    spec = spec_without_eos_and_pad_token(tmp_path, tiny, Breakage(format=format))
    assert not errors_of(spec, tmp_path)
    code, log = skip_checks.run(tmp_path / "run", spec, fork_server)
    assert code == 0, log


def test_tokenizer_without_special_tokens(tmp_path: Path, tiny: Path, fork_server: ForkServer) -> None:
    spec = spec_without_eos_and_pad_token(tmp_path, tiny, Breakage())
    path = tmp_path / "model/tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens": []}))
    errors = errors_of(spec, tmp_path)
    assert [*errors] == ["MDL005"]
    assert "has no padding token" in errors["MDL005"].message
    code, log = skip_checks.run(tmp_path / "run", spec, fork_server)
    assert (code, "has no padding token" in log, "Traceback" in log) == (1, True, False), log


def spec_without_eos_and_pad_token(folder: Path, tiny: Path, case: Breakage) -> RunSpec:
    """One step with the tiny model, whose tokenizer says nothing about the end and the padding."""
    shutil.copytree(tiny, folder / "model")
    path = folder / "model/tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in tokenizer.items() if not key.endswith("_token")}))
    return edit(spec_of(case, case.write(folder), folder / "model"), {"train.max_steps": 1})


def test_validation_set_without_usable_examples(tmp_path: Path, tiny: Path, fork_server: ForkServer) -> None:
    """The log says that they are dropped; there is no eval loss, and no best checkpoint to load."""
    rows = [{"messages": [user("When? " * 300), assistant()]}] * 2
    (tmp_path / "validation.jsonl").write_bytes(encode(rows, ".jsonl"))
    options = {
        "data.validation": "files",
        "data.validation_files": (str(tmp_path / "validation.jsonl"),),
        "eval.strategy": "steps",
        "eval.steps": 1,
        "save.strategy": "steps",
        "save.steps": 1,
        "save.load_best_model_at_end": True,
        "train.max_steps": 1,
    }
    spec = spec_of(Breakage(options=options), Breakage().write(tmp_path), tiny)
    assert not errors_of(spec, tmp_path)
    found = findings_of(spec, tmp_path)["DAT007"]
    assert "The validation set has 2 examples, none of which has a trained token within" in found.message
    assert "DAT007" not in findings_of(edit(spec, found.fixes[1].patch), tmp_path)
    code, log = skip_checks.run(tmp_path / "run", spec, fork_server)
    assert code == 0, log
    assert "2 dropped, without trained tokens" in log


# Which usable examples are selected: (the format, the stage, the positions of the usable ones of 6 examples).
FEW = {
    "conversations": ("messages", "sft", (4,)),
    "two conversations": ("messages", "sft", (0, 3)),
    "pairs": ("pairs", "dpo", (1,)),
    "pairs for KTO": ("pairs", "kto", (5,)),
    "labels": ("labels", "kto", (2, 3)),
}
SELECTIONS: list[dict[str, Any]] = [
    {"data.validation": "none"},
    {"data.validation": "none", "data.max_samples": 2},
    {"data.validation": "split", "data.validation_split": 0.01},
    {"data.validation": "split", "data.validation_split": 0.5},
    {"data.validation": "split", "data.validation_split": 0.9, "data.max_samples": 1},
]


@pytest.mark.parametrize("name", soak_except(FEW, ("pairs for KTO",)))
def test_selection_of_few_usable_examples(name: str, tmp_path: Path, tiny: Path, tokenizer: Any) -> None:
    """The checks know which of the usable examples the validation split and data.max_samples select."""
    format, stage, usable = FEW[name]
    long = {"prompt": LONG} if format != "messages" else turns(user(LONG), assistant())({})
    case = Breakage(
        format=format,
        options={"train.stage": stage, "eval.strategy": "epoch"},
        examples=lambda rows: [row if n in usable else {**row, **long} for n, row in enumerate(rows)],
    )
    base, seen = spec_of(case, case.write(tmp_path, 6), tiny), Counter[str]()
    for number, selection in enumerate(SELECTIONS * 2):
        spec = edit(base, {**selection, "train.seed": number})
        found, facts = findings_of(spec, tmp_path), inspect_inputs(spec, tmp_path)
        try:
            data = prepared(spec, tokenizer)
        except TrainError as error:
            assert re.search(
                r"training examples has a trained token|only training example has no trained token", str(error)
            )
            assert "DAT017" in found and found["DAT017"].fixes
            for fix in found["DAT017"].fixes:
                assert "DAT017" not in findings_of(edit(spec, fix.patch), tmp_path), fix
                assert len(prepared(edit(spec, fix.patch), tokenizer).train), fix
            seen["no training example"] += 1
            continue
        lost = selection["data.validation"] == "split" and data.validation is None
        assert ("DAT017" in found, "DAT007" in found) == (False, lost or selection["data.validation"] == "none")
        assert facts.usable_examples(spec.data, number) == (len(data.train), len(data.validation or ()))
        seen["no validation example" if lost else "both"] += 1
    assert seen["no training example"] and seen["no validation example"], seen


def test_one_pair_for_kto_cannot_be_split(tmp_path: Path, tiny: Path, tokenizer: Any) -> None:
    """KTO trains on both of its completions, and the split is before that."""
    case = Breakage(format="pairs", options={"train.stage": "kto", "data.validation": "split"})
    spec = spec_of(case, case.write(tmp_path, 1, 0), tiny)
    assert [*errors_of(spec, tmp_path)] == ["DAT006"]
    with pytest.raises(TrainError, match="only one example is in the dataset, and it cannot be split"):
        prepared(spec, tokenizer)


def test_positions_of_unusable_examples_are_unknown_if_there_are_too_many(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Breakage(example=turns(user(LONG), assistant()), options={"data.max_samples": 1})
    spec = spec_of(case, case.write(tmp_path), tiny)
    for most, positions in ((COUNT, (2,)), (COUNT - 1, None)):
        monkeypatch.setattr(tokenize_examples, "MAX_POSITIONS", most)
        facts = inspect_inputs(spec, tmp_path)
        assert (facts.unusable_positions, facts.num_usable) == (positions, 3)
        assert (facts.usable_examples(spec.data, 0) is None) == (positions is None)
        assert not errors_of(edit(spec, {"data.max_samples": 0}), tmp_path)


def test_a_stream_whose_first_examples_are_unusable(tmp_path: Path, tiny: Path) -> None:
    case = Breakage(example=turns(user(LONG), assistant()), options={"data.validation": "split"})
    streamed = {"data.streaming": True, "train.duration": "steps", "data.validation_split": 0.5}
    spec = edit(spec_of(case, case.write(tmp_path), tiny), streamed)
    values = [row.value for row in training_rows(spec)]
    each = {seed: [n for n, value in enumerate(values) if is_held_out(value, 0.5, seed)] for seed in range(9)}
    seed, held_out = next((seed, found) for seed, found in each.items() if 0 < len(found) < len(values))
    spec = edit(spec, {"train.seed": seed})
    facts = inspect_inputs(spec, tmp_path)
    assert list(facts.held_out_positions) == held_out
    unusable = set(facts.unusable_positions or ())
    for count in range(1, len(values) - len(held_out) + 1):
        used = [n for n in range(len(values)) if n not in held_out][:count]
        found = facts.usable_examples(edit(spec, {"data.max_samples": count}).data, seed)
        assert found == (len({*used} - unusable), len({*held_out} - unusable))
