"""The score of an evaluation by an LLM judge: whether the output of the base model or of the trained model is better.
Each pair is judged in both orders. Verdicts are written to a file at once, so that an evaluation that was stopped does
not request them again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.models.chat_files import Lines, append
from backend.models.evaluation import JUDGE, VERDICTS_FILE, Settings
from backend.scoring.judge import FIRST, SECOND, TIE, BadAnswer, Client, JudgeError, verdict_of
from backend.train.generation_eval import EvalPrompt
from backend.train.run_log import TrainError
from backend.wording import counted

BASE, TRAINED = "base", "trained"
ORDERS = ((BASE, TRAINED), (TRAINED, BASE))  # which model wrote response A and response B
POINTS = {BASE: [1.0, 0.0], TIE: [0.5, 0.5], TRAINED: [0.0, 1.0]}  # points of base model and trained model
KEPT = "Outputs and verdicts are kept: evaluate again to continue."
MAX_ANSWER = 2_000  # characters that are kept
NAMED = 5  # examples without a verdict in a sentence


class JudgeScore:
    """The share of comparisons in which the judge prefers the output of a model; a tie counts half for both. A model
    wins if the judge prefers its output in both orders; if the orders disagree, the comparison is a tie."""

    name, label, is_binary = JUDGE, "Preferred by the judge", False

    def __init__(self, settings: Settings, folder: Path, check: Callable[[], None]) -> None:
        judge = settings.judge
        assert judge
        if problem := judge.problem():  # the environment of this process may be different
            raise TrainError(problem)
        self.client, self.path = Client(judge, check), folder / VERDICTS_FILE
        # Lines without a verdict are left out: they are requested again.
        self.known = {str(line.get("key")): line for line in Lines(self.path).read() if line.get("verdict")}
        self.counts: Counter[str] = Counter()
        self.missing: dict[int, str] = {}  # examples with comparisons without a verdict, and the first reason

    def of(self, number: int, prompt: EvalPrompt, outputs: Mapping[str, Sequence[str]]) -> list[list[float | None]]:
        """The points of the samples of each model for the example `number`, those of the base model first. The first
        samples of both models are compared, then the second ones. Raises TrainError."""
        base, trained = outputs.values()
        pairs = [self._compare(number, prompt, *pair) for pair in zip(base, trained, strict=True)]
        return [[pair[0] for pair in pairs], [pair[1] for pair in pairs]]

    def _compare(self, number: int, prompt: EvalPrompt, base: str, trained: str) -> list[float | None]:
        if base == trained:
            self.counts["equal"] += 1
            return list(POINTS[TIE])
        texts = {BASE: base, TRAINED: trained}
        found = [self._line(prompt, texts, order) for order in ORDERS]
        if problems := [line["problem"] for line in found if line["problem"]]:
            self.counts["missing"] += 1
            self.missing.setdefault(number, f"example {number}: {problems[0]}")
            return [None, None]
        one, other = (
            {FIRST: order[0], SECOND: order[1], TIE: TIE}[line["verdict"]]
            for line, order in zip(found, ORDERS, strict=True)
        )
        self.counts["disagreements"] += one != other
        winner = one if one == other else TIE
        self.counts[winner] += 1
        return list(POINTS[winner])

    def _line(self, prompt: EvalPrompt, texts: Mapping[str, str], order: tuple[str, str]) -> dict[str, Any]:
        """The line of the file for the texts in this order. It names no model: another example may have the same texts
        with the models exchanged."""
        judge = self.client.judge
        messages = judge.question(prompt.plain, prompt.reference, *(texts[side] for side in order))
        key = hashlib.sha256(json.dumps([judge.endpoint, judge.model, messages]).encode()).hexdigest()
        if key in self.known:
            self.client.has_answered |= bool(self.known[key]["verdict"])
            return self.known[key]
        line = {"key": key, "verdict": "", "problem": "", "answer": ""}
        try:
            line["answer"] = self.client.ask(messages)[-MAX_ANSWER:]
            line["verdict"] = verdict_of(line["answer"])
        except BadAnswer as error:
            line["problem"] = str(error)
        except JudgeError as error:
            raise TrainError(f"{judge.name} {error}. {KEPT}") from None
        append(self.path, line)
        self.known[key] = line
        return line

    def limits(self, examples: int) -> list[str]:
        """What a reader must know about this score, of which `examples` have one, as sentences."""
        if not self.missing:
            return []
        count, named = self.counts["missing"], "; ".join(list(self.missing.values())[:NAMED])
        more = f"; and {counted(hidden, 'more example')}" if (hidden := len(self.missing) - NAMED) > 0 else ""
        total = count + self._judged() + self.counts["equal"]
        has, are = ("has", "is") if count == 1 else ("have", "are")
        return [
            f"{count} of {counted(total, 'comparison')} {has} no verdict of the judge and {are} left out of the "
            f"judge's score ({named}{more})."
        ]

    def summary(self) -> dict[str, Any]:
        """For the result: a sentence, wins of the trained model, ties and losses, the share of comparisons in which
        the verdicts of the two orders differ, and further counts."""
        judged, same = self._judged(), self.counts["equal"]
        share = self.counts["disagreements"] / judged if judged else None
        sentence = (
            f"{self.client.judge.name} preferred the trained model in {self.counts[TRAINED]} and the base model in "
            f"{self.counts[BASE]} of {counted(judged, 'comparison')}; {self._ties()}."
        )
        if self.missing and not judged:
            sentence = f"{self.client.judge.name} gave no verdict on any comparison."
        if share is not None:
            sentence += f" In {share:.0%} of the comparisons, the verdict depended on the order of the outputs: a tie."
        if same:
            pairs = counted(same, "further pair")
            sentence += f" Identical outputs ({pairs}) are ties, and were not sent to the judge."
        return {
            "sentence": sentence, "wins": self.counts[TRAINED], "ties": self.counts[TIE] + same,
            "losses": self.counts[BASE], "disagreement": share, "identical": same,
            "without_verdict": self.counts["missing"], "repeated_requests": self.client.retries,
        }  # fmt: skip

    def _ties(self) -> str:
        return "1 is a tie" if self.counts[TIE] == 1 else f"{self.counts[TIE]} are ties"

    def _judged(self) -> int:
        """Comparisons with a verdict in both orders."""
        return sum(self.counts[winner] for winner in (BASE, TRAINED, TIE))


def summary(scores: Sequence[Any]) -> dict[str, Any]:
    """The part of an evaluation's result about the judge, if it has one."""
    found = next((score for score in scores if isinstance(score, JudgeScore)), None)
    return {JUDGE: found.summary()} if found else {}
