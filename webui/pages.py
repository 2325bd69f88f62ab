"""The page: one Gradio Blocks with four views (Build, Run, Runs, Compare), of which `body[data-tab]` shows one.

Gradio renders the form; everything that updates (check report, log, charts, list of runs) is JavaScript in static/ that
uses the API's routes. HTML here is constant: data reaches the page as JSON, and the DOM by `textContent` only.
"""

from __future__ import annotations

import json
from typing import Any

import gradio as gr

from backend.config import Source
from backend.config.options import by_name, text
from webui.form import Form, field_kind
from webui.layout import place_options
from webui.page_frame import main_header
from webui.search_index import search_index

SCRIPT = "main.js"
STYLES = (
    "page.css",
    "gradio.css",
    "build/form.css",
    "build/datasets.css",
    "build/files.css",
    "build/report.css",
    "build/examples.css",
    "build/strategies.css",
    "vendor/uPlot.min.css",
    "run/run.css",
    "run/results.css",
    "run/jobs.css",
    "run/chat.css",
    "run/evaluation.css",
    "run/generations.css",
    "run/benchmarks.css",
    "run/publish.css",
    "charts.css",
    "run/log.css",
    "runs/runs.css",
    "compare/compare_runs.css",
    "responsive.css",
)
# Gradio adds the scripts of the head while it renders the page, in any order and possibly after this code runs.
START = """async () => {
  while (!window.footplate || !window.uPlot) await new Promise((done) => setTimeout(done, 10));
  await window.footplate.start(%s);
}"""

PRESETS_AND_SEARCH = """
<div class="fp-from">
  <label>Preset <select id="fp-presets" aria-describedby="fp-preset-about"></select></label>
  <span id="fp-preset-about" class="fp-dim"></span>
  <span class="fp-from-actions">
    <button type="button" class="fp-link" id="fp-undo" title="Undo the last change to the form (Ctrl+Z)"
      disabled>Undo</button>
    <button type="button" class="fp-link" id="fp-versions"
      title="Go back to values that the form had in the last hour">History</button>
    <button type="button" class="fp-link" id="fp-sweep" aria-expanded="false" aria-controls="fp-sweep-form"
      title="Start several runs that differ in a few options">Sweep</button>
    <button type="button" class="fp-link" id="fp-import"
      title="Load a Footplate YAML file, or a config from another tool, such as DeepSpeed or axolotl">Import</button>
    <button type="button" class="fp-link" id="fp-export" title="Download the options as YAML">Export</button>
  </span>
  <input type="file" id="fp-import-file" accept=".yaml,.yml,.json" hidden>
</div>
<div class="fp-welcome" id="fp-welcome" role="note" hidden>
  <p>Footplate fine-tunes language models: set the options here, read in the check report whether the run can start and
    how much memory it needs, then start it. New here? Read <a href="help/getting-started">Getting started</a>.</p>
  <button type="button" class="fp-icon" aria-label="Close this note" title="Close this note">&times;</button>
</div>
<div id="fp-preset-offer" role="status" hidden></div>
<div class="fp-search" role="search">
  <input type="search" id="fp-search" placeholder="Search options, for example lora_alpha or ZeRO" autocomplete="off"
    spellcheck="false" role="combobox" aria-label="Search options" aria-expanded="false"
    aria-controls="fp-search-rows" aria-haspopup="grid" aria-autocomplete="list">
  <kbd aria-hidden="true">/</kbd>
  <div id="fp-search-results" hidden>
    <div id="fp-search-rows" role="grid" aria-label="Matching options"></div>
    <p class="fp-dim" id="fp-search-none" role="status"></p>
  </div>
</div>
"""

REPORT = """
<aside class="fp-side" aria-label="Check report">
  <h2 class="fp-sr">Check report</h2>
  <section class="fp-status" id="fp-status" data-level="checking" role="status" aria-live="polite">
    <p class="fp-status-text">Checking</p>
    <p class="fp-status-more"></p>
    <p class="fp-status-examples" aria-live="off"></p>
    <p class="fp-status-slow" hidden>This report is about earlier values. The last edit is being checked.</p>
    <button type="button" class="fp-button" id="fp-fix-all" hidden>Fix all errors</button>
    <button type="button" class="fp-button" id="fp-try" hidden
      title="A rehearsal, not the run: two steps on the longest examples, a crash, a resume and loading the saved \
model. Start begins the training.">Try it</button>
    <button type="button" class="fp-start" id="fp-start" disabled>Start</button>
    <button type="button" class="fp-start" id="fp-export-plan" hidden disabled>Export</button>
    <button type="button" class="fp-link" id="fp-tune" hidden
      title="Measure which settings train fastest on this machine, with short trainings">Find fastest settings</button>
  </section>
  <section class="fp-card" id="fp-rehearsal" aria-label="Rehearsal" hidden></section>
  <section class="fp-card" id="fp-tuning" aria-label="Fastest settings" hidden></section>
  <section class="fp-card" id="fp-sweep-form" aria-label="Sweep" hidden></section>
  <section id="fp-findings" aria-label="Findings"></section>
  <section class="fp-card" id="fp-memory" aria-label="Memory"></section>
  <section class="fp-card" id="fp-time" aria-label="Time" hidden></section>
  <details class="fp-card" id="fp-examples">
    <summary><h3>Examples</h3> <span class="fp-dim">as the model sees them</span></summary>
    <details id="fp-columns" hidden>
      <summary>Columns</summary>
      <table aria-label="What each column is used for"><tbody></tbody></table>
      <p class="fp-dim"></p>
    </details>
    <div class="fp-examples-head">
      <button type="button" class="fp-chip" id="fp-example-previous">Previous</button>
      <label>Example <input type="number" id="fp-example-number" min="1" value="1"></label>
      <button type="button" class="fp-chip" id="fp-example-next">Next</button>
      <span class="fp-gap"></span>
      <span class="fp-dim"><span class="fp-trained">Trained on</span> or not</span>
    </div>
    <div id="fp-example-datasets"></div>
    <div id="fp-example-summary"></div>
    <div id="fp-example"></div>
  </details>
  <section class="fp-card" id="fp-preview" aria-label="Launch preview">
    <div class="fp-card-head"><h3>Launch preview</h3><span class="fp-gap"></span>
      <button type="button" class="fp-link" id="fp-copy-script">Copy as script</button></div>
    <div class="fp-tabs"><div id="fp-preview-tabs" role="tablist" aria-label="Command and files"></div>
      <span class="fp-gap"></span><button type="button" class="fp-link" id="fp-copy-tab">Copy</button></div>
    <pre class="fp-code" id="fp-preview-text" role="tabpanel" aria-label="Text of the selected file" tabindex="0"></pre>
    <p class="fp-dim" id="fp-preview-notes"></p>
  </section>
</aside>
"""

