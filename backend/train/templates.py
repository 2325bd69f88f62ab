"""The chat template of a run, and which tokens of a conversation are trained on.

There are three ways to find the completions, and the first one that works is used: the template's own {% generation %}
markers; TRL's training version of a known template; and the difference that each assistant message makes to the
rendered text, for templates that only append.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    has_generation_markers,
)
from trl.data_utils import common_prefix_length

from backend.config import RunSpec
from backend.data.chat import LOSS_WEIGHT, TEMPLATE_KWARGS, has_loss_weights
from backend.train.encoding import Rendered, TextEncoder
from backend.train.run_log import TrainError
from backend.train.template_input import (
    TEMPLATE_ERRORS,
    Messages,
    TemplateInput,
    conversations_of,
    lost,
    may_be_lost,
    turns_of,
)
from backend.train.token_places import Tokens

NOTHING: Mapping[str, Any] = MappingProxyType({})
# A variable of the chat template that has a value unless the caller sets another one.
DEFAULT = re.compile(r"\{%- if (\w+) is not defined %\}\{% set \1 = .*? %\}\{% endif -%\}\n")
END_TEXT = re.compile(r"(<[^<>\s]{1,40}>|\[/?[A-Z_]{1,40}\])\s*$")  # as templates write it
END_TOKENS = 40  # that this text may consist of
SHOWN = 40  # characters of a prompt's end in an error
IGNORE_INDEX = -100  # the label of tokens without a loss
Span = tuple[int, int]  # of characters
Labeled = tuple[list[int], list[int], list[float] | None]  # ids, labels, and weights if there are any
Completions = tuple[list[int], list[list[int]]]  # ids of a prompt and of each completion
CHATML_MARKERS = ("<|im_start|>", "<|im_end|>")
# For models without a chat template. The loss is on what stands between {% generation %} and {% endgeneration %}:
# the completion and its end. Where ChatML's tokens are not in the vocabulary, the tokenizer's EOS token follows, so
# that the trained model can end its output.
CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] + '<|im_end|>' + END + '\\n' -}}
{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


class UnsupportedConversation(ValueError):
    """A conversation that the chat template cannot render; the message says why."""


class UnmarkedCompletions(UnsupportedConversation):
    """Completions that cannot be told from their prompts in the rendered text. All tokens could be trained on."""


def is_trained(turn: Mapping[str, Any]) -> bool:
    """Whether the turn is an assistant turn with a loss."""
    return turn["role"] == "assistant" and turn.get("train") is not False


def _reason(error: Exception) -> str:
    """Why a template failed; transformers passes only the special tokens that the tokenizer has."""
    token = re.fullmatch(r"'(\w+)_token' is undefined", str(error))
    return f"it uses {token[1]}_token, and the tokenizer has no {token[1].upper()} token" if token else str(error)


def chatml(tokenizer: Any) -> str:
    """The ChatML template for this tokenizer."""
    return CHATML.replace(" + END", " + eos_token" if CHATML_MARKERS[1] in split_markers(tokenizer) else "")


def split_markers(tokenizer: Any) -> list[str]:
    """The markers of ChatML that the tokenizer splits into several tokens."""
    known = tokenizer.get_vocab()
    return [marker for marker in CHATML_MARKERS if marker not in known]


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


def set_defaults(spec: RunSpec, tokenizer: Any) -> None:
    """Make data.chat_template_kwargs the defaults of the tokenizer's template, which is saved with the model."""
    lines = [
        f"{{%- if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif -%}}\n"  # as DEFAULT expects
        for name, value in spec.data.template_kwargs.items()
    ]
    template, defaults = tokenizer.chat_template, "".join(lines)
    if isinstance(template, dict):
        tokenizer.chat_template = {name: defaults + each for name, each in template.items()}
    elif template:
        tokenizer.chat_template = defaults + template


