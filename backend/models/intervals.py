"""The difference between two models on the same examples, with a paired bootstrap interval.

The examples are drawn again with replacement, RESAMPLES times, and the difference between the means is computed each
time; the interval has the middle 95% of these differences (Efron and Tibshirani 1993, chapter 13). Both models have
answered the same examples, so only their differences are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy

RESAMPLES, CONFIDENCE, SEED = 10_000, 0.95, 0
MIN_EXAMPLES = 8  # with fewer, an interval of losses misses the true value in one of five cases or more
CHUNK = 2_000_000  # drawn numbers in memory at a time
BETTER, WORSE, UNCLEAR, FEW = "better", "worse", "unclear", "few"


@dataclass(frozen=True)
class Comparison:
    """A score of the base model and of the trained model on `count` examples: means, and the interval of the difference
    from `low` to `high`. `is_share`: the score is from 0 to 1 and shown in percent; else it is a loss, for which lower
    is better."""

    name: str
    label: str
    count: int
    base: float
    trained: float
    low: float
    high: float
    is_share: bool

    @property
    def verdict(self) -> str:
        """Whether the trained model is better, worse, neither with certainty, or whether the examples are too few."""
        if self.count < MIN_EXAMPLES:
            return FEW
        if self.low <= 0 <= self.high:
            return UNCLEAR
        return BETTER if (self.low > 0) == self.is_share else WORSE

    def sentence(self) -> str:
        """The result in a sentence: both means and, where it is clear, the change."""
        means = f"{self.label}: base model {self._shown(self.base)}, trained model {self._shown(self.trained)}"
        if self.verdict == FEW:
            return f"{means}; too few examples to tell whether that is chance."
        if self.verdict == UNCLEAR:
            return f"{means}; no clear change ({self._change(self.low, self.high, True)}, 95% interval)."
        return f"{means}; {self.verdict} by {self._change(self.low, self.high, False)} (95% interval)."

    def _shown(self, value: float) -> str:
        return f"{100 * value:.1f}%" if self.is_share else f"{value:.3f}"

    def _change(self, low: float, high: float, signed: bool) -> str:
        if not signed and high < 0:
            low, high = -high, -low
        sign = "+" if signed else ""
        if not self.is_share:
            return f"{low:{sign}.3f} to {high:{sign}.3f}"
        return f"{100 * low:{sign}.1f} to {100 * high:{sign}.1f} percentage points"

    def as_json(self) -> dict[str, Any]:
        """For the result."""
        return {**asdict(self), "verdict": self.verdict, "sentence": self.sentence()}


def compare(
    name: str, label: str, base: Sequence[float], trained: Sequence[float], weights: Sequence[float] = ()
) -> Comparison:
    """The means of both models, and the interval of their difference. With `weights`, which are numbers of tokens, the
    values are losses per token. At least one example."""
    return compare_pairs(name, label, [(base, trained)], weights)[0]


def compare_pairs(
    name: str, label: str, pairs: Sequence[tuple[Sequence[float], Sequence[float]]], weights: Sequence[float] = ()
) -> list[Comparison]:
    """`compare` for several pairs of models on the same examples, which are drawn once for all of them."""
    ones, twos = (numpy.asarray([pair[side] for pair in pairs], dtype=float) for side in (0, 1))
    ours = numpy.asarray(weights or numpy.ones(ones.shape[1]), dtype=float)
    intervals = _intervals(twos - ones, ours, is_share=not weights)
    before, after = (numpy.average(values, axis=1, weights=ours).tolist() for values in (ones, twos))
    return [
        Comparison(name, label, len(ours), one, two, low, high, is_share=not weights)
        for one, two, (low, high) in zip(before, after, intervals, strict=True)
    ]


def _intervals(differences: Any, weights: Any, is_share: bool) -> list[tuple[float, float]]:
    """(low, high) of the weighted mean of each row of differences."""
    count, random, means = len(weights), numpy.random.default_rng(SEED), []
    for _ in range(0, RESAMPLES, per := max(1, CHUNK // count)):
        drawn = random.integers(0, count, (per, count)) + count * numpy.arange(per)[:, None]
        times = numpy.bincount(drawn.ravel(), minlength=per * count).reshape(per, count).astype(float)
        means.append(times @ (differences * weights).T / (times @ weights)[:, None])
    outside = 100 * (1 - CONFIDENCE) / 2
    low, high = numpy.percentile(numpy.concatenate(means)[:RESAMPLES], (outside, 100 - outside), axis=0).tolist()
    equal = [is_share and bool((each == each[0]).all()) for each in differences]
    return [
        _all_equal(float(each[0]), count) if is_equal else found
        for each, is_equal, found in zip(differences, equal, zip(low, high, strict=True), strict=True)
    ]


def _all_equal(difference: float, count: int) -> tuple[float, float]:
    """The interval where all examples have the same difference, for which a bootstrap interval would have zero width.
    At least `share` of all examples have it: with a smaller share, `count` examples in a row would have it in fewer
    than 2.5% of cases (Clopper and Pearson 1934). The others may have any difference from -1 to 1."""
    share = ((1 - CONFIDENCE) / 2) ** (1 / count)
    return share * difference - (1 - share), share * difference + (1 - share)
