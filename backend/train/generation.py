"""Held-out rows answered by the model, before and after, and compared with what was wanted.

Beside the floors. Imports spec, data, device, journal, templates.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from backend.config import RunSpec
from backend.train.data import Item
from backend.train.device import ProcessGroup
from backend.train.run_log import TrainError, write_json
from backend.train.templates import Unlearnable, Writer

BEFORE = "before.json"


@dataclass(frozen=True)
class Question:
    """What the model sees (`text`), what a person is shown of it (`prompt`), and the answer that is wanted."""

    text: str
    prompt: str
    wanted: str


def questions(writer: Writer, items: Sequence[Item]) -> list[Question]:
    """One question a row: all that stands before its last answer. Raises TrainError."""
    found = []
    for item in items:
        turns = item.value["messages"]
        last = max(n for n, turn in enumerate(turns) if turn["role"] == "assistant")
        try:
            text = writer.prompt(turns[:last], item.value.get("tools"))
        except Unlearnable as error:
            raise TrainError(f"{item.where}: {error}.") from error
        asked = [turn["content"] for turn in turns[:last] if turn["role"] != "system"]
        found.append(Question(text, asked[-1] if asked else "", turns[last]["content"]))
    return found


@dataclass(frozen=True)
class Answering:
    """How answers are made: greedily, `batch` at once, at most `longest` tokens each. So many ranks in a row hold one
    model in `slices`, and answer together."""

    tokenizer: Any
    team: ProcessGroup
    batch: int
    longest: int
    dtype: torch.dtype
    slices: int = 1

    @classmethod
    def of(cls, spec: RunSpec, tokenizer: Any, team: ProcessGroup, dtype: torch.dtype) -> Answering:
        """As `spec` asks for it."""
        slices = spec.parallel.slices
        return cls(tokenizer, team, spec.eval.per_device_eval_batch_size, spec.eval.max_new_tokens, dtype, slices)

    def answer(self, model: Any, asked: Sequence[Question], tick: Callable[[int, int], bool]) -> list[str]:
        """The model's answers, in order; the ranks share the work. Missing ones are '' where `tick` ended it."""
        mine = list(range(self.team.rank // self.slices, len(asked), self.team.world // self.slices))
        mine.sort(key=lambda number: len(asked[number].text))  # like lengths together: less padding
        most = -(-len(asked) * self.slices // self.team.world)  # ranks that agree on each batch have as many
        training = model.training
        answers: dict[int, str] = {}
        model.eval()
        for at in range(0, most, self.batch):
            if numbers := mine[at : at + self.batch]:
                answers.update(zip(numbers, self._batch(model, [asked[n].text for n in numbers]), strict=True))
            end = not tick(len(answers), len(mine))
            if self.team.agree(end) if self.slices > 1 else end:
                break
        model.train(training)
        together = {number: text for part in self.team.gather(answers) for number, text in part.items()}
        return [together.get(number, "") for number in range(len(asked))]

    def _batch(self, model: Any, texts: list[str]) -> list[str]:
        batch = self.tokenizer(
            texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
        ).to(model.device)
        low = self.dtype != torch.float32
        cast = torch.autocast(model.device.type, dtype=self.dtype) if low else contextlib.nullcontext()
        with torch.no_grad(), cast:  # fp8 layers do not know inference mode
            written = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                generation_config=self._how(model),
                synced_gpus=False,  # the weights are whole: no rank needs to wait for another's answers
                **_unbalanced(model),
            )
        new = written[:, batch["input_ids"].shape[1] :]
        return [text.strip() for text in self.tokenizer.batch_decode(new, skip_special_tokens=True)]

    def _how(self, model: Any) -> GenerationConfig:
        own, end = model.generation_config.eos_token_id, self.tokenizer.eos_token_id
        ends = {*([own] if isinstance(own, int) else own or []), *([end] if end is not None else [])}
        return GenerationConfig(
            do_sample=False,
            max_new_tokens=self.longest,
            eos_token_id=sorted(ends) or None,
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
        )


def _unbalanced(model: Any) -> dict[str, bool]:
    """A mixture's routers are balanced over whole rows, and answering gives the model a token at a time."""
    known = hasattr(model.config.get_text_config(), "output_router_logits")
    return {"output_router_logits": False} if known else {}


def remember(folder: Path, asked: Sequence[Question], answers: Sequence[str]) -> None:
    """Keep the untouched model's answers at once: a resumed run needs them."""
    write_json(folder / BEFORE, [[q.text, a] for q, a in zip(asked, answers, strict=True)])


def remembered(folder: Path, asked: Sequence[Question]) -> list[str] | None:
    """The untouched model's answers to these questions, if they were kept."""
    try:
        kept = dict(json.loads((folder / BEFORE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return [kept[q.text] for q in asked] if all(q.text in kept for q in asked) else None
