"""The prompt of a chat whose model has called a tool: as the model wrote the call, where the template allows that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from trl import chat_template_utils

from backend.config import RunSpec
from backend.inference import chat_prompt
from backend.models.chat_files import TUNED, Request, Turn
from backend.train.run_log import TrainError
from backend.train.templates import ChatTokenizer, UnsupportedConversation

WEATHER = {
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}},
}
TOOLS = json.dumps([{"type": "function", "function": WEATHER}])
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
# Template of TRL -> what its model writes, and the special token that ends it.
CALLS = {
    "qwen3": (HERMES, "<|im_end|>"),
    "gptoss": (
        "<|channel|>analysis<|message|>I ask.<|end|><|start|>assistant to=functions.weather"
        '<|channel|>commentary json<|message|>{"city": "Rome"}',
        "<|call|>",
    ),
    "gemma4": ('<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|>', ""),
}


def render(tiny: Path, template: str, written: str, stop: str, **values: Any) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = getattr(chat_template_utils, f"{template}_chat_template")
    before = Turn(Request(id="a", prompt="Is it warm?"), {TUNED: {"text": written, "stop": stop, "end": "stop token"}})
    request = Request(**{"prompt": '{"degrees": 21}', "role": "tool", "tools": TOOLS, "system": "", **values})
    return chat_prompt.render(RunSpec(), ChatTokenizer.create(tokenizer, True), request, TUNED, [before])


@pytest.mark.parametrize("template", CALLS)
def test_the_result_of_a_tool_is_in_the_prompt(tiny: Path, template: str) -> None:
    found = render(tiny, template, *CALLS[template])
    assert "21" in found["prompt"] and "Rome" in found["prompt"] and found["is_plain"]
    has_calls = "tool_calls" in found["messages"][1]
    assert has_calls == (template != "qwen3"), "as the model wrote it, if the template renders that"
    if has_calls:
        (call,) = found["messages"][1]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
        assert found["messages"][2]["tool_call_id"] == call["id"] and found["messages"][2]["name"] == "weather"


@pytest.mark.parametrize(
    ("template", "values", "error", "words"),
    [
        ("gemma4", {}, UnsupportedConversation, "no tool call is recognized in the previous output"),
        ("gemma4", {"prompt": "warm"}, UnsupportedConversation, "no tool call is recognized"),  # also in the question
        ("gptoss", {}, UnsupportedConversation, "no previous assistant message with a tool call"),
        ("llama3", {}, TrainError, "Clear the field Tools, or run the command without --tools"),
        ("llama3", {"tools": ""}, TrainError, "does not read tools, so a tool result cannot be sent"),
        ("qwen3", {"template_kwargs": {"mood": 1}}, TrainError, "remove mood, which the chat template"),
    ],
)
def test_what_the_model_would_not_see_is_refused(
    tiny: Path, template: str, values: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        render(tiny, template, "No call.", "", **values)
