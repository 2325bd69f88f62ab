"""One conversation is the same tokens in each data format, stage and use, with each template that TRL publishes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trl
from parameters import soak_except
from transformers import AutoTokenizer

from backend.config import Data
from backend.data import convert, unpair
from backend.train import completion_start, generation_eval
from backend.train.data import ExampleTokenizer
from backend.train.examples import ConvertedExample
from backend.train.preference_data import PreferenceTokenizer
from backend.train.templates import IGNORE_INDEX, ChatTokenizer, UnsupportedConversation

PUBLISHED = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in PUBLISHED.glob("*.jinja") if not path.stem.endswith("_training"))
# Those that differ most: how they write roles, reasoning and calls, and what follows the generation prompt.
IN_MAKE_TEST = (
    "cohere2", "deepseek_r1_distill", "deepseekv3", "diffusion_gemma", "gemma4_v5", "glm4moe", "gptoss", "lfm2_v2",
    "llama3_1", "llava_next", "nemotron_3_nano", "phi3", "qwen3", "qwen3_5_nothink", "qwen3_8",
)  # fmt: skip
SPECIAL = re.compile(r"<\W?[\w▁]+\W?>|\[/?[A-Z_]+\]")
SYSTEM = {"role": "system", "content": "Name a time."}
QUESTION, ANSWER = {"role": "user", "content": "Next IC to Bern?"}, {"role": "assistant", "content": "At nine."}
INLINE = {**ANSWER, "content": "<think>\nThe IC leaves at nine.\n</think>\n\nAt nine."}
FUNCTION = {"name": "timetable", "arguments": {"to": "Bern"}}
CALL = {**ANSWER, "content": "", "tool_calls": [{"id": "a00000000", "type": "function", "function": FUNCTION}]}
RESULT = {"role": "tool", "content": "9:00", "name": "timetable", "tool_call_id": "a00000000"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [QUESTION, ANSWER],
    "system": [SYSTEM, QUESTION, ANSWER],
    "two": [QUESTION, ANSWER, {"role": "user", "content": "And to Biel?"}, {"role": "assistant", "content": "At ten."}],
    "reasoning": [QUESTION, {**ANSWER, "reasoning_content": "The IC leaves at nine."}],
    "inline": [QUESTION, INLINE],
    "call": [QUESTION, CALL, RESULT, ANSWER],
    "call_and_text": [QUESTION, {**CALL, "content": "I look it up."}, RESULT, ANSWER],
}
# Generation continues after an open or empty <think>, and the data has none there: see rule DAT026.
OPENS_THINKING = {
    *("deepseek_r1_distill", "deepseekv3", "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super"),
    *("nemotron_3_ultra", "qwen3_5_think", "qwen3_6", "qwen3_8"),
}
SWITCHED = {*OPENS_THINKING, "qwen3_5_nothink"} - {"deepseek_r1_distill", "deepseekv3"}  # by enable_thinking
# TRL's version of these for training differs from what the model's own template makes of a prompt and a completion:
# after a GLM completion stands the next turn's <|user|>, and Qwen's earlier turns keep an empty <think>.
TRAINS_OTHER_TEXT: dict[str, Collection[str]] = {
    "glm4moe": CONVERSATIONS,
    "deepseek_r1_distill": ("inline",),  # its reasoning is left out by the template, and kept by TRL's
    "qwen3": ("two", "call", "call_and_text"),
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), ("two",)),
    "diffusion_gemma": (
        "call",
        "call_and_text",
    ),  # its generation prompt has no <|turn>model after the result of a call
    "gptoss": ("call_and_text",),  # it leaves out the text next to a call when an answer follows
}
OTHER_STARTS = {("qwen3_5_nothink", "reasoning"), ("qwen3_5_nothink", "inline"), ("diffusion_gemma", "call")}
CONTENT = re.compile(r"(?:<think>\n(.*)\n</think>\n\n)?(.*)")


@cache
def own_tokenizer(tiny: Path, name: str) -> Any:
    """With the special tokens of the template."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    template = (PUBLISHED / f"{name}.jinja").read_text()
    tokenizer.add_tokens(sorted({*SPECIAL.findall(template)}), special_tokens=True)
    tokenizer.bos_token = tokenizer.bos_token or "<|endoftext|>"
    tokenizer.chat_template = template
    return tokenizer