def _training_template(tokenizer: Any, template: str) -> str | None:
    """TRL's version of a template for training, with the defaults that `set_defaults` has put before it in an earlier
    run; None if TRL does not know the template."""
    defaults = "".join(match[0] for match in DEFAULT.finditer(template))
    for without in _without_defaults(tokenizer, template.removeprefix(defaults)):
        with suppress(*TEMPLATE_ERRORS):
            if found := get_training_chat_template(without):
                return defaults + str(found)
    return None


def _without_defaults(tokenizer: Any, known: str) -> Iterator[Any]:
    """Copies of the tokenizer with templates that TRL may know: Jinja leaves out a newline at the end."""
    for same in (known, known.removesuffix("\n"), f"{known}\n"):
        without = copy.copy(tokenizer)
        without.chat_template = same
        yield without


def response_tokenizer(tokenizer: Any, template: str) -> Any:
    """A copy of the tokenizer that parses responses, such as tool calls: with its own response template, or with TRL's
    for a known chat template; None if there is none."""
    defaults = "".join(match[0] for match in DEFAULT.finditer(template))
    for without in _without_defaults(tokenizer, template.removeprefix(defaults)):
        if getattr(without, "response_template", None) or getattr(without, "response_schema", None):
            return without
        with suppress(ValueError):
            return add_response_schema(without)
    return None


