"""A test client of the app with a minimal page, which is built once."""

from functools import cache

import gradio as gr
from starlette.testclient import TestClient

from webui import server


@cache
def small_page():
    with gr.Blocks(analytics_enabled=False) as page:
        gr.HTML("page")
    return page


def client(runs, **options):
    return TestClient(server.create_app(runs, small_page, **options), base_url="http://127.0.0.1:7860")
