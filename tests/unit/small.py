"""The app around a page that is quickly made."""

import gradio as gr
from starlette.testclient import TestClient

from webui import server


def small_page():
    with gr.Blocks(analytics_enabled=False) as page:
        gr.HTML("here")
    return page


def client(runs, **more):
    return TestClient(server.make(runs, small_page, **more), base_url="http://127.0.0.1:7860")
