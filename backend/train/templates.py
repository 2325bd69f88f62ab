"""The chat template of a run, and which tokens of a conversation are answers.

Beside the floors. Imports spec, chatml, journal. Three ways to find the answers, the first that works: the
template's own {% generation %} marks; TRL's training twin of a known template; and the difference that each answer
makes to the rendered text, which needs a template that only ever appends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from trl.chat_template_utils import (
    get_training_chat_template,
    has_generation_markers,
    is_chat_template_stop_token_trained,
)
from trl.data_utils import common_prefix_length

from backend.config import RunSpec
from backend.train.chatml import chatml
from backend.train.run_log import TrainError

Turns = Sequence[Mapping[str, Any]]


class Unlearnable(ValueError):
    """A conversation that the template cannot write, in a sentence."""


def choose(spec: RunSpec, tokenizer: Any) -> None:
    """Give the tokenizer the chat template that `spec` asks for; it is saved with the model. Raises TrainError."""
    if spec.data.chat_template == "chatml":
        tokenizer.chat_template = chatml(tokenizer)
    elif spec.data.chat_template == "file":
        path = Path(spec.data.chat_template_file).expanduser()
        try:
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TrainError(f"data.chat_template_file: {path} cannot be read ({error}).") from error


@dataclass(frozen=True)
class Writer:
    """Writes conversations as tokens with labels: -100 where nothing is to be learned."""

    tokenizer: Any
    marked: str | None  # a template with {% generation %} marks that writes the same text
    everything: bool  # learn all tokens, not the answers alone

    @classmethod
    def of(cls, tokenizer: Any, everything: bool) -> Writer:
        """The best way for this tokenizer's template. Raises TrainError where it has none."""
        template = tokenizer.chat_template
        if not template:
            raise TrainError(
                "This model has no chat template: set data.chat_template to chatml, or to a file of your own."
            )
        if isinstance(template, dict):
            template = template.get("default") or next(iter(template.values()))
        if everything or has_generation_markers(template):
            return cls(tokenizer, template, everything)
        try:
            return cls(tokenizer, get_training_chat_template(tokenizer), everything)
        except (ValueError, TemplateError):  # none that TRL knows
            return cls(tokenizer, None, everything)

    @property
    def stops(self) -> bool:
        """Whether the end of an answer is learned too: some marks end before it, and the loss looks as well."""
        if self.everything or self.marked is None:
            return True
        return bool(is_chat_template_stop_token_trained(self.tokenizer, chat_template=self.marked))

    def prompt(self, turns: Turns, tools: Any = None) -> str:
        """What the model sees before it answers. Raises Unlearnable."""
        return self._text(turns, tools, add_generation_prompt=True)

    def tokens(self, turns: Turns, tools: Any = None) -> tuple[list[int], list[int]]:
        """(input ids, labels) of a conversation, every answer of it learned. Raises Unlearnable."""
        if self.marked is None:
            return self._by_difference(turns, tools)
        try:
            written = self.tokenizer.apply_chat_template(
                self._fitting(turns),
                tools=tools,
                chat_template=self.marked,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=not self.everything,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise Unlearnable(f"the chat template refuses it: {error}") from error
        ids = list(written["input_ids"])
        if self.everything:
            return ids, list(ids)
        mask = written["assistant_masks"]
        return ids, [token if learned else -100 for token, learned in zip(ids, mask, strict=True)]

    def answers(self, prompt: Turns, answers: Sequence[Turns], tools: Any = None) -> tuple[list[int], list[list[int]]]:
        """Ids of a prompt, and of what each answer adds: from where the ids are no longer the prompt's, since some
        templates and tokenizers write its end in another way when an answer follows. Raises Unlearnable."""
        alone = self._ids(self._text(prompt, tools, add_generation_prompt=True))
        whole = [self._ids(self._text([*prompt, *answer], tools)) for answer in answers]
        shared = min(common_prefix_length(alone, ids) for ids in whole)
        return alone[:shared], [ids[shared:] for ids in whole]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _by_difference(self, turns: Turns, tools: Any) -> tuple[list[int], list[int]]:
        whole, spans = self._text(turns, tools), []
        for number, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            before = self._text(turns[:number], tools, add_generation_prompt=True)
            after = self._text(turns[: number + 1], tools)
            if not (after.startswith(before) and whole.startswith(after)):
                raise Unlearnable(
                    "the chat template rewrites earlier turns, so the answers cannot be told from the rest: "
                    "set data.loss_on to all_tokens, or give a data.chat_template_file with {% generation %} marks"
                )
            spans.append((len(before), len(after.rstrip())))
        try:
            written = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError as error:
            raise Unlearnable(
                "this slow tokenizer cannot tell answers from the rest: set data.loss_on to all_tokens"
            ) from error
        ids, offsets = written["input_ids"], written["offset_mapping"]
        learned = [any(start < b and e > a for a, b in spans) for start, e in offsets for start in [start]]
        return ids, [token if yes else -100 for token, yes in zip(ids, learned, strict=True)]

    def _text(self, turns: Turns, tools: Any, **more: Any) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(self._fitting(turns), tools=tools, tokenize=False, **more))
        except (TemplateError, TypeError, ValueError) as error:
            raise Unlearnable(f"the chat template refuses it: {error}") from error

    def _fitting(self, turns: Turns) -> list[dict[str, Any]]:
        """Turns as the template can write them: calls become text where it knows no calls."""
        if "tool_calls" in str(self.tokenizer.chat_template):
            return [dict(turn) for turn in turns]
        return [
            {**turn, "content": json.dumps([call["function"] for call in turn["tool_calls"]], ensure_ascii=False)}
            if turn.get("tool_calls")
            else dict(turn)
            for turn in turns
        ]
