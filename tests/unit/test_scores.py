"""Scores of answers, against figures worked out by hand."""

import pytest

from backend.train.text_metrics import UnicodeTokenizer, exact_match, scores


def test_json_counts_by_what_it_says():
    wanted = ['{"a": 1, "b": [2]}', "yes", "1"]
    assert exact_match(wanted, ['{"b":[2],"a":1}', " yes\n", "1.0"]) == pytest.approx(2 / 3)


def test_right_answers_score_one_and_foreign_ones_zero():
    wanted = ["the train leaves at nine", "it stops in every town"]
    names = ("exact_match", "rouge_1", "rouge_2", "rouge_l", "bleu")
    assert scores(wanted, wanted) == dict.fromkeys(names, 1)
    assert scores(wanted, ["Gleis sieben", ""]) == dict.fromkeys(names, 0)


def test_rouge_is_the_mean_f_measure_of_the_rows():
    """Four of five words, three of four pairs, in order: precision 1, recall 4/5; the second row has nothing."""
    found = scores(["the train leaves at nine", "x"], ["the train leaves at", "y"])
    assert found["rouge_1"] == found["rouge_l"] == pytest.approx((2 * 4 / 9) / 2, abs=1e-6)
    assert found["rouge_2"] == pytest.approx((2 * 3 / 7) / 2, abs=1e-6)


def test_bleu_counts_all_rows_together():
    """One pair of wanted words is missing of each order 1 to 4, and nothing is too short."""
    found = scores(["a b c d e"], ["a b c d x"])
    assert found["bleu"] == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25, abs=1e-4)


@pytest.mark.parametrize(
    "wanted",
    ["Καλημέρα σε όλους εδώ", "поезд уходит в девять", "火车九点出发了", "電車は九時に出ます", "รถไฟออกเก้าโมง"],
)
def test_other_scripts_are_no_blank(wanted):
    found = scores([wanted], [wanted])
    assert found["rouge_1"] == found["rouge_l"] == found["bleu"] == 1
    assert scores([wanted], ["something else"])["rouge_1"] == 0


def test_words():
    assert UnicodeTokenizer().tokenize('{"Ort": "Köln", n_2: 3}') == ["ort", "köln", "n", "2", "3"]
    assert UnicodeTokenizer().tokenize("去Köln吧") == ["去", "köln", "吧"]