@dataclass(frozen=True)
class ChatTokenizer:
    """Turns conversations into token ids and labels; the label is -100 for tokens without a loss."""

    tokenizer: Any
    marked_template: str | None  # a template with {% generation %} markers that renders the same text
    all_tokens: bool  # the loss is on all tokens, not on completions only
    kwargs: Mapping[str, Any]  # variables of the template
    input: TemplateInput
    marked_input: TemplateInput  # of marked_template
    with_tools: ChatTokenizer | None = None  # for examples with tools, if the tokenizer has a template of its own

    @classmethod
    def create(cls, tokenizer: Any, all_tokens: bool, kwargs: Mapping[str, Any] | None = None) -> ChatTokenizer:
        """The best way for this tokenizer's template, which gets `kwargs` as variables. Raises TrainError if the
        tokenizer has none."""
        template = tokenizer.chat_template
        if not template:
            raise TrainError(
                "The model's tokenizer has no chat template: set data.chat_template to chatml, or to file with a "
                "template in data.chat_template_file."
            )
        with_tools = None
        if isinstance(template, dict):
            if "tool_use" in template:  # apply_chat_template of transformers uses it for conversations with tools
                alone = copy.copy(tokenizer)
                alone.chat_template = template["tool_use"]
                with_tools = cls.create(alone, all_tokens, kwargs)
            template = template.get("default") or next(iter(template.values()))
        marked: str | None = template
        if not all_tokens and not has_generation_markers(template):
            marked = _training_template(tokenizer, template)
        plain, of_marked = (TemplateInput.create(tokenizer, each or template) for each in (template, marked))
        return cls(tokenizer, marked, all_tokens, kwargs or {}, plain, of_marked, with_tools)

    def of(self, example: Mapping[str, Any]) -> ChatTokenizer:
        """The one for a converted example, or for variables of the template: that for tools if it has any."""
        return self.with_tools if self.with_tools and example.get("tools") else self

    def _variables(self, example: Mapping[str, Any]) -> dict[str, Any]:
        """What the template gets besides the turns."""
        given = {name: example[name] for name in ("tools", "documents") if name in example}
        return {**self.kwargs, **given, **example.get(TEMPLATE_KWARGS, {})}

    def unread(self, value: Mapping[str, Any]) -> set[str]:
        """The parts of a converted example's turns that are not trained on, as words."""
        if (own := self.of(value)) is not self:
            return own.unread(value)
        read = self.marked_input if "messages" in value else self.input
        found = read.unread(turns_of(value), value)
        found |= {f"{name} of data.{TEMPLATE_KWARGS}" for name in self.kwargs.keys() - read.variables}
        template = self.marked_template if "messages" in value else None
        for turns in conversations_of(value):
            if not may_be_lost(turns):
                continue
            with suppress(UnsupportedConversation):  # tokenizing the example reports the error
                found |= lost(turns, self.render(turns, value, chat_template=template))
        return found

    def special_tokens_in(self, value: Mapping[str, Any]) -> set[str]:
        """The tokenizer's special tokens in the contents of a converted example's turns. Even in a user's text they
        would end a turn or begin one."""
        known = self._special_tokens
        return {token for turn in turns_of(value) for token in known.findall(turn["content"])} if known else set()

    @cached_property
    def _special_tokens(self) -> re.Pattern[str] | None:
        added = (str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        tokens = {*added, *map(str, self.tokenizer.all_special_tokens)} - {""}
        return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None

    def ends(self, labels: Sequence[int], example: Mapping[str, Any] = NOTHING) -> list[int | None]:
        """The token that ends each part with a loss: one that the tokenizer was given as a whole, such as <|im_end|>,
        or None. Whitespace after it does not count. With a loss on all tokens, the end of the last part counts, or of
        each trained turn if a turn of the example has no loss: the loss then ends where that turn begins."""
        whole = self.all_tokens and not self._has_turns_without_a_loss(example)
        labels = self._of_completions(labels, example)
        is_trained = numpy.append(numpy.asarray(labels) != IGNORE_INDEX, False)
        lasts = numpy.flatnonzero(is_trained[:-1] & ~is_trained[1:]).tolist()
        return [self._end(labels, last) for last in lasts if not whole or last == len(labels) - 1]

    def unknown_end(self, labels: Sequence[int], example: Mapping[str, Any]) -> str:
        """The text that the template writes at the end of the trained text, such as <|im_end|>, of which the tokenizer
        makes several tokens; '' if there is none."""
        labels = self._of_completions(labels, example)
        trained = [label for label in labels if label != IGNORE_INDEX][-END_TOKENS:]
        found = END_TEXT.search(self.tokenizer.decode(trained))
        turns = [turn for turn in turns_of(example) if turn.get("train") is not False]
        if found is None or (turns and str(turns[-1]["content"]).rstrip().endswith(found[1])):
            return ""
        return str(found[1])

    @staticmethod
    def _has_turns_without_a_loss(example: Mapping[str, Any]) -> bool:
        return any(turn.get("train") is False for turn in example.get("messages", ()))

    def _of_completions(self, labels: Sequence[int], example: Mapping[str, Any]) -> Sequence[int]:
        """The labels of an example. With a loss on all tokens, those of the trained assistant turns only if another
        turn has no loss; the example was rendered, so the places of its turns are known."""
        if (own := self.of(example)) is not self:
            return own._of_completions(labels, example)
        if not self.all_tokens or not self._has_turns_without_a_loss(example):
            return labels
        messages = example["messages"]
        text, spans = self._rendered(messages, example)
        turns = self._turns_with_spans(text, spans, messages, example)
        trained = [span for span, turn in turns if is_trained(turn)]
        found = self.encoder.finish(
            Rendered([text], lambda tokens: _labeled(tokens[0], trained, (), None)[1], offsets=True)
        )
        return found[: len(labels)]

    def inner(self, labels: Sequence[int]) -> set[int]:
        """The tokens that the tokenizer was given as a whole and that are followed by text with a loss in the same
        part, such as the <|end|> of gpt-oss between a reasoning and its answer."""
        known, found = self._whole_tokens, set[int]()
        for position in numpy.flatnonzero(numpy.isin(labels, list(known))).tolist():
            after = (label for label in islice(labels, position + 1, None) if label not in known)
            if next((label for label in after if label == IGNORE_INDEX or self._has_text(label)), IGNORE_INDEX) >= 0:
                found.add(labels[position])
        return found

    def _end(self, labels: Sequence[int], last: int) -> int | None:
        known = self._whole_tokens
        part = takewhile(lambda position: labels[position] != IGNORE_INDEX, range(last, -1, -1))
        tokens = (labels[position] for position in part)
        end = next((token for token in tokens if token in known or self._has_text(token)), None)
        return end if end in known else None

    def _has_text(self, token: int) -> bool:
        """Whether the text of a token is more than whitespace."""
        if token not in self._with_text:
            self._with_text[token] = bool(self.tokenizer.decode([token]).strip())
        return self._with_text[token]

    @cached_property
    def _with_text(self) -> dict[int, bool]:
        return {}

    @cached_property
    def _whole_tokens(self) -> set[int]:
        """The tokens that are not made of text; the tokenizer takes a millisecond to list them."""
        return {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}

    def render_prompt(self, messages: Messages, example: Mapping[str, Any] = NOTHING) -> str:
        """The text that the model completes; `example` has the tools and the like. Raises UnsupportedConversation."""
        return self.render(messages, example, add_generation_prompt=True)

    def tokenize(self, messages: Messages, example: Mapping[str, Any] = NOTHING) -> tuple[list[int], list[int]]:
        """(input ids, labels) of a conversation with the loss on every completion; `example` has the tools and the
        like. Raises UnsupportedConversation."""
        return self.encoder.finish(self.conversation(messages, example))[:2]

    def loss_weights(self, messages: Messages, example: Mapping[str, Any] = NOTHING) -> list[float] | None:
        """The weight in the loss of each token of `tokenize`: that of its turn, else 1. None if no turn has another
        weight. Raises UnsupportedConversation."""
        return self.encoder.finish(self.conversation(messages, example))[2] if has_loss_weights(messages) else None

    def conversation(self, messages: Messages, example: Mapping[str, Any] = NOTHING) -> Rendered[Labeled]:
        """The text of a conversation, of whose tokens ids, labels and weights are made. Raises
        UnsupportedConversation."""
        if (own := self.of(example)) is not self:
            return own.conversation(messages, example)
        text, spans = self._rendered(messages, example)
        turns = list[tuple[Span, Mapping[str, Any]]]()
        weighted = has_loss_weights(messages)
        if weighted or any(message.get("train") is False for message in messages):
            turns = list(self._turns_with_spans(text, spans, messages, example))
        without = [span for span, turn in turns if turn.get("train") is False]
        weights = [(span, turn.get(LOSS_WEIGHT, 1.0)) for span, turn in turns] if weighted else None
        spans = [(0, len(text))] if self.all_tokens else spans
        trained = None if list(spans) == [(0, len(text))] and not without else spans  # None: all tokens
        if trained is None and weights is None:
            return Rendered([text], lambda tokens: (tokens[0], list(tokens[0]), None))
        self._require_offsets()
        return Rendered([text], lambda tokens: _labeled(tokens[0], trained, without, weights), offsets=True)

    def _rendered(self, messages: Messages, example: Mapping[str, Any]) -> tuple[str, Sequence[tuple[int, int]]]:
        """The text of a conversation, and where its completions are in it. Raises UnsupportedConversation."""
        if self.marked_template is not None:
            return self._marked(messages, example)
        text = self.render(messages, example)
        return text, self._differences(text, messages, example)

    def _turns_with_spans(
        self, text: str, spans: Sequence[tuple[int, int]], messages: Messages, example: Mapping[str, Any]
    ) -> Iterator[tuple[tuple[int, int], Mapping[str, Any]]]:
        """Each assistant turn, with its place in the rendered text. A template may mark none or several parts of a
        turn, so markers count only where the turns do not show otherwise. Raises UnsupportedConversation."""
        turns = [message for message in messages if message["role"] == "assistant"]
        try:
            of_turns = spans
            if self.marked_template is not None:
                of_turns = _with_markers(self._differences(text, messages, example), spans)
        except UnsupportedConversation as error:
            of_turns, parts = spans, [text[slice(*span)] for span in spans]
            if len(parts) != len(turns) or not all(map(_shows, parts, turns)):
                markers = "use a data.chat_template_file with {% generation %} markers around each assistant turn"
                raise UnmarkedCompletions(
                    "a turn has a weight, and the chat template rewrites earlier turns, so its tokens cannot be told "
                    f"from others; remove it, or {'set data.loss_on to completions' if self.all_tokens else markers}"
                ) from error
        return zip(of_turns, turns, strict=True)

    def _marked(self, messages: Messages, example: Mapping[str, Any]) -> tuple[str, Sequence[tuple[int, int]]]:
        """The text that `marked_template` renders, and where its markers are in it; () without markers."""
        if not has_generation_markers(self.marked_template):
            return self.render(messages, example, chat_template=self.marked_template), ()
        try:
            texts, spans = render_jinja_template(
                [self.marked_input(messages)],
                chat_template=self.marked_template,
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self._variables(example)},  # as in apply_chat_template
            )
        except TEMPLATE_ERRORS as error:
            raise UnsupportedConversation(f"the chat template cannot render it: {_reason(error)}") from error
        return str(texts[0]), spans[0]

    def marked_spans(self, messages: Messages, example: Mapping[str, Any]) -> Sequence[tuple[int, int]]:
        """Where the template's markers are in the rendered text; () without markers. Raises UnsupportedConversation."""
        return self._marked(messages, example)[1] if self.marked_template else ()

    def tokenize_completions(
        self, prompt: Messages, completions: Sequence[Messages], example: Mapping[str, Any] = NOTHING
    ) -> tuple[list[int], list[list[int]]]:
        """Ids of a prompt, and of what each completion adds: from the first id that differs from the prompt's, because
        some templates and tokenizers render the prompt's end differently if a completion follows. Raises
        UnsupportedConversation."""
        return self.encoder.finish(self.completions(prompt, completions, example))

    def completions(
        self, prompt: Messages, completions: Sequence[Messages], example: Mapping[str, Any] = NOTHING
    ) -> Rendered[Completions]:
        """The texts of which `tokenize_completions` makes ids. Raises UnsupportedConversation."""
        alone = self.render(prompt, example, add_generation_prompt=True)
        whole = [self.render([*prompt, *completion], example) for completion in completions]
        return Rendered([alone, *whole], _split)

    def ids(self, text: str) -> list[int]:
        """The token ids of a rendered text."""
        return self.encoder.ids(text)

    @cached_property
    def encoder(self) -> TextEncoder:
        """Encodes rendered texts."""
        return TextEncoder(self.tokenizer)

    def _differences(self, whole: str, messages: Messages, example: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Where the text of each assistant turn is in the rendered text. Raises UnmarkedCompletions."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:number], example, add_generation_prompt=True)
            after = self.render(messages[: number + 1], example) if number + 1 < len(messages) else whole
            if not whole.startswith(after):  # Phi-3's template ends each text with the EOS token
                after = after.removesuffix(self.tokenizer.eos_token or "")
            if not (after.startswith(before) and whole.startswith(after)):
                is_appended = whole.startswith(after) and after.startswith(self.render(messages[:number], example))
                raise UnmarkedCompletions(self._why_unmarked(before if is_appended else ""))
            spans.append((len(before), len(after)))
        return spans

    def _why_unmarked(self, prompt: str) -> str:
        """Why completions cannot be told from prompts: the text of a completion does not begin with the `prompt` that
        the template renders for generation, or '' if it rewrites earlier messages."""
        why, change = "rewrites earlier messages", ""
        if prompt:
            end = f"…{prompt[-SHOWN:]}" if len(prompt) > SHOWN else prompt
            why = f"ends the prompt of a generation with {end!r}, and completions begin differently"
            if self.kwargs:
                why, change = f"{why} (it gets data.{TEMPLATE_KWARGS})", f"change data.{TEMPLATE_KWARGS}, "
        return (
            f"the chat template {why}, so completions cannot be told from prompts; {change}set data.loss_on to "
            "all_tokens, or use a data.chat_template_file with {% generation %} markers"
        )

    def _require_offsets(self) -> None:
        """Raise UnmarkedCompletions if the tokenizer does not say where tokens are in a text."""
        if not self.tokenizer.is_fast:
            why = "completions cannot be told from prompts; set data.loss_on to all_tokens"
            if self.all_tokens:
                why = "the tokens of a turn with a weight cannot be found; remove the weight"
            raise UnmarkedCompletions(f"this tokenizer is not a fast tokenizer and has no character offsets, so {why}")

    def render(self, messages: Messages, example: Mapping[str, Any], **more: Any) -> str:
        """The text of a conversation; `more` goes to apply_chat_template. Raises UnsupportedConversation."""
        if (own := self.of(example)) is not self:
            return own.render(messages, example, **more)
        if not messages:  # transformers raises "Cannot apply chat template to an empty conversation"
            raise UnsupportedConversation("begins with an assistant turn; add a user or system turn as its prompt")
        turns = (self.marked_input if more.get("chat_template") else self.input)(messages)
        try:
            return str(self.tokenizer.apply_chat_template(turns, tokenize=False, **more, **self._variables(example)))
        except TEMPLATE_ERRORS as error:
            raise UnsupportedConversation(f"the chat template cannot render it: {_reason(error)}") from error


def _with_markers(turns: Sequence[Span], marked: Sequence[Span]) -> list[Span]:
    """The places of turns, each with all of the marked parts that have text of this turn only: a template may mark more
    than a turn adds to its prompt, such as the next turn's header that ends a completion of GLM."""
    found = []
    for turn in turns:
        parts = [each for each in marked if [other for other in turns if _overlap(each, other)] == [turn]]
        starts, ends = zip(turn, *parts, strict=True)
        found.append((min(starts), max(ends)))
    return found


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _shows(part: str, turn: Mapping[str, Any]) -> bool:
    """Whether a part of a rendered text has the content of a turn, or one of its tool calls. Templates strip contents,
    and leave out a reasoning in them."""
    content = str(turn["content"]).rpartition("</think>")[2].strip()
    calls = [str(call["function"]["name"]) for call in turn.get("tool_calls", ())]
    return any(found in part for found in (content, *calls) if found)


def _labeled(
    encoded: Tokens,
    spans: Sequence[Span] | None,
    without: Sequence[Span],
    weights: Sequence[tuple[Span, float]] | None,
) -> Labeled:
    """The ids of a text, and its labels: a loss on the tokens that have characters in `spans` and none in `without`, or
    on all tokens without `spans`; and the weight of each token, if there are `weights` of spans."""
    ids = encoded.ids
    labels = [IGNORE_INDEX] * len(ids) if spans is not None else list(ids)
    for span in spans or ():
        tokens = encoded.between(*span)
        labels[tokens] = ids[tokens]
    for span in without:
        tokens = encoded.between(*span)
        labels[tokens] = [IGNORE_INDEX] * len(ids[tokens])
    if weights is None:
        return ids, labels, None
    of_tokens = [1.0] * len(ids)
    for span, weight in weights:
        tokens = encoded.between(*span)
        of_tokens[tokens] = [weight] * len(of_tokens[tokens])
    return ids, labels, of_tokens


def _split(tokens: Sequence[list[int]]) -> Completions:
    """The ids of a prompt, and what each text with a completion adds."""
    alone, *whole = tokens
    shared = min(common_prefix_length(alone, ids) for ids in whole)
    return alone[:shared], [ids[shared:] for ids in whole]
