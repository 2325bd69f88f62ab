"""Whether a run fits: the one verdict about an estimate, which rules, headline, memory card and strategies share."""

from __future__ import annotations

from enum import StrEnum

# An estimate above this multiple of the free memory does not fit, even if the estimate is off by as much as measured.
CLEAR_EXCESS = 1.2


class Fit(StrEnum):
    """How certain it is that a run fits, from the best to the worst."""

    YES = "yes"
    UNKNOWN = "unknown"
    UNCERTAIN = "uncertain"  # the estimate fits, the upper end of its range does not
    UNLIKELY = "unlikely"  # the estimate exceeds the memory, by less than its uncertainty
    NO = "no"

    @property
    def text(self) -> str:
        """The verdict in words, as the page shows it."""
        return TEXTS[self]


TEXTS = {
    Fit.YES: "Fits",
    Fit.UNKNOWN: "Memory unknown",
    Fit.UNCERTAIN: "May not fit",
    Fit.UNLIKELY: "Most likely does not fit",
    Fit.NO: "Does not fit",
}


def fit_of(needed_bytes: int, high_bytes: int, free_bytes: int, is_exact: bool = False) -> Fit:
    """The verdict about a peak with the upper end of its range. `is_exact`: it is a lower bound, or known exactly, so
    that any excess is certain."""
    if needed_bytes > (1 if is_exact else CLEAR_EXCESS) * free_bytes:
        return Fit.NO
    if needed_bytes > free_bytes:
        return Fit.UNLIKELY
    return Fit.UNCERTAIN if high_bytes > free_bytes else Fit.YES


def worst(first: Fit, second: Fit) -> Fit:
    """The worse of two verdicts."""
    order = list(Fit)
    return max(first, second, key=order.index)
