"""What a look can show. Floor 2. Imports spec, shape."""

from __future__ import annotations

from dataclasses import dataclass

from backend.config import Data
from backend.modelspec import ModelShape


@dataclass(frozen=True)
class DataIssue:
    """Something wrong with a file: the option that names it, the file and line, and a sentence about it."""

    field: str
    where: str
    sentence: str
    row: bool = False  # one row of a file that can be read

    def __str__(self) -> str:
        return f"{self.where}: {self.sentence}"


@dataclass(frozen=True)
class InputFacts:
    """Facts about the files. None or '' means that nobody can know before the run."""

    shape: ModelShape | None = None
    unknown: str = "the model was not looked at"  # why there is no shape, as the end of a sentence
    model: str = ""  # what is wrong with the model's folder
    packed: str = ""  # the format of weights that came packed, as config.json's quant_method
    stacked: tuple[str, ...] = ()  # of a mixture: layers that peft knows as stacked weights (catalog.STACKED)
    is_multimodal: bool = False  # the model sees or hears by layers that text does not reach
    has_template: bool | None = None  # the tokenizer brings a chat template
    is_downloaded: bool = True  # nothing has to be downloaded
    issues: tuple[DataIssue, ...] = ()  # of data files
    format: str = ""  # of the rows: the one asked for, or recognised
    columns: tuple[str, ...] = ()
    rows: int | None = None  # in the data files, before a part is kept back
    held: int | None = None  # in the validation files
    exact: bool = True  # rows and held were counted to the end
    labels: tuple[int, int] | None = None  # good and bad answers that were seen, of labelled ones
    lengths: tuple[int, ...] = ()  # tokens of rows that were seen, about, ascending
    min_prompt_tokens: int = 0  # tokens before the first answer, about, in the row that has fewest
    template: str = ""  # what is wrong with the template file
    checkpoint: str = ""  # what is wrong with the checkpoint folder
    nvme: str = ""  # what is wrong with the NVMe folder
    nvme_slow: str = ""  # why it is no fast disk
    taken: int = 0  # the port at which the ranks would meet, if something holds it
    spare: int = 0  # one that is free instead
    classes: tuple[str, ...] = ()  # of the model's modules, those with weights first; empty if nobody knows
    attributes: frozenset[str] = frozenset()  # without a shape: all that modules may be called, if anybody knows

    @property
    def longest(self) -> int:
        """Tokens of the longest row seen, about; 0 if none was."""
        return self.lengths[-1] if self.lengths else 0

    def training_rows(self, data: Data) -> int | None:
        """Rows that are trained on."""
        if self.rows is None:
            return None
        kept = self.rows - (self.validation_rows(data) or 0 if splits(data) else 0)
        return min(kept, data.max_samples) if data.max_samples else kept

    def validation_rows(self, data: Data) -> int | None:
        """Rows that are kept back or named for validation."""
        if data.source != "builtin" and data.validation == "none":
            return 0
        if splits(data):
            if self.rows is None or self.rows < 2:
                return None if self.rows is None else 0
            return min(self.rows - 1, max(1, round(self.rows * data.validation_split)))
        return self.held


def splits(data: Data) -> bool:
    """Whether a part of the rows is kept back."""
    return data.source != "builtin" and data.validation == "split"
