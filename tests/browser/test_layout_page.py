"""The Build page: the verdict stays in sight, menus close when the focus leaves them, the focus is visible."""

from __future__ import annotations

import re
import time
from itertools import combinations, pairwise

import pytest
from playwright.sync_api import expect
from same_page import settled

from backend.config.options import options, shown
from backend.presets import presets

WIDEST_AND_NARROWEST = [pytest.param(1440, marks=pytest.mark.soak), 390]


@pytest.fixture
def page(same_page):
    same_page.show_build()
    return same_page.page


def resize(page, width):
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def opened(page, server, width=1440):
    resize(page, width)
    page.goto(server.url)
    page.wait_for_selector("body[data-ready]")
    settled(page)


COVERING = """() => {
  const status = document.querySelector('#fp-status'), found = new Set();
  for (let y = 600; y < 1400; y += 70) {
    window.scrollTo(0, y);
    const { left, top, width, height } = status.getBoundingClientRect();
    for (let x = left + 8; x < left + width; x += 20)
      for (let row = top + 8; row < top + height; row += 12) {
        const seen = document.elementFromPoint(x, row);
        if (seen && !status.contains(seen)) found.add(seen.outerHTML.slice(0, 80));
      }
  }
  return [...found];
}"""


@pytest.mark.parametrize("width", [1440, *(pytest.param(w, marks=pytest.mark.soak) for w in (1024, 800)), 390])
def test_verdict_and_start_stay_in_sight(page, width):
    resize(page, width)
    page.mouse.move(width / 4, 600)
    page.mouse.wheel(0, 900)
    page.wait_for_function("() => window.scrollY > 600")
    expect(page.locator("#fp-start")).to_be_in_viewport(ratio=1)
    expect(page.locator(".fp-status-text")).to_be_in_viewport(ratio=1)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert page.evaluate(COVERING) == [], "what is scrolled under the status is not drawn over it"


def test_a_long_verdict_and_the_links_have_room(page):
    page.locator("#fp-presets").select_option("full-8b-zero3")
    page.locator("#fp-machine").select_option("1x24gb")
    expect(page.locator(".fp-status-text")).to_contain_text("warning")
    lines = "(node) => Math.round(node.getBoundingClientRect().height / parseFloat(getComputedStyle(node).lineHeight))"
    actions = page.locator(".fp-from-actions button:visible")
    links = page.locator(".fp-from :is(a, button):visible, .fp-from select")
    for width in (1440, 1240, 1024, 910, 800, 390):
        resize(page, width)
        assert page.locator(".fp-status-text").evaluate(lines) == (1 if width > 640 else 2), width
        tops = actions.evaluate_all("(all) => new Set(all.map((one) => one.getBoundingClientRect().top)).size")
        assert tops == 1, width
        boxes = links.evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().toJSON())")
        for one, other in combinations(boxes, 2):
            apart_x = one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
            apart_y = one["y"] + one["height"] <= other["y"] or other["y"] + other["height"] <= one["y"]
            assert apart_x or apart_y, (width, one, other)


def test_segments_show_their_whole_text(page):
    texts = page.locator("#model-source label span")
    expect(texts).to_have_text(["Built-in", "Local folder", "Hugging Face Hub"])
    hidden = "(all) => all.map((one) => one.scrollWidth - one.clientWidth)"
    for width in (1440, 1330, 1240, 1110, 1024, 390, 375):
        resize(page, width)
        assert texts.evaluate_all(hidden) == [0, 0, 0], width
    name, theme = page.locator(".fp-brand").bounding_box(), page.locator("#fp-theme").bounding_box()
    assert name["y"] <= theme["y"] <= name["y"] + name["height"], "on a phone, both are in the first line"


def test_a_report_of_earlier_values_says_so_while_the_check_takes_long(page):
    note, held = page.locator(".fp-status-slow"), []
    expect(note).to_be_hidden()
    page.route("**/api/check", lambda route: held.append(route))
    page.locator("#train-learning_rate input").fill("0.0007")
    expect(note).to_have_text("This report is about earlier values. The last edit is being checked.")
    expect(note).to_be_visible()
    for route in held:
        route.continue_()
    settled(page)
    expect(note).to_be_hidden()


def test_menu_closes_when_the_focus_leaves_it(page):
    lists = page.locator(".fp-field [role=listbox]")
    page.locator("#model-builtin input").focus()
    expect(lists).to_have_count(1)
    for _ in range(8):  # over two more menus
        page.keyboard.press("Tab")
    expect(lists).to_have_count(0)
    page.locator("#model-builtin input").click()
    lists.get_by_role("option").first.click()
    settled(page)
    expect(lists).to_have_count(0)


