"""Uses of columns: what they are for a spec, and the options that change them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend import registry
from backend.config import Data, RunSpec
from backend.config.options import edit
from backend.data import convert
from backend.data.columns import column_options, patch, read_by_name, uses, uses_of_columns
from backend.inspect.columns import describe_columns, use_column
from backend.machine import Machine
from backend.preflight import build_case
from backend.rules import examine

CPU = Machine(device="cpu", gpus=(), cores=8)
SFT = registry.STAGES["sft"].formats
USER, REPLY = {"role": "user", "content": "When?"}, {"role": "assistant", "content": "At nine."}
HUMAN, GPT = {"from": "human", "value": "When?"}, {"from": "gpt", "value": "At nine."}


def clicked(example: dict[str, Any], *choices: tuple[str, str], stage: str = "sft", data: Data | None = None) -> Data:
    """The data section after these choices in the menus: (column, use)."""
    for column, use in choices:
        changed = patch(example, data or Data(), registry.STAGES[stage].formats, column, use)
        data = edit(RunSpec(data=data or Data()), changed).data
    assert data
    return data


@pytest.mark.parametrize(
    ("stage", "example", "choices"),
    [
        ("sft", {"frage": "When?", "antwort": "At nine."}, ["frage prompt", "antwort completion"]),
        ("sft", {"frage": "When?", "antwort": "At nine."}, ["antwort completion", "frage prompt"]),
        ("sft", {"talk": [USER, REPLY]}, ["talk messages"]),
        ("sft", {"talk": [HUMAN, GPT]}, ["talk messages"]),
        ("sft", {"talk": json.dumps([HUMAN, GPT])}, ["talk messages"]),
        ("sft", {"prompt": "At nine.", "completion": "When?"}, ["completion prompt"]),  # swapped
        ("sft", {"messages": [REPLY], "q": "When?", "a": "At nine."}, ["q prompt", "a completion"]),
        ("sft", {"text": "X", "instruction": "When?", "output": "At nine."}, ["text text", "instruction prompt",
                                                                              "output completion"]),
    ],
)  # fmt: skip
def test_a_layout_is_chosen_by_clicking(stage: str, example: dict[str, Any], choices: list[str]) -> None:
    data = clicked(example, *(choice.split() for choice in choices), stage=stage)
    assert convert(example, data.format, data) == {"messages": [USER, REPLY]}
    assert set(uses_of_columns(example, data, SFT)) >= {choices[-1].split()[0]}


def test_preferences() -> None:
    pair = {"q": "When?", "good": "At nine.", "bad": "Never.", "ok": True}
    data = clicked(pair, ("q", "prompt"), ("good", "chosen"), ("bad", "rejected"), stage="dpo")
    assert convert(pair, data.format, data)["rejected"][0]["content"] == "Never."
    data = clicked(pair, ("ok", "label"), ("q", "prompt"), ("good", "completion"), stage="kto")
    assert data.format == "labels"
    assert convert(pair, data.format, data)["label"] is True
    assert clicked(pair, ("bad", "rejected"), stage="kto", data=data).format == "pairs"


def test_the_system_prompt_is_optional() -> None:
    """Its column is a column of the data, or none; other columns keep their uses."""
    row = {"prompt": "When?", "completion": "At nine.", "persona": "Be brief.", "system": "Linux"}
    formats = uses_of_columns(row, Data(), SFT)
    assert formats == {"prompt": "prompt", "completion": "completion", "system": "system"}
    data = clicked(row, ("persona", "system"))
    assert convert(row, data.format, data)["messages"][0] == {"role": "system", "content": "Be brief."}
    data = clicked(row, ("system", ""))
    assert [turn["role"] for turn in convert(row, data.format, data)["messages"]] == ["user", "assistant"]
    first = {"prompt": "When?", "completion": "At nine.", "q": "Where?"}  # later examples have a system prompt
    data = clicked(first, ("q", "prompt"))
    assert convert({**row, **first}, data.format, data)["messages"][0]["content"] == "Linux"
    assert clicked(first, ("q", "prompt"), ("prompt", "system")).system_column == "prompt"
    talk = {"messages": [USER, REPLY], "system": "Be brief."}
    assert convert(talk, "messages", Data())["messages"][0]["content"] == "Be brief."


def test_columns_that_are_read_by_name() -> None:
    row = {"instruction": "Q", "input": "more", "output": "A", "tools": [{"name": "f"}], "documents": []}
    assert set(read_by_name(row, Data(), SFT)) == {"input", "tools"}
    assert read_by_name({"text": "X", "tools": [1]}, Data(), SFT) == ()


def test_uses_are_those_of_the_stage() -> None:
    assert list(uses(registry.STAGES["dpo"].formats)) == ["prompt", "chosen", "rejected", "system"]
    assert uses(SFT)["system"] == "System prompt"


def test_any_choice_gives_a_valid_spec_that_uses_the_column_so() -> None:
    """Each use of each column, from each layout."""
    rows = [
        {"prompt": "When?", "completion": "At nine.", "x": "X"},
        {"messages": [USER, REPLY], "x": "X"},
        {"prompt": "When?", "chosen": "A", "rejected": "B", "label": True, "x": "X"},
        {"frage": "When?", "antwort": "A", "x": 3},
    ]
    for stage, row in ((stage, row) for stage in registry.STAGES for row in rows):
        formats = registry.STAGES[stage].formats
        for column, use in ((column, use) for column in row for use in uses(formats)):
            data = clicked(row, (column, use), stage=stage)
            assert getattr(data, f"{use}_column") == column, (stage, row, column, use)
            assert f"data.{use}_column" in column_options(data.format)


def test_the_page_gets_the_first_rows(tmp_path: Path) -> None:
    rows = [{"frage": f"Q{n}", "n": n, **{f"c{each}": each for each in range(200)}} for n in range(5)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = edit(RunSpec(), {"data.source": "files", "data.files": ("a.jsonl",)})
    found = describe_columns(spec, tmp_path)
    assert len(found["columns"]) == 100 and found["more"] == 102
    assert found["columns"][0] == {
        "name": "frage", "use": "", "fixed": False, "required": False, "values": ["Q0", "Q1", "Q2"],
    }  # fmt: skip
    assert found["columns"][1]["values"] == ["0", "1", "2"]
    assert use_column(spec, tmp_path, "frage", "prompt")["data.prompt_column"] == "frage"
    assert use_column(spec, tmp_path, "gone", "prompt") == {} == use_column(spec, tmp_path, "frage", "nonsense")
    missing = edit(spec, {"data.files": ("none.jsonl",)})
    assert describe_columns(missing, tmp_path)["columns"] == []
    assert describe_columns(RunSpec(), tmp_path)["columns"] == [], "the demo data needs no choice"


LAYOUTS = [
    {"frage": "When?", "antwort": "At nine."},
    {"prompt": "When?", "completion": "At nine."},
    {"messages": [USER, REPLY]},
    {"messages": [HUMAN, GPT]},
    {"chosen": [USER, REPLY], "rejected": [USER, REPLY]},
    {"prompt": "When?", "completion": "At nine.", "label": "maybe"},
    {"question": "When?", "answer": None},
    {"n": 1},
]


# `make test` has each layout with one stage.
STAGES = ("sft", "dpo", "kto")
ONE_STAGE = [pytest.param(row, STAGES[i % 3 :][:1], id=" ".join(row)) for i, row in enumerate(LAYOUTS)]
ALL_STAGES = [pytest.param(row, STAGES, id=f"all {' '.join(row)}", marks=pytest.mark.soak) for row in LAYOUTS]


@pytest.mark.parametrize(("row", "stages"), [*ONE_STAGE, *ALL_STAGES])
def test_no_fix_of_data_leads_back(row: dict[str, Any], stages: tuple[str, ...], tmp_path: Path) -> None:
    """From every format and stage, no chain of fixes about the data comes to the same configuration again."""
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    files = {"data.source": "files", "data.files": ("a.jsonl",), "data.validation": "none", "eval.strategy": "no"}

    def follow(spec: RunSpec, before: tuple[RunSpec, ...]) -> None:
        for finding in (each for each in examine(build_case(spec, CPU, tmp_path)) if each.code.startswith("DAT")):
            for fix in finding.fixes:
                changed = edit(spec, fix.patch)
                assert changed not in before, (finding.code, fix.label)
                if len(before) < 4:
                    follow(changed, (*before, changed))

    for stage in stages:
        for format in ("auto", *registry.FORMATS):
            spec = edit(RunSpec(), {**files, "train.stage": stage, "data.format": format})
            follow(spec, (spec,))


def test_a_column_without_a_name_is_no_system_prompt(tmp_path: Path) -> None:
    """As in a .csv file that pandas has written with its index."""
    (tmp_path / "a.csv").write_text(",question,answer\n0,When?,At nine.\n")
    spec = edit(RunSpec(), {"data.source": "files", "data.files": ("a.csv",)})
    for column, use in (("question", "prompt"), ("answer", "completion")):
        spec = edit(spec, use_column(spec, tmp_path, column, use))
    row = {"": "0", "question": "When?", "answer": "At nine."}
    assert convert(row, spec.data.format, spec.data) == {"messages": [USER, REPLY]}
    assert [each["use"] for each in describe_columns(spec, tmp_path)["columns"]] == ["", "prompt", "completion"]
    assert use_column(spec, tmp_path, "", "prompt") == {}
