"""Metrics of generated text, compared with values computed by hand."""

import pytest

from backend.runs.search import SCORES
from backend.train.text_metrics import UnicodeTokenizer, exact_match, scores


def test_exact_match_compares_json_by_value():
    references = ['{"a": 1, "b": [2]}', "yes", "1"]
    assert exact_match(references, ['{"b":[2],"a":1}', " yes\n", "1.0"]) == pytest.approx(2 / 3)


def test_exact_generations_score_one_and_unrelated_ones_zero():
    references = ["the train leaves at nine", "it stops in every town"]
    assert scores(references, references) == dict.fromkeys(SCORES, 1)
    assert scores(references, ["Gleis sieben", ""]) == dict.fromkeys(SCORES, 0)


def test_rouge_is_the_mean_f_measure_of_the_examples():
    """Example 1 has 4 of 5 words and 3 of 4 bigrams: precision 1, recall 4/5 and 3/4. Example 2 has no match."""
    metrics = scores(["the train leaves at nine", "x"], ["the train leaves at", "y"])
    assert metrics["rouge_1"] == metrics["rouge_l"] == pytest.approx((2 * 4 / 9) / 2, abs=1e-6)
    assert metrics["rouge_2"] == pytest.approx((2 * 3 / 7) / 2, abs=1e-6)


def test_bleu_of_one_example():
    """One n-gram is wrong in each order from 1 to 4; no brevity penalty."""
    metrics = scores(["a b c d e"], ["a b c d x"])
    assert metrics["bleu"] == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25, abs=1e-4)


@pytest.mark.parametrize(
    "wanted",
    ["Καλημέρα σε όλους εδώ", "поезд уходит в девять", "火车九点出发了", "電車は九時に出ます", "รถไฟออกเก้าโมง"],
)
def test_non_latin_scripts_are_tokenized(wanted):
    metrics = scores([wanted], [wanted])
    assert metrics["rouge_1"] == metrics["rouge_l"] == metrics["bleu"] == 1
    assert scores([wanted], ["something else"])["rouge_1"] == 0


def test_unicode_tokenizer():
    assert UnicodeTokenizer().tokenize('{"Ort": "Köln", n_2: 3}') == ["ort", "köln", "n", "2", "3"]
    assert UnicodeTokenizer().tokenize("去Köln吧") == ["去", "köln", "吧"]


def test_vowel_signs_and_accents_are_part_of_words():
    """Girl and boy in Hindi differ in a vowel sign only; an accent is part of a letter or a character of its own."""
    assert UnicodeTokenizer().tokenize("लड़की, हिन्दी.") == ["लड\u093cकी", "हिन्दी"]
    assert scores(["लड़की"], ["लड़का"])["rouge_1"] == 0
    assert UnicodeTokenizer().tokenize("Cafe\u0301") == ["caf\u00e9"]