def test_a_long_list_is_no_tab_stop(page):
    """Chromium moves the focus to whatever can be scrolled."""
    page.locator("#train-optim input").focus()
    expect(page.locator(".fp-menu ul").first).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.locator(".fp-menu ul")).to_have_count(0)
    assert page.evaluate("document.activeElement.closest('.fp-field').id") == "train-activation_checkpointing"


def test_a_click_opens_a_menu_that_was_closed_with_escape(page):
    menu = page.locator("#train-stage input")
    for _ in range(2):
        menu.click()
        expect(menu).to_have_attribute("aria-expanded", "true")
        page.keyboard.press("Escape")
        expect(menu).to_have_attribute("aria-expanded", "false")


def test_escape_leaves_the_choice_and_not_what_was_typed(page):
    menu = page.locator("#train-optim input")
    choice = menu.input_value()
    for _ in range(2):
        menu.click()
        expect(menu).to_have_attribute("aria-expanded", "true")
        page.keyboard.type("lion")
        page.keyboard.press("Escape")
        expect(menu).to_have_value(choice)
        expect(menu).to_have_attribute("aria-expanded", "false")


# The text is selected right after the event that sets the focus; a person types later than that.
ALL_SELECTED = """() => {
  const { selectionStart, selectionEnd, value } = document.activeElement;
  return selectionEnd - selectionStart === value.length;
}"""


def test_typing_into_a_menu_replaces_its_text(page):
    """The text of the selected choice would be a part of what is searched for, so that nothing matches."""
    menu = page.locator("#train-optim")
    menu.locator("input").click()
    page.wait_for_function(ALL_SELECTED)
    page.keyboard.type("galore")
    assert menu.locator("input").input_value() == "galore"
    choices = menu.get_by_role("option")
    expect(choices.first).to_contain_text("GaLore", ignore_case=True)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(menu.locator("input")).to_have_value(re.compile("galore", re.IGNORECASE))
    expect(menu.locator("input")).to_be_focused()
    expect(choices).to_have_count(0)
    page.keyboard.press("Tab")
    assert page.evaluate(
        "document.activeElement.closest('.fp-section').contains(document.getElementById('train-optim'))"
    )
    page.locator("#train-learning_rate input").focus()
    menu.locator("input").focus()
    page.wait_for_function(ALL_SELECTED)
    page.keyboard.type("sgd")
    assert menu.locator("input").input_value() == "sgd"


def test_a_text_field_shows_the_focus(page):
    page.locator("#train-learning_rate input").focus()
    style = "() => { const s = getComputedStyle(document.activeElement); return [s.outlineStyle, s.outlineWidth]; }"
    assert page.evaluate(style) == ["solid", "2px"]


SHOWN = """() => Object.fromEntries([...document.querySelectorAll(".fp-field")].map((field) =>
    [field.id, getComputedStyle(field).display !== "none"]))"""


def test_exactly_the_options_with_an_effect_are_shown(page):
    """The page decides it from the same `when` as Python."""
    for preset in presets():
        if preset.name not in ("first-run", "dpo", "full-8b-zero3"):
            continue
        page.locator("#fp-presets").select_option(preset.name)
        settled(page)
        in_place = {"launch.devices", "parallel.strategy", "data.sources"}  # other parts of the page show them
        expected = {o.element_id: shown(preset.spec, o) for o in options() if o.name not in in_place}
        found = page.evaluate(SHOWN)
        assert {name: found[name] for name in expected} == expected, preset.name
        assert page.locator("#fp-hub-token").is_visible() == expected["model-hub_id"]


def test_notifications_stay_in_their_view(page):
    page.locator("#fp-presets").select_option(presets()[1].name)
    expect(page.locator(".fp-toast")).to_be_visible()
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator(".fp-toast")).to_have_count(0)


def test_the_theme_of_a_page_without_gradio_can_be_switched_before_its_modules_are_loaded(new_page, shared):
    new_page.route("**/static_page.js", lambda route: route.abort())
    new_page.goto(f"{shared.url}/help/getting-started")
    was_dark = new_page.evaluate("() => document.body.classList.contains('dark')")
    new_page.locator("#fp-theme").click()
    assert new_page.evaluate("() => document.body.classList.contains('dark')") is not was_dark


