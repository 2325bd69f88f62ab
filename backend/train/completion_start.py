"""How completions begin: in the prompt that generation completes, and in the text that is trained on.

Some chat templates add more to a generation prompt than conversations have there, such as an open <think>. A model that
was never trained to continue from it may generate anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from backend.train.template_input import Messages
from backend.train.templates import ChatTokenizer, UnsupportedConversation, is_trained

SHOWN = 20  # characters of a completion
SWITCHES = ("enable_thinking", "thinking")  # variables of published templates for the start of completions
Start = tuple[str, str, str]  # its text in generation and in training, and what differs: text, tokens or loss


def difference(chat: ChatTokenizer, example: Mapping[str, Any]) -> Start | None:
    """How the last completion of a converted example begins in generation, and in training. None if training has the
    same beginning, as text and as tokens, and the loss starts right after it, or if the template rewrites earlier
    turns. Raises UnsupportedConversation."""
    chat, is_marked = chat.of(example), "messages" in example
    template = chat.marked_template if is_marked else None
    prompt, completion = last_completion(example)
    if not prompt:
        return None
    before = chat.render(prompt, example), chat.render(prompt, example, chat_template=template)
    generated = chat.render(prompt, example, add_generation_prompt=True)
    trained = chat.render(turns := [*prompt, *completion], example, chat_template=template)
    if not (generated.startswith(before[0]) and trained.startswith(before[1])):
        return None
    generated, trained = generated[len(before[0]) :], trained[len(before[1]) :]
    ids, what = chat.ids(generated), "text"
    if trained.startswith(generated):
        what = "tokens"
        if chat.ids(trained)[: len(ids)] == ids:
            spans = chat.marked_spans(turns, example) if is_marked and not chat.all_tokens else ()
            starts = [start for start, _ in spans if start >= len(before[1])]
            if not starts or starts[0] <= len(before[1]) + len(generated):
                return None
            what = "loss"  # what stands between the generation prompt and the loss is never generated
    return generated, trained[: len(generated) + SHOWN], what


def kwargs_without_difference(chat: ChatTokenizer, example: Mapping[str, Any]) -> dict[str, bool] | None:
    """A template variable that makes the beginnings of an example equal, with its value, if there is one."""
    chat = chat.of(example)
    for name in SWITCHES:
        for value in (False, True):
            switched = replace(chat, kwargs={**chat.kwargs, name: value})
            with suppress(UnsupportedConversation):  # the template may reject this value
                if name in chat.input.variables and difference(switched, example) is None:
                    return {name: value}
    return None


def last_completion(example: Mapping[str, Any]) -> tuple[Messages, Messages]:
    """The prompt, and the last completion with a loss (of a pair, the preferred one). Without one, the prompt is ()."""
    if "messages" not in example:
        return example["prompt"], example.get("chosen") or example["completion"]
    turns = example["messages"]
    last = max((n for n, turn in enumerate(turns) if is_trained(turn)), default=0)
    return turns[:last], turns[last : last + 1]
