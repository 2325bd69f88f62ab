"""The scores of the examples of an evaluation: of each sample, their means, and pass@k of binary scores. An example has
one value per model, whatever the number of samples: intervals draw examples, not samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from backend.inference.custom_scores import Custom, CustomScore
from backend.inference.scores import SCORES, Score, pass_at_k
from backend.models import intervals
from backend.models.chat_files import BASE, TUNED
from backend.models.evaluation import Settings
from backend.train.generation_eval import EvalPrompt, Generated

ENDS = Score("ends", "Ended by a stop token", lambda reference, output: None)  # computed from how the output ended
NAMES = {BASE: "base model", TUNED: "trained model"}
SIDES = tuple(NAMES)
Outputs = Mapping[str, Sequence[Generated]]  # side -> samples


class ExampleScores:
    """The scores of an evaluation with these settings and custom scores."""

    def __init__(self, settings: Settings, custom: Sequence[Custom]) -> None:
        self.settings, self.custom = settings, custom
        self.every: tuple[Custom | Score, ...] = (*custom, *SCORES, ENDS)
        self.binary: tuple[str, ...] = ()  # names of scores that have a pass@k

    def row(self, number: int, prompt: EvalPrompt, outputs: Outputs) -> dict[str, Any]:
        """The example `number`, as `evaluation.rows` describes it. Raises TrainError, Stopped."""
        found: dict[str, list[list[float | None]]] = {}  # name -> the values of each side's samples
        for score in SCORES:
            found[score.name] = [[score.of(prompt.reference, one.text) for one in outputs[side]] for side in SIDES]
        found[ENDS.name] = [[float(one.ended) for one in outputs[side]] for side in SIDES]
        for custom in self.custom:
            texts = {name: [one.text for one in outputs[side]] for side, name in NAMES.items()}
            found[custom.name] = custom.of(number, prompt, texts)
        row = {
            "scores": {name: [_mean(values) for values in sides] for name, sides in found.items()},
            "prompt": prompt.prompt,
            "reference": prompt.reference,
            **{side: outputs[side][0].text for side in SIDES},
        }
        if self.settings.samples_per_prompt > 1:
            row["samples"] = {
                side: [
                    {"text": one.text, "scores": {name: sides[place][n] for name, sides in found.items()}}
                    for n, one in enumerate(outputs[side])
                ]
                for place, side in enumerate(SIDES)
            }
        return row

    def add_pass_at_k(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add pass@k to the scores of each row. The score of a score file has pass@k if all of its values are 0 or
        1."""
        sampled = [row for row in rows if "samples" in row]
        samples = [one for row in sampled for one in chain.from_iterable(row["samples"].values())]
        self.binary = tuple(
            score.name
            for score in self.every
            if (isinstance(score, CustomScore) or score.is_binary)
            and (values := {one["scores"][score.name] for one in samples} - {None})
            and values <= {0.0, 1.0}
        )
        for row in sampled:
            for name in self.binary:
                for k in self.settings.ks:
                    row["scores"][_pass_name(name, k)] = [_pass(row["samples"][side], name, k) for side in SIDES]

    def compare(self, rows: Sequence[dict[str, Any]]) -> list[intervals.Comparison]:
        """Each score that rows have, followed by its pass@k."""
        found = []
        for score in self.every:
            ks = self.settings.ks if score.name in self.binary else []
            labels = {score.name: f"{score.label}, pass@1" if ks else score.label}
            labels |= {_pass_name(score.name, k): f"{score.label}, pass@{k}" for k in ks}
            for name, label in labels.items():
                pairs = (row["scores"].get(name, [None]) for row in rows)
                if known := [pair for pair in pairs if pair[0] is not None]:
                    found.append(intervals.compare(name, label, *zip(*known, strict=True)))
        return found


def _pass_name(name: str, k: int) -> str:
    return f"{name}_pass_at_{k}"


def _pass(samples: Sequence[Mapping[str, Any]], name: str, k: int) -> float | None:
    values = [one["scores"][name] for one in samples]
    return None if None in values else pass_at_k([value == 1 for value in values], k)


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of the known values: a judge may have no verdict on some pairs of samples."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
