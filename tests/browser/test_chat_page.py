"""The card "Chat" of a run's page. Its process is replaced by fake_chat.py; the real one is in tests/process."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect
from same_page import show_run
from served import FAKE
from test_accessibility import violations
from test_journeys import SLOW_TIMEOUT
from test_trained_model_page import plant

from backend.models import chat
from backend.runs import RESULT
from backend.runs.folder import ALIVE

TOOLS = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}])


@pytest.fixture
def page(same_page):
    return same_page.page


@pytest.fixture
def run(shared):
    """A run whose chats are answered by fake_chat.py."""
    found = plant(shared, "chatty")
    (found.path / FAKE).write_text(str(Path(__file__).with_name("fake_chat.py")))
    samples = [{"prompt": f"Example {n}", "reference": "r", "before": "b", "after": "a"} for n in (1, 2)]
    (found.path / RESULT).write_text(json.dumps({"steps": 3, "model": "model", "samples": samples}))
    yield found
    found.delete()  # stops the chat


def ready(page):
    page.wait_for_selector("body[data-ready]")
    card = page.get_by_role("region", name="Chat")
    expect(card).to_be_visible(timeout=SLOW_TIMEOUT)
    return card


def outputs(card, side):
    return card.locator(f".fp-chat-output[data-side={side}]")


def test_a_conversation(run, page):
    show_run(page, run)
    card = ready(page)
    expect(card.get_by_label("Prompt", exact=True)).to_be_hidden()
    card.get_by_role("button", name="Chat with this model").click()
    prompt = card.get_by_label("Prompt", exact=True)
    card.get_by_label("Compare with the base model").check()
    prompt.fill("one")
    prompt.press("Shift+Enter")
    prompt.press_sequentially("two")
    prompt.press("Enter")
    expect(outputs(card, "base")).to_contain_text("base <b onclick=alert(1)>bold</b> one two", timeout=SLOW_TIMEOUT)
    assert card.locator("b").count() == 0, "text of a model is no HTML"
    expect(outputs(card, "trained")).to_contain_text("4 tokens in 3.1 s, ended with <|im_end|>")
    expect(prompt).to_have_value("")
    outputs(card, "trained").get_by_role("button", name="Show tokens").click()
    expect(outputs(card, "trained").locator("pre")).to_have_count(2)
    expect(outputs(card, "trained").locator("[title='Token 2, probability 50%']")).to_have_count(4)

    card.get_by_label("Compare with the base model").uncheck()
    prompt.fill("endless")
    card.get_by_role("button", name="Send").click()
    expect(outputs(card, "trained").nth(1)).to_contain_text("more more")
    card.get_by_role("button", name="Stop", exact=True).click()
    expect(outputs(card, "trained").nth(1)).to_contain_text("stopped")
    expect(outputs(card, "trained").nth(0).get_by_role("button", name="Hide tokens")).to_be_visible()  # it stayed open
    card.locator("summary").click()
    assert violations(page, ".fp-chat") == []

    page.reload()
    card = ready(page)
    expect(outputs(card, "trained")).to_have_count(2)
    expect(card.locator("summary")).to_have_text("System prompt and settings")
    card.locator("summary").click()
    expect(card.get_by_label("System prompt")).to_have_value("As JSON: train, from, to, time (HH:MM), platform.")
    card.get_by_role("button", name="Validation example").click()
    expect(card.get_by_label("Prompt", exact=True)).to_have_value("Example 1")
    expect(card.get_by_label("Include earlier turns")).not_to_be_checked()
    card.get_by_role("button", name="Regenerate").click()
    card.get_by_role("button", name="Stop", exact=True).click()
    expect(card.get_by_role("button", name="Regenerate")).to_be_visible()
    expect(outputs(card, "trained")).to_have_count(2)


@pytest.mark.soak
def test_tools_reasoning_code_and_kept_prompts(run, page):
    show_run(page, run)
    card = ready(page)
    expect(card).to_contain_text("Loading takes at least")
    expect(card).to_contain_text("is free.")
    card.get_by_role("button", name="Chat with this model").click()
    prompt, tools = card.get_by_label("Prompt", exact=True), card.get_by_label("Tools", exact=True)
    card.locator("summary", has_text="System prompt").click()
    expect(tools).to_be_visible(timeout=SLOW_TIMEOUT)
    expect(card.get_by_label("Send as")).to_be_hidden()
    tools.fill("[{]")
    prompt.fill("one")
    prompt.press("Enter")
    expect(page.locator("#fp-toasts")).to_contain_text("Tools: this is not valid JSON")
    tools.fill(TOOLS)
    prompt.press("Enter")
    expect(page.locator("#fp-toasts")).to_have_text("", timeout=5000)  # the error would stay for 15 s
    expect(outputs(card, "trained")).to_contain_text("3 tokens", timeout=SLOW_TIMEOUT)
    expect(outputs(card, "trained").locator("summary", has_text="Reasoning")).to_be_hidden()

    card.get_by_label("Reasoning", exact=True).select_option("On")
    card.get_by_label("Include earlier turns").check()
    card.get_by_label("Send as").select_option("Tool result")
    prompt.fill("21 degrees")
    prompt.press("Enter")
    second = outputs(card, "trained").nth(1)
    expect(second).to_contain_text("tokens in 3.1 s", timeout=SLOW_TIMEOUT)
    expect(second.locator("details.fp-chat-reasoning div")).to_have_text("because")
    expect(second).not_to_contain_text("</think>")
    expect(card.locator(".fp-chat-prompt").nth(1)).to_contain_text("Tool result")
    expect(card.get_by_label("Send as")).to_have_value("user")
    second.get_by_role("button", name="Show code").click()
    expect(second.locator("pre")).to_contain_text("messages, tools=tools, enable_thinking=True")
    assert violations(page, ".fp-chat") == []
    keep(page, run, second)


def keep(page, run, second):
    """Keep the conversation of the second turn for evaluations."""
    second.get_by_role("button", name="Keep for evaluation").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Reference")).to_have_value("trained <b onclick=alert(1)>bold</b> 21 degrees")
    dialog.get_by_label("Reference").fill("It is warm.")
    dialog.get_by_role("button", name="Keep", exact=True).click()
    expect(page.locator("#fp-toasts")).to_contain_text("evaluation_prompts.jsonl, which has 1 prompt now.")
    evaluation = page.get_by_role("region", name="Evaluation")
    evaluation.locator("summary", has_text="Settings").click()
    evaluation.get_by_role("button", name="Use the prompt kept from chats").click()
    kept = run.path.parent / "evaluation_prompts.jsonl"
    expect(evaluation.get_by_label("Data file on the server")).to_have_value(str(kept))
    assert json.loads(kept.read_text())["completion"][0]["content"] == "It is warm."


def test_errors_the_end_and_another_run(shared, run, page):
    other = plant(shared, "other")
    show_run(page, run)
    card = ready(page)
    card.get_by_role("button", name="Chat with this model").click()
    prompt = card.get_by_label("Prompt", exact=True)
    prompt.fill("fail")
    prompt.press("Enter")
    expect(outputs(card, "trained")).to_contain_text("Generation failed: on purpose.", timeout=SLOW_TIMEOUT)
    prompt.fill("x" * 70_000)
    prompt.press("Enter")
    expect(page.locator("#fp-toasts")).to_contain_text("at most 64 KiB")
    assert len(prompt.input_value()) == 70_000, "what could not be sent stays"
    card.get_by_label("Send as").select_option("Tool result")
    card.get_by_role("button", name="Clear", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Clear").click()
    expect(outputs(card, "trained")).to_have_count(0)
    card.get_by_role("button", name="End chat").click()
    expect(card).to_contain_text("The chat was stopped.", timeout=SLOW_TIMEOUT)
    job = chat.current(run)
    assert job.state not in ALIVE

    show_run(page, other)
    expect(page.locator(".fp-run h2")).to_have_text("other", timeout=SLOW_TIMEOUT)
    expect(card.get_by_role("button", name="Chat with this model")).to_be_visible()
    expect(card).not_to_contain_text("The chat was stopped.")
    expect(card.get_by_label("Send as")).to_have_value("user")
