"""Tables of the command line."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def lines(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """The rows as lines of text, each column as wide as its longest text; columns `right` (0 is the first) are aligned
    to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (text.rjust(widths[n]) if n in right else text.ljust(widths[n]) for n, text in enumerate(row))
        yield "  ".join(cells).rstrip()