@pytest.mark.parametrize(
    ("path", "module", "field", "found"),
    [
        ("help/getting-started", "static_page.js", "Search the help", "main mark"),
        pytest.param("rules", "rules.js", "Search rules", "article[hidden]", marks=pytest.mark.soak),
    ],
)
def test_words_typed_before_the_modules_are_loaded_are_searched(new_page, shared, path, module, field, found):
    held = []
    new_page.route(f"**/{module}", lambda route: held.append(route))
    new_page.goto(f"{shared.url}/{path}", wait_until="commit")
    new_page.get_by_label(field).fill("rehearsal")
    assert new_page.locator(found).count() == 0
    held[0].continue_()
    new_page.locator(found).first.wait_for(state="attached")


@pytest.mark.parametrize("width", WIDEST_AND_NARROWEST)
def test_the_header_leads_from_each_page_to_the_others_in_this_tab(page, width):
    """The form keeps its values, and the theme is the same on each page."""
    resize(page, width)
    page.locator("#logging-run_name input").fill("kept")
    settled(page)
    views = page.get_by_role("navigation", name="Views")
    views.get_by_role("link", name="Rules").click()
    page.locator("article").first.wait_for()
    was_dark = page.evaluate("() => document.body.classList.contains('dark')")
    page.locator("#fp-theme").click()
    views.get_by_role("link", name="Help").click()
    page.get_by_role("heading", name="Getting started", level=1).wait_for()
    expect(views.get_by_role("link", name="Help")).to_have_attribute("aria-current", "page")
    assert page.evaluate("() => document.body.classList.contains('dark')") is not was_dark
    page.get_by_label("Search the help").fill("rehearsal")
    page.locator("main mark").first.wait_for()
    assert "search" not in page.url
    page.get_by_label("Search the help").fill("")
    page.get_by_role("heading", name="Getting started", level=1).wait_for()
    page.get_by_label("Search the help").fill("rehearsal")
    page.keyboard.press("Enter")
    page.wait_for_url("**/help/search?q=rehearsal")
    page.get_by_role("link", name="Rehearsal", exact=True).click()
    page.wait_for_url("**/help/guide#rehearsal")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert len(page.context.pages) == 1
    views.get_by_role("link", name="Build").click()
    page.wait_for_selector("body[data-ready]")
    expect(page.locator("#logging-run_name input")).to_have_value("kept")
    page.locator("#fp-theme").click()


COUNT_FRAMES = """window.framesAsked = 0;
  const native = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (draw) => { window.framesAsked++; return native(draw); };"""


@pytest.mark.parametrize("width", WIDEST_AND_NARROWEST)
def test_the_first_visit_says_what_footplate_is(new_page, shared, width):
    """A later visit does not say so again. The page starts only after its scripts have loaded, even if Gradio's are
    faster, and rests when nothing happens."""
    new_page.route("**/footplate/main.js", lambda route: (time.sleep(2), route.continue_()))
    opened(new_page, shared, width)
    new_page.unroute_all()
    for view in ("run", "runs"):
        new_page.wait_for_selector(f"#fp-{view}-page > *", state="attached")
    note = new_page.get_by_role("note")
    expect(note).to_contain_text("Footplate fine-tunes language models")
    expect(note.get_by_role("link", name="Getting started")).to_have_attribute("href", "help/getting-started")
    later = new_page.context.new_page()
    later.add_init_script(COUNT_FRAMES)
    opened(later, shared, width)
    expect(later.locator("#fp-welcome")).to_be_hidden()
    assert_it_rests(later)
    later.close()
    note.get_by_role("button", name="Close this note").click()
    expect(note).to_be_hidden()


@pytest.mark.soak
def test_a_reload_keeps_the_note_of_the_first_visit_until_it_is_closed(new_page, shared):
    note = new_page.get_by_role("note")
    for _ in range(2):
        opened(new_page, shared)
        expect(note).to_be_visible()
    note.get_by_role("button", name="Close this note").click()
    opened(new_page, shared)
    expect(new_page.locator("#fp-welcome")).to_be_hidden()


def assert_it_rests(page):
    counts = [0]
    while len(counts) < 20 and (len(counts) < 3 or counts[-1] - counts[-2] >= 5):  # Gradio's first animations end soon
        page.wait_for_timeout(1000)
        counts.append(page.evaluate("() => window.framesAsked"))
    assert counts[-1] - counts[-2] < 5, counts


