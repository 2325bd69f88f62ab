"""The page for keyboards, touch and screen readers: axe-core finds nothing in any view and theme; help, segments, focus
and the way to the content work without a mouse."""

from __future__ import annotations

import sys
from urllib.parse import parse_qsl

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import expect
from same_page import settled
from test_trained_model_page import plant

from backend.paths import HOME
from backend.presets import presets

sys.path.append(str(HOME / "tests" / "unit"))
from failed_runs import failed_run, out_of_memory

UNFOLD = """() => document.querySelectorAll('.fp-head[aria-expanded=false], .fp-more[aria-expanded=false]')
  .forEach((button) => button.click())"""


# axe reports nothing of what is hidden or not `within` the selected elements, but examines it too: without the form it
# takes a third of the time. What would be loaded again for it (`preload`) is for rules that are off.
RUN_AXE = """async ({ within, rules }) => {
  const views = ["#fp-build", "#fp-run", "#fp-runs", "#fp-compare"].map((id) => document.querySelector(id));
  const selected = within && [...document.querySelectorAll(within)], returns = [];
  const isOutline = (node) => selected.some((one) => node.contains(one)) || node.querySelector("h1, h2, h3, h4");
  const leaveOut = (node) => {
    const standIn = node.cloneNode();
    node.replaceWith(standIn);
    returns.push(() => standIn.replaceWith(node));
  };
  const keepSelected = (node) => {
    if (selected.includes(node) || node.matches("h1, h2, h3, h4")) return;
    if (isOutline(node)) [...node.children].forEach(keepSelected);
    else if (node.childElementCount) leaveOut(node);
  };
  for (const view of views.filter(Boolean)) {
    if (!view.checkVisibility()) leaveOut(view);
    else if (selected) keepSelected(view);
  }
  const context = within ? { include: [[within]] } : document;
  try {
    return await axe.run(context, { resultTypes: ["violations"], preload: false, ...rules });
  } finally {
    returns.forEach((putBack) => putBack());
  }
}"""
# Hundreds of lines, rows and cards of a document have the same kinds of elements in them.
KEEP_ONE_OF_EACH_KIND = """() => {
  const seen = new Set(), kind = ({ tagName, className }) => `${tagName} ${className}`;
  for (const node of document.querySelectorAll("main > *, article, main :is(li, tr, p)")) {
    const kinds = `${kind(node)}: ${[...new Set([...node.querySelectorAll("*")].map(kind))].sort()}`;
    if (seen.has(kinds)) node.remove();
    seen.add(kinds);
  }
}"""


@pytest.fixture
def page(same_page):
    same_page.show_build()
    return same_page.page


def violations(page, *within):
    """What axe-core reports in both themes, which differ in colors only: rule, theme, and the first elements."""
    found = []
    # Colors change gradually, for longer on a loaded machine than a test can wait.
    style = "*, *::before, *::after { transition: none !important; animation: none !important; }"
    still = page.add_style_tag(content=style)
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE_SCRIPT)
    for theme, rules in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
        page.evaluate("dark => document.body.classList.toggle('dark', dark)", theme == "dark")
        page.evaluate("() => new Promise(requestAnimationFrame)")
        result = page.evaluate(RUN_AXE, {"within": ", ".join(within) or None, "rules": rules})
        for violation in result["violations"]:
            nodes = [(node["html"][:150], node.get("failureSummary", "")) for node in violation["nodes"][:3]]
            found.append((violation["id"], theme, nodes))
    page.evaluate("() => document.body.classList.remove('dark')")
    still.evaluate("style => style.remove()")
    return found


def test_build_view(page, same_page):
    """With all sections unfolded; then what is new with errors, and with results of a search that have buttons which
    show a hidden option."""
    same_page.show_build("2x8x80gb", "two-nodes")
    page.evaluate(UNFOLD)
    settled(page)
    assert violations(page) == []
    same_page.show_build("1x24gb", "two-nodes")
    page.wait_for_selector(".fp-finding[data-level=error]")
    page.locator("#fp-search").fill("zero")
    assert page.locator(".fp-search-ways button").count()
    assert violations(page, ".fp-search", "#fp-status", "#fp-findings", ".fp-field[data-level]", "#fp-strategies") == []
    page.locator("#fp-search").fill("no such option")
    expect(page.locator("#fp-search-none")).to_be_visible()


