"""Scores of one output against its reference, each from 0 to 1: the rows of SCORES.

A score is None for an example to which it does not apply. The reference decides that, so examples with JSON get the
scores for JSON without any setting.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from backend.train import text_metrics

ANSWER = re.compile(r"####|\\boxed\{|\banswer(?: is|:)", re.IGNORECASE)  # marks before the final number
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!)(?=\d)")  # in LaTeX
# An answer that begins with a word, even if a number follows; and one that is more than this number: 3/4, 3^2, 3\pi.
WORD = re.compile(r"\W*[^\W\d]")
TERM = re.compile(r"\W*\\[dt]?(?:frac|sqrt)|\W*[\d,.]+\s*(?:/\s*\d|\^(?!\{?\\circ)|\\(?:sqrt|[dt]?frac|pi))")
ARGUMENTS = ("arguments", "parameters")
CLOSE = 1e-6  # relative difference of equal numbers


@dataclass(frozen=True)
class Score:
    """`of` gets reference and output. `is_binary`: an output is right (1) or wrong (0), so there is a pass@k."""

    name: str
    label: str
    of: Callable[[str, str], float | None]
    is_binary: bool = False


def pass_at_k(right: Sequence[bool], k: int) -> float:
    """The probability that at least one of `k` samples of a prompt is right, estimated from all of them without bias
    (Chen et al. 2021, arXiv:2107.03374): one minus the share of all choices of k samples in which every sample is
    wrong. `k` is at most the number of samples."""
    return 1 - math.comb(len(right) - sum(right), k) / math.comb(len(right), k)


def exact_match(reference: str, output: str) -> float | None:
    """Whether both are equal; JSON by value."""
    return float(text_metrics.is_exact_match(reference, output))


def valid_json(reference: str, output: str) -> float | None:
    """Whether the output is JSON, where the reference is."""
    return None if _json(reference) is None else float(_json(output) is not None)


def json_fields(reference: str, output: str) -> float | None:
    """The share of fields, nested ones too, with the right value: of all fields in the reference or the output."""
    wanted = _json(reference)
    if not isinstance(wanted, dict):
        return None
    found = _json(output)
    try:
        expected, given = Counter(_leaves(wanted)), Counter(_leaves(found) if isinstance(found, dict) else ())
    except RecursionError:  # hundreds of brackets
        return exact_match(reference, output)
    return sum((expected & given).values()) / max(1, sum((expected | given).values()))


def numeric_answer(reference: str, output: str) -> float | None:
    """Whether the final number is right, where the reference is a number or marks one as its answer."""
    wanted = _final_number(reference, is_marked=False)
    if wanted is None:
        return None
    found = _final_number(output, is_marked=True)
    return float(found is not None and abs(found - wanted) <= CLOSE * max(1.0, abs(wanted)))


def tool_calls(reference: str, output: str) -> float | None:
    """Whether the same functions are called with the same arguments, in any order, where the reference calls one."""
    wanted = _calls(reference)
    return float(sorted(_calls(output)) == sorted(wanted)) if wanted else None


def rouge_l(reference: str, output: str) -> float | None:
    """F-measure of the longest common subsequence of words."""
    return float(_rouge().score(reference, output)["rougeL"].fmeasure)


def chrf(reference: str, output: str) -> float | None:
    """F-score of character n-grams, as sacrebleu computes it for a sentence."""
    return float(_chrf().sentence_score(output, [reference]).score) / 100


SCORES = (
    Score("exact_match", "Exact match", exact_match, is_binary=True),
    Score("valid_json", "Valid JSON", valid_json, is_binary=True),
    Score("json_fields", "Correct JSON fields", json_fields),
    Score("numeric_answer", "Correct numeric answer", numeric_answer, is_binary=True),
    Score("tool_calls", "Correct tool calls", tool_calls, is_binary=True),
    Score("rouge_l", "ROUGE-L", rouge_l),
    Score("chrf", "chrF", chrf),
)


@cache
def _rouge() -> Any:
    return importlib.import_module("rouge_score.rouge_scorer").RougeScorer(
        ["rougeL"], tokenizer=text_metrics.UnicodeTokenizer()
    )


@cache
def _chrf() -> Any:
    return importlib.import_module("sacrebleu.metrics").CHRF()


def _json(text: str) -> Any:
    """The object or list of a JSON text, else None."""
    try:
        value = text_metrics.parse_json(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, value) of each field; the elements of a list are fields too."""
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _leaves(part, f"{path}/{json.dumps(name)}")
    elif isinstance(value, list) and value:
        for number, part in enumerate(value):
            yield from _leaves(part, f"{path}/{number}")
    else:
        yield path, text_metrics.canonical_json(value)


def _final_number(text: str, is_marked: bool) -> float | None:
    """The number of a text that is a number, or the one after the last mark; else, with `is_marked`, the last
    number."""
    text = THOUSANDS.sub("", text)
    if marks := list(ANSWER.finditer(text)):
        end = marks[-1].end()
        if TERM.match(text, end) or (not is_marked and WORD.match(text, end)):
            return None
        if after := NUMBER.search(text, end):
            return _number(after[0])
    if NUMBER.fullmatch(text.strip().strip("$€£% ").rstrip(".")):
        return _number(text.strip().strip("$€£% ").rstrip("."))
    every = NUMBER.findall(text)
    return _number(every[-1]) if is_marked and every else None


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _calls(text: str) -> list[str]:
    """The tool calls in a text, each as JSON in one notation: objects with a name and arguments, wherever they are."""
    found, decoder, start = [], json.JSONDecoder(parse_float=text_metrics.parse_float), text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
            call = _call(value)
        except ValueError:
            call = None
        except RecursionError:  # thousands of nested brackets; trying each start would take long
            break
        if call:
            found.append(call)
        else:
            end = start + 1  # there may be one inside
        start = text.find("{", end)
    return found


def _call(value: Any) -> str | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = next((value[key] for key in ARGUMENTS if key in value), None)
    if isinstance(given, str):
        given = _json(given)
    return text_metrics.canonical_json([value["name"], given]) if isinstance(given, dict) else None
