"""What of a conversation is trained on: reasoning, tool calls and weights of turns, with the templates of published
models; and what is not trained on is counted or refused by name."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
import trl
from datasets import Dataset
from fork_server import ForkServer
from pyarrow import parquet
from training_runs import make_spec
from transformers import AutoTokenizer, GenerationConfig

from backend.config import Data
from backend.data import InvalidExample, convert, read_examples, unpair
from backend.data.reading import read_parquet_in_process
from backend.inspect import examples
from backend.inspect.facts import InputFacts
from backend.models import trained as trained_model
from backend.runs.folder import Run
from backend.train import completion_start, data, end_tokens, generation_eval, tokenize_examples
from backend.train import examples as train_examples
from backend.train.data import ExampleTokenizer
from backend.train.examples import ConvertedExample
from backend.train.preference_data import PreferenceTokenizer
from backend.train.run_log import TrainError
from backend.train.template_input import names_in
from backend.train.templates import ChatTokenizer, UnmarkedCompletions, set_defaults

PUBLISHED = Path(trl.__file__).parent / "chat_templates"
QUESTION = {"role": "user", "content": "Next IC to Bern?"}
ANSWER = {"role": "assistant", "content": "At nine."}
OTHER_WEIGHT = "unread weight of a turn that is not an assistant turn"
TOOL = {"type": "function", "function": {"name": "timetable", "parameters": {"type": "object", "required": []}}}
# Templates of models: DeepSeek V3 concatenates the arguments with text; another writes whatever it gets.
CONCATENATES = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}{% for t in m['tool_calls'] %}"
    "```json\n{{ PART }}```{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer(tiny: Path) -> Any:
    found = AutoTokenizer.from_pretrained(tiny)
    found.bos_token = found.bos_token or "<|endoftext|>"
    return found


def published(tokenizer: Any, name: str) -> ChatTokenizer:
    tokenizer.chat_template = (PUBLISHED / f"{name}.jinja").read_text()
    return ChatTokenizer.create(tokenizer, False)


def calling(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call00000", "type": "function", "function": {"name": "timetable", "arguments": arguments}}
    result = {"role": "tool", "content": "9:00", "tool_call_id": "call00000"}
    return [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, result, ANSWER]


def converted(row: Mapping[str, Any], format: str = "messages") -> dict[str, Any]:
    return convert(row, format, Data())


def trained(chat: ChatTokenizer, value: Mapping[str, Any]) -> list[str]:
    """The parts with a loss, as text."""
    ids, labels = chat.tokenize(value["messages"], value)
    assert [label for label in labels if label != -100] == [
        i for i, label in zip(ids, labels, strict=True) if label >= 0
    ]
    text = "".join("\0" if label == -100 else chat.tokenizer.decode([label]) for label in labels)
    return [part for part in text.split("\0") if part]


def count(chat: ChatTokenizer | None, value: dict[str, Any]) -> Counter[str]:
    tokenizer = chat.tokenizer if chat else AutoTokenizer.from_pretrained("gpt2")
    return ExampleTokenizer(tokenizer, chat, False, 512)(ConvertedExample("here", value))[1]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", ["qwen3", "gptoss", "glm4moe"])
def test_reasoning_is_trained_where_the_template_has_it(tokenizer: Any, name: str, key: str) -> None:
    chat = published(tokenizer, name)
    value = converted({"messages": [QUESTION, {**ANSWER, key: "The IC leaves at nine."}]})
    assert "The IC leaves at nine." in "".join(trained(chat, value))
    assert not [counted for counted in count(chat, value) if counted.startswith("unread")]


def test_what_the_template_does_not_read_is_counted(tokenizer: Any) -> None:
    """By name, except ids, sources and the like. A template may read reasoning and still leave it out."""
    more = {"reasoning_content": "Nine.", "emotion": "calm", "loss": 2.5, "id": "7", "source": "web", "refusal": None}
    value = converted({"messages": [QUESTION | {"weight": 1}, ANSWER | more], "tools": [TOOL]})
    found = count(ChatTokenizer.create(tokenizer, False), value)
    assert {key for key in found if key.startswith("unread")} == {
        "unread reasoning_content", "unread emotion", "unread loss", OTHER_WEIGHT, "unread the column tools",
    }  # fmt: skip
    qwen = count(published(tokenizer, "qwen3"), value)
    assert {key for key in qwen if key.startswith("unread")} == {"unread emotion", "unread loss", OTHER_WEIGHT}
    value = converted({"messages": [QUESTION, ANSWER], "loss_mask": [2, 1]})
    found = count(ChatTokenizer.create(tokenizer, False), value)
    assert "unread loss_mask of a turn that is not an assistant turn" in found


def test_a_system_column_next_to_another_system_prompt_is_counted(tokenizer: Any) -> None:
    row = {"messages": [{"role": "system", "content": "Own."}, QUESTION, ANSWER], "system": "Other."}
    found = count(ChatTokenizer.create(tokenizer, False), converted(row))
    assert {key for key in found if key.startswith("unread")} == {"unread the system prompt in column system"}


def test_weights_of_examples_are_counted(tokenizer: Any) -> None:
    """No loss uses them; a weight of 1 says nothing, and a column that an option names is not a weight."""
    row = {"messages": [QUESTION, ANSWER], "weight": 0.5, "masks": [0, 1], "sample_weight": 1, "mask": None}
    found = count(ChatTokenizer.create(tokenizer, False), converted(row))
    unread = {key for key in found if key.startswith("unread")}
    assert unread == {"unread the weights in column weight", "unread the weights in column masks"}
    table = {"weight": "1", "weights": math.nan, "loss_mask": ""}  # cells of CSV and Parquet files
    assert convert({"messages": [QUESTION, ANSWER], **table}, "messages", Data()) == {"messages": [QUESTION, ANSWER]}
    assert "unused_columns" not in convert({"mask": "A text."}, "text", Data(text_column="mask"))
    pair = convert({"prompt": "?", "chosen": "A", "rejected": "B", "weight": 2}, "pairs", Data())
    assert [each["unused_columns"] for each in unpair(pair)] == [["weight"], ["weight"]]
    assert convert({"instruction": "?", "output": "A", "loss_mask": [1, 0]}, "alpaca", Data())["unused_columns"]


@pytest.mark.parametrize(
    ("name", "turn", "what"),
    [
        ("glm4moe", {**ANSWER, "reasoning": "Nine."}, "reasoning"),
        ("gptoss", {**ANSWER, "thinking": "Nine."}, "thinking"),
        ("deepseekv3", {**ANSWER, "content": "<think>\nNine.\n</think>At nine."}, "the content before </think>"),
        ("qwen3", {**ANSWER, "reasoning": {"text": "Nine."}}, "reasoning"),
        ("deepseek_r1_distill", calling({"to": "Bern"})[1], "tool_calls"),
    ],
)
def test_what_the_template_leaves_out_is_counted(tokenizer: Any, name: str, turn: dict[str, Any], what: str) -> None:
    """Most templates drop the reasoning of earlier turns."""
    value = converted({"messages": [QUESTION, turn, QUESTION, ANSWER]})
    assert f"unread {what}" in count(published(tokenizer, name), value)


def test_a_text_next_to_a_call_and_after_a_reasoning_is_not_counted(tokenizer: Any) -> None:
    """The template has line breaks between reasoning and text, and the example has none."""
    thinking = {**calling({"to": "Bern"})[1], "content": "<think>Nine.</think>I look it up."}
    value = converted({"messages": [QUESTION, thinking, *calling("")[2:]]})
    assert not [key for key in count(published(tokenizer, "qwen3"), value) if key.startswith("unread")]


@pytest.mark.parametrize("all_tokens", [False, True])
@pytest.mark.parametrize(
    ("key", "off", "on"), [("weight", 0, 1), ("weight", "0", "1.0"), ("train", "false", True), ("loss", False, None)]
)
@pytest.mark.parametrize("name", ["qwen3", "llama3", "plain"])
def test_turns_without_a_loss(tokenizer: Any, name: str, key: str, off: Any, on: Any, all_tokens: bool) -> None:
    chat = published(tokenizer, name) if name != "plain" else None
    if chat is None:
        tokenizer.chat_template = CONCATENATES.replace("PART", "t")  # no markers, and not known to TRL
    chat = ChatTokenizer.create(tokenizer, all_tokens)
    wrong, right = {**ANSWER, "content": "At eight.", key: off}, {**ANSWER, key: on}
    value = converted({"messages": [QUESTION, wrong, {"role": "user", "content": "Sure?"}, right]})
    if name == "qwen3" and all_tokens:  # its own template renders the last turn in another way
        with pytest.raises(UnmarkedCompletions, match=r"a turn has a weight, .* or set data.loss_on to completions"):
            trained(chat, value)
        return
    text = "".join(trained(chat, value))
    assert "At eight." not in text and "At nine.<|im_end|>" in text.replace("<|eot_id|>", "<|im_end|>")
    assert ("Sure?" in text) is all_tokens
    mask = {"messages": [QUESTION, ANSWER, QUESTION, ANSWER], "loss_mask": [0, 0, 0, 1]}
    assert "".join(trained(chat, converted(mask))).count("At nine.") == 1


@pytest.mark.parametrize(
    ("turns", "problem"),
    [
        ([QUESTION, {**ANSWER, "weight": -0.5}], "the weight of turn 2 is -0.5; expected 0 for no loss, or a weight"),
        ([QUESTION, {**ANSWER, "loss_weight": "nan"}], "the loss_weight of turn 2 is 'nan'; expected 0"),
        ([QUESTION, {**ANSWER, "weight": math.inf}], "the weight of turn 2 is inf; expected 0"),
        ([QUESTION, {**ANSWER, "weight": 10**400}], "the weight of turn 2 is 1000.*; expected 0"),
        ([QUESTION, {**ANSWER, "weight": 1001}], "the weight of turn 2 is 1001; .* a weight from 0.001 to 1,000"),
        ([QUESTION, {**ANSWER, "weight": [1]}], r"the weight of turn 2 is \[1\]; expected 0"),
        ([QUESTION, {**ANSWER, "train": 0.5}], "the train of turn 2 is 0.5; expected 1"),
        (
            [QUESTION, {**ANSWER, "weight": 0.5, "loss_weight": 2}],
            "the keys weight and loss_weight of turn 2 contradict",
        ),
        ([QUESTION, {**ANSWER, "weight": 0.5, "train": False}], "the keys weight and train of turn 2 contradict"),
        ([QUESTION, {**ANSWER, "train": "later"}], "the train of turn 2 is 'later'; expected 1"),
        (calling("{'to': 'Bern'")[:2], "the arguments of a tool call of turn 2 are not a JSON object"),
        ([QUESTION, {**ANSWER, "weight": 0, "train": True}], "the keys weight and train of turn 2 contradict"),
    ],
)
def test_weights_that_are_not_supported(turns: Sequence[Any], problem: str) -> None:
    with pytest.raises(InvalidExample, match=problem):
        converted({"messages": turns})


@pytest.mark.parametrize(
    "row", [{"loss_mask": [0, 1]}, {"loss_mask": [0, -0.5, 1]}, {"loss_mask": [0, 1, None]}, {"loss_mask": "yes"}]
)
def test_a_loss_mask_has_a_number_for_each_turn(row: dict[str, Any]) -> None:
    with pytest.raises(InvalidExample, match="column loss_mask is not a list of 3 numbers"):
        converted({"messages": [{"role": "system", "content": "?"}, QUESTION, ANSWER], **row})


@pytest.mark.parametrize(
    ("turn", "mask", "weight"),
    [
        ({"weight": "0.5"}, None, 0.5),
        ({"loss_weight": 2, "train": True}, None, 2.0),
        ({"weight": 2}, [1, 2], 2.0),
        ({"weight": 2}, [0, 1], 2.0),
        ({}, [7, "0.25"], 0.25),
        ({"weight": 1.0}, [1, True], None),
    ],
)
def test_weights_of_turns(turn: dict[str, Any], mask: Any, weight: float | None) -> None:
    value = converted({"messages": [QUESTION, {**ANSWER, **turn}], **({"loss_mask": mask} if mask else {})})
    assert value["messages"][1] == {**ANSWER, **({"loss_weight": weight} if weight else {})}


def test_a_mask_that_contradicts_the_weight_of_a_turn() -> None:
    with pytest.raises(InvalidExample, match=r"turn 2 has the weight 2, and 0.5 in column loss_mask; remove one"):
        converted({"messages": [QUESTION, {**ANSWER, "weight": 2}], "loss_mask": [1, 0.5]})
    value = converted({"messages": [QUESTION, {**ANSWER, "weight": 2}], "loss_mask": [1, 0]})
    assert value["messages"][1] == {**ANSWER, "train": False}


@pytest.mark.parametrize("all_tokens", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "llama3", "plain"])
def test_the_weights_of_tokens(tokenizer: Any, name: str, all_tokens: bool) -> None:
    """Those of the tokens of a turn, with its end, are that of the turn; all others are 1. Ids and labels stay."""
    if name == "plain":
        tokenizer.chat_template = CONCATENATES.replace("PART", "t")
    else:
        published(tokenizer, name)
    chat = ChatTokenizer.create(tokenizer, all_tokens)
    turns = [QUESTION, {**ANSWER, "content": "At eight."}, QUESTION, ANSWER]
    value = converted({"messages": turns, "loss_mask": [0, 0.25, 0, 1]})
    if name == "qwen3" and all_tokens:  # see above
        with pytest.raises(UnmarkedCompletions, match="a turn has a weight"):
            chat.loss_weights(value["messages"])
        return
    columns, _ = ExampleTokenizer(tokenizer, chat, False, 512)(ConvertedExample("here", value))
    ids, labels, weights = (columns[name][0].tolist() for name in ("input_ids", "labels", "loss_weights"))
    assert (ids, labels) == chat.tokenize(turns)
    text = tokenizer.decode([id for id, weight in zip(ids, weights, strict=True) if weight != 1])
    assert "At eight." in text and "At nine" not in text and "Next" not in text
    assert {*weights} == {0.25, 1.0} and chat.loss_weights(turns) is None


# Marks the reasoning and the content of a turn, and no calls.
MARKS_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% if m.reasoning_content %}"
    "{% generation %}<think>{{ m.reasoning_content }}</think>{% endgeneration %}{% endif %}{% if m.content %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.tool_calls[0].function.name }}"
    "<|im_end|>{% endif %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_markers_that_are_not_those_of_turns(tokenizer: Any) -> None:
    """Two parts are marked, and there are two assistant turns, but both parts are of the second one."""
    tokenizer.chat_template = MARKS_PARTS
    question, call, result, answer = calling({})
    turns = [question, {**call, "weight": 0}, result, {**answer, "reasoning_content": "Nine."}]
    chat = ChatTokenizer.create(tokenizer, False)
    assert "".join(trained(chat, converted({"messages": turns}))) == "<think>Nine.</think>At nine.<|im_end|>"
    turns[1]["weight"] = 5
    _, labels = chat.tokenize(converted({"messages": turns})["messages"])
    weights = chat.loss_weights(converted({"messages": turns})["messages"]) or []
    assert {weight for weight, label in zip(weights, labels, strict=True) if label != -100} == {1.0}
    tokenizer.chat_template = "{% if messages[-1].role == 'tool' %}!{% endif %}" + MARKS_PARTS  # rewrites
    with pytest.raises(UnmarkedCompletions, match=r"remove it, or use a data\.chat_template_file"):
        ChatTokenizer.create(tokenizer, False).loss_weights(converted({"messages": turns})["messages"])
    slow = replace(ChatTokenizer.create(tokenizer, True), tokenizer=SimpleNamespace(is_fast=False))
    with pytest.raises(UnmarkedCompletions, match="a turn with a weight cannot be found; remove the weight"):
        slow._require_offsets()


def test_weights_are_refused_where_the_whole_text_is_trained() -> None:
    for weight in (0, 0.5):
        value = converted({"messages": [QUESTION, {**ANSWER, "weight": weight}]})
        with pytest.raises(TrainError, match="here: a turn has a weight, and pretraining"):
            ExampleTokenizer(None, None, True, 64)(ConvertedExample("here", value))
        with pytest.raises(InvalidExample, match=r"column completion has a turn with a weight.*; remove the weight"):
            converted({"prompt": [QUESTION], "completion": [{**ANSWER, "weight": weight}]}, "prompt_completion")
    with pytest.raises(
        InvalidExample, match="column prompt has a turn with a weight; remove the weight, which only SFT"
    ):
        prompt = [QUESTION, {**ANSWER, "weight": 0.5}, QUESTION]
        converted({"prompt": prompt, "completion": [ANSWER]}, "prompt_completion")


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "glm4moe", "gptoss", "deepseekv3", "text", "object"])
def test_tool_calls_are_the_same_tokens_in_all_formats(tokenizer: Any, name: str) -> None:
    """Arguments as an object or as JSON text; OpenAI's tool_calls and function_call; ShareGPT's."""
    if name == "text":
        tokenizer.chat_template = CONCATENATES.replace("PART", "t['function']['arguments'] + '!'")
    elif name == "object":  # Python's string of an object would be wrong
        tokenizer.chat_template = CONCATENATES.replace("PART", "t['function']['arguments'] ~ '!'")
    chat = ChatTokenizer.create(tokenizer, False) if name in ("text", "object") else published(tokenizer, name)
    arguments = {"to": "Bern", "via": ["Olten", "Köln"], "bikes": 2}
    text = json.dumps(arguments, ensure_ascii=False)
    ids, _ = chat.tokenize(converted({"messages": calling(arguments)})["messages"])
    assert chat.tokenize(converted({"messages": calling(text)})["messages"])[0] == ids
    assert "\\" not in chat.tokenizer.decode(ids) and "Köln" in chat.tokenizer.decode(ids)
    assert "'to'" not in chat.tokenizer.decode(ids)
    called = calling(arguments)[1]["tool_calls"][0]["function"]
    called["parameters"] = called.pop("arguments")  # as Llama 3 writes them
    renamed = [QUESTION, {"role": "assistant", "content": "", "function_call": called}, *calling("")[2:]]
    assert chat.tokenize(converted({"messages": renamed})["messages"])[0] == ids
    called["arguments"] = None  # as in a table in which other calls have arguments
    assert chat.tokenize(converted({"messages": renamed})["messages"])[0] == ids
    empty = [chat.tokenize(converted({"messages": calling(given)})["messages"])[0] for given in ({}, "", "{}", None)]
    assert empty[1:] == [empty[0]] * 3


def test_an_openai_function_call_and_functions_are_used(tokenizer: Any) -> None:
    chat = published(tokenizer, "qwen3")
    call = {"name": "timetable", "arguments": '{"to": "Bern"}'}
    turns = [QUESTION, {"role": "assistant", "content": None, "function_call": call}]
    value = converted({"messages": turns, "functions": [TOOL["function"]]})
    assert value["tools"] == [TOOL] and '{"name": "timetable", "arguments": {"to": "Bern"}}' in trained(chat, value)[0]


@pytest.mark.parametrize("all_tokens", [False, True])
def test_a_template_for_tools_renders_conversations_with_tools(tokenizer: Any, all_tokens: bool) -> None:
    """transformers chooses it by its name, tool_use."""
    templates = {"tool_use": published(tokenizer, "qwen3").tokenizer.chat_template, "default": OPENS_THINKING}
    alone, value = {}, converted({"messages": calling({"to": "Bern"}), "tools": [TOOL]})
    for name, tokenizer.chat_template in (*templates.items(), ("both", templates)):
        alone[name] = ChatTokenizer.create(copy.copy(tokenizer), all_tokens)
    for example, name in ((value, "tool_use"), ({"messages": value["messages"]}, "default")):
        both, expected = alone["both"], alone[name]
        assert both.tokenize(example["messages"], example) == expected.tokenize(example["messages"], example)
        assert both.unread(example) == expected.unread(example)
        prompt, completion = example["messages"][:3], example["messages"][3:]
        ids = [chat.tokenize_completions(prompt, [completion], example) for chat in (both, expected)]
        assert ids[0] == ids[1]
        assert completion_start.difference(both, example) == completion_start.difference(expected, example)


def test_calls_and_responses_as_roles(tokenizer: Any) -> None:
    """ms-swift's names."""
    chat, call = published(tokenizer, "qwen3"), {"name": "timetable", "arguments": {"to": "Bern"}}
    turns = [QUESTION, {"role": "tool_call", "content": json.dumps(call)}, {"role": "tool_response", "content": "9:00"}]
    expected = calling({"to": "Bern"})
    assert chat.tokenize(converted({"messages": [*turns, ANSWER]})["messages"]) == chat.tokenize(expected)


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"prompt": "Next IC?", "completion": "At nine."}, "prompt_completion"),
        ({"instruction": "Next IC?", "output": "At nine."}, "alpaca"),
    ],
)
def test_reasoning_in_a_column(tokenizer: Any, row: dict[str, Any], format: str) -> None:
    found = trained(published(tokenizer, "qwen3"), converted({**row, "reasoning": "The IC leaves at nine."}, format))
    assert found == ["<think>\nThe IC leaves at nine.\n</think>\n\nAt nine.<|im_end|>\n"]


