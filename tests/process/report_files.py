"""Markdown documents written by `make soak` and `make gpu`: an introduction, and one section per passed test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Sections = Mapping[str, str]


def read_sections(document: Path) -> dict[str, str]:
    """Title -> body of the sections in a document."""
    parts = document.read_text(encoding="utf-8").split("\n## ")[1:] if document.exists() else []
    return {title: body.strip() for title, _, body in (part.partition("\n") for part in parts)}


def write_section(
    document: Path, introduction: Callable[[Sections], str], order: Sequence[str], title: str, body: str
) -> None:
    """Write or replace one section, in the given order, below an introduction that is computed from all sections."""
    written = {**read_sections(document), title: body}
    sections = {name: written[name] for name in order if name in written}
    bodies = "".join(f"\n## {name}\n\n{text}\n" for name, text in sections.items())
    document.write_text(introduction(sections).strip() + "\n" + bodies, encoding="utf-8")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    cells = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in cells)
