"""The picture of all examples in the card Examples: their lengths, and where problems are."""

from __future__ import annotations

from webui.api.examples import BARS, _summary


def test_each_length_is_in_one_bar() -> None:
    found = {"complete": True, "tokenized": 4, "lengths": [1, 50, 99, 100], "longest": 100, "places": {"copies": [2]}}
    made = _summary(found, 64)
    bars = made["lengths"]["bars"]
    assert (len(bars), sum(bars), bars[0], bars[20], bars[-1]) == (BARS, 4, 1, 1, 2)
    assert made["lengths"]["text"].startswith("Tokens of 4 examples: half have up to 99,")
    assert made["kinds"] == [["equal to an earlier one", [2]]]
    assert "of the first 4 examples" in _summary({**found, "tokenized": 9, "longest": 300}, 64)["lengths"]["text"]


def test_nothing_is_known_yet() -> None:
    assert _summary({"complete": False}, 64) == {"complete": False, "lengths": None, "kinds": []}