def test_figures_and_buttons_say_what_they_mean(page, same_page):
    expect(page.locator("#fp-try")).to_have_attribute("title", re.compile("A rehearsal, not the run"))
    expect(page.locator(".fp-machine")).to_have_attribute("title", re.compile("hardware that the options are checked"))
    for text, meaning in (("Memory per", "Estimated peak memory of one"), ("Sent per step", "sends to other devices")):
        heading = page.locator(".fp-strategy-head span", has_text=text)
        expect(heading).to_have_attribute("title", re.compile(meaning))
    columns = page.locator(".fp-column text")
    expect(columns).to_have_text(["Process 0"])
    same_page.show_build("2x8x80gb", "two-nodes")
    expect(columns).to_have_text([f"GPU {i}" for i in range(8)] * 2)
    widths = "(all) => all.map((one) => [one.getBoundingClientRect().left, one.getBoundingClientRect().right])"
    spans = columns.evaluate_all(widths)[:8]  # of one node
    assert all(one[1] + 2 < other[0] for one, other in pairwise(spans)), spans


def paste_lab(page):
    """Add a machine by pasting its description, after texts that cannot be used. Returns the dialog."""
    page.get_by_role("button", name="Add a machine", exact=True).click()
    dialog = page.get_by_role("dialog", name="Add a machine to plan for")
    pasted = dialog.get_by_label("Paste the output of footplate machine")
    dialog.get_by_label("Name", exact=True).fill("Node 7")
    pasted.fill("| NVIDIA-SMI 550.54   Driver Version: 550.54 |")
    note = dialog.get_by_role("status")
    expect(note).to_contain_text("Run footplate machine on that machine")
    expect(dialog.get_by_label("Name", exact=True)).to_have_value("Node 7")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_role("alert")).to_contain_text("correct it, or delete it")
    pasted.fill("name: Lab\ngpus: [{name: X9, count: 2, capability: 9.0}]\nhas_libaio: false")
    expect(note).to_contain_text("Memory per GPU: is missing")
    pasted.fill("name: Lab\ngpus: [{name: X9, count: 2, memory_gib: 80, capability: 9.0}]\nhas_libaio: false")
    expect(note).to_have_text("The fields below now have the pasted values.")
    return dialog


@pytest.mark.soak
def test_escape_asks_before_it_discards_what_was_entered(page):
    add = page.get_by_role("button", name="Add a machine", exact=True)
    dialog = page.get_by_role("dialog", name="Add a machine to plan for")
    add.click()
    expect(dialog).to_be_visible()  # it opens once the server has sent its fields
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    add.click()
    name = dialog.get_by_label("Name", exact=True)
    name.click()
    page.keyboard.type("Lab")
    page.keyboard.press("Escape")
    expect(dialog.get_by_role("alert")).to_contain_text("Press Escape again to discard it")
    page.keyboard.type("2")
    page.keyboard.press("Escape")
    expect(name).to_have_value("Lab2")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


def test_a_custom_machine_is_added_used_and_removed(page):
    dialog = paste_lab(page)
    memory = dialog.get_by_label("Memory per GPU (GiB)", exact=True)
    expect(dialog).to_contain_text("The checks assume 64 GiB if it is empty.")
    memory.fill("-141")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Memory per GPU: must be a number of GiB greater than 0")
    expect(memory).to_be_focused()
    expect(memory).to_have_attribute("aria-invalid", "true")
    memory.fill("141")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog).to_have_count(0)
    menu, figure = page.locator("#fp-machine"), page.locator("#fp-memory .fp-figure")
    expect(menu).to_have_value("lab")
    expect(figure).to_contain_text("of 141 GiB")
    expect(page.locator("#fp-export-plan")).to_be_visible()
    page.reload()
    expect(menu.locator("option:checked")).to_have_text("Lab: 2 x X9 141GB")
    expect(page.locator("#fp-export-plan")).to_be_visible()
    expect(figure).to_contain_text("of 141 GiB")

    page.get_by_role("button", name="Edit this machine").click()
    dialog = page.get_by_role("dialog", name="Edit Lab")
    expect(dialog.get_by_label("libaio is installed")).to_have_value("false")
    dialog.get_by_label("Memory per GPU (GiB)", exact=True).fill("192")
    dialog.get_by_role("button", name="Save").click()
    expect(figure).to_contain_text("of 192 GiB")
    page.get_by_role("button", name="Edit this machine").click()
    page.get_by_role("dialog", name="Edit Lab").get_by_role("button", name="Remove", exact=True).click()
    page.get_by_role("dialog").last.get_by_role("button", name="Remove", exact=True).click()
    expect(menu).to_have_value("")
    expect(menu.locator("option[value=lab]")).to_have_count(0)
    expect(figure).not_to_contain_text("of 192 GiB")
    expect(page.get_by_role("button", name="Edit this machine")).to_be_hidden()
