"""Parts of a chat's conversation: the tools that a prompt offers, and the reasoning before an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from backend.config.data import RESERVED_KWARGS
from backend.data.chat import InvalidExample, as_tool, check_encodable, type_name

USER, TOOL = "user", "tool"  # roles of a prompt
EXAMPLE = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
# What models write around their reasoning: DeepSeek, Qwen and most others, Magistral, Seed, gpt-oss, Command.
MARKERS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|channel|>analysis<|message|>": "<|end|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
# What gpt-oss, after reasoning and without it, and Command write around an answer.
AROUND_ANSWER = {
    "<|start|>assistant<|channel|>final<|message|>": "",
    "<|channel|>final<|message|>": "",
    "<|START_RESPONSE|>": "<|END_RESPONSE|>",
}


class InvalidTools(ValueError):
    """Why tools cannot be given to a chat template; the message is sentences that name the field."""


def parse_tools(text: str) -> list[Mapping[str, Any]]:
    """The tool definitions in a JSON text, in OpenAI's format; empty for ''. Raises InvalidTools."""
    if not text.strip():
        return []
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidTools(f"Tools: this is not valid JSON ({error}). Enter a list such as {EXAMPLE}.") from None
    if not isinstance(found, list):
        raise InvalidTools(f"Tools: expected a list of tool definitions, got {type_name(found)}, as in {EXAMPLE}.")
    tools = [as_tool(tool) if isinstance(tool, Mapping) else {} for tool in found]
    for number, tool in enumerate(tools, 1):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidTools(f"Tools: definition {number} has no function with a name, as in {EXAMPLE}.")
    try:
        check_encodable({"tools": tools})
    except InvalidExample as error:
        raise InvalidTools(f"Tools: the list {error}.") from None
    return tools


def variables_problem(values: Any) -> str:
    """Why these cannot be variables of a chat template, as a sentence; '' if they can."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        return 'Chat template kwargs: expected a JSON object, such as {"enable_thinking": false}.'
    if reserved := sorted(RESERVED_KWARGS & values.keys()):
        return f"Chat template kwargs: remove {', '.join(reserved)}, which the chat sets itself."
    return ""


def opened_by(prompt: str) -> str:
    """The marker with which a rendered prompt begins the model's reasoning; '' if it begins none."""
    return next((begin for begin in MARKERS if prompt.rstrip().endswith(begin)), "")


def split_reasoning(text: str, opened: str = "") -> tuple[str, str] | None:
    """(reasoning, answer) of an output, without the markers around them; None if it has no reasoning. `opened`: the
    marker at the end of its prompt. Reasoning without an end is all of the output so far."""
    for begin, end in MARKERS.items():
        if opened == begin or text.lstrip().startswith(begin):
            reasoning, _, answer = text.lstrip().removeprefix(begin).partition(end)
            return reasoning, without_markers(answer)
    return None


def without_markers(answer: str) -> str:
    """The text of an answer without what its model writes around it."""
    for begin, end in AROUND_ANSWER.items():
        if answer.lstrip().startswith(begin):
            return answer.strip().removeprefix(begin).removesuffix(end)
    return answer
