"""The tested version of Gradio, and what depends on its internals."""

import inspect
import re
from pathlib import Path

import gradio as gr
import pytest

from backend.paths import HOME
from webui import gradio_internals


def test_the_tested_version_is_the_constraint():
    """After an upgrade of Gradio: read gradio_internals.py, gradio.js and gradio.css, run tests/browser, then change
    TESTED_VERSION."""
    pinned = re.search(r"^gradio==(\d+\.\d+)", (HOME / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and pinned[1] == gradio_internals.TESTED_VERSION


def test_another_version_is_a_warning(caplog):
    tested = gradio_internals.TESTED_VERSION
    assert gradio_internals.check_version(f"{tested}.4") and not caplog.records
    assert not gradio_internals.check_version("5.0.0")
    assert "5.0.0 is installed" in caplog.text and tested in caplog.text


def test_no_stub_files_are_written_inside_the_block():
    original = inspect.getfile
    with pytest.raises(OSError), gradio_internals.without_stub_files():
        inspect.getfile(gr.Textbox)
    assert inspect.getfile is original
    with gradio_internals.without_stub_files():
        assert inspect.getfile(Path) == original(Path)


def test_selectors_of_gradio_are_in_its_own_files():
    """Elements, classes and attributes that Gradio renders; ours start with fp-."""
    everywhere = r"gradio-app|gradio-container|gradio_config|data-?test-?id|info-text|secondary-wrap|html-container"
    for path in sorted((HOME / "webui" / "static").rglob("*.*s")):
        names = everywhere + (r"|\.(wrap|block|form|container)\b" if path.suffix == ".css" else "")
        if path.name not in ("gradio.js", "gradio.css") and path.parent.name != "vendor":
            assert not re.findall(names, path.read_text()), path.name
