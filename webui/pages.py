"""The page: one Blocks with three views (build, run, runs), switched by `body[data-tab]`.

Floor 6. Imports: form, layout, runpage, gradio. Gradio makes form, layout and look; what lives (verdict, log,
charts, run list) is plain JS in static/ on the page's own routes. Templates are constant: data reaches the page
by JSON and `textContent` only.
"""

from __future__ import annotations

import json
from typing import Any

import gradio as gr

from backend.config.options import options, text
from webui.form import Form, deciding, shape, visibility_css
from webui.layout import arrange
from webui.run_page import run_html, runs_html

# Sent as one script: Gradio adds what belongs to the head while it runs, and several would come in any order.
SCRIPT = "page.js"
SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "core.js",
    "poll.js",
    "form.js",
    "whatif.js",
    "verdict.js",
    "build.js",
    "charts.js",
    "log.js",
    "run.js",
    "runs.js",
)
# The script may come later than the page that it serves.
READY = "async () => { while (!window.FP) await new Promise((done) => setTimeout(done, 10)); FP.ready(%s); }"
STYLES = ("page.css", "vendor/uPlot.min.css", "run.css")

TOP = """
<header class="fp-top">
  <a class="fp-brand" href="?tab=build" data-tab="build">Footplate</a>
  <nav aria-label="Views">
    <a href="?tab=build" data-tab="build">Build</a>
    <a href="?tab=run" data-tab="run" hidden>Run</a>
    <a href="?tab=runs" data-tab="runs">Runs</a>
    <a href="rules" class="fp-quiet" target="_blank" rel="noopener">Rules</a>
  </nav>
  <label class="fp-machine">For <select id="fp-machine" aria-label="The machine that it is for"></select></label>
  <button type="button" class="fp-icon" id="fp-theme" aria-label="Light or dark" title="Light or dark"></button>
</header>
"""

START_FROM = """
<div class="fp-from">
  <label>Start from <select id="fp-presets" aria-describedby="fp-preset-about"></select></label>
  <span id="fp-preset-about" class="fp-dim"></span>
  <span class="fp-gap"></span>
  <button type="button" class="fp-link" id="fp-import">Import</button>
  <button type="button" class="fp-link" id="fp-export">Export</button>
  <input type="file" id="fp-import-file" accept=".yaml,.yml,.json" hidden>
</div>
"""

SIDE = """
<aside class="fp-side" aria-label="Verdict">
  <section class="fp-verdict" id="fp-verdict" data-level="checking" role="status" aria-live="polite">
    <p class="fp-verdict-text">Checking</p>
    <p class="fp-verdict-more"></p>
    <button type="button" class="fp-button" id="fp-fix-all" hidden>Fix everything</button>
    <button type="button" class="fp-start" id="fp-start" disabled>Start</button>
    <button type="button" class="fp-start" id="fp-take" hidden disabled>Export</button>
  </section>
  <section class="fp-card" id="fp-memory" aria-label="Memory"></section>
  <section id="fp-findings" aria-label="Findings"></section>
  <section class="fp-card" id="fp-preview" aria-label="What will run">
    <div class="fp-card-head"><h3>What will run</h3><span class="fp-gap"></span>
      <button type="button" class="fp-link" id="fp-copy-script">Copy as script</button></div>
    <div class="fp-tabs" id="fp-preview-tabs" role="tablist"></div>
    <pre class="fp-code" id="fp-preview-text" tabindex="0"></pre>
    <p class="fp-dim" id="fp-preview-notes"></p>
  </section>
</aside>
"""

THEME = gr.themes.Default(
    primary_hue="blue",
    neutral_hue="slate",
    font=["system-ui", "-apple-system", "Segoe UI", "sans-serif"],
    font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
).set(
    # Gradio's help text misses the contrast of WCAG AA.
    body_text_color_subdued="*neutral_600",
    block_info_text_color="*neutral_600",
    body_text_color_subdued_dark="*neutral_300",
    block_info_text_color_dark="*neutral_300",
)


def build() -> gr.Blocks:
    """The whole page, with nothing of any run in it."""
    form = Form()
    with gr.Blocks(title="Footplate", analytics_enabled=False, fill_width=True) as page:
        _still(TOP)
        with gr.Column(elem_id="fp-build", elem_classes=["fp-view"]), gr.Row(elem_classes=["fp-columns"]):
            with gr.Column(elem_classes=["fp-form"]):
                _still(START_FROM)
                arrange(form)
            with gr.Column(elem_classes=["fp-aside"]):
                _still(SIDE)
        with gr.Column(elem_id="fp-run", elem_classes=["fp-view"]):
            _still(run_html())
        with gr.Column(elem_id="fp-runs", elem_classes=["fp-view"]):
            _still(runs_html())
        _wire(page, form)
    if form.missing():
        raise ValueError(f"not placed in layout.py: {', '.join(form.missing())}")
    return page


def _still(html: str) -> gr.HTML:
    return gr.HTML(html, apply_default_css=False, padding=False)


def _wire(page: gr.Blocks, form: Form) -> None:
    """One js handler for the whole form; a hidden button writes values into it."""
    widgets = list(form.widgets.values())
    fill = gr.Button("fill", elem_id="fp-fill", elem_classes=["fp-hidden"])
    quiet: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    gr.on(
        [w.input for w in widgets],
        None,
        inputs=widgets,
        js="(...values) => { FP.form.edited(values); }",
        trigger_mode="multiple",
        **quiet,
    )
    fill.click(None, inputs=None, outputs=widgets, js="() => FP.form.filling()", **quiet)
    page.load(None, inputs=None, js=READY % json.dumps(_described(form)), **quiet)


def _described(form: Form) -> dict[str, Any]:
    """What the scripts need of the options: names in the order of the widgets, labels, defaults, deciding names."""
    found = {o.name: o for o in options()}
    return {
        "names": list(form.widgets),
        "deciding": deciding(),
        "options": {
            name: {
                "label": found[name].label,
                "kind": found[name].kind,
                "shape": shape(found[name]),
                "unit": found[name].unit,
                "default": text(found[name], found[name].default),
                "choices": dict(found[name].choices),
                "when": [{k: list(v) for k, v in c.items()} for c in found[name].when],
            }
            for name in form.widgets
        },
    }


def head() -> str:
    """Scripts and styles for the page's head, and the CSS that follows from `when`."""
    styles = "".join(f'<link rel="stylesheet" href="footplate/{name}">' for name in STYLES)
    script = f'<script src="footplate/{SCRIPT}"></script>'
    icon = '<link rel="icon" href="footplate/icon.svg" type="image/svg+xml">'
    return f"{icon}{styles}<style>{visibility_css()}</style>{script}"


def mounting() -> dict[str, Any]:
    """The arguments of `gr.mount_gradio_app` that belong to the look."""
    return {"theme": THEME, "head": head(), "footer_links": [], "run_history": False}
