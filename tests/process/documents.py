"""Documents that long proofs write: a head, and sections that come one at a time, each from a proof of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Sections = Mapping[str, str]


def known(document: Path) -> dict[str, str]:
    """Title -> body of the sections that stand there."""
    parts = document.read_text(encoding="utf-8").split("\n## ")[1:] if document.exists() else []
    return {title: body.strip() for title, _, body in (part.partition("\n") for part in parts)}


def keep(document: Path, top: Callable[[Sections], str], order: Sequence[str], title: str, body: str) -> None:
    """Put one section in, in the given order, under a head that is made of all."""
    found = {**known(document), title: body}
    sections = {name: found[name] for name in order if name in found}
    bodies = "".join(f"\n## {name}\n\n{said}\n" for name, said in sections.items())
    document.write_text(top(sections).strip() + "\n" + bodies, encoding="utf-8")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows under their titles."""
    cells = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in cells)
