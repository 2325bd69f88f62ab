"""The chat template of a run, and which tokens of a conversation are trained on.

There are three ways to find the completions, and the first one that works is used: the template's own {% generation %}
markers; TRL's training version of a known template; and the difference that each assistant message makes to the
rendered text, for templates that only append.
"""

from __future__ import annotations

import json
import re
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
from backend.train.run_log import TrainError

Messages = Sequence[Mapping[str, Any]]
IGNORE_INDEX = -100  # the label of tokens without a loss
# For models without a chat template. The loss is on what stands between {% generation %} and {% endgeneration %}:
# the completion and its end. Where ChatML's tokens are not in the vocabulary, the tokenizer's EOS token follows, so
# that the trained model can end its output.
CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] + '<|im_end|>' + END -}}
{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


class UnsupportedConversation(ValueError):
    """A conversation that the chat template cannot render; the message says why."""


class UnmarkedCompletions(UnsupportedConversation):
    """Completions that cannot be told from their prompts in the rendered text. All tokens could be trained on."""


def _reason(error: Exception) -> str:
    """Why a template failed; transformers passes only the special tokens that the tokenizer has."""
    token = re.fullmatch(r"'(\w+)_token' is undefined", str(error))
    return f"it uses {token[1]}_token, and the tokenizer has no {token[1].upper()} token" if token else str(error)


def chatml(tokenizer: Any) -> str:
    """The ChatML template for this tokenizer."""
    known = "<|im_end|>" in tokenizer.get_vocab()
    return CHATML.replace(" + END", "" if known else " + eos_token")


def set_chat_template(spec: RunSpec, tokenizer: Any) -> None:
    """Give the tokenizer the template of data.chat_template; it is saved with the model. Raises TrainError."""
    if spec.data.chat_template == "chatml":
        tokenizer.chat_template = chatml(tokenizer)
    elif spec.data.chat_template == "file":
        path = Path(spec.data.chat_template_file).expanduser()
        try:
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TrainError(f"data.chat_template_file: {path} cannot be read ({error}).") from error


@dataclass(frozen=True)
class ChatTokenizer:
    """Turns conversations into token ids and labels; the label is -100 for tokens without a loss."""

    tokenizer: Any
    marked_template: str | None  # one with {% generation %} markers that renders the same text
    all_tokens: bool  # the loss is on all tokens, not on completions only

    @classmethod
    def create(cls, tokenizer: Any, all_tokens: bool) -> ChatTokenizer:
        """The best way for this tokenizer's template. Raises TrainError if it has none."""
        template = tokenizer.chat_template
        if not template:
            raise TrainError(
                "The model's tokenizer has no chat template: set data.chat_template to chatml, or to file with a "
                "template in data.chat_template_file."
            )
        if isinstance(template, dict):
            template = template.get("default") or next(iter(template.values()))
        if all_tokens or has_generation_markers(template):
            return cls(tokenizer, template, all_tokens)
        try:
            return cls(tokenizer, get_training_chat_template(tokenizer), all_tokens)
        except (ValueError, TemplateError):  # TRL does not know the template
            return cls(tokenizer, None, all_tokens)

    @property
    def trains_stop_token(self) -> bool:
        """Whether the loss includes the token that ends a completion. The markers of some templates leave it out."""
        if self.all_tokens or self.marked_template is None:
            return True
        return bool(is_chat_template_stop_token_trained(self.tokenizer, chat_template=self.marked_template))

    def render_prompt(self, messages: Messages, tools: Any = None) -> str:
        """The text that the model completes. Raises UnsupportedConversation."""
        return self._render(messages, tools, add_generation_prompt=True)

    def tokenize(self, messages: Messages, tools: Any = None) -> tuple[list[int], list[int]]:
        """(input ids, labels) of a conversation with the loss on every completion. Raises UnsupportedConversation."""
        if self.marked_template is None:
            return self._tokenize_by_difference(messages, tools)
        try:
            encoded = self.tokenizer.apply_chat_template(
                self._with_calls_as_text(messages),
                tools=tools,
                chat_template=self.marked_template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=not self.all_tokens,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UnsupportedConversation(f"the chat template cannot render it: {_reason(error)}") from error
        ids = list(encoded["input_ids"])
        if self.all_tokens:
            return ids, list(ids)
        mask = encoded["assistant_masks"]
        return ids, [token if trained else IGNORE_INDEX for token, trained in zip(ids, mask, strict=True)]

    def tokenize_completions(
        self, prompt: Messages, completions: Sequence[Messages], tools: Any = None
    ) -> tuple[list[int], list[list[int]]]:
        """Ids of a prompt, and of what each completion adds: from the first id that differs from the prompt's, because
        some templates and tokenizers render its end differently if a completion follows. Raises
        UnsupportedConversation."""
        alone = self._ids(self._render(prompt, tools, add_generation_prompt=True))
        whole = [self._ids(self._render([*prompt, *completion], tools)) for completion in completions]
        shared = min(common_prefix_length(alone, ids) for ids in whole)
        return alone[:shared], [ids[shared:] for ids in whole]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _tokenize_by_difference(self, messages: Messages, tools: Any) -> tuple[list[int], list[int]]:
        whole, spans = self._render(messages, tools), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], tools, add_generation_prompt=True)
            after = self._render(messages[: number + 1], tools)
            if not (after.startswith(before) and whole.startswith(after)):
                raise UnmarkedCompletions(
                    "the chat template rewrites earlier messages, so completions cannot be told from prompts; set "
                    "data.loss_on to all_tokens, or use a data.chat_template_file with {% generation %} markers"
                )
            spans.append((len(before), len(after.rstrip())))
        try:
            encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError as error:
            raise UnmarkedCompletions(
                "this tokenizer is not a fast tokenizer and has no character offsets, so completions cannot be told "
                "from prompts; set data.loss_on to all_tokens"
            ) from error
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        trained = [any(start < b and end > a for a, b in spans) for start, end in offsets]
        return ids, [token if yes else IGNORE_INDEX for token, yes in zip(ids, trained, strict=True)]

    def _render(self, messages: Messages, tools: Any, **more: Any) -> str:
        if not messages:  # transformers raises "Cannot apply chat template to an empty conversation"
            raise UnsupportedConversation("begins with an assistant turn; add a user or system turn as its prompt")
        messages = self._with_calls_as_text(messages)
        try:
            return str(self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **more))
        except (TemplateError, TypeError, ValueError) as error:
            raise UnsupportedConversation(f"the chat template cannot render it: {_reason(error)}") from error

    def _with_calls_as_text(self, messages: Messages) -> list[dict[str, Any]]:
        """Tool calls become text where the template does not support them."""
        if "tool_calls" in str(self.tokenizer.chat_template):
            return [dict(message) for message in messages]
        return [
            {**message, "content": json.dumps([call["function"] for call in message["tool_calls"]], ensure_ascii=False)}
            if message.get("tool_calls")
            else dict(message)
            for message in messages
        ]
