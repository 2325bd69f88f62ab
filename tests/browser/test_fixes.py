"""From a bad configuration to one that can run by clicking fixes alone, as a person does who knows none of it.

One server and one page for all: each starting point is imported as a file, for the machine that it was meant for.
"""

import json

import pytest
from playwright.sync_api import expect
from served import serving

MOST = 4  # clicks
CARD = ".fp-finding[data-level=error] .fp-fix button"
EIGHT_B = "model: {source: hub, hub_id: meta-llama/Llama-3.1-8B-Instruct}\ndata: {source: hub, hub_id: a/b}\n"
SEVENTY_B = "model: {source: hub, hub_id: meta-llama/Llama-3.3-70B-Instruct}\ndata: {source: hub, hub_id: a/b}\n"
SMALL = "model: {source: hub, hub_id: Qwen/Qwen3-1.7B}\ndata: {source: hub, hub_id: a/b}\n"
FULL = "method: {kind: full}\n"

# Name: machine, YAML, the rule that speaks first.
STARTS = {
    "galore-zero3": (
        "4x80gb",
        SMALL + FULL + "train: {optim: galore, learning_rate: 0.00002}\n"
        "parallel: {strategy: zero3}\nlaunch: {processes: 4}\n",
        "OPT003",
    ),
    "galore-zero3-8b": (
        "2x24gb",
        EIGHT_B + FULL + "train: {optim: galore, learning_rate: 0.00002}\nparallel: {strategy: zero3}\n",
        "OPT003",
    ),
    "layerwise-galore-on-two": (
        "4x80gb",
        SMALL + FULL + "train: {optim: galore_layerwise, gradient_accumulation_steps: 4, learning_rate: 0.00002}\n"
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
        EIGHT_B + "train: {use_unsloth: true}\nparallel: {strategy: zero3}\nlaunch: {processes: 8}\n",
        "UNS003",
    ),
    "absurd-rank": ("1x24gb", EIGHT_B + "lora: {r: 4096, init: pissa}\n", "ADP002"),
    "fp16-on-a-cpu": ("laptop", "precision: {compute: fp16}\n", "PRC001"),
    "qlora-fsdp1": ("2x24gb", EIGHT_B + "method: {quantization: nf4}\nparallel: {strategy: fsdp1}\n", "QNT004"),
    "pissa-on-a-packed-base": ("1x24gb", SMALL + "method: {quantization: nf4}\nlora: {init: pissa}\n", "QNT002"),
    "deepspeed-by-python": (
        "4x80gb",
        SMALL + "parallel: {strategy: zero2}\nlaunch: {processes: 4, launcher: python}\n",
        "LCH001",
    ),
    "flash-without-a-gpu": ("laptop", "model: {attn_implementation: flash_attention_2}\n", "KRN001"),
    "longer-than-the-model-counts": (
        "1x24gb",
        "model: {source: path, path: GPT2}\ndata: {max_length: 4096}\n",
        "DAT010",
    ),
    "seventy-b-on-a-gaming-card": ("1x24gb", SEVENTY_B + FULL + "train: {learning_rate: 0.00002}\n", "MEM001"),
    "eight-b-on-a-gaming-card": ("1x24gb", EIGHT_B + FULL + "train: {learning_rate: 0.00002}\n", "MEM001"),
    "eight-b-by-ddp": (
        "8x80gb",
        EIGHT_B + FULL + "train: {learning_rate: 0.00002}\nparallel: {strategy: ddp}\nlaunch: {processes: 8}\n",
        "MEM001",
    ),
    "best-never-evaluated": (
        "1x24gb",
        SMALL + "eval: {strategy: steps, steps: 30}\ncheckpoint: {best: true, when: steps, steps: 70}\n",
        "TRN006",
    ),
    "eight-processes-on-two": ("2x24gb", SMALL + "parallel: {strategy: ddp}\nlaunch: {processes: 8}\n", "LCH002"),
    "int8-spread": ("2x24gb", SMALL + "method: {quantization: int8}\nparallel: {strategy: fsdp2}\n", "QNT003"),
    "merged-and-spread": ("2x24gb", SMALL + "parallel: {strategy: zero3}\ncheckpoint: {merge: true}\n", "STR004"),
}


@pytest.fixture(scope="module")
def page(chromium, tmp_path_factory):
    """A page that stays open, and a model that counts to 1,024."""
    place = tmp_path_factory.mktemp("fixes")
    errors = []
    with serving(place / "runs") as server:
        page = chromium.new_context(viewport={"width": 1440, "height": 1000}).new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.url)
        page.wait_for_selector("body[data-ready]", timeout=30_000)
        page.place = place
        yield page
        page.context.close()
    assert errors == []


@pytest.fixture
def gpt2(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50_257, "n_positions": 1024,
    }))  # fmt: skip
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path


