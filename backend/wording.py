"""Numbers with nouns and quoted texts, as every message of Footplate writes them."""

from __future__ import annotations

import json
import re
from functools import cache

JOINERS = "\u200c\u200d"  # invisible parts of words and emoji


def figure(value: float) -> str:
    """Three significant digits, or the integer from 100 on: 1.5, 15.2, 1020. `:.3g` would write 1.02e+03."""
    return f"{value:.3g}" if abs(value) < 99.95 else f"{value:.0f}"


def data_size(count: float) -> str:
    """Bytes in the largest binary unit: '3.2 GiB', '512 bytes'."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count * 1024 >= 1023.5 * factor:  # what would be rounded to 1024 of the unit below is 1 of this one
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


def visible(text: str) -> str:
    """The text in quotes, with a mark for each space that a reader would miss: at an end, and next to whitespace. Other
    whitespace and invisible characters are escaped."""
    marked = re.sub(r"^ | $|(?<=\s) | (?=\s)", "␣", text)
    quoted = json.dumps(marked, ensure_ascii=False)
    return "".join(char if char.isprintable() or char in JOINERS else json.dumps(char)[1:-1] for char in quoted)


def different_start(generated: str, trained: str, what: str) -> str:
    """A clause about a completion that starts differently in generation and in training. `what`: what differs, as
    backend.train.completion_start says."""
    texts = f"{visible(trained)} in training, {visible(generated)} in generation."
    if what == "tokens":
        return (
            "the tokenizer joins the end of the generation prompt with the completion after it, so the last assistant "
            f"turn starts with different tokens: {texts}"
        )
    if what == "loss":
        return f"the loss on the last assistant turn starts after a text that the generation prompt lacks: {texts}"
    return f"the last assistant turn starts differently: {texts}"
