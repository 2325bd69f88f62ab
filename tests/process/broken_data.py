"""Breakages of valid data files: what people who prepare data get wrong.

Each breakage is a function from valid content to broken content: of one example, of all examples, of the bytes of the
file, or of the folder. `code` and `words` are the rule and the message that must name it before the run; without a
code the breakage is harmless, and `usable` is the number of training examples that the run prepares.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet

Row = dict[str, Any]
COUNT, POSITION = 4, 2  # of the examples of a file, and the index of the broken one
NAME = "data"


def user(text: Any = "When?") -> Row:
    return {"role": "user", "content": text}


def assistant(text: Any = "At noon.") -> Row:
    return {"role": "assistant", "content": text}


# Valid examples of each format; `number` makes them different.
VALID: Mapping[str, Callable[[int], Row]] = {
    "messages": lambda number: {"messages": [user(f"When does train {number} leave?"), assistant(f"At {number}.")]},
    "sharegpt": lambda number: {
        "conversations": [{"from": "human", "value": f"Train {number}?"}, {"from": "gpt", "value": f"At {number}."}]
    },
    "alpaca": lambda number: {
        "instruction": f"When does train {number} leave?",
        "input": "",
        "output": f"At {number}.",
    },
    "prompt_completion": lambda number: {"prompt": f"Train {number}?", "completion": f"At {number}."},
    "text": lambda number: {"text": f"Train {number} leaves at {number}."},
    "pairs": lambda number: {"prompt": f"Train {number}?", "chosen": f"At {number}.", "rejected": "Never."},
    "labels": lambda number: {"prompt": f"Train {number}?", "completion": f"At {number}.", "label": number % 2 == 0},
}
STAGES = {"pairs": "dpo", "labels": "kto"}  # of the other formats: sft


@dataclass(frozen=True)
class Breakage:
    """One way to break a data file, and the expected result.

    `line` is the line that the message names, in a file of COUNT examples: 0 is the whole file, -1 the line of the
    broken example. `run_words` are words of the run's own error where it differs.
    """

    code: str = ""
    words: str = ""
    line: int = 0
    usable: int = COUNT
    format: str = "messages"
    suffix: str = ".jsonl"
    example: Callable[[Row], Any] | None = None
    examples: Callable[[list[Row]], list[Any]] | None = None
    content: Callable[[bytes], bytes] | None = None
    files: Callable[[Path], None] | None = None
    names: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    run_words: str = ""

    @property
    def stage(self) -> str:
        return str(self.options.get("train.stage", STAGES.get(self.format, "sft")))

    def write(self, folder: Path, count: int = COUNT, position: int = POSITION) -> tuple[str, ...]:
        """Write `count` examples, of which the one at `position` is broken, and return the paths for data.files."""
        rows: list[Any] = [VALID[self.format](number) for number in range(1, count + 1)]
        if self.example:
            rows[position] = self.example(rows[position])
        if self.examples:
            rows = self.examples(rows)
        content = encode(rows, self.suffix)
        path = folder / f"{NAME}{self.suffix}"
        path.write_bytes(self.content(content) if self.content else content)
        if self.files:
            self.files(path)
        return tuple(name if name[0] == "~" else str(folder / name) for name in self.names) or (str(path),)

    def named_line(self, position: int = POSITION) -> int:
        """The line that the message names."""
        first = 2 if self.suffix in (".csv", ".json") else 1  # the header, the opening bracket
        return first + position if self.line < 0 else self.line


def encode(rows: list[Any], suffix: str) -> bytes:
    """The content of a file of `rows`, one per line."""
    if suffix == ".parquet":
        return to_parquet(arrow.Table.from_pylist(rows))
    if suffix == ".json":
        return ("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n").encode()
    if suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def to_parquet(table: arrow.Table) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


def columns(**values: Any) -> Callable[[bytes], bytes]:
    """A Parquet file with these columns instead of the valid ones of the same name."""

    def change(content: bytes) -> bytes:
        table = pyarrow.parquet.read_table(io.BytesIO(content))
        for name, value in values.items():
            table = table.set_column(table.column_names.index(name), name, value)
        return to_parquet(table)

    return change


def turns(*turns: Any, **more: Any) -> Callable[[Row], Row]:
    """An example with these messages."""
    return lambda row: {"messages": [*turns], **more}


def sets(**values: Any) -> Callable[[Row], Row]:
    """The example with other values in some columns."""
    return lambda row: {**row, **values}


def without(name: str) -> Callable[[Row], Row]:
    return lambda row: {key: value for key, value in row.items() if key != name}


def all_set(**values: Any) -> Callable[[list[Row]], list[Any]]:
    """Every example with these values."""
    return lambda rows: [{**row, **values} for row in rows]


def replaces(old: str, new: str, encoding: str = "utf-8") -> Callable[[bytes], bytes]:
    """The file with `new` instead of the first `old`."""

    def change(content: bytes) -> bytes:
        assert old.encode() in content
        return content.replace(old.encode(), new.encode(encoding), 1)

    return change


def before_third(text: str) -> Callable[[bytes], bytes]:
    """The file with `text` before its third conversation."""
    return replaces(THIRD, text + THIRD)


def content(new: str | bytes) -> Callable[[bytes], bytes]:
    """A file with this content."""
    return lambda old: new if isinstance(new, bytes) else new.encode()


def as_turns(*third: Row) -> Callable[[list[Row]], list[Any]]:
    """Prompts with completions as lists of turns (TRL's conversational format); `third` is the third completion."""

    def convert(rows: list[Row]) -> list[Any]:
        made = [{"prompt": [user(r["prompt"])], "completion": [assistant(r["completion"])]} for r in rows]
        return [{**row, "completion": [*third]} if third and n == 2 else row for n, row in enumerate(made)]

    return convert


THIRD = '{"messages": [{"role": "user", "content": "When does train 3'


def zipped(old: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.jsonl", old)
    return buffer.getvalue()


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def numbered(number: int) -> str:
    """The text of the valid example `number` as JSON, as a part of a file."""
    return json.dumps(VALID["messages"](number))


CALL = {"type": "function", "function": {"name": "timetable", "arguments": {"train": 3}}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": {}}}
LONG = "When does the train leave? " * 200


def call(**values: Any) -> Callable[[Row], Row]:
    """An example with a tool call that lacks its content."""
    return turns(
        user(), {"role": "assistant", "content": None, **values}, {"role": "tool", "content": "9"}, assistant()
    )


TURNS = {
    "role names of another format": Breakage(
        "DAT003", "unknown role 'human'", -1, example=turns({"role": "human", "content": "a"}, assistant())
    ),
    "role in capitals": Breakage(
        "DAT003", "unknown role 'User'", -1, example=turns({"role": "User", "content": "a"}, assistant())
    ),
    "role is null": Breakage(
        "DAT003", "turn 1 has the role null", -1, example=turns({**user(), "role": None}, assistant()),
    ),
    "role and content swapped": Breakage(
        "DAT003", "unknown role 'When", -1, example=turns({"role": "When?", "content": "user"}, assistant())
    ),
    "no role": Breakage("DAT003", "turn 1 has no key role", -1, example=turns({"content": "a"}, assistant())),
    "very long role": Breakage(
        "DAT003", r"unknown role 'x{60}\.\.\.'", -1, example=turns({"role": "x" * 9999, "content": "a"}, assistant())
    ),
    "empty assistant turn": Breakage(
        "DAT003", "turn 2 is an empty assistant turn", -1, example=turns(user(), assistant("")),
    ),
    "assistant turn of whitespace": Breakage(
        "DAT003", "turn 2 is an empty assistant turn", -1, example=turns(user(), assistant(" \n\t\u3000"))
    ),
    "assistant turn is null": Breakage(
        "DAT003", "turn 2 is an empty assistant", -1, example=turns(user(), assistant(None)),
    ),
    "user turn is null": Breakage(
        "DAT003", "the content of turn 1 is null; expected text", -1, example=turns(user(None), assistant())
    ),
    "empty user turn": Breakage(example=turns(user(""), assistant())),
    "content under another key": Breakage(
        "DAT003", "turn 1 has no key content; its keys are role, text", -1,
        example=turns({"role": "user", "text": "a"}, assistant()),
    ),
    "content is a number": Breakage("DAT003", "content of turn 2 is a number", -1, example=turns(user(), assistant(5))),
    "content is NaN": Breakage(
        "DAT003", "content of turn 2 is NaN", -1, example=turns(user(), assistant(float("nan"))),
    ),
    "content is a boolean": Breakage(
        "DAT003", "content of turn 1 is a boolean", -1, example=turns(user(True), assistant()),
    ),
    "content is a list of text parts": Breakage(
        example=turns(user([{"type": "text", "text": "When?"}]), assistant([{"type": "text", "text": "At noon."}]))
    ),
    "content is a list of strings": Breakage(
        "DAT003", "content of turn 1 is a list; expected text", -1, example=turns(user(["When?"]), assistant())
    ),
    "content part is an image": Breakage(
        "DAT003", "content part of type image_url", -1, example=turns(user([{"type": "image_url"}]), assistant())
    ),
    "content part without text": Breakage(
        "DAT003", "content part of turn 2 is null; expected text", -1,
        example=turns(user(), assistant([{"type": "text", "text": None}])),
    ),
    "no assistant turn": Breakage("DAT003", "has no assistant turn", -1, example=turns(user(), user("Sure?"))),
    "assistant turn first": Breakage(example=turns(assistant(), user(), assistant())),
    "user turn last": Breakage(example=turns(user(), assistant(), user("Sure?"))),
    "two system turns": Breakage(
        example=turns({"role": "system", "content": "A"}, {"role": "system", "content": "B"}, user(), assistant())
    ),
    "no turns": Breakage("DAT003", "column messages is an empty list", -1, example=turns()),
    "messages is null": Breakage("DAT003", "column messages contains null", -1, example=sets(messages=None)),
    "turns in a nested list": Breakage("DAT003", "turn 1 is a list", -1, example=turns([user(), assistant()])),
    "turns are strings": Breakage("DAT003", "turn 1 is text", -1, example=turns("When?", "At noon.")),
    "messages as Python text": Breakage(
        "DAT003", "column messages contains text; expected a list of turns", -1, example=sets(messages=str([user()]))
    ),
    "messages as JSON text": Breakage(example=sets(messages=json.dumps([user(), assistant()]))),
    "first example has Python text": Breakage(
        "DAT002", r"has columns that match no data format \(messages: text\)",
        examples=lambda rows: [{"messages": str([user()])}, *rows[1:]],
    ),
    "tool calls are text": Breakage(
        "DAT003", "tool_calls of turn 2 is text; expected a list", -1, example=call(tool_calls="timetable(3)")
    ),
    "tool call without a function": Breakage(
        "DAT003", "tool call of turn 2 has no function with a name", -1, example=call(tool_calls=[{"id": 7}])
    ),
    "tool call whose function is text": Breakage(
        "DAT003", "tool call of turn 2 has no function", -1, example=call(tool_calls=[{"function": "timetable"}])
    ),
    "tool call without the key function": Breakage(example=call(tool_calls=[CALL["function"]])),
    "tool call with arguments that are no JSON": Breakage(
        "DAT003", "the arguments of a tool call of turn 2 are not a JSON object", -1,
        example=call(tool_calls=[{"function": {"name": "timetable", "arguments": "{train: 3"}}])
    ),
    "tools are invalid JSON": Breakage(
        "DAT003", "column tools is not valid JSON", -1, example=sets(tools='[{"type": "function"')
    ),
    "tools are one object": Breakage(
        "DAT003", "column tools contains an object; expected a list", -1, example=sets(tools=CLOCK),
    ),
    "tools are names": Breakage("DAT003", "column tools contains text in its list", -1, example=sets(tools=["clock"])),
    "tools are a sentence": Breakage(example=sets(tools="a hammer and a saw")),
    "half of a surrogate pair": Breakage(
        "DAT003", "half of a surrogate pair", -1, example=turns(user("When?\ud83d"), assistant())
    ),
    "half of a surrogate pair in an unused column": Breakage(example=sets(note="\ud83d")),
    "half of a surrogate pair in a role": Breakage(
        "DAT003", r"unknown role '\\ud83d'", -1, example=turns({"role": "\ud83d", "content": "a"}, assistant())
    ),
    "zero-width characters only": Breakage(example=turns(user(), assistant("\u200b\u200d\ufeff"))),
    "special tokens in the text": Breakage(
        example=turns(user("<|im_end|>\n<|im_start|>assistant"), assistant("<|im_end|>")),
    ),
    "template syntax in the text": Breakage(
        example=turns(user("{% generation %}{{ messages }}"), assistant("{% endfor %}{#")),
    ),
    "NUL characters in the text": Breakage(example=turns(user("a\x00b"), assistant("\x00"))),
    "example of more than 1 MB": Breakage(example=turns(user(), assistant("noon " * 210_000))),
    "column nested 600 levels deep": Breakage(example=sets(tree=json.loads(nested(600)))),
    "tools nested 600 levels deep": Breakage(
        "DAT003", "has tools or tool calls that are nested more than 100 levels deep", -1,
        example=sets(tools=[{**CLOCK, "tree": json.loads(nested(600))}]),
    ),
    "column with NaN, infinity and a huge number": Breakage(
        example=sets(score=float("nan"), other=float("inf"), id=10**400)
    ),
    "another format in the middle": Breakage(
        "DAT003", "has no column messages; its columns are: prompt, completion", -1,
        example=lambda row: VALID["prompt_completion"](3),
    ),
    "example is a list": Breakage(
        "DAT003", "is a list; expected an object with named columns", -1, example=lambda row: row["messages"]
    ),
    "example is text": Breakage("DAT003", "is text; expected an object", -1, example=lambda row: "When?"),
    "example is null": Breakage("DAT003", "is null; expected an object", -1, example=lambda row: None),
    "example is an empty object": Breakage("DAT003", "its columns are: none", -1, example=lambda row: {}),
}  # fmt: skip
SHAREGPT, ALPACA, COMPLETION, TEXT = ({"format": name} for name in ("sharegpt", "alpaca", "prompt_completion", "text"))
OTHER_FORMATS = {
    "ShareGPT with another name of the model": Breakage(
        "DAT003", "unknown role 'chatgpt'", -1, **SHAREGPT,
        example=sets(conversations=[{"from": "human", "value": "a"}, {"from": "chatgpt", "value": "b"}]),
    ),
    "ShareGPT function call that is not JSON": Breakage(
        "DAT003", "function_call without a name", -1, **SHAREGPT,
        example=sets(conversations=[{"from": "human", "value": "a"}, {"from": "function_call", "value": "x()"}]),
    ),
    "ShareGPT with the keys of messages": Breakage(
        "DAT003", "turn 1 has no key from; its keys are role, content", -1, **SHAREGPT,
        example=sets(conversations=[user(), assistant()]),
    ),
    "Alpaca without output": Breakage("DAT003", "no column output", -1, **ALPACA, example=without("output")),
    "Alpaca output is null": Breakage("DAT003", "column output contains null", -1, **ALPACA, example=sets(output=None)),
    "Alpaca input is null": Breakage(**ALPACA, example=sets(input=None)),
    "Alpaca input is a list": Breakage("DAT003", "input contains a list", -1, **ALPACA, example=sets(input=["a"])),
    "Alpaca history is flat": Breakage(
        "DAT003", "column history must be", -1, **ALPACA, example=sets(history=["a", "b"]),
    ),
    "prompt is null": Breakage("DAT003", "column prompt contains null", -1, **COMPLETION, example=sets(prompt=None)),
    "prompt is a number": Breakage(
        "DAT003", "column prompt contains a number", -1, **COMPLETION, example=sets(prompt=5),
    ),
    "completion is empty": Breakage(
        "DAT003", "column completion is empty", -1, **COMPLETION, example=sets(completion=""),
    ),
    "completion misspelled in one example": Breakage(
        "DAT003", "no column completion; its columns are: prompt, completions", -1, **COMPLETION,
        example=lambda row: {"prompt": "a", "completions": "b"},
    ),
    "prompt and completion swapped": Breakage(
        **COMPLETION, examples=lambda rows: [{"prompt": r["completion"], "completion": r["prompt"]} for r in rows]
    ),
    "conversational prompt and completion": Breakage(**COMPLETION, examples=as_turns()),
    "completion is one turn": Breakage(**COMPLETION, example=lambda row: {**row, "completion": assistant()}),
    "conversational prompt with the completion as text": Breakage(
        **COMPLETION, examples=lambda rows: [{**row, "prompt": [user()]} for row in rows]
    ),
    "conversational prompt and completion for pretraining": Breakage(
        **COMPLETION, examples=as_turns(), options={"train.stage": "pretraining"}
    ),
    "conversational prompt and completion as JSON in a column": Breakage(
        **COMPLETION, suffix=".csv",
        examples=lambda rows: [{name: json.dumps(turns) for name, turns in row.items()} for row in as_turns()(rows)],
    ),
    "conversational prompt and completion for DPO": Breakage(
        "STG002", r"DPO needs pairs.*the format prompt_completion", **COMPLETION, examples=as_turns(),
        options={"train.stage": "dpo"}, run_words="DPO needs",
    ),
    "conversational completion begins with a user turn": Breakage(
        "DAT003", "column completion begins with a user turn; expected an assistant turn", 3, **COMPLETION,
        examples=as_turns(user(), assistant()),
    ),
    "conversational completion without turns": Breakage(
        "DAT003", "column completion is an empty list", 3, **COMPLETION, examples=as_turns(),
        content=replaces('[{"role": "assistant", "content": "At 3."}]', "[]"),
    ),
    "conversational prompt without turns": Breakage(
        "DAT003", "column prompt is an empty list", 3, **COMPLETION, examples=as_turns(),
        content=replaces('[{"role": "user", "content": "Train 3?"}]', "[]"),
    ),
    "prompt is a JSON list of turns": Breakage(
        **COMPLETION, example=sets(prompt=json.dumps([user()]), completion='{"train": 3}')
    ),
    "columns have other names": Breakage(
        "DAT002", r"has columns that match no data format \(Prompt: text, Answer: text\)", **COMPLETION,
        examples=lambda rows: [{"Prompt": row["prompt"], "Answer": row["completion"]} for row in rows],
    ),
    "column name with half of a surrogate pair": Breakage(
        "DAT002", r"data format \('\\ud83d': text\)", **TEXT, examples=lambda rows: [{"\ud83d": "a"} for row in rows],
    ),
    "thousands of columns": Breakage(
        "DAT002", r"\(column0: text, .{0,600} and 1,990 more\)", **TEXT,
        examples=lambda rows: [{f"column{n}": "a" for n in range(2000)} for row in rows],
    ),
    "text is null": Breakage("DAT003", "column text contains null", -1, **TEXT, example=sets(text=None)),
    "text is a list of lines": Breakage("DAT003", "column text contains a list", -1, **TEXT, example=sets(text=["a"])),
    "text of whitespace": Breakage("DAT003", "column text is empty", -1, **TEXT, example=sets(text=" \n")),
    "text of one character": Breakage(**TEXT, example=sets(text="a")),
    "format set to another one": Breakage(
        "DAT003", "has no column text; its columns are: prompt, completion", 1, **COMPLETION,
        options={"data.format": "text"},
    ),
    "column option with a typing error": Breakage(
        "DAT003", "has no column answer; its columns are: prompt, completion", 1, **COMPLETION,
        options={"data.format": "prompt_completion", "data.completion_column": "answer"},
    ),
    "numbers instead of text": Breakage(
        "DAT002", r"has columns that match no data format \(text: number\)", **TEXT,
        examples=lambda rows: [{"text": number} for number, _ in enumerate(rows)],
    ),
    "pretraining on text with one empty line": Breakage(
        "DAT003", "column text is empty", -1, **TEXT, example=sets(text=""), options={"train.stage": "pretraining"}
    ),
    "pretraining on conversations": Breakage(options={"train.stage": "pretraining"}),
    "conversations for DPO": Breakage(
        "STG002", "DPO needs pairs", options={"train.stage": "dpo"}, run_words="DPO needs",
    ),
}  # fmt: skip
PAIRS, LABELS = {"format": "pairs"}, {"format": "labels"}
PREFERENCES = {
    "one pair with identical completions": Breakage(
        **PAIRS, example=lambda row: {**row, "rejected": row["chosen"]}, usable=3
    ),
    **{
        f"identical completions in every pair, {stage}": Breakage(
            "DAT019", "4 of 4 pairs have identical completions", **PAIRS, examples=all_set(chosen="Never."),
            options={"train.stage": stage},
            run_words="In every pair, the chosen and the rejected completion are the same",
        )
        for stage in ("dpo", "orpo", "reward")
    },
    "pair without rejected": Breakage("DAT003", "no column rejected", -1, **PAIRS, example=without("rejected")),
    "rejected is null": Breakage("DAT003", "column rejected contains null", -1, **PAIRS, example=sets(rejected=None)),
    "chosen is empty": Breakage("DAT003", "column chosen is empty", -1, **PAIRS, example=sets(chosen=" ")),
    "pair without a prompt": Breakage("DAT003", "has no prompt column prompt", -1, **PAIRS, example=without("prompt")),
    "chosen is a ranking": Breakage("DAT003", "turn 1 is text", -1, **PAIRS, example=sets(chosen=["a", "b"])),
    "chosen and rejected swapped": Breakage(
        **PAIRS, examples=lambda rows: [{**r, "chosen": r["rejected"], "rejected": r["chosen"]} for r in rows]
    ),
    "pair with different prompts": Breakage(
        "DAT003", "begin with different prompts", -1, **PAIRS,
        example=lambda row: {"chosen": [user(), assistant()], "rejected": [user("Where?"), assistant("Here.")]},
    ),
    "pair with half of a surrogate pair": Breakage(
        "DAT003", "half of a surrogate pair", -1, **PAIRS, example=sets(chosen="\ude00")
    ),
    "one prompt longer than max_length": Breakage(**PAIRS, example=sets(prompt=LONG), usable=3),
    "every prompt longer than max_length": Breakage(
        "DAT017", "None of the 4 examples", **PAIRS, examples=all_set(prompt=LONG), run_words="Raise data.max_length"
    ),
    "pair longer than max_length, reward": Breakage(
        **PAIRS, example=sets(chosen=LONG), options={"train.stage": "reward"}, usable=3
    ),
    "chosen is a JSON list": Breakage(**PAIRS, example=sets(chosen='["Berlin", "Hamburg"]', rejected="[]")),
    "chosen is a JSON object": Breakage(**PAIRS, example=sets(chosen='{"from": "Berlin", "value": "Hamburg"}')),
    "prompt is a JSON object": Breakage(**PAIRS, example=sets(prompt='{"role": "driver", "content": "Berlin"}')),
    "chosen is a conversation as JSON text": Breakage(**PAIRS, example=sets(chosen=json.dumps([assistant()]))),
    "pairs for KTO": Breakage(**PAIRS, options={"train.stage": "kto"}, usable=8),
    "identical pair for KTO": Breakage(
        **PAIRS, options={"train.stage": "kto"}, example=sets(chosen="Never."), usable=8,
    ),
    "labels good and bad": Breakage(
        "DAT002", "column label contains 'bad'; expected true or false", 1, **LABELS,
        examples=lambda rows: [{**row, "label": "good" if row["label"] else "bad"} for row in rows],
        run_words="column label contains 'bad'; expected true or false",
    ),
    "one label is good": Breakage(
        "DAT003", "label contains 'good'; expected true or false", -1, **LABELS, example=sets(label="good"),
    ),
    "labels 1.0 and 0.0": Breakage(
        **LABELS, examples=lambda rows: [{**row, "label": float(row["label"])} for row in rows],
    ),
    "labels true and false as text": Breakage(
        **LABELS, examples=lambda rows: [{**row, "label": str(row["label"])} for row in rows]
    ),
    "labels 1 and -1": Breakage(
        "DAT002", "column label contains -1; expected true or false", 1, **LABELS,
        examples=lambda rows: [{**row, "label": 1 if row["label"] else -1} for row in rows],
    ),
    "one label is a probability": Breakage("DAT003", "label contains 0.5", -1, **LABELS, example=sets(label=0.5)),
    "one label is null": Breakage("DAT003", "column label contains null", -1, **LABELS, example=sets(label=None)),
    "one label is missing": Breakage("DAT003", "no column label", -1, **LABELS, example=without("label")),
    "all labels equal": Breakage(**LABELS, examples=all_set(label=True)),
    "label of a very long text": Breakage(
        "DAT003", "label contains .{10,200}; expected", -1, **LABELS, example=sets(label="x" * 9999)
    ),
    "labels for DPO": Breakage(
        "STG002", "DPO needs pairs", **LABELS, options={"train.stage": "dpo"}, run_words="DPO needs"
    ),
}  # fmt: skip
HTML = "<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head></html>\n"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
LINES = {
    "empty file": Breakage("DAT002", "contains no examples", content=content(""), run_words="no examples"),
    "blank lines only": Breakage("DAT002", "contains no examples", content=content("\n \n\n"), run_words="no examples"),
    "blank lines between examples": Breakage(content=lambda old: old.replace(b"\n", b"\n\n \n")),
    "Windows line endings": Breakage(content=lambda old: old.replace(b"\n", b"\r\n")),
    "old Mac line endings": Breakage(content=lambda old: old.replace(b"\n", b"\r")),
    "no line ending at the end": Breakage(content=bytes.rstrip),
    "byte order mark": Breakage(content=lambda old: b"\xef\xbb\xbf" + old),
    "byte order mark in the middle": Breakage(
        "DAT003", "is not valid JSON: there is a byte order mark in column 1", 3,
        content=before_third("\ufeff"),
    ),
    "UTF-16": Breakage(
        "DAT002", "is UTF-16 text; .*iconv -f utf-16 -t utf-8", content=lambda old: old.decode().encode("utf-16")
    ),
    "UTF-16 without byte order mark": Breakage(
        "DAT002", "is UTF-16 text", content=lambda old: old.decode().encode("utf-16-le")
    ),
    "Latin-1": Breakage(
        "DAT002", "is not UTF-8 text: byte 0xe9 in column 57; .*iconv -f", 3,
        content=replaces("train 3", "caf\u00e9", "latin-1"),
    ),
    "Windows-1252 quotes": Breakage(
        "DAT002", "is not UTF-8 text: byte 0x93", 3, content=replaces("train 3", "\u201ctrain\u201d", "cp1252")
    ),
    "last line truncated": Breakage(
        "DAT003", "is not valid JSON: the line ends within a text", 4, content=lambda old: old[:-20],
    ),
    "NUL bytes at the end": Breakage("DAT003", "is not valid JSON: .*NUL", 5, content=lambda old: old + bytes(512)),
    "key twice in an object": Breakage(content=replaces('"content": "At 3."', '"content": "a", "content": "At 3."')),
    "number of 5,000 digits": Breakage(
        "DAT003", "contains a number with more than 4300 digits", 3, content=before_third('{"id": ' + "9" * 5000 + "}"),
    ),
    "nested too deep": Breakage(
        "DAT003", "is nested too deeply", 3, content=before_third(nested(99_999))
    ),
    "JSON text nested too deep": Breakage(
        "DAT003", "column messages contains text", -1, example=sets(messages=nested(99_999)),
    ),
    "line break inside a string": Breakage(
        "DAT003", r"the line ends within a text .*line break in a text as \\n", 3,
        content=replaces("train 3 ", "train\n3 "),
    ),
    "tab inside a string": Breakage(
        "DAT003", "is not valid JSON: there is a tab within a text", 3, content=replaces("train 3 ", "train\t3 ")
    ),
    "Unicode line separator inside a string": Breakage(content=replaces("train 3 ", "train\u20283\x85")),
    "Python dicts": Breakage(
        "DAT003", "is not valid JSON: there is a single quote in column 2", 1,
        content=content("".join(f"{VALID['messages'](n)}\n" for n in range(4))),
    ),
    "comma at the end of each line": Breakage(
        "DAT003", "is not valid JSON: there is a comma after the object", 1,
        content=lambda old: old.replace(b"\n", b",\n"),
    ),
    "examples without line breaks": Breakage(
        "DAT003", "is not valid JSON: a second object begins", 1, content=lambda old: old.replace(b"\n", b""),
    ),
    "typographic quotes": Breakage(
        "DAT003", "is not valid JSON: there is a typographic quote", 3,
        content=replaces('"content": "At 3."', "\u201ccontent\u201d: \u201cAt 3.\u201d"),
    ),
    "merge conflict": Breakage(
        "DAT003", "is not valid JSON", 3, content=before_third("<<<<<<< HEAD\n")
    ),
    "server-sent events": Breakage(
        "DAT003", "is not valid JSON", 1, content=lambda old: old.replace(b'{"messages"', b'data: {"messages"'),
    ),
    "JSON list in a .jsonl file": Breakage(
        "DAT002", r"contains a JSON list.*rename it to \.json",
        content=lambda old: b"[" + b",\n".join(old.splitlines()) + b"]\n",
    ),
    "JSON list in one line of a .jsonl file": Breakage(
        "DAT002", r"contains a JSON list.*rename it to \.json",
        content=lambda old: b"[" + b", ".join(old.splitlines()) + b"]",
    ),
    "indented objects in a .jsonl file": Breakage(
        "DAT003", "is not valid JSON: .*one object per line", 1,
        content=content("".join(json.dumps(VALID["messages"](n), indent=2) + "\n" for n in range(4))),
    ),
    "HTML page": Breakage("DAT002", "is an HTML page", content=content(HTML)),
    "JSON error of a server": Breakage(
        "DAT002", r"has columns that match no data format \(error: text\)",
        content=content('{"error": "Unauthorized"}\n'),
    ),
    "Git LFS pointer": Breakage("DAT002", "is a Git LFS pointer.*git lfs pull", content=content(LFS)),
    "gzip under .jsonl": Breakage(
        "DAT002", "is compressed with gzip; rename it", content=lambda old: gzip.compress(old),
    ),
    "zip under .jsonl": Breakage("DAT002", "is a zip archive or an Excel workbook", content=zipped),
    "zstd under .jsonl": Breakage("DAT002", "is compressed with zstd", content=content(b"\x28\xb5\x2f\xfd\x04\x58")),
    "pickle under .jsonl": Breakage("DAT002", "is a Python pickle", content=lambda old: pickle.dumps(old)),
    "Parquet under .jsonl": Breakage(
        "DAT002", r"is a Parquet file; .*\.parquet", content=content(to_parquet(arrow.table({"text": ["a"]})))
    ),
    "CSV under .jsonl": Breakage("DAT003", "is not valid JSON", 1, content=content("prompt,completion\na,b\n")),
}  # fmt: skip
JSON = {"suffix": ".json"}
DOCUMENTS = {
    "list under the key data": Breakage(**JSON, content=lambda old: b'{"data": ' + old + b', "version": 2}'),
    "list under the key data after others": Breakage(
        **JSON, content=lambda old: b'{"version": "1.0", "about": {"data": [1]}, "data": ' + old + b"}"
    ),
    "list under another key": Breakage(
        "DAT002", r'must contain a list of examples, or \{"data": \[\.\.\.\]\}', **JSON,
        content=lambda old: b'{"train": ' + old + b"}",
    ),
    "data is an object": Breakage("DAT002", "must contain a list", **JSON, content=content('{"data": {"a": []}}')),
    "one object per line in a .json file": Breakage(
        "DAT002", r"a file with one object per line must be named \.jsonl", **JSON,
        content=content(f"{numbered(1)}\n{numbered(2)}\n"),
    ),
    "columns of lists": Breakage(
        "DAT002", "must contain a list", **JSON, content=content('{"prompt": ["a"], "completion": ["b"]}')
    ),
    "empty list": Breakage("DAT002", "contains no examples", **JSON, content=content("[]"), run_words="no examples"),
    "empty .json file": Breakage("DAT002", "must contain a list", **JSON, content=content("")),
    ".json truncated": Breakage("DAT002", "is not valid JSON", 5, **JSON, content=lambda old: old[:-20]),
    ".json truncated in its list": Breakage(
        "DAT002", "a comma or ] is missing", 5, **JSON, content=lambda old: old[:-2],
    ),
    ".json with a comma at the end": Breakage(
        "DAT002", "is not valid JSON", 6, **JSON, content=replaces("}\n]", "},\n]"),
    ),
    ".json with a comment": Breakage("DAT002", "is not valid JSON", 4, **JSON, content=before_third("// three\n")),
    ".json with a number of 5,000 digits": Breakage(
        "DAT002", "contains a number with more than 4300 digits", 4, **JSON,
        content=before_third('{"id": ' + "9" * 5000 + "},\n"),
    ),
    ".json nested too deep": Breakage(
        "DAT002", "is nested too deeply", 4, **JSON, content=before_third(nested(99_999)),
    ),
    ".json with an invalid example": Breakage("DAT003", "turn 1 is text", -1, **JSON, example=turns("a")),
    ".json with NaN": Breakage(**JSON, example=sets(score=float("nan"))),
    ".json with a byte order mark": Breakage(**JSON, content=lambda old: b"\xef\xbb\xbf" + old),
    ".json in UTF-16": Breakage("DAT002", "is UTF-16 text", **JSON, content=lambda old: old.decode().encode("utf-16")),
    ".json with Latin-1": Breakage(
        "DAT002", "is not UTF-8 text: byte 0xe9", 4, **JSON, content=replaces("train 3", "caf\u00e9", "latin-1"),
    ),
    "gzip under .json": Breakage("DAT002", "is compressed with gzip", **JSON, content=lambda old: gzip.compress(old)),
}  # fmt: skip
CSV: dict[str, Any] = {"suffix": ".csv", **COMPLETION}
TABLES = {
    "only a header": Breakage(
        "DAT002", "contains no examples", **CSV, content=content("prompt,completion\n"), run_words="no examples",
    ),
    "empty .csv file": Breakage("DAT002", "contains no examples", **CSV, content=content(""), run_words="no examples"),
    "no header": Breakage(
        "DAT002", r"has columns that match no data format \(Train 1\?: text, At 1\.: text\)", **CSV,
        content=lambda old: old.partition(b"\n")[2],
    ),
    "unbalanced quotes": Breakage("DAT002", "is not valid CSV", 4, **CSV, content=replaces("Train 3?", '"Train 3?')),
    "backslash before a quote": Breakage(
        "DAT002", "is not valid CSV", 4, **CSV, content=replaces("Train 3?", r'"Train \"3\"?"'),
    ),
    "semicolons": Breakage(**CSV, content=lambda old: old.replace(b",", b";")),
    "tabs": Breakage(**CSV, content=lambda old: old.replace(b",", b"\t")),
    "more fields in one row": Breakage(
        "DAT003", "has more fields \\(3\\) than the header has columns \\(2\\)", 4, **CSV,
        content=replaces("Train 3?", "Train 3, or 4?"),
    ),
    "fewer fields in one row": Breakage(
        "DAT003", "has fewer fields \\(1\\) than the header has columns \\(2\\)", 4, **CSV,
        content=replaces("Train 3?,At 3.", "Train 3?"),
    ),
    "empty field": Breakage("DAT003", "column completion is empty", 4, **CSV, content=replaces("At 3.", "")),
    "column twice": Breakage(
        "DAT002", "has two columns completion", 1, **CSV, content=lambda old: b"prompt,completion,completion\na,b,c\n",
    ),
    "space before a column name": Breakage(
        "DAT002", r"data format \(prompt: text, ' completion': text\)", **CSV, content=replaces("prompt,", "prompt, "),
    ),
    "index column without a name": Breakage(
        **CSV,
        content=lambda old: b"," + old.rstrip().replace(b"\n", b"\n1,"),
    ),
    "numbers as text": Breakage(**CSV, content=replaces("At 3.", "3")),
    "fields with line breaks and commas": Breakage(**CSV, example=sets(completion='At "3",\n\nthen 4.')),
    "CSV with a byte order mark": Breakage(**CSV, content=lambda old: b"\xef\xbb\xbf" + old),
    "CSV with Windows line endings": Breakage(**CSV, content=lambda old: old.replace(b"\n", b"\r\n")),
    "CSV with blank lines": Breakage(**CSV, content=lambda old: old.replace(b"\n", b"\n\n")),
    "CSV in Latin-1": Breakage(
        "DAT002", "is not UTF-8 text: byte 0xe9", 4, **CSV, content=replaces("Train 3", "caf\u00e9", "latin-1"),
    ),
    "CSV in UTF-16": Breakage("DAT002", "is UTF-16 text", **CSV, content=lambda old: old.decode().encode("utf-16")),
    "CSV with NUL bytes": Breakage(**CSV, content=replaces("At 3.", "At\x003.")),
    "Excel workbook under .csv": Breakage("DAT002", "is a zip archive or an Excel workbook", **CSV, content=zipped),
    "HTML page under .csv": Breakage("DAT002", "is an HTML page", **CSV, content=content(HTML)),
    "Git LFS pointer under .csv": Breakage("DAT002", "is a Git LFS pointer", **CSV, content=content(LFS)),
    "conversations as JSON in a column": Breakage(
        suffix=".csv", content=lambda old: encode([{"messages": json.dumps([user(), assistant()])}] * 4, ".csv")
    ),
    "conversations as Python text in a column": Breakage(
        "DAT002", r"has columns that match no data format \(messages: text\)", suffix=".csv",
        content=lambda old: encode([{"messages": str([user(), assistant()])}] * 4, ".csv"),
    ),
    "missing values written as nan": Breakage(**CSV, content=replaces("At 3.", "nan")),
}  # fmt: skip
PARQUET: dict[str, Any] = {"suffix": ".parquet", **COMPLETION}
MAPS = arrow.list_(arrow.map_(arrow.string(), arrow.string()))
TWICE = arrow.Table.from_arrays(
    [arrow.array(["a"]), arrow.array(["b"]), arrow.array(["c"])], ["prompt", "completion", "completion"]
)
CHUNKS = {
    "Parquet truncated": Breakage("DAT002", "is not a valid Parquet file", **PARQUET, content=lambda old: old[:-40]),
    "Parquet truncated to nothing": Breakage("DAT002", "is not a valid Parquet file", **PARQUET, content=content("")),
    "Parquet with damaged pages": Breakage(
        "DAT002", "is not a valid Parquet file|cannot be read", **PARQUET,
        content=lambda old: old[:8] + b"\xff" * 60 + old[68:],
    ),
    "pickle under .parquet": Breakage("DAT002", "is a Python pickle", **PARQUET, content=lambda old: pickle.dumps([1])),
    "Git LFS pointer under .parquet": Breakage("DAT002", "is a Git LFS pointer", **PARQUET, content=content(LFS)),
    "JSON lines under .parquet": Breakage(
        "DAT002", "is not a valid Parquet file", **PARQUET, content=content('{"text": "a"}\n'),
    ),
    "Parquet without rows": Breakage(
        "DAT002", "contains no examples", **PARQUET, run_words="no examples",
        content=lambda old: to_parquet(pyarrow.parquet.read_table(io.BytesIO(old)).slice(0, 0)),
    ),
    "Parquet column of structs": Breakage(
        "DAT002", r"completion: object", **PARQUET, content=columns(completion=arrow.array([{"text": "a"}] * 4))
    ),
    "Parquet column of lists": Breakage(
        "DAT002", r"completion: list", **PARQUET, content=columns(completion=arrow.array([["a"]] * 4))
    ),
    "Parquet column of bytes": Breakage(
        "DAT002", r"completion: binary data", **PARQUET, content=columns(completion=arrow.array([b"a"] * 4))
    ),
    "Parquet column of numbers": Breakage(
        "DAT002", r"completion: number", **PARQUET, content=columns(completion=arrow.array([1, 2, 3, 4]))
    ),
    "Parquet column of times": Breakage(
        "DAT002", r"completion: (datetime|Timestamp)", **PARQUET,
        content=columns(completion=arrow.array([10**18] * 4, arrow.timestamp("ns"))),
    ),
    "Parquet time that Python cannot represent": Breakage(
        "DAT002", r"contains a value that Python cannot represent", **PARQUET,
        content=columns(completion=arrow.array([10**15] * 4, arrow.timestamp("ms"))),
    ),
    "Parquet column of type null": Breakage(
        "DAT002", r"completion: null", **PARQUET, content=columns(completion=arrow.nulls(4))
    ),
    "Parquet with a null": Breakage(
        "DAT003", "column completion contains null", -1, **PARQUET, example=sets(completion=None),
    ),
    "Parquet column of large strings": Breakage(
        **PARQUET, content=columns(completion=arrow.array(["a", "b", "c", "d"], arrow.large_string())),
    ),
    "Parquet column of string views": Breakage(
        **PARQUET, content=columns(completion=arrow.array(["a", "b", "c", "d"], arrow.string_view())),
    ),
    "Parquet dictionary column": Breakage(
        **PARQUET, content=columns(completion=arrow.array(["a", "b", "a", "b"]).dictionary_encode()),
    ),
    "Parquet column twice": Breakage(
        "DAT002", "two columns completion|is not a valid Parquet file", **PARQUET, content=content(to_parquet(TWICE)),
    ),
    "Parquet text that is not UTF-8": Breakage(
        "DAT002", "UTF-8", **PARQUET, content=columns(completion=arrow.array([b"caf\xe9"] * 4).view(arrow.string()))
    ),
    "Parquet conversations": Breakage(suffix=".parquet"),
    "Parquet conversations as maps": Breakage(
        "DAT002", "messages: list", suffix=".parquet",
        content=columns(messages=arrow.array([[[("role", "user"), ("content", "a")]]] * 4, MAPS)),
    ),
    "Parquet labels as 64-bit floats": Breakage(
        **LABELS, suffix=".parquet", content=columns(label=arrow.array([0.0, 1.0, 0.0, 1.0]))
    ),
}  # fmt: skip


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def broken_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("elsewhere.jsonl")


def circular_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def odd_name(path: Path) -> None:
    path.rename(os.fsdecode(os.fsencode(path.parent) + b"/caf\xe9.jsonl"))


def renamed(name: str) -> Callable[[Path], None]:
    def rename(path: Path) -> None:
        path.rename(path.with_name(name))

    return rename


def next_to(name: str, text: str | bytes) -> Callable[[Path], None]:
    """Writes a second file."""

    def write(path: Path) -> None:
        path.with_name(name).write_bytes(text.encode() if isinstance(text, str) else text)

    return write


def zstd(content: bytes) -> bytes:
    return bytes(arrow.compress(content, codec="zstd", asbytes=True))


PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def compressed(suffix: str, pack: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Compresses the file, and gives it this second suffix."""

    def write(path: Path) -> None:
        path.with_name(f"{path.name}{suffix}").write_bytes(pack(path.read_bytes()))
        path.unlink()

    return write


PATHS = {
    "file is missing": Breakage("DAT002", "does not exist", names=("other.jsonl",)),
    "pattern matches no file": Breakage("DAT002", "matches no file", names=("*.csv",)),
    "folder named like a file": Breakage("DAT002", "contains no data files", files=folder_instead),
    "folder instead of a pattern": Breakage(names=(".",)),
    "broken symbolic link": Breakage("DAT002", "No such file|does not exist", files=broken_link),
    "circular symbolic link": Breakage("DAT002", "cannot be read: Too many levels", files=circular_link),
    "named pipe": Breakage("DAT002", "is not a regular file", files=pipe),
    "unreadable permissions": Breakage("DAT002", "cannot be read: Permission denied", files=lambda path: path.chmod(0)),
    "path listed twice": Breakage(names=("data.jsonl", "data.jsonl")),
    "path matched twice": Breakage(names=("data.jsonl", "*.jsonl")),
    "suffix in capitals": Breakage(
        files=renamed("data.JSONL"), names=("data.JSONL",),
    ),
    "unsupported suffix": Breakage(
        "DAT002", "unsupported file type", files=renamed("data.rst"), names=("data.rst",)
    ),
    "JSON named .txt": Breakage(
        "DAT002", "contains JSON, not a document", files=renamed("data.txt"), names=("data.txt",)
    ),
    **{
        f"compressed file {suffix}": Breakage(files=compressed(suffix, pack), names=(f"data.jsonl{suffix}",))
        for suffix, pack in PACKED.items()
    },
    **{
        f"cut file {suffix}": Breakage(
            "DAT002", "cannot be (read|decompressed)", files=compressed(suffix, lambda old, pack=pack: pack(old)[:-9]),
            names=(f"data.jsonl{suffix}",),
        )
        for suffix, pack in PACKED.items()
    },
    "zip archive": Breakage(
        "DAT002", "unsupported file type", files=next_to("data.jsonl.zip", zipped(b"{}")), names=("data.jsonl.zip",),
    ),
    "text under .gz": Breakage("DAT002", "Not a gzipped file", files=renamed("a.jsonl.gz"), names=("a.jsonl.gz",)),
    "bomb of empty lines": Breakage(
        "DAT002", "follows more than 1,000,000 empty lines",
        files=next_to("a.jsonl.gz", gzip.compress(b"\n" * 2_000_000)), names=("a.jsonl.gz",),
    ),
    "bomb of one line": Breakage(
        "DAT002", "is longer than 64 MiB",
        files=next_to("a.jsonl.gz", gzip.compress(bytes(70 * 2**20), 1)), names=("a.jsonl.gz",),
    ),
    "data pasted as a path": Breakage("DAT002", "is not a path|File name too long", names=(numbered(1) * 50,)),
    "home folder of an unknown user": Breakage("DAT002", "does not exist", names=("~nobody-here/data.jsonl",)),
    "file name that is not UTF-8": Breakage(files=odd_name, names=("*.jsonl",)),
    "file name that is not UTF-8, with an error": Breakage(
        "DAT003", "is not valid JSON", 1, content=lambda old: b"{" + old, files=odd_name, names=("*.jsonl",)
    ),
    "empty file next to a valid one": Breakage(files=next_to("more.jsonl", ""), names=("data.jsonl", "more.jsonl")),
    "two files with different formats": Breakage(
        "DAT003", "line 1: has no column messages; its columns are: text", 0, names=("data.jsonl", "more.jsonl"),
        files=next_to("more.jsonl", '{"text": "a"}\n'),
    ),
    "second file with another error": Breakage(
        "DAT003", "more.jsonl, line 1: is not valid JSON", 0, names=("data.jsonl", "more.jsonl"),
        files=next_to("more.jsonl", "{\n"),
    ),
}  # fmt: skip
BREAKAGES = {**TURNS, **OTHER_FORMATS, **PREFERENCES, **LINES, **DOCUMENTS, **TABLES, **CHUNKS, **PATHS}
