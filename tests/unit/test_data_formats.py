"""Data formats: each is converted to one kind of conversation, and invalid examples are reported by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend.config import Data
from backend.data import (
    DEFAULTS,
    DataFileError,
    InvalidExample,
    convert,
    detect_format,
    example_problem,
    expand,
    read_examples,
    required_columns,
    to_text,
)

DATA = Data()
USER = {"role": "user", "content": "When?"}
ANSWER = {"role": "assistant", "content": "At nine."}
ROWS = {
    "messages": {"messages": [USER, ANSWER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "When?"}, {"from": "gpt", "value": "At nine."}]},
    "alpaca": {"instruction": "When?", "input": "", "output": "At nine."},
    "prompt_completion": {"prompt": "When?", "completion": "At nine."},
    "text": {"text": "At nine."},
}


@pytest.mark.parametrize("format", ROWS)
def test_each_format_is_detected_and_converted(format: str) -> None:
    row = ROWS[format]
    assert detect_format(row) == format
    assert example_problem(row, format, DATA) is None
    assert convert(row, format, DATA) == ({"text": "At nine."} if format == "text" else {"messages": [USER, ANSWER]})
    assert to_text(convert(row, format, DATA)) == ("At nine." if format == "text" else "When?\n\nAt nine.")


@pytest.mark.parametrize("format", [f for f in ROWS if f != "text"])
def test_the_system_prompt_is_added_to_conversations_without_one(format: str) -> None:
    said = Data(system_prompt="Be brief.")
    assert convert(ROWS[format], format, said)["messages"][0] == {"role": "system", "content": "Be brief."}
    own = {"messages": [{"role": "system", "content": "Own."}, USER, ANSWER]}
    assert [t["content"] for t in convert(own, "messages", said)["messages"]] == ["Own.", "When?", "At nine."]
    empty = {"messages": [{"role": "system", "content": " "}, USER, ANSWER]}
    assert [t["content"] for t in convert(empty, "messages", said)["messages"]] == ["Be brief.", "When?", "At nine."]
    assert convert(empty, "messages", Data())["messages"][0]["content"] == " "  # what the template makes of it
    assert convert({**empty, "system": "Row's."}, "messages", said)["messages"][0]["content"] == "Row's."
    both = {**own, "system": "Row's."}
    assert convert(both, "messages", said)["unused_system"] == "system"
    for same in ({**own, "system": " Own. "}, {**own, "system": ""}, empty | {"system": "Row's."}):
        assert "unused_system" not in convert(same, "messages", said)
    assert "unused_system" not in convert(both, "messages", Data(system_column=""))
    row = {**ROWS["alpaca"], "system": "Row's."}
    assert convert(row, "alpaca", said)["messages"][0]["content"] == "Row's."


def test_column_options() -> None:
    data = Data(source="files", format="prompt_completion", prompt_column="question", completion_column="reply")
    assert required_columns(data, "prompt_completion") == {"prompt_column": "question", "completion_column": "reply"}
    assert convert({"question": "When?", "reply": "At nine."}, "prompt_completion", data)["messages"] == [
        USER,
        ANSWER,
    ]
    assert set(DEFAULTS) == set(ROWS)


def test_alpaca_joins_instruction_and_input_after_the_history() -> None:
    row = {"instruction": "Do.", "input": "This.", "output": "Done.", "history": [["a", "b"]]}
    assert [t["content"] for t in convert(row, "alpaca", DATA)["messages"]] == [
        "a",
        "b",
        "Do.\n\nThis.",
        "Done.",
    ]


def test_sharegpt_calls_and_observations_become_tool_turns() -> None:
    turns = [
        {"from": "human", "value": "When?"},
        {"from": "function_call", "value": '{"name": "table", "arguments": {"train": "IC 5"}}'},
        {"from": "observation", "value": "9:00"},
        {"from": "gpt", "value": "At nine."},
    ]
    row = {"conversations": turns, "system": "S", "tools": '[{"name": "table"}]'}
    converted = convert(row, "sharegpt", DATA)
    assert [t["role"] for t in converted["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert converted["messages"][2]["tool_calls"][0]["function"]["arguments"] == {"train": "IC 5"}
    assert converted["tools"] == [{"type": "function", "function": {"name": "table"}}]


def test_openai_content_parts_and_json_text_are_read() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "When?"}]}, ANSWER]
    assert convert({"messages": parts}, "messages", DATA)["messages"] == [USER, ANSWER]
    cell = {"messages": json.dumps([USER, ANSWER])}
    assert detect_format(cell) == "messages"
    assert convert(cell, "messages", DATA)["messages"] == [USER, ANSWER]


TURNS = {"prompt": [USER], "completion": [ANSWER]}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "row",
    [
        TURNS,
        {"prompt": USER, "completion": ANSWER},
        {"prompt": [USER], "completion": "At nine."},
        {"prompt": "When?", "completion": [ANSWER]},
        {name: json.dumps(value) for name, value in TURNS.items()},
        {
            "prompt": [{"from": "human", "value": "When?"}],
            "completion": [{"from": "gpt", "value": "At nine."}],
        },
    ],
)
def test_prompt_and_completion_may_be_turns(row: dict[str, Any]) -> None:
    """TRL's conversational prompt-completion format. Prompt and completion stay apart: no turn of the prompt is trained
    on."""
    assert detect_format(row) == "prompt_completion"
    assert convert(row, "prompt_completion", DATA) == TURNS
    assert to_text(convert(row, "prompt_completion", DATA)) == "When?\n\nAt nine."
    found = convert({**row, "tools": [{"name": "clock"}]}, "prompt_completion", Data(system_prompt="Be brief."))
    assert found == {**TURNS, "prompt": [SYSTEM, USER], "tools": [{"type": "function", "function": {"name": "clock"}}]}


def test_prompt_of_turns_without_a_completion_has_no_format() -> None:
    assert detect_format({"prompt": [USER]}) is None
    assert detect_format({"prompt": [USER], "completion": None}) is None


def test_json_in_a_prompt_or_a_completion_alone_stays_text() -> None:
    for row in ({"prompt": "When?", "completion": json.dumps([ANSWER])}, {**TURNS, "prompt": "x", "completion": "[]"}):
        messages = convert(row, "prompt_completion", DATA)["messages"]
        assert [turn["content"] for turn in messages] == [row["prompt"], row["completion"]]


BAD = [
    ("alpaca", {"instruction": "a", "answer": "b"}, "no column output; its columns are: instruction, answer"),
    ("alpaca", {"instruction": "a", "output": " "}, "output is empty"),
    ("alpaca", {"instruction": "a", "output": None}, "output contains null"),
    ("alpaca", {"instruction": "a", "output": "b", "input": 3}, "input contains a number"),
    ("alpaca", {"instruction": "a", "output": "b", "history": ["x"]}, "list of [prompt, response] pairs"),
    ("prompt_completion", {"prompt": ["a"], "completion": "b"}, "prompt contains a list"),
    ("prompt_completion", {"prompt": [USER], "completion": [USER]}, "completion begins with a user turn"),
    ("prompt_completion", {"prompt": [USER], "completion": []}, "column completion is an empty list"),
    ("prompt_completion", {"prompt": [USER], "completion": ""}, "column completion is empty"),
    ("prompt_completion", {"prompt": [USER], "completion": 3}, "completion contains a number"),
    ("text", {"text": 5}, "text contains a number"),
    ("messages", {"messages": "hello"}, "contains text; expected a list of turns"),
    ("messages", {"messages": []}, "an empty list"),
    ("messages", {"messages": ["hello"]}, "turn 1 is text"),
    ("messages", {"messages": [{"from": "human", "value": "a"}]}, "no key role; its keys are from, value"),
    ("messages", {"messages": [{"role": "gpt", "content": "a"}]}, "unknown role 'gpt'"),
    ("messages", {"messages": [USER]}, "no assistant turn"),
    ("messages", {"messages": [USER, {"role": "assistant", "content": ""}]}, "turn 2 is an empty assistant turn"),
    ("messages", {"messages": [{"role": "user", "content": 1}, ANSWER]}, "content of turn 1 is a number"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "only text"),
    (
        "sharegpt",
        {"conversations": [{"from": "function_call", "value": "x"}]},
        "function_call without a name",
    ),
]


@pytest.mark.parametrize(("format", "row", "part"), BAD)
def test_an_invalid_example_is_explained(format: str, row: dict[str, object], part: str) -> None:
    problem = example_problem(row, format, DATA)
    assert problem is not None
    assert part in problem


@pytest.mark.parametrize("row", [{}, {"question": "a"}, {"messages": "no"}, {"text": 1}, {"instruction": "a"}])
def test_unknown_formats_are_not_guessed(row: dict[str, object]) -> None:
    assert detect_format(row) is None


FILES = {
    "a.jsonl": '{"text": "one"}\n\n{"text": "two"}\n',
    "b.json": '[\n {"text": "one"},\n\n {"text":\n "two"}]\n',
    "c.json": '{"data": [\n\n{"text": "one"}, {"text": "two"}], "version": 1}',
    "d.csv": 'text,n\r\n"one",1\r\ntwo,2\r\n',
    "e.jsonl": '\ufeff{"text": "one"}\n{"text": "two"}',
    "f.json": '[{"text": "one"}, {"text": "two"}]',
}
LINES = {"a": [1, 3], "b": [2, 4], "c": [3, 3], "d": [2, 3], "e": [1, 2], "f": [1, 1]}


@pytest.mark.parametrize("name", FILES)
def test_files_are_read_with_their_lines(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FILES[name], encoding="utf-8", newline="")
    rows = list(read_examples(path))
    assert [row["text"] for _, row in rows] == ["one", "two"]
    assert [line for line, _ in rows] == LINES[name[0]]
    assert list(read_examples(path, limit=1)) == rows[:1]


def test_long_and_multiline_csv_fields(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text(f'text\n"{"a" * 200_000}\n\nb"\nlast\n', encoding="utf-8")
    rows = list(read_examples(path))
    assert [(line, len(row["text"])) for line, row in rows] == [(2, 200_003), (5, 4)]


def test_parquet_is_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"messages": [[USER, ANSWER]] * 3}), path)
    rows = list(read_examples(path, limit=2))
    assert [line for line, _ in rows] == [1, 2]
    assert detect_format(rows[0][1]) == "messages"
    (tmp_path / "b.parquet").write_text("no")
    with pytest.raises(DataFileError, match="not a valid Parquet file"):
        list(read_examples(tmp_path / "b.parquet"))


BROKEN = {
    "a.jsonl": ('{"text": "one"}\n{"text": \n', 2),
    "b.jsonl": ('{"text": "one"}\n[1]\n', 2),
    "c.json": ('[{"text": "one"},\n{"text": oops}]', 2),
    "d.json": ('[{"text": "one"}\n{"text": "two"}]', 2),
    "e.json": ('[{"text": "one"},\n]', 2),
    "f.json": ('[{"text": "one"}]\n{"text": "two"}', 2),
    "g.json": ('[{"text": "one"},\n1]', 2),
    "h.json": ('{"text": "one"}', 0),
    "i.json": ("", 0),
    "j.csv": ("text\none\na,b\n", 3),
    "k.txt": ('{"text": "one"}\n', 0),
    "l.json": ('[{"text": "one"}', 1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_reported_with_its_line(tmp_path: Path, name: str) -> None:
    text, line = BROKEN[name]
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataFileError) as caught:
        list(read_examples(path))
    assert (caught.value.path, caught.value.line) == (str(path), line)
    assert name in str(caught.value)
    assert caught.value.message


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes('{"text": "café"}'.encode("latin-1"))
    with pytest.raises(DataFileError, match="UTF-8"):
        list(read_examples(tmp_path / "latin.jsonl"))
    with pytest.raises(DataFileError, match="No such file"):
        list(read_examples(tmp_path / "none.jsonl"))


def test_glob_patterns_are_expanded_in_order_without_duplicates(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "odd[1].jsonl"):
        (tmp_path / name).touch()
    assert [p.name for p in expand(["b.jsonl", "?.jsonl"], tmp_path)] == ["b.jsonl", "a.jsonl"]
    assert [p.name for p in expand([str(tmp_path / "odd[1].jsonl")])] == ["odd[1].jsonl"]
    with pytest.raises(DataFileError, match="matches no file"):
        expand(["*.csv"], tmp_path)
    with pytest.raises(DataFileError, match="does not exist"):
        expand(["c.csv"], tmp_path)


def test_a_folder_may_have_characters_of_patterns(tmp_path: Path) -> None:
    """Relative patterns are resolved against the working folder, whose name is no pattern."""
    folder = tmp_path / "work [v2] *?" / "data [new]"
    folder.mkdir(parents=True)
    for name in ("a.jsonl", "b [1].jsonl", "b 1.jsonl"):
        (folder / name).touch()
    for names, base in (
        (["data [new]/?.jsonl"], folder.parent),
        (["*.jsonl"], folder),
        ([f"{folder}/[ac].jsonl"], None),
    ):
        assert expand(names, base)[0] == folder / "a.jsonl"
    assert [path.name for path in expand(["b [1].jsonl", "**/b*"], folder)] == ["b [1].jsonl", "b 1.jsonl"]
    with pytest.raises(DataFileError, match="does not exist"):
        expand(["c.jsonl"], folder)
    with pytest.raises(DataFileError, match=r"matches no file; in a pattern, \[\[\] stands for the character \["):
        expand(["[c]*1].jsonl"], folder)


@pytest.mark.parametrize(
    "example",
    [{"text": "a\ud83d"}, {"messages": [{"role": "user", "content": "\udc00"}, {"role": "assistant", "content": "b"}]}],
)
def test_half_of_a_surrogate_pair_is_named(example: dict[str, Any]) -> None:
    """JSON can escape it, and no tokenizer can encode it."""
    with pytest.raises(InvalidExample, match="half of a surrogate pair"):
        convert(example, "text" if "text" in example else "messages", Data())


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert convert(json.loads('{"text": "\\ud83d\\ude00"}'), "text", Data()) == {"text": "\U0001f600"}
