"""Endpoint for the examples as the model sees them, one at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from backend.config import RunSpec
from backend.config.options import for_dataset
from backend.inspect import show_examples, summarize_examples
from backend.wording import counted
from webui.api.checking import parse_form
from webui.api.requests import DatasetRequest

BARS = 40
WORTH_SAYING = 0.05  # share of padding from which the summary mentions it
KINDS = {  # kinds of problems, the most important first
    "unusable": "unusable",
    "dropped": "without a token to train on",
    "long": "longer than max_length",
    "identical": "with equal completions",
    "endless": "without a loss on an end token",
    "weightless": "without a loss on an assistant turn",
    "different_starts": "starting differently in generation",
    "truncated": "cut by max_length",
    "unread ": "with unused parts",
    "special ": "with special tokens in a text",
    "copies": "equal to an earlier one",
    "copies_in_validation": "evaluated and trained on",
    "contradictions": "contradicting an earlier one",
}


class ExampleRequest(DatasetRequest):
    """`position`: of the example in its dataset, 0 for the first."""

    position: Annotated[int, Field(ge=0, le=10**9)] = 0


def show(body: ExampleRequest) -> dict[str, Any]:
    """The example, or None after the last one; "problem" says why it cannot be shown. "pending" while the worker
    renders it: the page asks again. "lengths" and "kinds" are a summary of all examples: see `_summary`."""
    whole, _ = parse_form(body.values)
    spec = for_dataset(whole, body.dataset_of(whole))
    found = show_examples(spec, Path.cwd(), os.environ, body.position, 1, 0)
    if found is None or isinstance(found, str):
        return {"example": None, "problem": found or "", "pending": found is None}
    example = next(iter(found["examples"]), None)
    summary = _summary(summarize_examples(spec, Path.cwd(), os.environ), spec)
    return {"example": example, "problem": found["problem"], "pending": False, **summary}


def _summary(found: dict[str, Any], spec: RunSpec) -> dict[str, Any]:
    """What the card draws: "complete" (nothing more is to come); "lengths", None without any, with "bars" (how many
    examples are in each of BARS ranges of tokens), "end" (of the last range), "limit" (max_length), "text", "longest"
    (a position) and "rows" (how many positions there are); "kinds": [words for a kind of problem, positions of the
    examples that have it]."""
    lengths, max_length = found.get("lengths"), spec.data.max_length
    kinds = [[words, found["places"][kind]] for kind, words in KINDS.items() if kind in found.get("places", {})]
    if not lengths:
        return {"complete": found["complete"], "lengths": None, "kinds": kinds}
    end = max(lengths[-1], 1)
    bars = [0] * BARS
    for length in lengths:
        bars[min(BARS - 1, length * BARS // end)] += 1
    which = f"{'' if found['tokenized'] == len(lengths) else 'the first '}{counted(len(lengths), 'example')}"
    half, most = lengths[len(lengths) // 2], lengths[-1 - len(lengths) // 100]
    text = (
        f"Tokens of {which}: half have up to {half:,}, 99% up to {most:,}; the longest has "
        f"{found['longest']:,}. max_length is {max_length:,}.{_padding(lengths, spec)}"
    )
    picture = {"bars": bars, "end": end, "limit": max_length, "text": text}
    picture |= {"longest": found["longest_row"], "rows": found["rows"]}
    return {"complete": found["complete"], "lengths": picture, "kinds": kinds}


def _padding(lengths: Sequence[int], spec: RunSpec) -> str:
    """The share of padding, as a sentence with a space before it; empty if it is small or not known here."""
    batch, data, train = spec.train.per_device_train_batch_size, spec.data, spec.train
    if train.stage != "sft" or data.packing or train.train_sampling_strategy != "random":
        return ""
    share = padding_share([min(length, data.max_length) for length in lengths], batch)
    if share < WORTH_SAYING:
        return ""
    return f" In batches of {batch}, about {100 * share:.0f}% of the tokens are padding; packing avoids it."


def padding_share(lengths: Sequence[int], batch: int) -> float:
    """The expected share of padding in batches of `batch` examples in random order. `lengths`: ascending, in tokens.

    A batch is as long as its longest example, and the longest of b random ones is one of the i shortest of n with
    probability (i / n)^b.
    """
    below = [(i / len(lengths)) ** batch for i in range(len(lengths) + 1)]
    longest = sum(length * (now - before) for length, (before, now) in zip(lengths, pairwise(below), strict=True))
    return 1 - sum(lengths) / len(lengths) / longest
