"""The help: the documents of docs/ as pages with a list of all documents and a search.

All text is escaped.
"""

from __future__ import annotations

from html import escape
from typing import Annotated

from fastapi import Query
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from backend.paths import ASSETS
from webui import documents
from webui.api.requests import ApiError
from webui.page_frame import static_page

ROOT = "../"
HEADERS = {"cache-control": "no-cache"}
MAX_QUERY = 200

CONTENT = """<div class="columns">
<aside><form role="search" action="search"><input type="search" name="q" value="{query}" maxlength="{max_query}"
  placeholder="Search the help" aria-label="Search the help" required></form>
<details open><summary>Documents</summary><nav aria-label="Documents">{list}</nav></details></aside>
<main id="fp-content" tabindex="-1">{main}</main>
</div>"""


def first() -> Response:
    """The help without a document."""
    return RedirectResponse(f"help/{documents.FIRST}", 307, headers=HEADERS)


def show(name: str) -> Response:
    """One document."""
    if name == documents.RULES:
        return RedirectResponse(documents.document_address(name), 307, headers=HEADERS)
    if name not in documents.names():
        raise ApiError(404, f"The help has no document {name[:100]}; it has {', '.join(documents.names())}.")
    document = documents.document(name)
    return _page(document.title, document.html, name)


def search(q: Annotated[str, Query(max_length=MAX_QUERY)] = "") -> Response:
    """The sections of all documents that contain every word of `q`, or most of its words."""
    found = documents.search(q)
    words = documents.patterns(q)
    items = "".join(
        f'<li><a href="{escape(section.address)}">{escape(section.heading)}</a> '
        f'<span class="dim">{escape(section.title)}</span><p>{documents.excerpt(section.text, words)}</p></li>'
        for section in found.sections
    )
    count = {0: "No section contains these words.", 1: "1 section"}.get(found.total, f"{found.total} sections")
    which = "" if found.has_all_words or not found.total else " with some of these words; no section has all of them"
    more = f"; the first {len(found.sections)} are shown" if found.total > len(found.sections) else ""
    status = f'<p class="dim" role="status">{count}{which}{more}</p>'
    return _page("Search", f'<h1>Search results</h1>{status}<ul class="results">{items}</ul>', query=q)


def picture(name: str) -> Response:
    """A picture of a document."""
    if name not in documents.pictures():
        raise ApiError(404, f"The help has no picture {name[:100]}.")
    return FileResponse(ASSETS / name, headers=HEADERS)


def _page(title: str, main: str, name: str = "", query: str = "") -> Response:
    content = CONTENT.format(query=escape(query), max_query=MAX_QUERY, list=_list(name), main=main)
    return HTMLResponse(static_page("help", title, content, root=ROOT), headers=HEADERS)


def _list(current: str) -> str:
    parts = []
    for group, names in documents.groups().items():
        items = "".join(_entry(name, name == current) for name in names)
        parts.append(f"<h2>{escape(group)}</h2><ul>{items}</ul>")
    return "".join(parts)


def _entry(name: str, is_current: bool) -> str:
    current = ' aria-current="page"' if is_current else ""
    link = f'<a href="{documents.document_address(name)}"{current}>{escape(documents.title(name))}</a>'
    if not is_current:
        return f"<li>{link}</li>"
    headings = documents.document(name).headings
    items = "".join(f'<li><a href="#{escape(anchor)}">{escape(text)}</a></li>' for anchor, text in headings)
    return f"<li>{link}<ul>{items}</ul></li>"
