"""The form contains every option once, and hides options by the same conditions as Python; the option search."""

import asyncio
import re

import gradio as gr
import pytest

from backend.config.aliases import ALIASES
from backend.config.options import options
from backend.paths import HOME
from webui import pages
from webui.form import Form, field_kind
from webui.layout import place_options
from webui.search_index import search_index


def in_blocks(function):
    """Call `function` inside Blocks in an event loop: outside of one, Gradio's locks leave event loops open."""

    async def call():
        with gr.Blocks():
            return function()

    return asyncio.run(call())


def test_every_option_is_placed_once():
    form = Form()
    in_blocks(lambda: place_options(form))
    assert form.missing() == []
    assert len(form.components) == len(options())
    for name, component in form.components.items():
        assert component.elem_id == name.replace(".", "-")
        assert component.label and component.info


def test_an_unknown_or_repeated_option_is_an_error():
    form = Form()
    in_blocks(lambda: form.place("train.seed"))
    with pytest.raises(ValueError, match="already"):
        form.place("train.seed")
    with pytest.raises(ValueError, match="not an option"):
        form.place("train.sead")


def test_page_links_its_files():
    in_blocks(pages.build)
    for name in (pages.SCRIPT, *pages.STYLES):
        assert f"footplate/{name}" in pages.head()


def test_search_index_has_every_option_and_the_names_of_libraries():
    index = {entry["name"]: entry for entry in search_index([o.name for o in options()])}
    assert len(index) == len(options()) and all(entry["help"] for entry in index.values())
    for name, alias in (
        ("lora.alpha", "lora_alpha"),
        ("lora.init", "init_lora_weights"),
        ("train.activation_checkpointing", "gradient_checkpointing"),
        ("precision.compute", "bf16"),
        ("parallel.strategy", "fsdp"),
        ("parallel.strategy", "deepspeed"),
        ("launch.nproc_per_node", "num_processes"),
    ):
        assert alias in index[name]["aliases"]


def test_aliases_name_options():
    known = {o.name for o in options()}
    for alias, name in ALIASES.items():
        assert name in known, alias
        assert alias not in (name, name.partition(".")[2]), "found by its own key anyway"


@pytest.mark.parametrize("view", ["charts", "compare/compare_runs", "build/report", "run/run", "runs/runs"])
def test_other_views_do_not_style_the_fields(view):
    """A rule for the class of a kind of field, meant for something else, would move every field of that kind."""
    kinds = {field_kind(option) for option in options()}
    text = (HOME / "webui/static" / f"{view}.css").read_text()
    assert not re.findall(rf"\.fp-(?:field|{'|'.join(kinds)})(?![\w-])", text)