def test_text_next_to_a_call_is_kept_by_templates_without_calls(tokenizer: Any) -> None:
    turns = calling({"to": "Bern"})
    turns[1]["content"] = "I look it up."
    found = trained(ChatTokenizer.create(tokenizer, False), converted({"messages": turns}))
    assert found[0].startswith("I look it up.\n[") and '"to": "Bern"' in found[0]


@pytest.mark.parametrize("in_process", [False, True])
def test_parquet_gives_the_tokens_of_jsonl(tokenizer: Any, tmp_path: Path, in_process: bool) -> None:
    """Its structs have the keys of all rows, with nulls."""
    other = [QUESTION, {**ANSWER, "reasoning_content": "Nine."}]
    rows = [{"messages": calling({"to": "Bern"}), "tools": [TOOL]}, {"messages": calling({"from": "Biel"})}]
    rows += [{"messages": other, "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = read_parquet_in_process if in_process else read_examples
    chat = published(tokenizer, "qwen3")
    tokens = [
        [chat.tokenize((value := converted(row))["messages"], value) for _, row in reader(tmp_path / name)]
        for reader, name in ((read, "rows.parquet"), (read_examples, "rows.jsonl"))
    ]
    assert tokens[0] == tokens[1] and "null" not in chat.tokenizer.decode(tokens[0][0][0])


def test_rows_of_the_hub_have_no_padding(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": calling({"to": "Bern"})}, {"messages": calling({"from": "Biel"})}]
    monkeypatch.setattr(train_examples, "load_dataset", lambda *_, **__: Dataset.from_list(rows))
    spec = make_spec({"data.source": "hub", "data.hub_id": "a/b", "data.validation": "none", "data.max_samples": 0})
    prepared = data.prepare(spec, tokenizer, lambda done, of: True, print).train
    expected = [ChatTokenizer.create(tokenizer, False).tokenize(converted(row)["messages"])[0] for row in rows]
    assert sorted(prepared["input_ids"]) == sorted(expected)


@pytest.mark.parametrize(
    ("column", "value"),
    [("images", ["a.png"]), ("image", {"bytes": b"1", "path": None}), ("image", "photos/a.JPG"), ("audio", b"1")],
)
def test_columns_with_media_are_refused(column: str, value: Any) -> None:
    with pytest.raises(InvalidExample, match=f"column {column} is not empty, and only text"):
        converted({"messages": [{**QUESTION, "content": "<image>\nWhat is this?"}, ANSWER], column: value})
    for harmless in (None, [], False, 0, "A photo of a train", "cover.png"):
        assert converted({"messages": [{**QUESTION, "content": "Hi"}, ANSWER], "image": harmless})


def test_generation_leaves_out_turns_without_a_loss(tokenizer: Any, tiny: Path, tmp_path: Path) -> None:
    wrong = {"role": "assistant", "content": "At eight.", "weight": 0}
    rows = [
        {"messages": turns} for turns in ([QUESTION, ANSWER, QUESTION, wrong], [QUESTION, wrong], [QUESTION, ANSWER])
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = str(tmp_path / "rows.jsonl")
    options = {"data.source": "files", "data.files": (files,), "data.validation": "files", "eval.num_generations": 3}
    spec = make_spec({**options, "data.validation_files": (files,), "eval.strategy": "steps"})
    prepared = data.prepare(spec, tokenizer, lambda done, of: True, print)
    prompts = generation_eval.eval_prompts(ChatTokenizer.create(tokenizer, True), prepared.eval_examples)
    assert [prompt.reference for prompt in prompts] == ["At nine.", "At nine."]


def test_the_same_prompt_with_other_ids_is_one_prompt() -> None:
    """Two conversations whose tool calls differ in their ids only begin with the same turns."""
    sides = {}
    for side, id in (("chosen", "a"), ("rejected", "b")):
        turns = calling({"to": "Bern"})
        turns[1]["tool_calls"][0]["id"] = turns[2]["tool_call_id"] = id
        sides[side] = [*turns[:3], {**ANSWER, "content": side, "id": id}]
    value = converted(sides, "pairs")
    assert [turn["role"] for turn in value["prompt"]] == ["user", "assistant", "tool"]


def test_the_reference_is_the_text_that_is_trained(tokenizer: Any) -> None:
    """For tool calls and reasoning too."""
    chat = published(tokenizer, "qwen3")
    rows = [{"messages": calling({"to": "Bern"})[:2]}, {"messages": [QUESTION, {**ANSWER, "reasoning": "Nine."}]}]
    examples = [ConvertedExample("here", converted(row)) for row in rows]
    assert not any(prompt.plain for prompt in generation_eval.eval_prompts(chat, examples)), "there is no judge"
    for prompt, example in zip(generation_eval.eval_prompts(chat, examples, True), examples, strict=True):
        assert prompt.reference + "<|im_end|>" == trained(chat, example.value)[-1].strip()
        assert prompt.reference
        assert prompt.plain == "Next IC to Bern?", "for a judge, without the template"


@pytest.mark.parametrize(("end", "endless"), [("<|im_end|>\n", 0), ("</s>", 1), ("", 1)])
@pytest.mark.parametrize("all_tokens", [False, True])
def test_answers_without_an_end_are_counted(tokenizer: Any, end: str, endless: int, all_tokens: bool) -> None:
    """</s> is not a token of this tokenizer."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}END{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ).replace("END", end)
    chat = ChatTokenizer.create(tokenizer, all_tokens)
    counts = count(chat, converted({"messages": [QUESTION, ANSWER]}))
    assert counts["endless"] == endless and counts[f"unknown end {end}"] == endless


@pytest.mark.parametrize("name", ["plain", "llama3", "endless"])
def test_a_last_turn_without_a_loss_ends_nothing(tokenizer: Any, name: str) -> None:
    """With a loss on all tokens: what it trains last begins that turn. The <|end_header_id|> of Llama 3 would become a
    token that ends generation. The end of the turn before it counts instead."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end_header_id|>", "<|eot_id|>"]})
    if name == "llama3":
        published(tokenizer, name)
    else:
        tokenizer.chat_template = CONCATENATES.replace("PART", "t")
        if name == "endless":
            tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "</s>")
    chat, off = ChatTokenizer.create(tokenizer, True), {**ANSWER, "weight": 0}
    end = tokenizer.convert_tokens_to_ids({"plain": "<|im_end|>", "llama3": "<|eot_id|>"}.get(name, ""))
    trained = (1, 0, ()) if name == "endless" else (0, 0, (end,))
    for turns, expected in (([ANSWER, QUESTION, off], trained), ([off, QUESTION], (0, 1, ())), ([off], (0, 1, ()))):
        counts = count(chat, converted({"messages": [QUESTION, *turns]}))
        assert (counts["endless"], counts["weightless"], end_tokens.counted(counts)) == expected
        assert counts["unknown end </s>"] == counts["endless"]


