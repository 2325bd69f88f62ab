"""The held-out questions, asked when the engine stands, and again after the training.

Beside the floors. Imports answers, gathered, scores, work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from backend.train import generation, text_metrics
from backend.train.context import TrainContext
from backend.train.generation import Answering, Question
from backend.train.unsharded import gathered


class GenerationEvalCallback(TrainerCallback):
    """Tells what the training did to the answers. Without questions it does nothing."""

    trainer: Any  # comes after its callbacks

    def __init__(self, work: TrainContext, how: Answering, asked: Sequence[Question]) -> None:
        self.work, self.how, self.asked = work, how, asked
        self.before: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What the model answers before the first step; remembered for a start that goes on."""
        if not self.asked:
            return
        kept: list[str] | None = self.work.team.share(generation.remembered(self.work.folder, self.asked))
        if kept is None:
            kept = self._answer("answering before", f"Answering {len(self.asked)} held-out rows, before training.")
            if self.work.team.rank == 0:
                generation.remember(self.work.folder, self.asked, kept)
        self.before = kept

    def after(self) -> dict[str, Any]:
        """Ask again. The answers side by side, and each score of them before and after."""
        if not self.asked:
            return {"exact_match_before": None, "exact_match_after": None, "samples": []}
        after = self._answer("answering after", f"Answering {len(self.asked)} held-out rows, after training.")
        wanted = [question.wanted for question in self.asked]
        samples = [
            {"prompt": q.prompt, "wanted": q.wanted, "before": was, "after": now}
            for q, was, now in zip(self.asked, self.before, after, strict=True)
        ]
        sides = {"before": text_metrics.scores(wanted, self.before), "after": text_metrics.scores(wanted, after)}
        figures = {f"{name}_{side}": value for side, found in sides.items() for name, value in found.items()}
        return {**figures, "samples": samples}

    def _answer(self, phase: str, text: str) -> list[str]:
        work = self.work
        work.journal.begin(phase, text)
        with gathered(work.spec, self.trainer) as model:
            found = self.how.answer(model, self.asked, work.tick(phase, text))
        work.check_stop()
        share = text_metrics.exact([question.wanted for question in self.asked], found)
        work.journal.say(f"Exact answers: {share:.0%} of {len(self.asked)}.")
        return found
