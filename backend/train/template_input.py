"""What a chat template receives of a conversation: the keys of its turns that it reads, and tool calls in the form that
it expects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from transformers.utils import chat_template_utils

from backend.data.chat import LOSS_MASK, LOSS_WEIGHT, REASONING, SWITCHES, TEMPLATE_KWARGS, WEIGHTS, parse_json

Messages = Sequence[Mapping[str, Any]]
ALWAYS = ("role", "content", "name", "tool_call_id")  # no meaning is lost if a template does not read these
PLAIN_KEYS = frozenset(ALWAYS)
COMPLETIONS = ("completion", "chosen", "rejected")
THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*(.*)", re.DOTALL)  # a content that begins with reasoning
# What a template can raise: its own errors, those of the sandbox that it runs in, and Python's.
TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError,
)  # fmt: skip
PROBE = "a-probe"
ARGUMENTS = {"probe": "value"}
PYTHON_OBJECT = "{'probe'"  # a template that writes the arguments where it expects a text
TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}
CALL = {"id": "a00000000", "type": "function"}  # some templates require nine letters and digits
USER, ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}


@dataclass(frozen=True)
class TemplateInput:
    """What a template gets. `keys`: of turns that it reads; `variables`: that it reads besides; `arguments_as_text`:
    it expects the arguments of tool calls as JSON text; `content_as_parts`: it expects lists of parts, as templates of
    vision-language models do; `without`: contents that it leaves out, as words; `thinks_twice`: it writes an empty
    reasoning before a content that begins with one."""

    keys: frozenset[str]
    variables: frozenset[str] = frozenset()
    arguments_as_text: bool = False
    content_as_parts: bool = False
    without: frozenset[str] = frozenset()
    thinks_twice: bool = False

    @classmethod
    def create(cls, tokenizer: Any, template: str) -> TemplateInput:
        """What `template` reads; nothing, if it is not valid: then no conversation can be rendered."""
        try:
            keys, variables = names_in(template)
        except TemplateError:
            return PLAIN
        probe = _Probe(tokenizer, template, keys)
        as_parts = probe.expects_parts()
        probe = _Probe(tokenizer, template, keys, as_parts)
        as_text = "tool_calls" in keys and probe.expects_text()
        return cls(keys, variables, as_text, as_parts, frozenset(probe.left_out(as_text)), probe.thinks_twice())

    def __call__(self, messages: Messages) -> list[dict[str, Any]]:
        """The turns as the template gets them."""
        return [self._turn(message) for message in messages]

    def _turn(self, message: Mapping[str, Any]) -> dict[str, Any]:
        turn = {key: value for key, value in message.items() if key in ALWAYS or self._reads(key)}
        if turn["role"] == "assistant" and (thought := self._thought(turn)):
            turn |= {"reasoning_content": thought[1].strip(), "content": thought[2]}
        calls = [self._call(call) for call in message.get("tool_calls", ())]
        if calls and "tool_calls" in self.keys:
            turn["tool_calls"] = calls
        elif calls:  # the template does not support them: they become text
            text = json.dumps([call["function"] for call in calls], ensure_ascii=False)
            turn["content"] = "\n".join(filter(None, (turn["content"], text)))
        if self.content_as_parts:
            turn["content"] = _parts(turn["content"])
        return turn

    def _thought(self, turn: Mapping[str, Any]) -> re.Match[str] | None:
        """The reasoning at the beginning of a content that the template would write twice: next to an empty one, or
        next to the same one from another key."""
        thought = THOUGHT.fullmatch(turn["content"])
        given = [turn[key] for key in REASONING if key in turn]
        if not thought or self.keys.isdisjoint(REASONING):
            return None
        same = all(isinstance(each, str) and each.strip() == thought[1].strip() for each in given)
        return thought if same and (given or self.thinks_twice) else None

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
        """Whether the template reads a key of a turn. transformers passes reasoning to templates under all of its
        names."""
        return key in self.keys or (key in REASONING and not self.keys.isdisjoint(REASONING))

    def unread(self, turns: Messages, example: Mapping[str, Any]) -> set[str]:
        """The parts of a converted example, whose turns are `turns`, that the template does not read, as words."""
        found = {f"the column {name}" for name in ("tools", "documents") if name in example.keys() - self.variables}
        found |= {f"{name} of {TEMPLATE_KWARGS}" for name in example.get(TEMPLATE_KWARGS, {}).keys() - self.variables}
        for turn in turns:
            if turn.keys() <= PLAIN_KEYS and not self.without:
                continue
            weights = {key for key in (*WEIGHTS, *SWITCHES, LOSS_MASK) if key in turn and turn["role"] != "assistant"}
            found |= {f"{key} of a turn that is not an assistant turn" for key in weights}
            as_text = ("tool_calls",) if self != PLAIN else ()
            known = {*ALWAYS, "train", LOSS_WEIGHT, *as_text, *weights}
            found |= {key for key in turn.keys() - known if not self._reads(key)}
            if self.without and turn["content"]:
                found |= self.without & {f"the content of {turn['role']} turns"}
        return found


PLAIN = TemplateInput(frozenset())  # no template: the contents of the turns only


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


@dataclass(frozen=True)
class _Probe:
    """Renders small conversations with a template, to see what it does."""

    tokenizer: Any
    template: str
    keys: frozenset[str]
    as_parts: bool = False

    def expects_parts(self) -> bool:
        """Whether the template renders contents that are lists of parts, but not texts."""
        user = {**USER, "content": PROBE}
        return PROBE not in self._text([user]) and PROBE in self._text([{**USER, "content": _parts(PROBE)}])

    def expects_text(self) -> bool:
        """Whether the template needs arguments as JSON text: it renders no others, or renders objects as Python writes
        them."""
        return not self._renders_call(ARGUMENTS) and self._renders_call(json.dumps(ARGUMENTS))

    def left_out(self, arguments_as_text: bool) -> Iterator[str]:
        """Kinds of turns whose content the template silently does not render."""
        arguments = json.dumps(ARGUMENTS) if arguments_as_text else ARGUMENTS
        call = {**ANSWER, "content": "", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": arguments}}]}
        result = {"role": "tool", "content": PROBE, "name": "f", "tool_call_id": CALL["id"]}
        conversations: list[list[dict[str, Any]]] = [
            [{"role": "system", "content": PROBE}, USER, ANSWER],
            [USER, call, result, ANSWER],
        ]
        for conversation in conversations:
            text = self._text([self._with_parts(turn) for turn in conversation])
            if text and PROBE not in text:
                yield from (f"the content of {turn['role']} turns" for turn in conversation if PROBE in turn.values())

    def thinks_twice(self) -> bool:
        """Whether the template writes two reasonings for a content that begins with one."""
        turn = {**ANSWER, "content": f"<think>\n{PROBE}\n</think>\n\n!"}
        return self._text([self._with_parts(each) for each in (USER, turn)]).count("<think>") > 1

    def _with_parts(self, turn: dict[str, Any]) -> dict[str, Any]:
        return {**turn, "content": _parts(turn["content"])} if self.as_parts else turn

    def _renders_call(self, arguments: Any) -> bool:
        call = {**CALL, "function": {"name": "f", "arguments": arguments}}
        turns = [self._with_parts(each) for each in (USER, {**ANSWER, "content": ""})]
        text = self._text([turns[0], {**turns[1], "tool_calls": [call]}])
        return bool(text) and PYTHON_OBJECT not in text

    def _text(self, messages: Messages) -> str:
        """What the template makes of these messages; '' if it fails."""
        try:
            found = self.tokenizer.apply_chat_template(
                messages, tools=[TOOL], chat_template=self.template, tokenize=False
            )
        except TEMPLATE_ERRORS:
            return ""
        return str(found)


def turns_of(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The turns of a converted example."""
    return [turn for part in ("messages", "prompt", *COMPLETIONS) for turn in value.get(part, ())]