RUN = '<div id="fp-run-page"></div>'
RUNS = '<div id="fp-runs-page"></div>'
COMPARE = '<div id="fp-compare-page"></div>'

THEME = gr.themes.Default(
    primary_hue="blue",
    neutral_hue="slate",
    font=["system-ui", "-apple-system", "Segoe UI", "sans-serif"],
    font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
).set(
    # The contrast of Gradio's help text is below WCAG AA.
    body_text_color_subdued="*neutral_600",
    block_info_text_color="*neutral_600",
    body_text_color_subdued_dark="*neutral_300",
    block_info_text_color_dark="*neutral_300",
)


def build() -> gr.Blocks:
    """The page, without the data of any run."""
    form = Form()
    with gr.Blocks(title="Footplate", analytics_enabled=False, fill_width=True) as page:
        _static(main_header())
        with gr.Column(elem_id="fp-build", elem_classes=["fp-view"]), gr.Row(elem_classes=["fp-columns"]):
            with gr.Column(elem_classes=["fp-form"]):
                _static(PRESETS_AND_SEARCH)
                place_options(form)
            with gr.Column(elem_classes=["fp-aside"]):
                _static(REPORT)
        with gr.Column(elem_id="fp-run", elem_classes=["fp-view"]):
            _static(RUN)
        with gr.Column(elem_id="fp-runs", elem_classes=["fp-view"]):
            _static(RUNS)
        with gr.Column(elem_id="fp-compare", elem_classes=["fp-view"]):
            _static(COMPARE)
        _add_events(page, form)
    if form.missing():
        raise ValueError(f"not placed in layout.py: {', '.join(form.missing())}")
    return page


def _static(html: str) -> gr.HTML:
    return gr.HTML(html, apply_default_css=False, padding=False)


def _add_events(page: gr.Blocks, form: Form) -> None:
    """A JavaScript handler for each menu; static/gradio.js reads the edits of other fields from their own events, which
    is much faster. Also a hidden button through which JavaScript writes values into the form."""
    components = list(form.components.values())
    write = gr.Button("write", elem_id="fp-write", elem_classes=["fp-hidden"])
    options: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    for name, component in form.components.items():
        if field_kind(by_name()[name]) == "menu":
            js = f"(value) => {{ window.footplate.edited({json.dumps(name)}, value); }}"
            component.input(None, inputs=component, js=js, trigger_mode="multiple", **options)
    write.click(None, inputs=None, outputs=components, js="() => window.footplate.valuesToWrite()", **options)
    page.load(None, inputs=None, js=START % json.dumps(_form_description(form)), **options)


OF_A_DATASET = {f"data.{name}" for name in Source.model_fields}


def _form_description(form: Form) -> dict[str, Any]:
    """What the scripts need to know about the options. `names` is in the order of the components."""
    known = by_name()
    return {
        "names": list(form.components),
        "options": {
            name: {
                "label": known[name].label,
                "kind": known[name].kind,
                "field": field_kind(known[name]),
                "unit": known[name].unit,
                "path": known[name].path,
                "default": text(known[name], known[name].default),
                "choices": dict(known[name].choices),
                **({"of_dataset": True, "help": known[name].help} if name in OF_A_DATASET else {}),
                "when": [{k: list(v) for k, v in c.items()} for c in known[name].when],
            }
            for name in form.components
        },
        "search": search_index(list(form.components)),
    }


def head() -> str:
    """Scripts and styles for the page's head."""
    styles = "".join(f'<link rel="stylesheet" href="footplate/{name}">' for name in STYLES)
    scripts = (
        '<script src="footplate/vendor/uPlot.iife.min.js"></script>'
        f'<script type="module" src="footplate/{SCRIPT}"></script>'
    )
    icon = '<link rel="icon" href="footplate/icon.svg" type="image/svg+xml">'
    return f"{icon}{styles}{scripts}"


def mount_arguments() -> dict[str, Any]:
    """The arguments of `gr.mount_gradio_app` that concern the page's look."""
    return {"theme": THEME, "head": head(), "footer_links": [], "run_history": False}
