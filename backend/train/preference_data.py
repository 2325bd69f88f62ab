"""Rows that compare answers -> the columns of tokens that TRL's trainers work on.

Beside the floors. Imports rows, spec, templates, journal. What a trainer's own preparation would do is done here, so
that template, cut-off and messages are those of every stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from backend.config import RunSpec
from backend.train.run_log import TrainError
from backend.train.templates import Unlearnable, Writer

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Comparing:
    """Makes columns of rows; sent to preparation processes as a whole."""

    writer: Writer
    stage: str
    max_length: int

    def __call__(self, items: Sequence[Any]) -> tuple[Columns, Counter[str]]:
        """The columns of what can be learned from, and how many rows were cut or dropped."""
        columns: Columns = {}
        counts = Counter[str]()
        for item in items:
            for name, value in (self._row(item, counts) or {}).items():
                columns.setdefault(name, []).append(value)
        return columns, counts

    def _row(self, item: Any, counts: Counter[str]) -> dict[str, Any] | None:
        value = item.value
        names = ("completion",) if "completion" in value else ("chosen", "rejected")
        try:
            prompt, answers = self.writer.answers(value["prompt"], [value[n] for n in names], value.get("tools"))
        except Unlearnable as error:
            raise TrainError(f"{item.where}: {error}.") from error
        counts["tokens"] += sum(len(prompt) + len(answer) for answer in answers)
        room = self.max_length - len(prompt)
        if any(len(answer) > room for answer in answers):
            if self.stage == "reward":  # what is cut off may be what the score is about
                counts["long"] += 1
                return None
            counts["cut"] += 1
            answers = [answer[: max(0, room)] for answer in answers]
        if not all(answers) or (len(answers) > 1 and answers[0] == answers[1]):
            counts["dropped"] += 1
            return None
        length = len(prompt) + max(map(len, answers))
        return {**self._columns(prompt, answers, value), "length": length}

    def _columns(self, prompt: list[int], answers: list[list[int]], value: dict[str, Any]) -> dict[str, Any]:
        if self.stage == "kto":
            return {"prompt_ids": prompt, "completion_ids": answers[0], "label": value["label"]}
        chosen, rejected = answers
        if self.stage == "reward":
            return {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}
        if self.stage == "dpo":
            return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        found: dict[str, Any] = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            found[f"{name}_input_ids"] = prompt + answer
            found[f"{name}_attention_mask"] = [1] * (len(prompt) + len(answer))
            found[f"{name}_labels"] = [-100] * len(prompt) + answer
        return found


def finished(table: Dataset, spec: RunSpec) -> Dataset:
    """For KTO each question also with the answer of its neighbour in the batch: what the model says anyway, from which
    the loss estimates its KL. The rows are therefore trained on in this order. Rows to validate have the neighbours
    of a training batch too, as in TRL: evaluated one by one, they would be their own."""
    if spec.train.stage != "kto" or spec.preference.kto_loss_type != "kto" or not len(table):
        return table
    answers, batch = list(table["completion_ids"]), spec.train.per_device_train_batch_size
    batches = [answers[at : at + batch] for at in range(0, len(answers), batch)]
    return table.add_column("KL_completion_ids", [turned for b in batches for turned in (b[-1], *b[:-1])])


def question(value: dict[str, Any]) -> dict[str, Any] | None:
    """A converted row as a conversation that ends with a good answer, to be answered before and after; None if it
    shows a bad one only."""
    good = value["chosen"] if "chosen" in value else value["completion"] if value.get("label") else None
    if good is None:
        return None
    return {"messages": [*value["prompt"], good[0]], **{key: value[key] for key in ("tools",) if key in value}}
