"""The documents of docs/ as HTML for the page's help, and a search over their sections.

HTML in a document is shown as text; links to other documents and pictures lead to the page's own routes, relative to
`help/`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import PurePosixPath

from markdown_it import MarkdownIt
from markdown_it.token import Token

from backend.paths import ASSETS, DOCS

GROUPS = {
    "Start": ("getting-started", "guide"),
    "Reference": ("cli", "options", "rules", "glossary"),
    "Clusters and trainers": ("slurm", "ray", "kubernetes", "skypilot", "llamafactory"),
    "Operation": ("security", "reliability"),
    "Measurements": ("strategies", "architectures", "exports", "memory", "time", "checks", "bench"),
    "Development": ("design",),
}
FIRST = "getting-started"
RULES = "rules"  # has a page of its own
MAX_RESULTS = 40
MAX_WORDS = 8
EXCERPT = 220  # characters


@dataclass(frozen=True)
class Section:
    """A heading and the text below it, until the next heading."""

    document: str
    title: str  # the title of the document
    heading: str
    anchor: str
    text: str

    @property
    def address(self) -> str:
        """Relative to `help/`."""
        return document_address(self.document, self.anchor)


@dataclass(frozen=True)
class Document:
    """A document as HTML, with its headings of the second level."""

    name: str
    title: str
    html: str
    headings: tuple[tuple[str, str], ...]  # anchor, text


def groups() -> dict[str, list[str]]:
    """The names of the documents that exist, by group."""
    existing = {path.stem for path in DOCS.glob("*.md")}
    listed = {name for names in GROUPS.values() for name in names}
    found = {group: [name for name in names if name in existing] for group, names in GROUPS.items()}
    return {group: names for group, names in {**found, "More": sorted(existing - listed)}.items() if names}


def names() -> list[str]:
    """The documents in the order of `groups`."""
    return [name for group in groups().values() for name in group]


def pictures() -> list[str]:
    """The names of the pictures that documents show."""
    return [path.name for path in ASSETS.glob("*.png")]


@cache
def title(name: str) -> str:
    """The first heading of a document."""
    with (DOCS / f"{name}.md").open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").strip()


@cache
def document(name: str) -> Document:
    """The document `name`, one of `names()`."""
    parser, tokens = _parsed(name)
    heads = [(str(tokens[i].attrGet("id")), tokens[i + 1]) for i, token in enumerate(tokens) if _is_heading(token, 2)]
    html = parser.renderer.render(tokens, parser.options, {})
    html = html.replace("<pre>", '<pre tabindex="0">').replace("<table>", '<div class="table" tabindex="0"><table>')
    html = html.replace("</table>", "</table></div>")
    return Document(name, title(name), html, tuple((anchor, _text(inline)) for anchor, inline in heads))


def document_address(name: str, anchor: str = "") -> str:
    """The address of a document, or of a heading in it, relative to `help/`."""
    if name == RULES:  # a heading there begins with the rule's code
        code = re.match(r"[a-z]{3}\d{3}(?=-)", anchor)
        return f"../rules#{code.group().upper()}" if code else "../rules"
    return f"{name}#{anchor}" if anchor else name


@dataclass(frozen=True)
class Search:
    """Sections for a query: the first of `total`. `has_all_words`: whether they contain every word of it."""

    sections: tuple[Section, ...]
    total: int
    has_all_words: bool


def search(query: str) -> Search:
    """The sections with every word of `query`, or, if there are none, with the most of its words; sections with the
    words in the heading come first."""
    words = patterns(query)
    counts = [(sum(_finds(word, section) for word in words), section) for section in _sections()]
    most = max((count for count, _ in counts), default=0)
    found = [section for count, section in counts if most and count == most]
    found.sort(key=lambda section: -sum(bool(word.search(section.heading)) for word in words))
    return Search(tuple(found[:MAX_RESULTS]), len(found), most == len(words))


def patterns(query: str) -> list[re.Pattern[str]]:
    """A pattern for each word of a query: "zero3" finds ZeRO-3, and "lora_alpha" finds lora.lora_alpha. A single letter
    occurs in every section, so it counts only if the query has no other words."""
    words = [re.sub(r"[-_./]", "", word) for word in query.split()[:MAX_WORDS]]
    words = [word for word in words if len(word) > 1 or word.isdigit()] or words
    return [re.compile(r"[-_./]?".join(map(re.escape, word)), re.IGNORECASE) for word in words if word]


def excerpt(text: str, words: Sequence[re.Pattern[str]]) -> str:
    """The part of a section around the first of the words, as HTML with the words marked."""
    places = [match.start() for word in words if (match := word.search(text))]
    start = max(0, min(places, default=0) - 60)
    if start:
        start = text.find(" ", start) + 1
    part = text[start : start + EXCERPT]
    marked, end = "", 0
    for match in sorted((match for word in words for match in word.finditer(part)), key=lambda match: match.start()):
        if match.start() >= end:
            marked += f"{escape(part[end : match.start()])}<mark>{escape(match.group())}</mark>"
            end = match.end()
    before, after = "... " if start else "", " ..." if start + EXCERPT < len(text) else ""
    return before + marked + escape(part[end:]) + after


def _finds(word: re.Pattern[str], section: Section) -> bool:
    return bool(word.search(section.heading) or word.search(section.text) or word.search(section.title))


@cache
def _sections() -> tuple[Section, ...]:
    return tuple(section for name in names() for section in _sections_of(name))


def _sections_of(name: str) -> list[Section]:
    _, tokens = _parsed(name)
    sections: list[Section] = []
    heading, anchor = "", ""
    texts: list[str] = []
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            if heading:
                sections.append(Section(name, title(name), heading, anchor, " ".join(texts)))
            heading, anchor, texts = _text(tokens[i + 1]), str(token.attrGet("id")), []
        elif token.type == "fence" or (token.type == "inline" and tokens[i - 1].type != "heading_open"):
            texts.append(" ".join(_text(token).split()))
    return [*sections, Section(name, title(name), heading, anchor, " ".join(texts))]


def _parsed(name: str) -> tuple[MarkdownIt, list[Token]]:
    """The tokens of a document; headings have ids, and links lead to the page's routes."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse((DOCS / f"{name}.md").read_text(encoding="utf-8"))
    used: Counter[str] = Counter()
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            anchor = heading_anchor(_text(tokens[i + 1]))
            token.attrSet("id", f"{anchor}-{used[anchor]}" if used[anchor] else anchor)
            used[anchor] += 1
        if token.children:
            token.children = _with_own_links(_with_line_breaks(token.children))
    return parser, tokens


