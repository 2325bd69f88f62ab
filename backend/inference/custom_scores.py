"""The custom scores of an evaluation: its regular expression, the function of its score file, and its judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from backend.inference.judged import JudgeScore
from backend.models.evaluation import Settings
from backend.scoring.scorer import Regex, ScoreError, ScoreFile, Scorer
from backend.train.generation_eval import EvalPrompt
from backend.train.run_log import TrainError
from backend.wording import counted

REGEX, FILE = "regex", "score_file"  # names of scores
KEPT = "The outputs are kept: evaluate again after the fix."


@dataclass
class CustomScore:
    """A score whose process is running. `one_sided`: how many examples have no score because the score applied to only
    some of their outputs."""

    name: str
    label: str
    definition: Regex | ScoreFile
    scorer: Scorer
    one_sided: int = field(default=0)

    def of(self, number: int, prompt: EvalPrompt, outputs: Mapping[str, Sequence[str]]) -> list[list[float | None]]:
        """The scores of all outputs of the example `number`; `outputs` has the samples of each model by its name.
        Raises TrainError."""
        found = [
            [self._one(f"example {number}, output of the {model}", prompt, text) for text in texts]
            for model, texts in outputs.items()
        ]
        values = list(chain.from_iterable(found))
        if None in values and any(value is not None for value in values):
            self.one_sided += 1
            return [[None] * len(samples) for samples in found]
        return found

    def _one(self, where: str, prompt: EvalPrompt, output: str) -> float | None:
        try:
            value = self.scorer.score(prompt.prompt, prompt.reference, output)
            if value is None or 0 <= value <= 1:
                return value
            raise ScoreError(f"returned {value:g}, but scores of an evaluation are from 0 (worst) to 1 (best)")
        except ScoreError as error:
            raise TrainError(f"{self.definition.name} {error} ({where}). {KEPT}") from None

    def limits(self, examples: int) -> list[str]:
        """What a reader must know about this score, as sentences; `examples`: how many examples have one."""
        if not examples and not self.one_sided:
            missing = "does not match with a first group in any reference" if self.name == REGEX else "returned None"
            always = "" if self.name == REGEX else " for every output"
            return [f"{self.definition.name} {missing}{always}, so there is no score."]
        if self.one_sided:
            one = self.one_sided == 1
            return [
                f"{self.definition.name} returned None for only some of the outputs of "
                f"{counted(self.one_sided, 'example')}, so its score leaves {'it' if one else 'them'} out."
            ]
        return []


Custom = CustomScore | JudgeScore


@contextmanager
def running(settings: Settings, check: Callable[[], None], folder: Path) -> Iterator[Sequence[Custom]]:
    """The scores with their processes, which end afterwards. `check` is called while a score is awaited, and may raise;
    `folder` is the evaluation's. Raises TrainError if a file cannot be loaded, or the judge cannot be used."""
    wanted: list[tuple[str, str, Regex | ScoreFile]] = []
    if rule := settings.regex_rule:
        wanted.append(
            (REGEX, "First group as in reference" if rule.compares_group else "Matches regular expression", rule)
        )
    if file := settings.file_rule:
        wanted.append((FILE, f"Score of {Path(file.path).name}", file))
    with ExitStack() as stack:
        found: list[Custom] = []
        for name, label, definition in wanted:
            try:
                scorer = stack.enter_context(Scorer(definition, check))
            except ScoreError as error:
                raise TrainError(f"{definition.name} {error}. Correct it, then evaluate again.") from None
            found.append(CustomScore(name, label, definition, scorer))
        yield [*found, JudgeScore(settings, folder, check)] if settings.judge else found