def judged(page):
    """Wait until what is shown is about what the form holds; the verdict, and the cards."""
    page.wait_for_selector("#fp-verdict[data-fresh=yes]:not([data-level=checking])", timeout=20_000)
    return page.locator(".fp-verdict-text").inner_text(), page.locator("#fp-findings").inner_text()


def begun(page, machine, yaml, code):
    """Import `yaml` for a machine; returns the verdict, and the cards."""
    if page.locator("#fp-machine").input_value() != machine:
        page.locator("#fp-machine").select_option(machine)
    path = page.place / "start.yaml"
    path.write_text(yaml)
    page.evaluate("FP.toast('')")
    page.locator("#fp-import-file").set_input_files(path)
    expect(page.locator(".fp-toast")).to_contain_text("start.yaml loaded")
    page.wait_for_selector(f".fp-finding[data-code={code}]", timeout=20_000)
    return judged(page)


@pytest.mark.parametrize("name", STARTS)
def test_fixes_alone_lead_to_a_run(page, gpt2, name):
    machine, yaml, code = STARTS[name]
    said, cards = begun(page, machine, yaml.replace("GPT2", str(gpt2)), code)
    seen, go = [cards], page.locator("#fp-start:visible, #fp-take:visible")
    expect(go).to_be_disabled()
    while said.startswith("Cannot run"):
        assert len(seen) <= MOST, cards
        page.locator(CARD).first.click()
        said, cards = judged(page)
        assert cards not in seen, "a fix that leads nowhere"
        seen.append(cards)
    assert said.startswith("Can run") and len(seen) > 1
    expect(go).to_be_enabled()


def test_everything_is_fixed_by_one_button_and_undone_by_another(page):
    yaml = SMALL + "parallel: {strategy: zero3}\nlaunch: {processes: 4, launcher: python}\ncheckpoint: {merge: true}\n"
    assert begun(page, "2x24gb", yaml, "STR004")[0].startswith("Cannot run: 3 errors")
    before = page.evaluate("() => FP.form.values()")
    page.get_by_role("button", name="Fix everything").click()
    note = page.locator(".fp-toast")
    expect(note).to_contain_text("3 fixes applied.")
    expect(note).to_contain_text("python \u2192 torchrun")
    assert judged(page)[0].startswith("Can run")
    expect(page.get_by_role("button", name="Fix everything")).to_be_hidden()
    note.get_by_role("button", name="Undo").click()
    assert judged(page)[0].startswith("Cannot run: 3 errors")
    assert page.evaluate("() => FP.form.values()") == before


def test_what_safe_fixes_cannot_mend_is_named(page):
    yaml = EIGHT_B + FULL + "train: {learning_rate: 0.00002}\nlaunch: {devices: [3]}\n"
    begun(page, "1x24gb", yaml, "MEM001")
    page.get_by_role("button", name="Fix what is safe").click()
    expect(page.locator(".fp-toast")).to_contain_text("1 fix applied. Left: It does not fit into memory.")
    assert judged(page)[0].startswith("Cannot run: 1 error")


def test_what_would_make_it_fit_is_a_click_away(page):
    """Each way with the peak that it leads to: what the bar says after the click."""
    begun(page, "8x80gb", *STARTS["eight-b-by-ddp"][1:])
    table = page.locator(".fp-fitting")
    assert table.locator("tr").count() >= 3
    peak = table.locator("td.fp-n").first.inner_text()
    table.get_by_role("button").first.click()
    assert judged(page)[0].startswith("Can run")
    expect(page.locator("#fp-memory .fp-figure")).to_have_text(f"{peak} of 80 GiB")
    expect(table).to_have_count(0)


def test_rules_are_found_by_word_level_and_family(page):
    """And what is no longer so beside them."""
    rules = page.context.new_page()
    rules.goto(page.url.partition("?")[0] + "rules")
    shown, status = rules.locator("article:visible"), rules.locator(".search [role=status]")
    every = shown.count()
    rules.get_by_label("Find a rule").press_sequentially("PiSSA ZeRO-3")
    expect(shown).to_have_count(1)
    expect(shown).to_contain_text("test_zero3_saves_the_same")
    rules.get_by_role("link", name="No longer so").click()
    expect(shown).to_have_count(every)
    rules.get_by_role("button", name="Error").click()
    rules.get_by_label("Family").select_option(label="Unsloth")
    assert {card.get_attribute("data-level") for card in shown.all()} == {"error"}
    expect(status).to_have_text(f"{shown.count()} of {rules.locator('article[id]').count()}")
    expect(rules.locator("#no-longer-so")).to_be_hidden()
    expect(shown.first.locator("li").first).to_have_text("Without Unsloth slower, and more memory")
    rules.close()
