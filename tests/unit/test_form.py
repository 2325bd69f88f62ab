"""The form holds every option once; what is placed twice or unknown is refused."""

import asyncio

import gradio as gr
import pytest

from backend.config.options import options
from webui import pages
from webui.form import Form, visibility_css
from webui.layout import arrange


def in_blocks(work):
    """Do `work` inside Blocks made in a loop: outside of one, each lock that Gradio makes leaves a loop open."""

    async def inside():
        with gr.Blocks():
            return work()

    return asyncio.run(inside())


def test_every_option_is_placed_once():
    form = Form()
    in_blocks(lambda: arrange(form))
    assert form.missing() == []
    assert len(form.widgets) == len(options())
    for name, made in form.widgets.items():
        assert made.elem_id == name.replace(".", "-")
        assert made.label and made.info


def test_unknown_and_twice_are_refused():
    form = Form()
    in_blocks(lambda: form.place("train.seed"))
    with pytest.raises(ValueError, match="already"):
        form.place("train.seed")
    with pytest.raises(ValueError, match="no option"):
        form.place("train.sead")


def test_css_hides_by_the_same_conditions():
    css = visibility_css()
    assert all(f"#{o.element_id}{{display" in css for o in options() if o.when != ({},))
    neither = (  # one of two conditions is enough
        'body[data-parallel-offload-optimizer]:not([data-parallel-offload-optimizer="nvme"])'
        '[data-parallel-offload-param]:not([data-parallel-offload-param="nvme"])'
        " #parallel-nvme_path{display:none!important}"
    )
    assert neither in css
    assert 'body[data-train-stage]:not([data-train-stage="sft"]) #data-loss_on{display:none!important}' in css


def test_page_builds_and_names_its_files():
    in_blocks(pages.build)
    for name in (pages.SCRIPT, *pages.STYLES):
        assert f"footplate/{name}" in pages.head()