def test_other_views(page, shared):
    """A comparison without runs, a finished run, a failed one, the list, a comparison, and the help; test_fixes.py has
    the rules."""
    done = plant(shared, "done")
    preset = next(preset for preset in presets() if preset.name == "lora-80gb")
    failed = failed_run(shared.runs, preset.spec, preset.machine, out_of_memory(), "out of memory")
    for query, ready, *within in (
        ("tab=compare", ".fp-compare-problems li", "#fp-compare-page"),
        (f"tab=run&run={done.id}", ".fp-model:visible"),
        (f"tab=run&run={failed.id}", ".fp-failure:visible", ".fp-failure", ".fp-run-title"),
        ("tab=runs", ".fp-runs-link"),
        (f"tab=compare&runs={done.id},{failed.id}", "#fp-compare-page table"),
    ):
        page.evaluate("({ tab, run, runs }) => footplate.showView(tab, run, runs && { runs })", dict(parse_qsl(query)))
        page.locator(ready).first.wait_for()
        assert violations(page, *within) == [], query
    document = page.context.new_page()  # the form of the other one need not be loaded again
    for path, ready in (("help/guide", "main h1"), ("help/search?q=rehearsal", "main mark")):
        document.goto(f"{shared.url}/{path}")
        document.locator(ready).first.wait_for()
        document.evaluate(KEEP_ONE_OF_EACH_KIND)
        assert violations(document) == [], path


def test_help_is_the_description_of_each_field(page):
    """Screen readers read it; the focus shows it, on touch screens too."""
    without = page.evaluate(
        """() => [...document.querySelectorAll('.fp-field')].filter((field) => {
          const help = field.querySelector('.info-text');
          const described = field.matches('fieldset') ? field : field.querySelector('input, textarea');
          return !help || described.getAttribute('aria-describedby') !== help.id || !help.textContent;
        }).map((field) => field.id)"""
    )
    assert without == []
    for field in ("train-learning_rate", "train-lr_scheduler_type"):  # a number and a menu
        help = page.locator(f"#{field} .info-text")
        expect(help).to_be_hidden()
        page.locator(f"#{field} input").focus()
        expect(help).to_be_visible()
        box, top = help.bounding_box(), page.locator(f"#{field}").bounding_box()["y"]
        assert box["height"] > 10
        assert box["y"] + box["height"] <= top or field == "train-learning_rate"  # not over the menu's list
    expect(page.locator("#train-lr_scheduler_type input")).to_have_css("outline-style", "none")  # its frame has it
    page.locator("#train-learning_rate input").focus()  # closes the menu's list, which may cover other fields
    page.locator("#train-lr_scheduler_type").hover()
    expect(help).to_be_visible()
    expect(page.locator("#train-learning_rate .info-text")).to_be_hidden()  # one at a time


HELP_OUTSIDE = """async () => {
  const outside = [], pause = () => new Promise((done) => setTimeout(done, 0));
  const isCut = (node, { top, bottom }) => {
    for (let parent = node.parentElement; parent !== document.body; parent = parent.parentElement) {
      const { display, overflowY } = getComputedStyle(parent), box = parent.getBoundingClientRect();
      if (display !== 'contents' && overflowY !== 'visible' && (top < box.top || bottom > box.bottom)) return true;
    }
    return false;
  };
  for (const field of document.querySelectorAll('.fp-field')) {
    const input = field.querySelector('input:not([type=radio]), textarea, input:checked');
    if (!input || !field.checkVisibility()) continue;
    input.focus();
    await pause();
    const help = field.querySelector('.info-text');
    const { left, right } = help.getBoundingClientRect(), cut = isCut(help, help.getBoundingClientRect());
    const shown = getComputedStyle(help).opacity === '1' && right - left > 100;
    const fits = left >= 0 && right <= document.documentElement.clientWidth;
    if (!shown || !fits || cut) outside.push([field.id, left, right, cut]);
  }
  return outside;
}"""


@pytest.mark.parametrize("width", [390, *(pytest.param(w, marks=pytest.mark.soak) for w in (800, 1024, 1440))])
def test_help_is_inside_the_window(page, width):
    page.set_viewport_size({"width": width, "height": 900})
    style = page.add_style_tag(content="* { transition: none !important; scroll-behavior: auto !important }")
    page.evaluate(UNFOLD)
    page.keyboard.press("Tab")  # after a click, the browser would show no focus, and so no help, of a radio button
    assert page.evaluate(HELP_OUTSIDE) == []
    field = page.locator("#train-learning_rate")
    page.evaluate("document.activeElement.blur()")
    field.evaluate("node => node.scrollIntoView({ block: 'end' })")
    field.hover()
    help = field.locator(".info-text")
    expect(help).to_have_css("opacity", "1")
    box = help.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= 900
    style.evaluate("style => style.remove()")


