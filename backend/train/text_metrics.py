"""How close answers come to what was wanted: exact match, ROUGE and BLEU, all from 0 to 1.

Beside the floors. Imports nothing of ours.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from typing import Any

# Scripts that put no blanks between words count by their characters, as usual for ROUGE and BLEU: kana, Han, Thai, Lao,
# Khmer, Burmese. rouge-score's own words are a-z and 0-9 alone, so that every answer in Greek would score 0.
UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\U00020000-\U0003ffff"
WORD = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
HAN = re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
OTHERS = re.compile("[\u3040-\u30ff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")  # unspaced, and not Chinese


def same(wanted: str, answer: str) -> bool:
    """Exactly what was wanted; JSON counts by what it says, not by its blanks and its order."""
    if wanted.strip() == answer.strip():
        return True
    try:
        first, second = json.loads(wanted), json.loads(answer)
    except ValueError:
        return False
    return isinstance(first, dict | list) and first == second


def exact(wanted: Sequence[str], answers: Sequence[str]) -> float:
    """The share of exact answers."""
    return sum(map(same, wanted, answers)) / max(1, len(wanted))


class Words:
    """rouge-score's tokenizer, for all scripts."""

    def tokenize(self, text: str) -> list[str]:
        """Lower-case words and numbers."""
        return WORD.findall(text.lower())


def scores(wanted: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
    """exact_match; rouge_1, rouge_2 and rouge_l (F-measure, mean of the rows); bleu (of all rows together, with
    sacrebleu's own tokens: 13a; zh where what is wanted is Chinese, char where it is Japanese, Thai and the like)."""
    if not wanted:
        return {}
    rouge: Any = importlib.import_module("rouge_score.rouge_scorer")  # these two: only where answers are scored
    sacrebleu: Any = importlib.import_module("sacrebleu.metrics")
    kinds = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}
    scorer = rouge.RougeScorer(list(kinds.values()), tokenizer=Words())
    rows = [scorer.score(want, answer) for want, answer in zip(wanted, answers, strict=True)]
    unspaced = "char" if any(map(OTHERS.search, wanted)) else "zh" if any(map(HAN.search, wanted)) else ""
    bleu = sacrebleu.BLEU(tokenize=unspaced or "13a")
    found = {ours: sum(row[theirs].fmeasure for row in rows) / len(rows) for ours, theirs in kinds.items()}
    found |= {"bleu": bleu.corpus_score(list(answers), [list(wanted)]).score / 100}
    return {"exact_match": exact(wanted, answers)} | {name: round(value, 6) for name, value in found.items()}
