"""Scores of outputs, and the intervals of their differences."""

import json

import numpy
import pytest

from backend.inference.scores import SCORES
from backend.models import intervals

NUMBER, CALLS, FIELDS = "numeric_answer", "tool_calls", "json_fields"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
OTHER = CALL.replace("add", "multiply")
OF = {score.name: score.of for score in SCORES}


@pytest.mark.parametrize(
    ("name", "reference", "output", "expected"),
    [
        ("exact_match", "Paris", " Paris\n", 1),
        ("exact_match", "Paris", "paris", 0),
        ("exact_match", '{"a": 1, "b": 2}', '{"b":2,"a":1}', 1),
        ("valid_json", "Paris", "{}", None),
        ("valid_json", '{"a": 1}', '{"b": 2}', 1),
        ("valid_json", '{"a": 1}', '```json\n{"a": 1}\n```', 0),
        (FIELDS, "[1]", "[1]", None),
        (FIELDS, '{"a": 1, "b": {"c": "x"}}', '{"b": {"c": "x"}, "a": 1}', 1),
        (FIELDS, '{"a": 1, "b": {"c": "x"}}', '{"a": 1, "b": {"c": "y"}}', 1 / 3),
        (FIELDS, '{"a": 1}', '{"a": "1"}', 0),
        (FIELDS, '{"a": [1, 2]}', '{"a": [1]}', 1 / 2),
        (FIELDS, '{"a": null}', "null", 0),
        (FIELDS, '{"a": {}}', '{"a": {}}', 1),
        ("exact_match", '{"a": 1}', '{"a": 1.0}', 1),
        ("exact_match", '{"a": 1}', '{"a": true}', 0),
        (FIELDS, '{"a": 1, "b": 2.5}', '{"a": 1.0, "b": 2.50}', 1),
        (FIELDS, '{"a": true}', '{"a": 1}', 0),
        (NUMBER, "Two trains leave at 7.", "7", None),
        (NUMBER, "3 + 4 = 7\n#### 7", "I think it is 7.", 1),
        (NUMBER, "3 + 4 = 7\n#### 7", "#### 8, since 7 is wrong", 0),
        (NUMBER, "The answer is 1,250.", "So 1000 + 250 = 1250", 1),
        (NUMBER, "\\boxed{0.5}", "It is 0.50", 1),
        (NUMBER, "$12.50", "12.5", 1),
        (NUMBER, "-3", "3", 0),
        (NUMBER, "42", "no number", 0),
        (NUMBER, "42", "-", 0),
        (NUMBER, "\\boxed{\\frac{1}{2}}", "\\boxed{\\frac{1}{3}}", None),
        (NUMBER, "The answer is 3/4.", "The answer is 3/5.", None),
        (NUMBER, "\\boxed{3\\sqrt{2}}", "\\boxed{3}", None),
        (NUMBER, "\\boxed{3}", "\\boxed{3\\sqrt{2}}", 0),
        (NUMBER, "\\boxed{8{,}000}", "\\boxed{8{,}500}", 0),
        (NUMBER, "\\boxed{8{,}000}", "8000", 1),
        (NUMBER, "\\boxed{.5}", "0.5", 1),
        (NUMBER, "\\boxed{50^\\circ}", "50 degrees", 1),
        (NUMBER, "**Answer:** 7 apples", "The answer is $7$.", 1),
        (NUMBER, "The answer is Paris, which has 2 million people.", "2", None),
        (CALLS, "No call.", CALL, None),
        (CALLS, CALL + OTHER, OTHER + CALL, 1),
        (CALLS, CALL, CALL.replace("1", "1.0"), 1),
        (CALLS, CALL, 'Sure: {"arguments": {"b": [2], "a": 1}, "name": "add"}', 1),
        (CALLS, CALL, '{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": [2]}"}', 1),
        (CALLS, CALL, '{"name": "add", "parameters": {"a": 1, "b": [2]}}', 1),
        (CALLS, CALL, CALL + CALL, 0),
        (CALLS, CALL, CALL.replace("[2]", "[3]"), 0),
        (CALLS, CALL, '{"name": "add", "arguments": {"a": 1', 0),
        (CALLS, CALL, "{{{{", 0),
        ("rouge_l", "Он быстро бежит", "Он быстро", 0.8),
        ("rouge_l", "", "", 0),
        ("chrf", "same words", "same words", 1),
        ("chrf", "same words", "", 0),
    ],
)
def test_score(name, reference, output, expected):
    found = OF[name](reference, output)
    assert found == (None if expected is None else pytest.approx(expected))