def test_ends_of_completions(tokenizer: Any) -> None:
    """Of each part with a loss; in the order of their counts, without rare ones."""
    chat = ChatTokenizer.create(tokenizer, False)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    _, labels = chat.tokenize([QUESTION, ANSWER, QUESTION, ANSWER])
    assert chat.ends(labels) == [end, end] and chat.ends([-100, 5]) == [None] and chat.ends([-100]) == []
    assert end_tokens.counted(Counter({"end 5": 100, "end 2": 2000, "end 7": 19, "tokens": 9})) == (2, 5)
    assert end_tokens.counted(Counter({"tokens": 9})) == ()


def test_a_token_within_completions_does_not_end_them(tokenizer: Any) -> None:
    """The <|end|> of gpt-oss ends earlier turns, and the reasoning before the last answer."""
    special = ["<|end|>", "<|return|>", "<|start|>", "<|channel|>", "<|message|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    end, back = tokenizer.convert_tokens_to_ids(special[:2])
    thinking = {**ANSWER, "thinking": "The next one leaves at nine."}
    for last, ends in ((thinking, (back,)), (ANSWER, (end, back))):
        chat = published(tokenizer, "gptoss")
        counts = count(chat, converted({"messages": [QUESTION, ANSWER, QUESTION, last]}))
        assert set(end_tokens.counted(counts)) == set(ends)
    assert end_tokens.counted(Counter({"end 5": 9, "inner 5": 1})) == (5,), "one example has it in its text"
    pair = {"prompt": [QUESTION], "chosen": [thinking], "rejected": [ANSWER]}
    chat = ChatTokenizer.create(tokenizer, True)  # as for all preferences
    _, counts = PreferenceTokenizer(chat, "dpo", 999)(ConvertedExample("here", converted(pair, "pairs")))
    assert (counts[f"inner {end}"], counts[f"end {back}"]) == (1, 1)


def test_a_trained_part_without_text_has_no_end(tokenizer: Any) -> None:
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert published(tokenizer, "qwen3").ends([-100, *newline]) == [None]


def test_examples_in_groups_are_as_each_alone(tokenizer: Any) -> None:
    """Also after one that cannot be rendered."""
    lengths = [1, 2, 60, 40] * 12
    published(tokenizer, "qwen3")
    tokenizer.chat_template = "{% if messages[0].content|length == 80 %}{{ raise_exception('no') }}{% endif %}" + (
        tokenizer.chat_template
    )
    chat = ChatTokenizer.create(tokenizer, False)
    to_columns = ExampleTokenizer(tokenizer, chat, False, 512)
    turns = [[{**QUESTION, "content": "?!" * n}, {**ANSWER, "loss_weight": 1 + n % 2}] for n in lengths]
    values = [ConvertedExample(f"line {n}", converted({"messages": each})) for n, each in enumerate(turns)]
    for example, found in zip(values, to_columns.each(values), strict=True):
        if isinstance(found, TrainError):
            assert str(found) == f"{example.location}: the chat template cannot render it: no."
            continue
        columns, counts = to_columns(example)
        assert str((columns, counts)) == str(found) and len(columns["input_ids"]) == 1
    assert sum(isinstance(each, TrainError) for each in to_columns.each(values)) == 12


def test_a_newline_at_the_end_of_a_template_changes_nothing(tokenizer: Any) -> None:
    """Jinja leaves it out; editors add it."""
    turns = [QUESTION, ANSWER, QUESTION, ANSWER]
    expected = published(tokenizer, "qwen3").tokenize(turns)
    text = (PUBLISHED / "qwen3.jinja").read_text()
    for same in (text.removesuffix("\n"), text.removesuffix("\n") + "\n"):
        tokenizer.chat_template = same
        assert ChatTokenizer.create(tokenizer, False).tokenize(turns) == expected


def test_a_text_that_begins_with_bos_has_no_second_one(tokenizer: Any) -> None:
    tokenizer.add_bos_token = True
    first = tokenizer("a")["input_ids"][0]
    added = SimpleNamespace(bos_token_id=7, eos_token_id=None, eos_token=None)

    def encode(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [7, *([7] if text.startswith("<s>") else []), first]}

    class Tokenizer(SimpleNamespace):
        __call__ = staticmethod(encode)

    to_columns = ExampleTokenizer(Tokenizer(**vars(added)), None, True, 99)
    for text in ("<s>a", "a"):
        (ids,) = to_columns(ConvertedExample("here", {"text": text}))[0]["input_ids"]
        assert ids.tolist() == [7, first]


def test_a_system_turn_that_the_template_replaces_is_named(tokenizer: Any) -> None:
    chat = published(tokenizer, "deepseek_r1_distill")
    first, second = ({"role": "system", "content": f"{name} rule."} for name in ("First", "Second"))
    named = "unread the content of some system turns"
    assert count(chat, converted({"messages": [first, second, QUESTION, ANSWER]}))[named] == 1
    assert not count(chat, converted({"messages": [first, QUESTION, ANSWER]}))[named]


@pytest.mark.parametrize(("known", "kept"), [(None, []), (0, [0]), ([0, 9], [0, 9])])
@pytest.mark.parametrize(("template", "changed"), [("{{ x }}", True), ("{{ x }}{{ eos_token }}", False)])
def test_a_model_gets_the_ends_that_it_does_not_know(
    tokenizer: Any, known: Any, kept: list[int], template: str, changed: bool
) -> None:
    model = SimpleNamespace(generation_config=GenerationConfig(eos_token_id=known))
    tokenizer.chat_template, tokenizer.eos_token = template, "<|endoftext|>"
    end_tokens.apply(model, tokenizer, ())
    assert model.generation_config.eos_token_id == known
    end_tokens.apply(model, tokenizer, (1, 2))
    assert model.generation_config.eos_token_id == [*kept, 1, 2]
    assert tokenizer.eos_token_id == (1 if changed else tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    tokenizer.eos_token = "<|endoftext|>"
    end_tokens.apply(model, tokenizer, (2, 3))  # it knows one of them
    assert model.generation_config.eos_token_id[-3:] == [1, 2, 3] and tokenizer.eos_token == "<|endoftext|>"


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_end_of_the_template_is_saved_with_every_form_of_the_model(
    root: Path, fork_server: ForkServer, tmp_path: Path, ranks: int
) -> None:
    """Two ranks map the prepared data; one trains an adapter."""
    template = "{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}<|im_start|>{% endfor %}"
    (tmp_path / "t.jinja").write_text(template + "{% if add_generation_prompt %}assistant\n{% endif %}")
    changes = {"data.chat_template": "file", "data.chat_template_file": str(tmp_path / "t.jinja")}
    changes |= {"save.strategy": "steps", "save.steps": 3, "save.final_model": True}
    changes |= {"parallel.strategy": "ddp", "launch.nproc_per_node": 2, "method.kind": "full"} if ranks else {}
    folder = fork_server.train(tmp_path / "run", make_spec(changes), ranks)
    for place in (folder / "model", folder / "checkpoints/checkpoint-3"):
        tokens = AutoTokenizer.from_pretrained(place)
        assert tokens.eos_token == "<|im_start|>", place
        assert tokens.eos_token_id in GenerationConfig.from_pretrained(place).eos_token_id, place
    found = trained_model.find(Run(folder))
    assert found and ("GenerationConfig.from_pretrained" in found.code) == (not ranks)


def test_names_that_a_template_reads() -> None:
    read = "{% for m in messages %}{{ m.a }}{{ m['b'] }}{{ m.get('c') }}{% if 'd' in m %}{% generation %}{{ m.d }}"
    keys, variables = names_in(read + "{% endgeneration %}{% endif %}{% endfor %}{# e #}")
    assert keys == {"a", "b", "c", "d", "get"} and {"m", "messages"} <= variables
    assert names_in("{# e #} e {{ 'x' }}") == (frozenset(), frozenset())


def test_the_log_names_what_is_not_used(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [QUESTION, {**ANSWER, "reasoning": "Nine."}]}))
    options = {"data.source": "files", "data.files": (str(tmp_path / "rows.jsonl"),), "data.validation": "none"}
    lines: list[str] = []
    data.prepare(make_spec(options), AutoTokenizer.from_pretrained(tiny), lambda done, of: True, lines.append)
    assert lines[-1].endswith("; reasoning left out in 1."), lines