def test_a_narrow_window(page):
    """The offer of recommended values has its button below the text; without fields there is no gap in a section."""
    page.set_viewport_size({"width": 390, "height": 900})
    page.locator("#fp-presets").select_option("first-run")
    settled(page)
    above = page.locator("#fp-strategies").bounding_box()
    more = page.locator("#fp-section-launch .fp-more").bounding_box()
    assert page.locator("#launch-nproc_per_node").is_hidden()
    assert more["y"] - above["y"] - above["height"] < 5
    page.locator("#model-source input:checked").focus()
    page.keyboard.press("ArrowRight")
    settled(page)
    offer = page.locator("#fp-preset-offer")
    expect(offer).to_be_visible()
    text, button = offer.locator("p").bounding_box(), offer.locator("button").bounding_box()
    assert button["y"] >= text["y"] + text["height"] and text["width"] > 300


def test_arrow_keys_select_a_segment(page):
    page.locator("#model-source input:checked").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("() => footplate.values()['model.source']") == "path"
    expect(page.locator("#model-path")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("() => footplate.values()['model.source']") == "builtin"
    page.keyboard.press("Tab")  # one tab stop for the group
    assert page.evaluate("() => document.activeElement.closest('.fp-field').id") == "model-builtin"


def test_skip_link_and_headings(page):
    page.keyboard.press("Tab")
    expect(page.locator("#fp-skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#fp-build")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("#fp-presets")).to_be_focused()
    page.locator("#fp-skip-report").press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.closest('#fp-status') !== null")  # Try it, then Start
    expect(page.locator("h1")).to_have_text("Build a run")
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator("h1")).to_have_text("Runs")
    expect(page.locator(".fp-top nav [aria-current=page]")).to_have_text(["Runs"])


def test_focus_moves_on_after_a_fix(page, same_page):
    same_page.show_build("1x24gb", "full-8b-zero3")
    page.wait_for_selector(".fp-finding[data-level=error]")
    for _ in range(6):
        fix = page.locator(".fp-finding[data-level=error] .fp-fix button").first
        if not fix.count():
            break
        fix.focus()
        page.keyboard.press("Enter")
        settled(page)
        assert page.evaluate("() => document.activeElement !== document.body")
    expect(page.locator("#fp-export-plan")).to_be_focused()


def focused_id(page):
    page.wait_for_timeout(100)  # the browser takes the focus from what is hidden when it draws the page
    return page.evaluate("() => document.activeElement.id || document.activeElement.closest('.fp-field')?.id")


@pytest.mark.soak
def test_focus_moves_on_after_all_fixes(page, same_page, tmp_path):
    """The button is hidden then. Undo returns the focus to where it was before the notification."""
    strategy = "parallel: {strategy: zero2}\nlaunch: {nproc_per_node: 4, launcher: python}\n"
    (tmp_path / "run.yaml").write_text(f"model: {{source: hub, hub_id: Qwen/Qwen3-1.7B}}\n{strategy}")
    same_page.show_build("4x80gb")
    page.locator("#fp-import-file").set_input_files(tmp_path / "run.yaml")
    page.wait_for_selector(".fp-finding[data-level=error]")
    settled(page)
    expect(page.locator("#fp-fix-all")).to_be_visible()
    page.locator("#fp-fix-all").press("Enter")
    expect(page.locator("#fp-fix-all")).to_be_hidden()
    assert focused_id(page) == "fp-export-plan"
    page.locator("#train-learning_rate input").focus()
    page.locator(".fp-toast").get_by_role("button", name="Undo").press("Enter")
    expect(page.locator("#fp-fix-all")).to_be_visible()
    assert focused_id(page) == "train-learning_rate"


@pytest.mark.soak
def test_focus_moves_on_after_the_recommended_values(page):
    page.locator("#fp-presets").select_option("first-run")
    settled(page)
    page.locator("#model-source input:checked").focus()
    page.keyboard.press("ArrowRight")
    settled(page)
    page.get_by_role("button", name="Use recommended values").press("Enter")
    expect(page.locator("#fp-preset-offer")).to_be_hidden()
    assert focused_id(page) == "fp-search"
    page.evaluate("document.activeElement.blur()")
    page.locator(".fp-toast").get_by_role("button", name="Undo").press("Enter")
    expect(page.locator("#fp-preset-offer")).to_be_visible()
    assert focused_id(page) == "logging-run_name"
