"""Configurations with errors become runnable by clicking only fixes.

All tests share a server and a page; each configuration is imported as a file, for a described machine.
"""

import json

import pytest
from parameters import soak_except
from playwright.sync_api import expect
from test_accessibility import KEEP_ONE_OF_EACH_KIND, violations

from backend.rules import example_findings

MAX_CLICKS = 4
ERROR_FIX_BUTTON = ".fp-finding[data-level=error] .fp-fix button"
EIGHT_B = "model: {source: hub, hub_id: meta-llama/Llama-3.1-8B-Instruct}\ndata: {source: hub, hub_id: a/b}\n"
SEVENTY_B = "model: {source: hub, hub_id: meta-llama/Llama-3.3-70B-Instruct}\ndata: {source: hub, hub_id: a/b}\n"
SMALL = "model: {source: hub, hub_id: Qwen/Qwen3-1.7B}\ndata: {source: hub, hub_id: a/b}\n"
FULL = "method: {kind: full}\n"

# Name: machine, YAML, the first error.
CONFIGURATIONS = {
    "galore-zero3": (
        "4x80gb",
        SMALL + FULL + "train: {optim: galore_adamw, learning_rate: 0.00002}\n"
        "parallel: {strategy: zero3}\nlaunch: {nproc_per_node: 4}\n",
        "OPT003",
    ),
    "galore-zero3-8b": (
        "2x24gb",
        EIGHT_B + FULL + "train: {optim: galore_adamw, learning_rate: 0.00002}\nparallel: {strategy: zero3}\n",
        "OPT003",
    ),
    "layerwise-galore-on-two": (
        "4x80gb",
        SMALL
        + FULL
        + "train: {optim: galore_adamw_layerwise, gradient_accumulation_steps: 4, learning_rate: 0.00002}\n"
        "parallel: {strategy: ddp}\n",
        "OPT004",
    ),
    "badam-ddp": (
        "4x80gb",
        SMALL + FULL + "train: {optim: badam, learning_rate: 0.00002}\nparallel: {strategy: ddp}\n",
        "OPT004",
    ),
    "unsloth-zero3": (
        "8x80gb",
        EIGHT_B + "train: {use_unsloth: true}\nparallel: {strategy: zero3}\nlaunch: {nproc_per_node: 8}\n",
        "UNS003",
    ),
    "rank-above-the-hidden-size": ("1x24gb", EIGHT_B + "lora: {r: 4096, init: pissa}\n", "ADP002"),
    "fp16-on-a-cpu": ("laptop", "precision: {compute: fp16}\n", "PRC001"),
    "qlora-fsdp1": ("2x24gb", EIGHT_B + "method: {quantization: nf4}\nparallel: {strategy: fsdp1}\n", "STR049"),
    "pissa-on-a-quantized-base": ("1x24gb", SMALL + "method: {quantization: nf4}\nlora: {init: pissa}\n", "QNT002"),
    "deepspeed-with-python-launcher": (
        "4x80gb",
        SMALL + "parallel: {strategy: zero2}\nlaunch: {nproc_per_node: 4, launcher: python}\n",
        "LCH001",
    ),
    "flash-without-a-gpu": ("laptop", "model: {attn_implementation: flash_attention_2}\n", "KRN001"),
    "longer-than-the-position-embeddings": (
        "1x24gb",
        "model: {source: path, path: GPT2}\ndata: {max_length: 4096}\n",
        "DAT010",
    ),
    "seventy-b-on-24-gb": ("1x24gb", SEVENTY_B + FULL + "train: {learning_rate: 0.00002}\n", "MEM001"),
    "eight-b-on-24-gb": ("1x24gb", EIGHT_B + FULL + "train: {learning_rate: 0.00002}\n", "MEM001"),
    "eight-b-with-ddp": (
        "8x80gb",
        EIGHT_B + FULL + "train: {learning_rate: 0.00002}\nparallel: {strategy: ddp}\nlaunch: {nproc_per_node: 8}\n",
        "MEM001",
    ),
    "best-never-evaluated": (
        "1x24gb",
        SMALL
        + "eval: {strategy: steps, steps: 30}\nsave: {load_best_model_at_end: true, strategy: steps, steps: 70}\n",
        "TRN006",
    ),
    "eight-processes-on-two": ("2x24gb", SMALL + "parallel: {strategy: ddp}\nlaunch: {nproc_per_node: 8}\n", "LCH002"),
    "int8-with-fsdp": ("2x24gb", SMALL + "method: {quantization: int8}\nparallel: {strategy: fsdp2}\n", "QNT003"),
    "merged-with-zero3": ("2x24gb", SMALL + "parallel: {strategy: zero3}\nsave: {merge_adapter: true}\n", "STR004"),
}