def heading_anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _is_heading(token: Token, level: int) -> bool:
    return token.type == "heading_open" and token.tag == f"h{level}"


def _text(token: Token) -> str:
    """The text of an inline token or a code block."""
    if token.children is None:
        return token.content
    return "".join(" " if "break" in child.type else child.content for child in token.children)


def _with_line_breaks(tokens: Sequence[Token]) -> list[Token]:
    """`<br>`, the only HTML in the documents, separates the lines of a table cell."""
    found = []
    for token in tokens:
        parts = token.content.split("<br>") if token.type == "text" else [""]
        if len(parts) == 1:
            found.append(token)
            continue
        for i, part in enumerate(parts):
            text = Token("text", "", 0, content=part)
            found += [Token("hardbreak", "br", 0), text] if i else [text]
    return found


def _with_own_links(tokens: Sequence[Token]) -> list[Token]:
    """Links lead to the page's routes. A link to a file that the page does not serve becomes plain text."""
    found, dropped = [], False
    for token in tokens:
        if token.type == "image":
            token.attrSet("src", f"pictures/{PurePosixPath(str(token.attrGet('src'))).name}")
        if token.type == "link_open":
            address = _own_address(str(token.attrGet("href")))
            dropped = not address
            token.attrSet("href", address)
        if not (dropped and token.type in ("link_open", "link_close")):
            found.append(token)
    return found


def _own_address(target: str) -> str:
    """Where a link of a document leads on the page; '' for a file that the page does not serve."""
    path, _, anchor = target.partition("#")
    if "://" in target or not path:
        return target
    name = path.removesuffix(".md")
    return document_address(name, anchor) if name in names() else ""