def conversations(tokenizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The conversations that the template renders, converted."""
    for case, turns in CONVERSATIONS.items():
        value = convert({"messages": turns}, "messages", Data())
        try:
            ChatTokenizer.create(tokenizer, False).tokenize(value["messages"])
        except UnsupportedConversation as error:  # with its reason, and for Gemma 4 with two fixes
            assert case in ("system", "call", "call_and_text") and re.search("[Rr]oles? |cannot be told", str(error))
        else:
            yield case, value


def without_first_part(labels: list[int]) -> list[int]:
    """The labels without those of the first part that has a loss."""
    start = next(n for n, label in enumerate(labels) if label != IGNORE_INDEX)
    end = start + labels[start:].index(IGNORE_INDEX)
    return [*labels[:start], *[IGNORE_INDEX] * (end - start), *labels[end:]]


def last_completion(ids: list[int], labels: list[int]) -> list[int]:
    end = max(n for n, label in enumerate(labels) if label != IGNORE_INDEX) + 1
    start = max((n for n, label in enumerate(labels[:end]) if label == IGNORE_INDEX), default=-1) + 1
    return ids[start:end]


@pytest.mark.parametrize("name", soak_except(NAMES, IN_MAKE_TEST))
def test_formats_stages_and_uses_agree(tiny: Path, name: str) -> None:
    """Formats of one conversation, completions and all tokens, preference stages, and the generation evaluation."""
    tokenizer = own_tokenizer(tiny, name)
    chat, of_all = ChatTokenizer.create(tokenizer, False), ChatTokenizer.create(tokenizer, True)
    for case, value in conversations(tokenizer):
        ids, labels = chat.tokenize(value["messages"])
        assert {token == label for token, label in zip(ids, labels, strict=True) if label != IGNORE_INDEX} == {True}
        for row, format in other_formats(CONVERSATIONS[case]):
            assert chat.tokenize(convert(row, format, Data())["messages"]) == (ids, labels), (case, format)
        if case == "two":
            turns = [{**turn, "train": number != 1} for number, turn in enumerate(value["messages"])]
            assert chat.tokenize(turns)[1] == without_first_part(labels)
        as_in_generation = case not in TRAINS_OTHER_TEXT.get(name, ())
        every, trained = of_all.tokenize(value["messages"])
        assert every == trained and (every == ids or not as_in_generation), case

        prompt, completion = value["messages"][:-1], value["messages"][-1:]
        before, (after,) = of_all.tokenize_completions(prompt, [completion])
        assert before + after == every, case
        pair = {"prompt": prompt, "chosen": completion, "rejected": [{"role": "assistant", "content": "No."}]}
        for stage, found in preference_ids(of_all, convert(pair, "pairs", Data())).items():
            assert found == every, (case, stage)
        (shown,) = generation_eval.eval_prompts(of_all, [ConvertedExample("here", value)])
        assert shown.reference == tokenizer.decode(after, skip_special_tokens=True).strip()
        if as_in_generation:
            text = tokenizer.decode(last_completion(ids, labels), skip_special_tokens=True).strip()
            assert text.endswith(shown.reference), case


def other_formats(turns: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    names = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}
    shared = [{"from": names[turn["role"]], "value": turn["content"], **more(turn)} for turn in turns]
    found: list[tuple[dict[str, Any], str]] = [({"conversations": shared}, "sharegpt")]
    system = {"system": turns[0]["content"]} if turns[0]["role"] == "system" else {}
    if len(turns) - len(system) == 2:
        question, answer = turns[-2]["content"], turns[-1]["content"]
        texts = {**system, **more(turns[-1])}
        found.append(({"prompt": question, "completion": answer, **texts}, "prompt_completion"))
        found.append(({"instruction": question, "output": answer, **texts}, "alpaca"))
    return found


def more(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in turn.items() if key not in ("role", "content")}


def preference_ids(chat: ChatTokenizer, pair: dict[str, Any]) -> dict[str, list[int]]:
    """The ids of prompt and chosen completion in each preference stage."""
    found = {}
    for stage in ("dpo", "orpo", "reward", "kto"):
        (value, *_) = unpair(pair) if stage == "kto" else [pair]
        columns, _ = PreferenceTokenizer(chat, stage, 4096)(ConvertedExample("here", value))
        first = {key: values[0] for key, values in columns.items()}
        whole = first.get("chosen_input_ids") or (first.get("chosen_ids") if stage == "reward" else None)
        found[stage] = whole or first["prompt_ids"] + (first.get("chosen_ids") or first["completion_ids"])
    return found


@pytest.mark.parametrize("name", soak_except(NAMES, IN_MAKE_TEST))
def test_nothing_is_left_out_without_a_word(tiny: Path, name: str) -> None:
    """Contents and reasoning are in the text, or counted if they are not; and nothing is in it twice."""
    tokenizer = own_tokenizer(tiny, name)
    chat = ChatTokenizer.create(tokenizer, False)
    for case, value in conversations(tokenizer):
        text = tokenizer.decode(chat.tokenize(value["messages"])[0])
        counts = ExampleTokenizer(tokenizer, chat, False, 4096)(ConvertedExample("here", value))[1]
        said = [part for turn in value["messages"] for part in CONTENT.fullmatch(turn["content"]).groups("")]
        said += [turn["reasoning_content"] for turn in value["messages"] if "reasoning_content" in turn]
        said += [FUNCTION["name"]] if "call" in case else []
        left_out = [part for part in said if part not in text]
        assert bool(left_out) == any(key.startswith("unread") for key in counts), (case, left_out)
        assert text.count("<think>") <= sum(turn["role"] == "assistant" for turn in value["messages"]), case


@pytest.mark.parametrize("name", soak_except(NAMES, IN_MAKE_TEST))
def test_generation_begins_as_training_or_it_is_found(tiny: Path, name: str) -> None:
    """By the tokens themselves: the generation prompt is the beginning of what is trained on."""
    tokenizer = own_tokenizer(tiny, name)
    chat = ChatTokenizer.create(tokenizer, False)
    for case, value in conversations(tokenizer):
        prompt = chat.ids(chat.render_prompt(value["messages"][:-1]))
        is_beginning = chat.tokenize(value["messages"])[0][: len(prompt)] == prompt
        different = completion_start.difference(chat, value)
        assert is_beginning == (different is None) or case in TRAINS_OTHER_TEXT.get(name, ()), case
        if different:
            assert name in OPENS_THINKING or (name, case) in OTHER_STARTS, case
        if different and name in SWITCHED:
            thinks = name == "qwen3_5_nothink"
            assert completion_start.kwargs_without_difference(chat, value) == {"enable_thinking": thinks}, case
