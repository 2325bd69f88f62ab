"""What LLaMA-Factory does not read in an example as Footplate does, and the form in which it reads all of it."""

import json
from pathlib import Path

import pytest

from backend.config import Data
from backend.data import convert, llamafactory
from backend.inspect import inspect_inputs
from backend.inspect.facts import InputFacts
from backend.presets import read

ASK, ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "12:00"}
TOOLS = [{"type": "function", "function": {"name": "now"}}]
READ = [
    ("messages", {"messages": [{"role": "system", "content": "s"}, ASK, ANSWER, ASK, ANSWER], "id": 1}),
    ("messages", {"messages": [ASK, ANSWER], "tools": json.dumps(TOOLS)}),
    ("sharegpt", {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "a"}]}),
    ("alpaca", {"instruction": "?", "input": "", "output": "a", "history": [["?", "a"]]}),
    ("prompt_completion", {"prompt": "?", "completion": "a"}),
    ("text", {"text": "a", "tools": TOOLS}),
    ("pairs", {"prompt": "?", "chosen": "a", "rejected": "b"}),
    ("pairs", {"messages": [ASK], "chosen": ANSWER, "rejected": ANSWER}),
    ("labels", {"prompt": "?", "completion": "a", "label": True}),
    ("labels", {"messages": [ASK, ANSWER], "label": False}),
]
NOT_READ = [
    ("messages", {"messages": [ASK, ASK, ANSWER]}, "turns of user and assistant do not alternate"),
    ("messages", {"messages": [ASK, ANSWER, ASK]}, "turns of user and assistant"),
    ("messages", {"messages": [{"role": "developer", "content": "s"}, ASK, ANSWER]}, "turns of user and assistant"),
    ("messages", {"messages": [ASK, CALLING, RESULT, ANSWER]}, "a turn has tool calls"),
    ("messages", {"messages": [ASK, {**ANSWER, "reasoning_content": "hm"}]}, "a turn has its reasoning"),
    ("messages", {"messages": [{**ASK, "content": [{"type": "text", "text": "?"}]}, ANSWER]}, "the content of a turn"),
    ("messages", {"messages": json.dumps([ASK, ANSWER])}, "the conversation is not a list"),
    ("messages", {"messages": [ASK, ANSWER], "tools": TOOLS}, "the tools are not JSON text"),
    ("messages", {"messages": [ASK, ANSWER], "chat_template_kwargs": {"x": 1}}, "there are variables"),
    ("sharegpt", {"conversations": [{"from": "user", "value": "?"}, {"from": "gpt", "value": "a"}]},
     "turns of human and gpt do not alternate"),
    ("alpaca", {"instruction": "?", "output": "a", "history": '[["?", "a"]]'}, "the history is not a list"),
    ("prompt_completion", {"prompt": "?", "completion": "a", "reasoning": "hm"}, "the reasoning is in a column"),
    ("prompt_completion", {"prompt": [ASK], "completion": [ANSWER]}, "prompt and completion are not both texts"),
]  # fmt: skip
PAIR, LABELED = {"prompt": "?", "chosen": "a", "rejected": "b"}, {"prompt": "?", "completion": "a", "label": True}
OTHER = "the prompt and the completions are in other columns, or of other types, than in the first example"
AFTER = [  # the first example, another one, and what is not read of it
    ("pairs", PAIR, {**PAIR, "chosen": [ANSWER]}, OTHER),
    ("pairs", PAIR, {"instruction": "?", "chosen": "a", "rejected": "b"}, OTHER),
    ("pairs", PAIR, {**PAIR, "reasoning": "hm"}, "the reasoning is in a column of its own"),
    ("pairs", PAIR, {**PAIR, "system": "s"}, "the column system has a value"),
    ("pairs", {"prompt": [ASK], "chosen": ANSWER, "rejected": ANSWER},
     {"prompt": [ASK, ANSWER], "chosen": ANSWER, "rejected": ANSWER}, "turns of user and assistant do not alternate"),
    ("labels", LABELED, {**LABELED, "label": 1}, OTHER),
    ("labels", {"prompt": [ASK, ANSWER], "label": True}, {"prompt": [ASK], "completion": ANSWER, "label": True}, OTHER),
]  # fmt: skip
NO_FORM = [
    ("pairs", {"prompt": "?", "chosen": [ANSWER], "rejected": [ANSWER]}),
    ("pairs", {"prompt": [ASK], "chosen": ANSWER, "rejected": {"from": "gpt", "value": "a"}}),
    ("pairs", {"chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER]}),
    ("pairs", {"prompt": json.dumps([ASK]), "chosen": "a", "rejected": "b"}),
    ("labels", {"prompt": "?", "completion": "a", "label": 1}),
    ("labels", {"prompt": [ASK], "completion": ANSWER, "label": True}),
]
PLAIN = Path("a.jsonl")


@pytest.mark.parametrize(("format", "example"), READ)
def test_examples_that_are_read(format, example):
    assert llamafactory.difference(example, format, Data(), example, PLAIN) == ""


@pytest.mark.parametrize(("format", "example", "words"), NOT_READ)
def test_examples_that_are_not_read(format, example, words):
    convert(example, format, Data())  # which Footplate reads
    assert llamafactory.difference(example, format, Data(), example, PLAIN).startswith(words)


@pytest.mark.parametrize(("format", "first", "example", "words"), AFTER)
def test_preferences_are_read_like_the_first_one(format, first, example, words):
    for each in (first, example):
        convert(each, format, Data())
    assert llamafactory.difference(first, format, Data(), first, PLAIN) == ""
    assert llamafactory.difference(example, format, Data(), first, PLAIN).startswith(words)


@pytest.mark.parametrize(("format", "example"), NO_FORM)
def test_preferences_of_other_forms_are_not_read(format, example):
    convert(example, format, Data())
    assert llamafactory.form(example, format, Data()) == ""


def test_columns_are_those_of_the_first_example():
    first = {"instruction": "?", "output": "a"}
    for name, value in {"input": "b", "history": [["?", "a"]], "system": "s", "tools": json.dumps(TOOLS)}.items():
        assert f"the column {name} has" in llamafactory.difference(
            {**first, name: value}, "alpaca", Data(), first, PLAIN
        )


def as_read(example, format, stage="sft"):
    return llamafactory.as_read(convert(example, format, Data()), stage)


def test_what_is_written_is_read():
    """Tool calls become turns of their own, and tools become text; what has no such form is left out."""
    (line,) = as_read({"messages": [ASK, CALLING, RESULT, ANSWER], "tools": TOOLS}, "messages")
    called = {"role": "function_call", "content": '{"name": "now", "arguments": {"zone": "UTC"}}'}
    assert line["messages"] == [ASK, called, RESULT, ANSWER] and json.loads(line["tools"]) == TOOLS
    developer = {"role": "developer", "content": [{"type": "text", "text": "s"}]}
    assert as_read({"messages": [developer, ASK, ANSWER]}, "messages")[0]["messages"][0] == {
        "role": "system",
        "content": "s",
    }
    for rejected in ([ASK, ASK, ANSWER], [ASK, {**ANSWER, "reasoning": "hm"}], [ASK, {**CALLING, "content": "so"}]):
        assert as_read({"messages": rejected}, "messages") == []
    assert as_read({"messages": [ASK, ANSWER]}, "messages", "pretraining") == [{"text": "?\n\na"}]


def test_both_completions_of_a_pair_are_labeled_for_kto():
    found = as_read({"prompt": "?", "chosen": "a", "rejected": "b"}, "pairs", "kto")
    assert [(line["messages"][1]["content"], line["kto_tag"]) for line in found] == [("a", True), ("b", False)]
    assert llamafactory.columns_of(found) == {"messages": "messages", "kto_tag": "kto_tag"}


def test_they_are_counted(tmp_path):
    rows = [{"messages": turns} for turns in ([ASK, ANSWER], [ASK, ASK, ANSWER], [ASK, ASK, ANSWER])]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "spec.yaml").write_text('{data: {source: files, files: ["a.jsonl"]}}')
    facts: InputFacts = inspect_inputs(read(tmp_path / "spec.yaml"), tmp_path)
    assert facts.unlike_llamafactory == (("turns of user and assistant do not alternate", 2),)
