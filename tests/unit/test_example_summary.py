"""The picture of all examples in the card Examples: their lengths, and where problems are."""

from __future__ import annotations

import random
from typing import Any

import pytest

from backend.config import RunSpec
from backend.config.options import edit
from webui.api.examples import BARS, _summary, padding_share

SPEC = edit(RunSpec(), {"data.max_length": 64, "train.per_device_train_batch_size": 1})
FOUND = {"complete": True, "longest_row": 3, "rows": 5}


def test_each_length_is_in_one_bar() -> None:
    found = {**FOUND, "tokenized": 4, "lengths": [1, 50, 99, 100], "longest": 100, "places": {"copies": [2]}}
    made = _summary(found, SPEC)
    assert (made["lengths"]["longest"], made["lengths"]["rows"]) == (3, 5)
    bars = made["lengths"]["bars"]
    assert (len(bars), sum(bars), bars[0], bars[20], bars[-1]) == (BARS, 4, 1, 1, 2)
    assert made["lengths"]["text"].startswith("Tokens of 4 examples: half have up to 99,")
    assert made["kinds"] == [["equal to an earlier one", [2]]]
    one = _summary({**found, "tokenized": 1, "lengths": [7], "longest": 7}, SPEC)["lengths"]["text"]
    assert one.startswith("Tokens of 1 example: half have up to 7,")
    assert "of the first 4 examples" in _summary({**found, "tokenized": 9, "longest": 300}, SPEC)["lengths"]["text"]


def test_nothing_is_known_yet() -> None:
    assert _summary({"complete": False}, SPEC) == {"complete": False, "lengths": None, "kinds": []}


def test_padding_is_what_random_batches_have() -> None:
    draw = random.Random(3)
    lengths = [draw.randrange(1, 500) for _ in range(2000)]
    used = padded = 0
    for _ in range(3000):
        batch = draw.sample(lengths, 8)
        used, padded = used + sum(batch), padded + 8 * max(batch)
    assert padding_share(sorted(lengths), 8) == pytest.approx(1 - used / padded, abs=0.01)
    assert padding_share([7, 7, 7], 8) == padding_share([1, 9], 1) == 0


@pytest.mark.parametrize(
    ("changes", "is_said"),
    [
        ({}, True),
        ({"train.per_device_train_batch_size": 1}, False),
        ({"data.packing": True}, False),
        ({"train.train_sampling_strategy": "group_by_length"}, False),
        ({"data.max_length": 8}, False),  # all examples are cut to the same length
        ({"train.stage": "dpo"}, False),
    ],
)
def test_padding_is_said_where_it_is_wasted(changes: dict[str, Any], is_said: bool) -> None:
    found = {**FOUND, "tokenized": 3, "lengths": [10, 20, 64], "longest": 64, "places": {}}
    spec = edit(SPEC, {"train.per_device_train_batch_size": 4, **changes})
    text = _summary(found, spec)["lengths"]["text"]
    assert text.endswith(" In batches of 4, about 43% of the tokens are padding; packing avoids it.") == is_said
    assert ("padding" in text) == is_said
