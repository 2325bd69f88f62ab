"""The option search of the Build view: what it finds, the keyboard, and options that are hidden."""

import pytest
from playwright.sync_api import expect

from backend.config.options import by_name


@pytest.fixture
def page(same_page):
    same_page.show_build()
    return same_page.page


def results(page, text):
    """The keys that a search finds, best first."""
    page.locator("#fp-search").fill(text)
    return page.locator(".fp-search-row").evaluate_all("(rows) => rows.map((row) => row.dataset.name)")


FIRST = (
    ("gradient acc", "train.gradient_accumulation_steps"),
    ("warmup", "train.warmup_steps"),
    ("flash", "model.attn_implementation"),
    ("zero", "parallel.strategy"),
    ("lora r", "lora.r"),
    ("LoRA_r", "lora.r"),
    ("per_device_train_batch_size", "train.per_device_train_batch_size"),
    ("lora_alpha", "lora.alpha"),
    ("gradient_checkpointing", "train.activation_checkpointing"),
    ("bf16", "precision.compute"),
    ("init_lora_weights", "lora.init"),
    ("fsdp", "parallel.strategy"),
    ("deepspeed", "parallel.strategy"),
    ("offload", "parallel.offload_optimizer"),
    ("num_processes", "launch.nproc_per_node"),
    ("load_in_4bit", "method.quantization"),
    ("ulysses", "parallel.sequence_parallel_size"),
)


def test_the_first_result(page):
    for text, name in FIRST:
        assert results(page, text)[0] == name, text


def test_choices_and_the_options_that_they_show(page):
    """ZeRO is a choice of the strategy, and the condition of the offload options."""
    found = results(page, "zero")
    assert {"parallel.offload_optimizer", "parallel.offload_param"} <= set(found)
    assert "launch.nproc_per_node" not in found
    strategy = page.locator(".fp-search-row").first
    expect(strategy).to_contain_text("ZeRO-3")
    expect(strategy).to_contain_text("Devices")
    assert results(page, "no such option") == []
    expect(page.locator("#fp-search-results")).to_contain_text("No option matches")


def test_keyboard(page):
    """/ focuses the search, arrows select, Enter goes to the option, Escape closes the list."""
    search, rows = page.locator("#fp-search"), page.locator(".fp-search-row")
    page.locator("#logging-run_name :is(input, textarea)").focus()
    page.keyboard.press("/")  # text in a field
    expect(search).not_to_be_focused()
    page.locator("#lora-r input").focus()
    page.keyboard.press("/")
    expect(search).to_be_focused()
    page.keyboard.press("Control+a")
    page.keyboard.type("batch")
    expect(rows.nth(0)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowDown")
    expect(rows.nth(1)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    expect(rows.last).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Escape")
    expect(page.locator("#fp-search-results")).to_be_hidden()
    page.keyboard.press("Control+a")
    page.keyboard.type("weight decay")
    page.keyboard.press("Enter")
    field = page.locator("#train-weight_decay input")
    expect(field).to_be_focused()
    assert page.evaluate("() => getSelection().toString()") == field.input_value(), "typing replaces the value"
    expect(page.locator("#fp-search-results")).to_be_hidden()
    search.fill("weight decay")
    expect(page.locator("#fp-search-results")).to_be_visible()
    page.keyboard.press("Tab")  # the list would cover what has the focus now
    expect(page.locator("#fp-search-results")).to_be_hidden()


def test_a_result_opens_its_section_and_the_rarely_used_options(page):
    head = page.locator("#fp-section-evaluation .fp-head")
    if head.get_attribute("aria-expanded") == "true":
        head.click()
    results(page, "eval_strategy")
    page.locator(".fp-search-row").first.click()
    expect(head).to_have_attribute("aria-expanded", "true")
    assert not page.locator("#launch-launcher").is_visible()
    results(page, "launcher")
    page.locator(".fp-search-row").first.click()
    expect(page.locator("#launch-launcher")).to_be_visible()
    expect(page.locator("#fp-section-launch .fp-more")).to_have_text("Fewer options")


def test_a_click_on_a_result_counts_when_the_view_can_have_the_focus(page):
    """After the link "Skip to content", pressing the mouse moved the focus to the view, which closed the list."""
    page.locator("#fp-skip").press("Enter")
    expect(page.locator("#fp-build")).to_be_focused()
    results(page, "eval_strategy")
    row = page.locator(".fp-search-row").first
    row.hover()
    page.mouse.down()
    expect(row).to_be_visible()
    page.mouse.up()
    expect(page.locator("#fp-section-evaluation .fp-head")).to_have_attribute("aria-expanded", "true")


def test_a_hidden_option_is_shown_by_one_click(page):
    """The result says why it is hidden; a click on a button sets the condition, and can be undone."""
    assert results(page, "offload_param")[0] == "parallel.offload_param"
    row, label = page.locator(".fp-search-row").first, by_name()["parallel.strategy"].label
    expect(row).to_contain_text(f"Hidden. Shown when {label} is ZeRO-3.")
    before = page.evaluate("() => footplate.values()")
    page.locator("#fp-search").press("Enter")
    button = row.get_by_role("button", name=f"Set {label} to ZeRO-3")
    expect(button).to_be_focused()
    button.press("Enter")
    expect(page.locator("#parallel-offload_param")).to_be_visible()
    assert page.evaluate("() => footplate.values()['parallel.strategy']") == "zero3"
    page.locator(".fp-toast").get_by_role("button", name="Undo").click()
    expect(page.locator("#parallel-offload_param")).to_be_hidden()
    assert page.evaluate("() => footplate.values()") == before
    assert results(page, "nvme_path")[0] == "parallel.nvme_path"
    expect(row).to_contain_text("Hidden. Shown when")
    expect(row.get_by_role("button")).to_have_count(0)  # two values would have to change
    page.locator("#fp-search").press("Enter")
    expect(page.locator("#fp-search-results")).to_be_hidden()
    expect(page.locator("#fp-strategies :focus")).to_have_count(1)  # the first of them
    expect(page.locator(".fp-toast").last).to_contain_text("is hidden. Shown when")


def test_visible_options_come_before_hidden_ones(page):
    """An option with exactly this name comes first even if it is hidden."""
    for text in ("zero", "offload", "batch", "steps", "eval"):
        found = results(page, text)
        hidden = page.locator(".fp-search-row").evaluate_all("(rows) => rows.map((row) => row.dataset.hidden == 'yes')")
        inexact = [is_hidden for name, is_hidden in zip(found, hidden, strict=True) if name.rpartition(".")[2] != text]
        assert inexact == sorted(inexact), text


def test_without_a_login_there_is_nothing_to_log_out_of(page):
    """test_login.py has the button."""
    expect(page.get_by_role("button", name="Log out")).to_have_count(0)
