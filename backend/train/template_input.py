"""What a chat template gets of a conversation: the keys of its turns that it reads, and tool calls in the form that it
expects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, nodes
from transformers.utils import chat_template_utils

from backend.data.chat import REASONING, SWITCHES, WEIGHTS, parse_json

Messages = Sequence[Mapping[str, Any]]
ALWAYS = ("role", "content", "name", "tool_call_id")  # without a template that reads them, nothing of meaning is lost
COMPLETIONS = ("completion", "chosen", "rejected")
ARGUMENTS = {"probe": "value"}
TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}
PYTHON_OBJECT = "{'probe'"  # a template that writes the arguments where it expects a text


@dataclass(frozen=True)
class TemplateInput:
    """`keys`: of turns that the template reads; `has_tools`: it reads the list of tools; `arguments_as_text`: it
    expects the arguments of tool calls as JSON text."""

    keys: frozenset[str]
    has_tools: bool
    arguments_as_text: bool

    @classmethod
    def create(cls, tokenizer: Any, template: str) -> TemplateInput:
        """What `template` reads; nothing, if it is not valid: then no conversation can be rendered."""
        try:
            keys, variables = names_in(template)
        except TemplateError:
            return PLAIN
        return cls(keys, "tools" in variables, "tool_calls" in keys and _expects_text(tokenizer, template))

    def __call__(self, messages: Messages) -> list[dict[str, Any]]:
        """The turns as the template gets them."""
        return [self._turn(message) for message in messages]

    def _turn(self, message: Mapping[str, Any]) -> dict[str, Any]:
        turn = {key: value for key, value in message.items() if key in ALWAYS or self._reads(key)}
        calls = [self._call(call) for call in message.get("tool_calls", ())]
        if calls and "tool_calls" in self.keys:
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
        elif not self.arguments_as_text and arguments is not None:
            function["arguments"] = parse_json(arguments)
        return {**call, "function": function}

    def _reads(self, key: str) -> bool:
        """Whether the template reads a key of a turn. transformers gives reasoning to it under all of its names."""
        return key in self.keys or (key in REASONING and not self.keys.isdisjoint(REASONING))

    def unread(self, turns: Messages, tools: Any = None) -> set[str]:
        """The parts of turns that the template does not read, as words."""
        found = {"the column tools"} if tools and not self.has_tools else set()
        for turn in turns:
            weights = {key for key in (*WEIGHTS, *SWITCHES) if key in turn and turn["role"] != "assistant"}
            found |= {f"{key} of a turn that is not an assistant turn" for key in weights}
            as_text = ("tool_calls",) if self != PLAIN else ()
            known = {*ALWAYS, "train", *as_text, *weights}
            found |= {key for key in turn.keys() - known if not self._reads(key)}
        return found


PLAIN = TemplateInput(frozenset(), False, False)  # no template: the contents of the turns only


def turns_of(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The turns of a converted example."""
    return [turn for part in ("messages", "prompt", *COMPLETIONS) for turn in value.get(part, ())]


def conversations_of(value: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """The conversations of a converted example: one for each completion."""
    if "messages" in value:
        return [value["messages"]]
    return [[*value["prompt"], *value[part]] for part in COMPLETIONS if part in value]


def may_be_lost(turn: Mapping[str, Any]) -> bool:
    """Whether a turn has reasoning or tool calls."""
    return "tool_calls" in turn or "</think>" in turn["content"] or any(key in turn for key in REASONING)


def lost(turns: Messages, text: str) -> set[str]:
    """The reasoning and tool calls of turns that the text made of them lacks, as words. Templates that read a key may
    still leave it out, such as the reasoning of earlier turns."""
    found = set()
    for turn in turns:
        for key in REASONING:
            if key in turn and not (isinstance(turn[key], str) and turn[key].strip() in text):
                found.add(key)
        thought, end, _ = turn["content"].partition("</think>")
        if end and turn["role"] == "assistant" and thought.removeprefix("<think>").strip() not in text:
            found.add("the content before </think>")
        if any(str(call["function"]["name"]) not in text for call in turn.get("tool_calls", ())):
            found.add("tool_calls")
    return found


def names_in(template: str) -> tuple[frozenset[str], frozenset[str]]:
    """The keys and the variables that a chat template reads. Raises TemplateError."""
    tree = chat_template_utils._compile_jinja_template(template).environment.parse(template)  # knows {% generation %}
    constants = [node.arg for node in tree.find_all(nodes.Getitem)]
    constants += [node.args[0] for node in tree.find_all(nodes.Call) if node.args]  # message.get("name")
    constants += [node.expr for node in tree.find_all(nodes.Compare)]  # "name" in message
    keys = {each.value for each in constants if isinstance(each, nodes.Const) and isinstance(each.value, str)}
    keys |= {node.attr for node in tree.find_all(nodes.Getattr)}
    return frozenset(keys), frozenset(node.name for node in tree.find_all(nodes.Name))


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