OPENS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def inspected(tiny: Path, tmp_path: Path, rows: Sequence[Mapping[str, Any]], **more: Any) -> InputFacts:
    """What the check finds in rows, with the template above."""
    (tmp_path / "t.jinja").write_text(OPENS_THINKING)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"data.source": "files", "data.files": ("rows.jsonl",), "data.validation": "none"}
    template = {"data.chat_template": "file", "data.chat_template_file": str(tmp_path / "t.jinja")}
    spec = make_spec({**files, **template, **more})
    sections = {name: getattr(spec, name).model_dump() for name in ("model", "data", "train")}
    found = json.loads(json.dumps(tokenize_examples.inspect(sections, str(tmp_path), str(tiny))))
    return InputFacts(**examples.facts_from(found, spec))


@pytest.mark.parametrize(
    ("kwargs", "rewrites", "words"),
    [
        ({"enable_thinking": False}, False, r"ends the prompt .*</think>.*\(it gets data\.chat_template_kwargs\)"),
        ({}, True, "rewrites earlier messages"),
    ],
)
def test_completions_that_cannot_be_told_from_prompts(
    tokenizer: Any, kwargs: dict[str, Any], rewrites: bool, words: str
) -> None:
    """With thinking off, templates like Qwen3's write an empty reasoning into the prompt, but not into the data."""
    count = "{{ messages | length }}" if rewrites else ""
    tokenizer.chat_template = (
        count + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    with pytest.raises(UnmarkedCompletions, match=words):
        ChatTokenizer.create(tokenizer, False, kwargs).tokenize([QUESTION, ANSWER])
    if not rewrites:
        assert ChatTokenizer.create(tokenizer, False).tokenize([QUESTION, ANSWER])


def test_another_start_is_found_with_its_way_out(tiny: Path, tmp_path: Path) -> None:
    """Reasoning in the data is no different start: it begins as the generation prompt ends."""
    thought = {**ANSWER, "content": "<think>\nNine.\n</think>\nAt nine."}
    rows = [{"messages": [QUESTION, ANSWER]}] * 3 + [{"messages": [QUESTION, thought]}]
    found = inspected(tiny, tmp_path, rows)
    assert (found.num_different_starts, found.num_starts) == (3, 4)
    assert found.start_difference[0] == "<|im_start|>assistant\n<think>\n"
    assert found.start_difference[1].startswith("<|im_start|>assistant\nAt nine.")
    assert found.start_kwargs == '{"enable_thinking": false}'
    with_kwargs = {"data.chat_template_kwargs": found.start_kwargs}
    assert inspected(tiny, tmp_path, rows[:3], **with_kwargs).num_different_starts == 0
    assert inspected(tiny, tmp_path, rows[:3], **with_kwargs, **{"train.stage": "reward"}).num_starts == 0


def test_a_generation_prompt_that_ends_within_a_token(tokenizer: Any) -> None:
    """The texts begin equally, but the tokenizer joins the space with the next word."""
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    chat = ChatTokenizer.create(tokenizer, False)
    start = completion_start.difference(chat, converted({"messages": [QUESTION, ANSWER]}))
    assert start == ("[assistant] ", "[assistant] At nine.<|im_end|>", "tokens")


def test_special_tokens_in_contents_are_found(tiny: Path, tmp_path: Path) -> None:
    wrong = {**QUESTION, "content": "What does <|im_end|> mean?"}
    found = inspected(tiny, tmp_path, [{"messages": [wrong, ANSWER]}, {"messages": [QUESTION, ANSWER]}])
    assert found.special_tokens == (("<|im_end|>", 1),) and found.num_checked == 2


def test_variables_of_the_template(tokenizer: Any) -> None:
    """They come from the option, and for an example from its row, as in TRL; those that are not read are counted."""
    tokenizer.chat_template = OPENS_THINKING
    row = {"messages": [QUESTION, ANSWER], "documents": [{"title": "A"}]}
    given = {**row, "chat_template_kwargs": '{"enable_thinking": false, "style": 1}'}
    for kwargs, value, thinks in [({}, row, True), ({"enable_thinking": False}, row, False), ({}, given, False)]:
        chat = ChatTokenizer.create(tokenizer, False, kwargs)
        assert chat.render_prompt([QUESTION], converted(value)).endswith("<think>\n") == thinks
    own = ChatTokenizer.create(tokenizer, False, {"bos_token": "<s>"}).tokenize([QUESTION, ANSWER])
    assert own == ChatTokenizer.create(tokenizer, False).tokenize([QUESTION, ANSWER])  # which reads no BOS token
    chat = ChatTokenizer.create(tokenizer, False, {"effort": "low"})
    unread = {key.removeprefix("unread ") for key in count(chat, converted(given)) if key.startswith("unread")}
    assert unread == {"the column documents", "style of chat_template_kwargs", "effort of data.chat_template_kwargs"}
    for wrong, problem in [([1], "contains a list"), ({"tools": []}, "has tools, which transformers sets itself")]:
        with pytest.raises(InvalidExample, match=problem):
            converted({**row, "chat_template_kwargs": wrong})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"tools": []}', "which transformers sets itself"),
        ('{"a b": 1}', "not a valid variable name"),
        ("[]", "object"),
    ],
)
def test_wrong_variables_of_the_template(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Data(chat_template_kwargs=text)


@pytest.mark.parametrize("several", [False, True])
def test_variables_become_defaults_of_the_saved_template(tokenizer: Any, several: bool) -> None:
    """A user of the trained model gets the prompt of the training, and can still set another value."""
    tokenizer.chat_template = {"default": OPENS_THINKING, "rag": OPENS_THINKING} if several else OPENS_THINKING
    prompt = {"tokenize": False, "add_generation_prompt": True}
    expected = tokenizer.apply_chat_template([QUESTION], enable_thinking=False, **prompt)
    set_defaults(
        make_spec({"data.chat_template_kwargs": '{"enable_thinking": false, "n": {"a": [null, "\'"]}}'}), tokenizer
    )
    assert tokenizer.apply_chat_template([QUESTION], **prompt) == expected
    assert tokenizer.apply_chat_template([QUESTION], enable_thinking=True, **prompt).endswith("<think>\n")


def test_contents_of_roles_that_a_template_leaves_out_are_counted(tokenizer: Any) -> None:
    value = converted({"messages": calling({"to": "Bern"})})
    assert "unread the content of tool turns" in count(published(tokenizer, "phi3"), value)


def test_reasoning_is_not_written_twice(tokenizer: Any) -> None:
    """Given in the content and in a key; reasonings that differ are both kept."""
    chat = published(tokenizer, "glm4moe")
    turn = {**ANSWER, "content": "<think>Nine.</think>At nine.", "reasoning_content": "Nine."}
    assert "".join(trained(chat, converted({"messages": [QUESTION, turn]}))).count("Nine.") == 1


@pytest.mark.parametrize("stage", ["sft", "kto"])
def test_copies_are_counted_and_dropped_as_the_run_drops_them(tiny: Path, tmp_path: Path, stage: str) -> None:
    pair = {"prompt": "IC?", "chosen": "At nine.", "rejected": "No."}
    row = {"messages": [QUESTION, ANSWER]} if stage == "sft" else pair
    others = [{**row, "system": f"Rule {n}.", "messages": [{**QUESTION, "content": f"{n}?"}, ANSWER]} for n in range(3)]
    (tmp_path / "validation.jsonl").write_text("\n".join(map(json.dumps, [row, others[0] | {"system": "New."}])))
    files = {"data.validation": "files", "data.validation_files": (str(tmp_path / "validation.jsonl"),)}
    options = {**files, "train.stage": stage}
    rows = [row, *others, row, others[1], row]
    found = inspected(tiny, tmp_path, rows, **options)
    assert (found.num_copies, found.num_examples) == (3, 7 * (1 + (stage == "kto")))
    places = (f"{tmp_path}/{name}.jsonl, line {line}" for name, line in (("rows", 5), ("rows", 1), ("validation", 1)))
    copy, first, evaluated = places
    assert found.equal_places == (("copies", copy, first), ("copies_in_validation", evaluated, first))
    options |= {"data.drop_duplicates": True, "data.source": "files", "data.files": (str(tmp_path / "rows.jsonl"),)}
    lines: list[str] = []
    ((train, validation),) = train_examples.select(make_spec(options), lines.append)
    found = inspected(tiny, tmp_path, rows, **options)
    assert (found.num_examples, found.num_validation_examples) == (len(train), len(validation))
    assert len(train) == 4 * (1 + (stage == "kto"))
    assert lines[0] == "3 training examples dropped: equal to an earlier training example."
    assert found.num_copies_in_validation == 1 and "1 validation example" in lines[1]


def test_a_model_that_was_trained_with_variables_is_trained_again(tokenizer: Any) -> None:
    """Its template has the defaults before it, and TRL knows the rest."""
    turns = [QUESTION, ANSWER, QUESTION, ANSWER]
    expected = published(tokenizer, "qwen3").tokenize(turns)
    set_defaults(make_spec({"data.chat_template_kwargs": '{"enable_thinking": false, "n": "x %} y"}'}), tokenizer)
    again = ChatTokenizer.create(tokenizer, False)
    assert again.tokenize(turns) == expected
    assert again.render_prompt(turns[:1]).endswith("<think>\n\n</think>\n\n")


def test_a_value_that_the_template_refuses_is_no_way_out(tokenizer: Any) -> None:
    """The difference is found anyway."""
    refuses = "{% if enable_thinking is defined and not enable_thinking %}{{ raise_exception('No.') }}{% endif %}"
    tokenizer.chat_template = refuses + OPENS_THINKING
    chat, value = ChatTokenizer.create(tokenizer, False), converted({"messages": [QUESTION, ANSWER]})
    assert completion_start.difference(chat, value)
    assert completion_start.kwargs_without_difference(chat, value) is None
