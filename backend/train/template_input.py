"""What a chat template gets of a conversation: the keys of its turns that it reads, and tool calls in the form that it
expects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, nodes
from transformers.utils import chat_template_utils

from backend.data.chat import REASONING

Messages = Sequence[Mapping[str, Any]]
ALWAYS = ("role", "content", "name", "tool_call_id")  # without a template that reads them, nothing of meaning is lost
ARGUMENTS = {"probe": "value"}
TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}
PYTHON_OBJECT = "{'probe'"  # a template that writes the arguments where it expects a text


@dataclass(frozen=True)
class TemplateInput:
    """`names`: of keys and variables that the template reads; `arguments_as_text`: it expects the arguments of tool
    calls as JSON text."""

    names: frozenset[str]
    arguments_as_text: bool

    @classmethod
    def create(cls, tokenizer: Any, templates: Sequence[str]) -> TemplateInput:
        """For templates that render the same text; the first one renders prompts."""
        names = frozenset(name for template in templates for name in names_in(template))
        return cls(names, "tool_calls" in names and _expects_text(tokenizer, templates[0]))

    def __call__(self, messages: Messages) -> list[dict[str, Any]]:
        """The turns as the template gets them."""
        return [self._turn(message) for message in messages]

    def _turn(self, message: Mapping[str, Any]) -> dict[str, Any]:
        turn = {key: value for key, value in message.items() if key in ALWAYS or self._reads(key)}
        calls = [self._call(call) for call in message.get("tool_calls", ())]
        if calls and "tool_calls" in self.names:
            turn["tool_calls"] = calls
        elif calls:  # the template does not support them: they become text
            text = json.dumps([call["function"] for call in calls], ensure_ascii=False)
            turn["content"] = "\n".join(filter(None, (turn["content"], text)))
        return turn

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A tool call; its arguments may be an object, or the JSON text of one, as in OpenAI's format."""
        function = dict(call["function"])
        arguments = function.get("arguments")
        if self.arguments_as_text and isinstance(arguments, Mapping):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        elif not self.arguments_as_text and isinstance(arguments, str):
            function["arguments"] = _object(arguments)
        return {**call, "function": function}

    def _reads(self, key: str) -> bool:
        """Whether the template reads a key of a turn. transformers gives reasoning to it under all of its names."""
        return key in self.names or (key in REASONING and not self.names.isdisjoint(REASONING))

    def unread(self, messages: Messages, tools: Any = None) -> set[str]:
        """What the turns say that the template does not read."""
        keys = {key for message in messages for key in message}
        as_text = {"tool_calls"} if self.names else set()
        missing = {key for key in keys - {*ALWAYS, "train"} - as_text if not self._reads(key)}
        return missing | ({"tools"} if tools and "tools" not in self.names else set())


def unread(template: TemplateInput | None, value: Mapping[str, Any]) -> set[str]:
    """What the turns of a converted example say that is not trained on; without a template, only their contents are."""
    parts = ("messages", "prompt", "completion", "chosen", "rejected")
    turns = [turn for part in parts for turn in value.get(part, ())]
    return (template or TemplateInput(frozenset(), False)).unread(turns, value.get("tools"))


def names_in(template: str) -> frozenset[str]:
    """The names of the variables and keys that a chat template reads. Raises TemplateError."""
    tree = chat_template_utils._compile_jinja_template(template).environment.parse(template)  # knows {% generation %}
    found = {node.name for node in tree.find_all(nodes.Name)} | {node.attr for node in tree.find_all(nodes.Getattr)}
    constants = [node.arg for node in tree.find_all(nodes.Getitem)]
    constants += [node.args[0] for node in tree.find_all(nodes.Call) if node.args]  # message.get("name")
    constants += [node.expr for node in tree.find_all(nodes.Compare)]  # "name" in message
    return frozenset(found | {each.value for each in constants if isinstance(each, nodes.Const)} - {None})


def _object(text: str) -> Any:
    """The object that a JSON text contains; other texts stay as they are."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _expects_text(tokenizer: Any, template: str) -> bool:
    """Whether only arguments as JSON text are rendered, or objects as Python writes them."""
    text = json.dumps(ARGUMENTS)
    return not _renders(tokenizer, template, ARGUMENTS) and _renders(tokenizer, template, text)


def _renders(tokenizer: Any, template: str, arguments: Any) -> bool:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "a00000000", "type": "function", "function": function}  # some require nine letters and digits
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        text = tokenizer.apply_chat_template(messages, tools=[TOOL], chat_template=template, tokenize=False)
    except (TemplateError, TypeError, ValueError, KeyError):
        return False
    return PYTHON_OBJECT not in str(text)
