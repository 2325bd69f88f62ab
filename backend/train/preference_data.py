"""Preference examples -> the columns of token ids that TRL's trainers read.

The trainers' own preparation is replaced by this, so that chat template, maximum length and messages are the same for
every stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, concatenate_datasets

from backend.config import RunSpec
from backend.data.chat import COLUMN, PROMPT_COLUMN, SYSTEM_TEXT, VARIABLES
from backend.data.preferences import MARGIN
from backend.train import end_tokens, template_input
from backend.train.encoding import BatchTokenizer, Columns, Rendered, TextEncoder
from backend.train.run_log import TrainError
from backend.train.templates import IGNORE_INDEX, ChatTokenizer, Completions, UnsupportedConversation

UNREAD, SPECIAL = "unread ", "special "  # with a key, or a token in a content: a count of examples


@dataclass(frozen=True)
class PreferenceTokenizer(BatchTokenizer[Completions]):
    """Makes columns of examples; pickled into the worker processes."""

    chat: ChatTokenizer
    stage: str
    max_length: int

    @property
    def encoder(self) -> TextEncoder:
        """Encodes the rendered texts."""
        return self.chat.encoder

    def render(self, example: Any) -> Rendered[Completions]:
        """The texts of an example. Raises TrainError."""
        value = example.value
        try:
            return self.chat.completions(value["prompt"], [value[name] for name in _completion_names(value)], value)
        except UnsupportedConversation as error:
            raise TrainError(f"{example.location}: {error}.") from error

    def columns(self, example: Any, result: Completions) -> tuple[Columns, Counter[str]]:
        """The columns of a usable example, and whether it was truncated or dropped."""
        counts = Counter[str]()
        count_unread(self.chat, example.value, counts)
        return {name: [value] for name, value in (self._example(example, *result, counts) or {}).items()}, counts

    def sequences(self, example: Any) -> Iterator[tuple[str, list[int], list[int]]]:
        """(name, ids, labels) of the prompt with each completion, before they are truncated. Raises TrainError."""
        prompt, completions = self.encoder.finish(self.render(example))
        for name, ids in zip(_completion_names(example.value), completions, strict=True):
            if "label" in example.value:
                name = f"{'desirable' if example.value['label'] else 'undesirable'} completion"
            yield name, prompt + ids, [IGNORE_INDEX] * len(prompt) + ids

    def _example(
        self, example: Any, prompt: list[int], completions: list[list[int]], counts: Counter[str]
    ) -> dict[str, Any] | None:
        value = example.value
        counts["tokens"] += sum(len(prompt) + len(completion) for completion in completions)
        counts["longest_sequences"] += len(prompt) + max(map(len, completions))
        if self.stage != "reward" and self.chat.ends(completions[0])[-1:] == [None]:
            counts["endless"] += 1
            counts[end_tokens.UNKNOWN + self.chat.unknown_end(completions[0], value)] += 1
        counts.update(
            {key for ids in completions for key in end_tokens.keys(self.chat.ends(ids), self.chat.inner(ids))}
        )
        room = self.max_length - len(prompt)
        if any(len(completion) > room for completion in completions):
            if self.stage == "reward":  # the reward may depend on what would be cut off
                counts["long"] += 1
                return None
            counts["truncated"] += 1
            completions = [completion[: max(0, room)] for completion in completions]
        if not all(completions):
            counts["dropped"] += 1
            return None
        if len(completions) > 1 and completions[0] == completions[1]:
            counts["identical"] += 1
            return None
        length = len(prompt) + max(map(len, completions))
        return {**self._columns(prompt, completions, value), "length": length}

    def _columns(self, prompt: list[int], completions: list[list[int]], value: dict[str, Any]) -> dict[str, Any]:
        if self.stage == "kto":
            return {"prompt_ids": prompt, "completion_ids": completions[0], "label": value["label"]}
        chosen, rejected = completions
        if self.stage == "reward":
            margin = float(value.get(MARGIN, 0))  # TRL 1.16 looks for it in the first example of a batch only
            return {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected, MARGIN: margin}
        if self.stage == "dpo":
            return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        columns: dict[str, Any] = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
        for name, completion in (("chosen", chosen), ("rejected", rejected)):
            columns[f"{name}_input_ids"] = prompt + completion
            columns[f"{name}_attention_mask"] = [1] * (len(prompt) + len(completion))
            columns[f"{name}_labels"] = [IGNORE_INDEX] * len(prompt) + completion
        return columns


def _completion_names(value: Mapping[str, Any]) -> tuple[str, ...]:
    return ("completion",) if "completion" in value else ("chosen", "rejected")


def count_unread(chat: ChatTokenizer | None, value: Mapping[str, Any], counts: Counter[str]) -> None:
    """Count an example for each part of its turns that is not trained on, for each of its weights that has no use, and
    for each special token in a content."""
    unread = chat.unread(value) if chat else template_input.PLAIN.unread(template_input.turns_of(value), value)
    unread |= {f"{COLUMN}{name}" for name in value.get("unused_columns", ())}
    unread |= {f"{PROMPT_COLUMN}{value['unused_prompt']}"} if "unused_prompt" in value else set()
    unread |= {f"{SYSTEM_TEXT}{value['unused_system']}"} if "unused_system" in value else set()
    for what in unread:
        counts[UNREAD + what] += 1
    for token in chat.special_tokens_in(value) if chat else ():
        counts[SPECIAL + token] += 1


def unread_keys(counts: Counter[str], kind: str = UNREAD) -> dict[str, int]:
    """Part of turns, or special token in a content, -> examples that `count_unread` counted for it."""
    return {name.removeprefix(kind): count for name, count in sorted(counts.items()) if name.startswith(kind)}


def add_kl_completions(dataset: Dataset, spec: RunSpec) -> Dataset:
    """For KTO, add to each prompt the completion of its neighbor in the batch, from which the loss estimates the KL
    divergence. The examples are therefore trained on in this order. Eval examples get the neighbors of a training batch
    too, as in TRL: with a batch size of 1 an example would be its own neighbor. So would one that is alone in the last
    batch, in TRL; here it belongs to the batch before."""
    if spec.train.stage != "kto" or spec.preference.kto_loss_type != "kto" or not len(dataset):
        return dataset
    count, size = len(dataset), spec.train.per_device_train_batch_size
    starts = [start for start in range(0, count, size) if start == 0 or start < count - 1]
    batches = map(range, starts, [*starts[1:], count])
    neighbors = dataset.select([row for batch in batches for row in (batch[-1], *batch[:-1])])
    completions = neighbors.select_columns(["completion_ids"]).rename_column("completion_ids", "KL_completion_ids")
    return concatenate_datasets([dataset, completions], axis=1)


def as_conversation(value: dict[str, Any]) -> dict[str, Any] | None:
    """An example with a prompt as a conversation that ends with the completion (of a pair, the preferred one), for the
    generation evaluation; None if it has an undesirable completion only."""
    preferred = value["chosen"] if "chosen" in value else value["completion"] if value.get("label", True) else None
    if preferred is None:
        return None
    return {"messages": [*value["prompt"], preferred[0]], **{key: value[key] for key in VARIABLES if key in value}}
