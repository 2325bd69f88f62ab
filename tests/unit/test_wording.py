"""Numbers with nouns in messages."""

from __future__ import annotations

import pytest

from backend.wording import counted, data_size, figure, plural, visible


@pytest.mark.parametrize(
    ("noun", "expected"),
    [
        ("step", "steps"), ("batch", "batches"), ("process", "processes"), ("index", "indexes"),
        ("entry", "entries"), ("key", "keys"), ("epoch", "epochs"), ("eval example", "eval examples"),
    ],
)  # fmt: skip
def test_plural(noun: str, expected: str) -> None:
    assert plural(noun) == expected


def test_counted() -> None:
    assert counted(1, "batch") == "1 batch" and counted(8, "batch") == "8 batches"
    assert counted(0, "step") == "0 steps" and counted(60_000, "step") == "60,000 steps"


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.5, "1.5"), (15.24, "15.2"), (99.94, "99.9"), (99.96, "100"), (999.6, "1000"), (1023.4, "1023"), (0, "0")],
)
def test_figures_have_no_exponent(value, text):
    assert figure(value) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[assistant] ", '"[assistant]␣"'),
        ("a  b c", '"a␣␣b c"'),
        ("\n x\u00a0\u200b", r'"\n␣x\u00a0\u200b"'),
        ("é", '"é"'),
    ],
)
def test_whitespace_that_a_reader_would_miss_is_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_a_size_below_a_unit_is_not_1024_of_the_unit_before() -> None:
    sizes = [1023, 1023.4 * 2**10, 2**20 - 1, 2**30 - 1, 2**30]
    assert [data_size(size) for size in sizes] == ["1,023 bytes", "1023 KiB", "1 MiB", "1 GiB", "1 GiB"]
