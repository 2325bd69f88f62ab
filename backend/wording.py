"""Numbers with nouns, as every message of Footplate writes them."""

from __future__ import annotations

import re
from functools import cache


def figure(value: float) -> str:
    """Three significant digits, or the integer from 100 on: 1.5, 15.2, 1020. `:.3g` would write 1.02e+03."""
    return f"{value:.3g}" if abs(value) < 99.95 else f"{value:.0f}"


def data_size(count: float) -> str:
    """Bytes in the largest binary unit: '3.2 GiB', '512 bytes'."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{figure(count / factor)} {unit}"
    return counted(round(count), "byte")


def learning_rate(value: float) -> str:
    """A learning rate, always as the page writes it: 1e-4, 2.5e-3, and 10."""
    if abs(value) >= 1:
        return f"{value:g}"
    digits, _, exponent = f"{value:.3e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}" if value else "0"


def counted(number: int, thing: str) -> str:
    """A number with a noun in the singular or plural: '1 step', '60,000 steps', '2 processes'."""
    return f"{number:,} {thing if number == 1 else plural(thing)}"


@cache
def plural(noun: str) -> str:
    """The regular plural of a noun: steps, batches, processes, entries."""
    if re.search(r"(s|x|z|sh|(?<!epo)ch)$", noun):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if re.search(r"[^aeiou]y$", noun) else f"{noun}s"


def ratio(value: float) -> str:
    """A factor, such as 0.5x."""
    return f"{value:,.0f}x" if value >= 100 else f"{value:.3g}x"


def names(items: object) -> str:
    """An enumeration: 'a, b and c'."""
    words = [str(item) for item in items] if isinstance(items, list | tuple | set | frozenset) else [str(items)]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "nothing"