def conversations_of(value: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """The conversations of a converted example: one for each completion."""
    if "messages" in value:
        return [value["messages"]]
    return [[*value["prompt"], *value[part]] for part in COMPLETIONS if part in value]


def may_be_lost(turns: Messages) -> bool:
    """Whether turns have reasoning, tool calls or several system prompts."""
    return sum(turn["role"] == "system" for turn in turns) > 1 or any(
        "tool_calls" in turn or "</think>" in turn["content"] or any(key in turn for key in REASONING) for turn in turns
    )


def lost(turns: Messages, text: str) -> set[str]:
    """The reasoning, tool calls and system prompts of turns that the text made of them lacks, as words. Templates that
    read a key may still leave it out, such as the reasoning of earlier turns."""
    found = set()
    systems = [turn["content"].strip() for turn in turns if turn["role"] == "system"]
    if len(systems) > 1 and not all(content in text for content in systems):
        found.add("the content of some system turns")
    for turn in turns:
        for key in REASONING:
            if key in turn and not (isinstance(turn[key], str) and turn[key].strip() in text):
                found.add(key)
        thought, end, _ = turn["content"].partition("</think>")
        if end and turn["role"] == "assistant" and thought.removeprefix("<think>").strip() not in text:
            found.add("the content before </think>")
        if any(str(call["function"]["name"]) not in text for call in turn.get("tool_calls", ())):
            found.add("tool_calls")
        answer = turn["content"].rpartition("</think>")[2]  # templates change the whitespace between both
        if turn.get("tool_calls") and answer.strip() not in text:
            found.add("the text next to tool calls")
    return found


@lru_cache(maxsize=16)
def names_in(template: str) -> tuple[frozenset[str], frozenset[str]]:
    """The keys and the variables that a chat template reads. Raises TemplateError."""
    tree = chat_template_utils._compile_jinja_template(template).environment.parse(template)  # knows {% generation %}
    constants = [node.arg for node in tree.find_all(nodes.Getitem)]
    constants += [node.args[0] for node in tree.find_all(nodes.Call) if node.args]  # message.get("name")
    constants += [node.expr for node in tree.find_all(nodes.Compare)]  # "name" in message
    keys = {each.value for each in constants if isinstance(each, nodes.Const) and isinstance(each.value, str)}
    keys |= {node.attr for node in tree.find_all(nodes.Getattr)}
    return frozenset(keys), frozenset(node.name for node in tree.find_all(nodes.Name))