IN_MAKE_TEST = {"qlora-fsdp1", "longer-than-the-position-embeddings", "seventy-b-on-24-gb"}


@pytest.fixture
def page(same_page, tmp_path):
    """The form has the values of the test before, which an import replaces."""
    same_page.page.folder = tmp_path
    return same_page.page


@pytest.fixture
def gpt2(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50_257, "n_positions": 1024,
    }))  # fmt: skip
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # without tensors
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path


def report(page):
    """The status and the findings, once they belong to the form's current values."""
    page.wait_for_selector("#fp-status[data-fresh=yes]:not([data-level=checking])")
    return page.locator(".fp-status-text").inner_text(), page.locator("#fp-findings").inner_text()


def import_yaml(page, machine, yaml, code):
    """Import `yaml` for a machine; the status and the findings."""
    if page.locator("#fp-machine").input_value() != machine:
        page.locator("#fp-machine").select_option(machine)
    path = page.folder / "start.yaml"
    path.write_text(yaml)
    page.evaluate("footplate.notify('')")
    page.locator("#fp-import-file").set_input_files(path)
    expect(page.locator(".fp-toast")).to_contain_text("start.yaml loaded")
    page.wait_for_selector(f".fp-finding[data-code={code}]")
    return report(page)


@pytest.mark.parametrize("name", soak_except(CONFIGURATIONS, IN_MAKE_TEST))
def test_clicking_fixes_leads_to_a_runnable_spec(page, gpt2, name):
    machine, yaml, code = CONFIGURATIONS[name]
    text, cards = import_yaml(page, machine, yaml.replace("GPT2", str(gpt2)), code)
    findings_seen, start = [cards], page.locator("#fp-start:visible, #fp-export-plan:visible")
    expect(start).to_be_disabled()
    while text.startswith("Cannot run"):
        assert len(findings_seen) <= MAX_CLICKS, cards
        page.locator(ERROR_FIX_BUTTON).first.click()
        text, cards = report(page)
        assert cards not in findings_seen, "the fix changed nothing"
        findings_seen.append(cards)
    assert text.startswith(("Can run", "May not fit")) and len(findings_seen) > 1
    expect(start).to_be_enabled()


def test_apply_all_fixes_and_undo(page):
    yaml = (
        SMALL
        + "parallel: {strategy: zero3}\nlaunch: {nproc_per_node: 4, launcher: python}\nsave: {merge_adapter: true}\n"
    )
    assert import_yaml(page, "2x24gb", yaml, "STR004")[0].startswith("Cannot run: 3 errors")
    before = page.evaluate("() => footplate.values()")
    page.get_by_role("button", name="Fix all errors").click()
    note = page.locator(".fp-toast")
    expect(note).to_contain_text("3 fixes applied.")
    expect(note).to_contain_text("python \u2192 torchrun")
    assert report(page)[0].startswith("Can run")
    expect(page.get_by_role("button", name="Fix all errors")).to_be_hidden()
    note.get_by_role("button", name="Undo").click()
    expect(page.locator("#fp-status")).to_contain_text("Cannot run: 3 errors")
    assert report(page)[0].startswith("Cannot run: 3 errors")
    assert page.evaluate("() => footplate.values()") == before


