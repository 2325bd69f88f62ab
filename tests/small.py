"""A test client of the app with a minimal page, which is built once."""

from functools import cache
from unittest.mock import patch

import gradio as gr
from gradio.routes import App
from starlette.testclient import TestClient

from webui import server

create_gradio_app = App.create_app
gradio_apps = {}


@cache
def small_page():
    with gr.Blocks(analytics_enabled=False) as page:
        gr.HTML("page")
    return page


def gradio_app(blocks, **options):
    """Gradio's app of the page, whose 79 routes are built once: a client takes a tenth of the time."""
    if blocks not in gradio_apps:
        gradio_apps[blocks] = create_gradio_app(blocks, **options)
    blocks.config = blocks.get_config_file()  # as create_app does, with the theme of this app
    return gradio_apps[blocks]


def client(runs, **options):
    with patch.object(App, "create_app", gradio_app):
        return TestClient(server.create_app(runs, small_page, **options), base_url="http://127.0.0.1:7860")
