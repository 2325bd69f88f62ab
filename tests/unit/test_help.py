"""The help: every document is a page with working links and pictures, and its sections can be searched."""

import re
from html import unescape
from urllib.parse import urljoin

import pytest
from small import client

from backend.paths import DOCS
from webui import documents

PAGES = sorted(path.stem for path in DOCS.glob("*.md") if path.stem != documents.RULES)


@pytest.fixture(scope="module")
def help_pages(tmp_path_factory):
    with client(tmp_path_factory.mktemp("runs")) as http:
        yield http


def ids(http, address):
    """The anchors of the page at `address`."""
    response = http.get(address)
    assert response.status_code == 200, address
    return set(re.findall(r' id="([^"]+)"', response.text))


def test_links_and_pictures_of_every_document_lead_somewhere(help_pages):
    assert set(documents.names()) == {*PAGES, documents.RULES}
    anchors, broken = {}, []
    for name in PAGES:
        page = help_pages.get(f"/help/{name}")
        assert page.status_code == 200 and "<h1 id=" in page.text and "&lt;br&gt;" not in page.text
        for address in re.findall(r'(?:href|src)="([^"]+)"', page.text):
            target = urljoin(f"/help/{name}", unescape(address))
            path, _, anchor = target.partition("#")
            if "://" in target or "?" in target:
                continue
            if path not in anchors:
                anchors[path] = ids(help_pages, path)
            if anchor and anchor not in anchors[path]:
                broken.append((name, target))
    assert broken == []
    assert "/help/pictures/build.png" in anchors and "/rules" in anchors


def test_the_list_names_every_document_and_the_sections_of_this_one(help_pages):
    page = help_pages.get("/help/guide").text
    for name in PAGES:
        assert f'<a href="{name}"' in page
    assert '<a href="guide" aria-current="page">Guide</a>' in page and '<a href="#rehearsal">Rehearsal</a>' in page


def test_unknown_documents_and_pictures(help_pages):
    for path in ("/help/nothing", "/help/..%2fREADME", "/help/pictures/..%2f..%2fREADME.md", "/help/pictures/x.png"):
        assert help_pages.get(path).status_code == 404, path
    assert help_pages.get("/help", follow_redirects=False).headers["location"] == "help/getting-started"
    assert help_pages.get("/help/rules", follow_redirects=False).headers["location"] == "../rules"


def test_search_finds_sections_by_all_words(help_pages):
    found = documents.search("Out of memory")
    assert found.sections[0].address == "guide#out-of-memory" and found.total > 1
    assert {section.address for section in documents.search("zero3 pissa").sections} == {
        section.address for section in documents.search("ZeRO-3 PiSSA").sections
    }
    assert any(section.address.startswith("../rules#") for section in documents.search("PiSSA rank").sections)
    assert documents.patterns("merge a LoRA") == documents.patterns("merge LoRA")
    assert "<mark>a</mark>" not in help_pages.get("/help/search", params={"q": "merge a LoRA"}).text
    assert documents.search("").total == documents.search("-").total == 0
    page = help_pages.get("/help/search", params={"q": "rehearsal"}).text
    assert '<a href="guide#rehearsal">Rehearsal</a>' in page and "<mark>rehearsal</mark>" in page
    assert "No section contains these words." in help_pages.get("/help/search?q=zzzz").text
    some = help_pages.get("/help/search?q=rehearsal+zzzz").text
    assert "with some of these words; no section has all of them" in some and '<a href="guide#rehearsal">' in some


def test_text_of_queries_and_documents_is_escaped(help_pages, tmp_path, monkeypatch):
    assert "<b>x" not in help_pages.get("/help/search", params={"q": '"><b>x'}).text
    assert help_pages.get("/help/search", params={"q": "x" * 201}).status_code == 400
    (tmp_path / "odd.md").write_text("# Odd <i>\n\n<script>1</script> [x](javascript:alert(1)) <a&b>\n")
    monkeypatch.setattr(documents, "DOCS", tmp_path)
    documents.title.cache_clear()
    html = documents.document("odd").html
    assert "<script>" not in html and "href=" not in html and "&lt;a&amp;b&gt;" in html
    marked = documents.excerpt("a <b> & zero-3 <i>", documents.patterns("zero3"))
    assert marked == "a &lt;b&gt; &amp; <mark>zero-3</mark> &lt;i&gt;"