@pytest.mark.soak
def test_errors_without_a_safe_fix_are_listed(page):
    yaml = EIGHT_B + FULL + "train: {learning_rate: 0.00002}\nlaunch: {devices: [3]}\n"
    import_yaml(page, "1x24gb", yaml, "MEM001")
    title = example_findings()["MEM001"].title
    page.get_by_role("button", name="Apply safe fixes").click()
    expect(page.locator(".fp-toast")).to_contain_text(f"1 fix applied. Remaining errors: {title.rstrip('.')}.")
    assert report(page)[0].startswith("Cannot run: 1 error")


def test_memory_remedies_are_applied_by_a_click(page):
    """Each change is listed with its peak, which the memory bar shows after the click."""
    import_yaml(page, "8x80gb", *CONFIGURATIONS["eight-b-with-ddp"][1:])
    table = page.locator(".fp-reductions")
    assert table.locator("tr").count() >= 3
    peak = table.locator("td.fp-n").first.inner_text()
    table.get_by_role("button").first.click()
    expect(page.locator("#fp-status")).to_contain_text("Can run")  # the report before the click is "Cannot run"
    assert report(page)[0].startswith("Can run")
    expect(page.locator("#fp-memory .fp-figure")).to_have_text(f"{peak} of 80 GiB")
    expect(table).to_have_count(0)


@pytest.mark.parametrize("width", [390, *(pytest.param(w, marks=pytest.mark.soak) for w in (800, 1024)), 1440])
def test_long_memory_remedies_stay_within_their_cards(page, width):
    """A combination of three changes has a long label; the peak next to it, and its button on the card of the finding,
    are in sight."""
    yaml = EIGHT_B.replace("a/b", "a/b, max_length: 4096") + FULL
    yaml += "parallel: {strategy: zero3}\nlaunch: {nproc_per_node: 8}\n"
    size = page.viewport_size
    page.set_viewport_size({"width": width, "height": 1000})
    import_yaml(
        page, "1x24gb", yaml + "train: {per_device_train_batch_size: 8, activation_checkpointing: false}\n", "MEM001"
    )
    assert max(map(len, page.locator(".fp-reductions button").all_inner_texts())) > 70
    for selector in (".fp-reductions :is(button, div, td)", ".fp-fix button"):
        outside = """nodes => nodes.filter(node => {
            const card = node.closest('#fp-memory, .fp-finding').getBoundingClientRect();
            return node.getBoundingClientRect().right > card.right || node.scrollWidth > node.clientWidth + 1;
        }).map(node => node.textContent)"""
        assert page.locator(selector).count() > 0
        assert page.locator(selector).evaluate_all(outside) == [], selector
    page.set_viewport_size(size)


def test_rules_page_filters_by_text_level_and_topic(page):
    """The filters also apply to outdated advice. axe-core finds nothing in the page."""
    rules = page.context.new_page()
    rules.goto(page.url.partition("?")[0] + "rules")
    shown, status = rules.locator("article:visible"), rules.locator(".search [role=status]")
    every = shown.count()
    search = rules.get_by_label("Search rules")
    found = []
    for words in ("PiSSA ZeRO-3", "pissa zero3"):
        search.fill(words)
        expect(shown.filter(has_text="test_zero3_saves_the_same")).to_have_count(1)
        found.append(shown.evaluate_all("cards => cards.map(card => card.id)"))
    assert found[0] == found[1] and len(found[0]) < 5
    search.fill("zero3 lora")
    assert shown.count() > 1
    rules.get_by_role("link", name="outdated advice").click()
    expect(shown).to_have_count(every)
    rules.get_by_role("button", name="Error").click()
    rules.get_by_label("Topic").select_option(label="Unsloth")
    assert set(shown.evaluate_all("cards => cards.map(card => card.dataset.level)")) == {"error"}
    expect(status).to_have_text(f"{shown.count()} of {rules.locator('article[id]').count()}")
    expect(rules.locator("#outdated")).to_be_hidden()
    fix = example_findings()[shown.first.get_attribute("id")].fixes[0]
    expect(shown.first.locator("li").first).to_contain_text(fix.label)
    expect(shown.first.locator("li").first).to_contain_text(fix.cost)
    rules.reload()
    rules.evaluate(KEEP_ONE_OF_EACH_KIND)
    assert violations(rules) == []
    rules.close()