DEEP = '{"name": "a", "arguments": ' + '{"a":' * 980 + "1" + "}" * 981


@pytest.mark.parametrize("text", [DEEP, "[" * 3000, '{"a":' * 3000, '{"name": 1e999}', "NaN", "{" * 2000, "9" * 5000])
def test_strange_outputs_have_a_score(text):
    for reference in (CALL, '{"a": 1}', "#### 7", text):
        for score in SCORES:
            value = score.of(reference, text)
            assert value is None or 0 <= value <= 1, score.name


def compare(base, trained, weights=()):
    return intervals.compare("score", "Score", base, trained, weights)


def test_the_interval_is_that_of_the_textbook():
    """Differences of a normal distribution: the interval of the mean is known."""
    random = numpy.random.default_rng(1)
    base = random.uniform(0, 1, 400)
    after = base + random.normal(0.1, 0.3, 400)
    found = compare(list(base), list(after))
    mean, error = (after - base).mean(), (after - base).std(ddof=1) / 20
    assert found.low == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(mean + 1.96 * error, abs=0.1 * error)
    assert found.verdict == "better" and found.trained - found.base == pytest.approx(mean)


def test_several_pairs_have_the_intervals_of_the_definition():
    """The examples are drawn, and the mean of their differences is taken."""
    random, count = numpy.random.default_rng(3), 250
    base, weights = random.random(count), random.integers(1, 50, count).astype(float)
    pairs = [(base, random.random(count)), (base, base + 0.25)]
    drawn = numpy.random.default_rng(intervals.SEED).integers(0, count, (intervals.RESAMPLES, count))
    for own in ((), weights.tolist()):
        chosen = numpy.asarray(own or numpy.ones(count))[drawn]
        found = intervals.compare_pairs("score", "Score", pairs, own)
        means = ((pairs[0][1] - base)[drawn] * chosen).sum(1) / chosen.sum(1)
        assert (found[0].low, found[0].high) == pytest.approx(numpy.percentile(means, (2.5, 97.5)), abs=1e-12)
        for one, pair in zip(found, pairs, strict=True):
            alone = compare(*pair, own)
            assert (one.low, one.high, one.trained) == pytest.approx((alone.low, alone.high, alone.trained), abs=1e-12)


def test_intervals_cover_the_truth_as_often_as_they_say():
    random = numpy.random.default_rng(2)
    inside = 0
    for _ in range(100):
        base, after = random.random(40) < 0.4, random.random(40) < 0.6
        found = compare(base.astype(float).tolist(), after.astype(float).tolist())
        inside += found.low <= 0.2 <= found.high
    assert 0.90 <= inside / 100 <= 0.99


def test_few_equal_differences_are_not_certain():
    none = compare([0.0] * 12, [0.0] * 12)
    assert none.verdict == "unclear" and none.high == -none.low == pytest.approx(1 - 0.025 ** (1 / 12))
    few = compare([0.0] * 7, [1.0] * 7)
    assert few.verdict == "few" and few.sentence().endswith("; too few examples to tell whether that is chance.")
    all_better = compare([0.0] * 12, [1.0] * 12)
    assert all_better.verdict == "better" and 0.4 < all_better.low < 0.6 and all_better.high == 1


def test_losses_count_tokens_and_less_is_better():
    """One long example decides the mean per token."""
    found = compare([2.0, 1.0], [1.0, 1.5], [900, 100])
    assert found.verdict == "few"
    assert found.base == pytest.approx(1.9) and found.trained == pytest.approx(1.05)
    better = compare([2.0] * 20, [1.0] * 20, [5] * 20)
    assert better.verdict == "better" and better.low == better.high == -1
    assert better.sentence() == "Score: base model 2.000, trained model 1.000; better by 1.000 to 1.000 (95% interval)."
    assert compare([1.0] * 20, [2.0] * 20, [5] * 20).verdict == "worse"


def test_sentences():
    pairs = [0.0] * 10 + [1.0] * 10, [1.0] * 15 + [0.0] * 5
    unclear = compare(*pairs)
    assert unclear.sentence().startswith("Score: base model 50.0%, trained model 75.0%; no clear change (-")
    assert unclear.sentence().endswith(" percentage points, 95% interval).")
    better = compare([0.0] * 20, [1.0] * 18 + [0.0] * 2)
    expected = "Score: base model 0.0%, trained model 90.0%; better by 75.0 to 100.0 percentage points (95% interval)."
    assert better.sentence() == expected
    assert json.loads(json.dumps(better.as_json()))["verdict"] == "better"
