"""How close generated outputs are to the references: exact match, ROUGE and BLEU, all from 0 to 1.

Standard library only, until `scores` is called.
"""

from __future__ import annotations

import importlib
import json
import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Any

# Scripts without spaces between words are counted by characters, as is usual for ROUGE and BLEU: kana, Han, Thai, Lao,
# Khmer, Burmese. rouge-score's own tokenizer knows a-z and 0-9 only, so every output in Greek would score 0.
UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\U00020000-\U0003ffff"
HAN = re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
UNSPACED_NOT_HAN = re.compile("[\u3040-\u30ff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")
MAX_WORDS = 2000  # of a text, for ROUGE: ROUGE-L needs memory for the product of both numbers of words
ROUGE = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}  # name -> rouge-score's


def is_exact_match(reference: str, output: str) -> bool:
    """Whether the output equals the reference. JSON is compared by value, not by whitespace and key order."""
    if reference.strip() == output.strip():
        return True
    try:
        first, second = parse_json(reference), parse_json(output)
        return isinstance(first, dict | list) and canonical_json(first) == canonical_json(second)
    except (ValueError, RecursionError):  # a model may generate thousands of brackets
        return False


def canonical_json(value: Any) -> str:
    """JSON that is equal for equal values from `parse_json`. Raises RecursionError."""
    return json.dumps(value, sort_keys=True)


def parse_json(text: str) -> Any:
    """The value of a JSON text, where 1.0 is the integer 1. Raises ValueError, RecursionError."""
    return json.loads(text, parse_float=parse_float)


def parse_float(text: str) -> float:
    """A number, an integer if it is whole."""
    value = float(text)
    return int(value) if value.is_integer() else value


def exact_match(references: Sequence[str], outputs: Sequence[str]) -> float:
    """The share of exact matches."""
    return sum(map(is_exact_match, references, outputs)) / max(1, len(references))


@cache  # not when it is imported: each training process imports this module
def _word() -> re.Pattern[str]:
    """A word or a number, with vowel signs and accents that are characters of their own, as in Hindi. In Python's
    regular expressions, these are not word characters."""
    marks = "".join(mark for mark in map(chr, range(0x300, 0x10000)) if unicodedata.category(mark).startswith("M"))
    return re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}](?:[^\W_{UNSPACED}]|[{marks}])*")


class UnicodeTokenizer:
    """A tokenizer for rouge-score that knows all scripts."""

    def tokenize(self, text: str) -> list[str]:
        """The first MAX_WORDS lower-case words and numbers."""
        plain = unicodedata.normalize("NFC", text.lower())  # an accent may be a character of its own
        return [found[0] for found in islice(_word().finditer(plain), MAX_WORDS)]


def each_rouge_l(references: Sequence[str], outputs: Sequence[str]) -> list[float]:
    """The F-measure of ROUGE-L of each output."""
    return [round(found["rougeL"].fmeasure, 4) for found in _rouge(references, outputs)]


def _rouge(references: Sequence[str], outputs: Sequence[str]) -> list[Any]:
    module: Any = importlib.import_module("rouge_score.rouge_scorer")  # slow to import and rarely needed
    scorer = module.RougeScorer(list(ROUGE.values()), tokenizer=UnicodeTokenizer())
    return [scorer.score(want, output) for want, output in zip(references, outputs, strict=True)]


def scores(references: Sequence[str], outputs: Sequence[str]) -> dict[str, float]:
    """exact_match; rouge_1, rouge_2 and rouge_l (mean F-measure over the examples); bleu (over the whole corpus, with
    sacrebleu's tokenizers: 13a; zh if the references are Chinese, char if they are Japanese, Thai and the like)."""
    if not references:
        return {}
    examples = _rouge(references, outputs)
    sacrebleu: Any = importlib.import_module("sacrebleu.metrics")
    unspaced = (
        "char" if any(map(UNSPACED_NOT_HAN.search, references)) else "zh" if any(map(HAN.search, references)) else ""
    )
    bleu = sacrebleu.BLEU(tokenize=unspaced or "13a")
    found = {ours: sum(each[name].fmeasure for each in examples) / len(examples) for ours, name in ROUGE.items()}
    found |= {"bleu": bleu.corpus_score(list(outputs), [list(references)]).score / 100}
    return {"exact_match": exact_match(references, outputs)} | {name: round(value, 6) for name, value in found.items()}
