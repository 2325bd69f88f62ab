"""The examples are checked in the background; Start waits for them."""

import json
import shutil

import pytest
from playwright.sync_api import expect
from same_page import settled
from served import serving
from test_datasets_page import card_field, drop

from backend.inspect.worker import SETTING
from backend.runs import LOG, processes
from backend.runs.folder import runs
from backend.train import builtin_models

EXAMPLES = 15_000
DAT018 = "[data-code=DAT018]"
TIMEOUT = 240_000  # ms; other tests use the same cores, and libraries load for ten seconds
TALK = {"messages": [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "At noon."}]}
SYSTEM = {"messages": [{"role": "system", "content": "Be brief."}, *TALK["messages"]]}
NO_SYSTEM = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
[{{ message['role'] }}]{{ message['content'] }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory, session_fork_server):
    """A server whose checks read all examples; the tiny model is in its cache. Its worker loads libraries once."""
    folder = tmp_path_factory.mktemp("examples")
    # Start goes on after 45 seconds, in which a machine with much other work does not check all of them.
    model = builtin_models.prepare("tiny-llama", lambda *_: None)  # the cache of all tests has it already
    shutil.copytree(model, folder / "cache" / "models" / model.name)
    variables = {"FOOTPLATE_TEST_START_SECONDS": "240", "FOOTPLATE_TEST_PYTHON": str(session_fork_server.python)}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FOOTPLATE_CACHE", str(folder / "cache"))
        environment.setenv(SETTING, "on")
        with serving(folder / "runs", **variables) as started:
            yield started


def open_draft(page, server, folder, examples, copies=0, **more):
    """The Build view with the preset First run, and this many examples, `copies` of them equal to the first one. The
    template cannot render the last one."""
    asked = [TALK["messages"][0] | {"content": f"When {max(n, copies)}?"} for n in range(examples - 1)]
    rows = [*({"messages": [question, TALK["messages"][1]]} for question in asked), SYSTEM]
    (folder / f"{examples}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "template.jinja").write_text(NO_SYSTEM)
    preset = page.request.get(f"{server.url}/api/presets/first-run").json()["values"]
    changes = {
        "model.builtin": "tiny-llama",
        "data.source": "files",
        "data.files": str(folder / f"{examples}.jsonl"),
        "data.validation": "none",
        "eval.strategy": "no",
        "data.chat_template": "file",
        "data.chat_template_file": str(folder / "template.jinja"),
        **more,
    }
    draft = f"{folder.name}-{examples}"
    made = page.request.post(f"{server.url}/api/check", data={"draft": draft, "values": {**preset, **changes}})
    assert made.ok, made.text()
    page.goto(f"{server.url}/?draft={draft}")
    page.wait_for_selector("body[data-ready]", timeout=TIMEOUT)


def change(page, values):
    """Edit the form, and show the first example."""
    page.evaluate("(values) => Object.entries(values).forEach((each) => footplate.edited(...each))", values)
    settled(page)
    page.locator("#fp-example-number").fill("1")
    page.locator("#fp-example-number").press("Tab")


def boxes(page):
    """Position and size of the status card and of Start."""
    return page.evaluate(
        "['#fp-status', '#fp-start'].map((e) => JSON.stringify(document.querySelector(e).getBoundingClientRect()))"
    )


@pytest.mark.soak
def test_start_waits_until_all_examples_are_checked(page, server, tmp_path):
    """The last of 15,000 examples cannot be rendered: the form says how many were checked, Start waits for the others,
    and the run is not started."""
    before = [run.id for run in runs(server.runs)]
    status, start, finding = page.locator(".fp-status-examples"), page.locator("#fp-start"), page.locator(DAT018)
    open_draft(page, server, tmp_path, 4)
    expect(status).to_have_text("All 4 examples checked", timeout=TIMEOUT)  # the worker has loaded its libraries
    expect(finding).to_contain_text("4.jsonl, line 4: ")
    expect(start).to_be_disabled()

    open_draft(page, server, tmp_path, EXAMPLES)
    expect(page.locator(".fp-status-text")).to_have_text("Can run", timeout=TIMEOUT)
    expect(page.locator(".fp-range")).to_contain_text("The range may change: the examples are still being read.")
    page.locator("#fp-memory summary", has_text="Breakdown").click()
    at_first = boxes(page)
    start.click()
    expect(start).to_be_disabled()
    page.wait_for_function(
        """() => /^First [\\d,]+ of 15,000 ex/.test(document.querySelector('.fp-status-examples').textContent)
        && /^Checking [1-9]\\d?%$/.test(document.querySelector('#fp-start').textContent)""",
        timeout=TIMEOUT,
    )
    assert boxes(page) == at_first, "nothing moves"
    assert page.locator("#fp-memory details[open]").count() == 1, "the card was not drawn again"
    expect(finding).to_contain_text(f"{EXAMPLES}.jsonl, line {EXAMPLES}: ", timeout=TIMEOUT)
    expect(page.locator(".fp-toast")).to_contain_text("Not started: ", timeout=TIMEOUT)
    expect(start).to_have_text("Start")
    expect(start).to_be_disabled()
    expect(status).to_have_text("All 15,000 examples checked")
    expect(page.locator(".fp-range")).not_to_contain_text("still being read")
    assert [run.id for run in runs(server.runs)] == before


def test_the_card_shows_what_is_trained_on(page, server, tmp_path):
    """Its tokens with the mask, the cut after an edit, and an example that cannot be rendered."""
    open_draft(page, server, tmp_path, 3, copies=1)
    card, tokens = page.locator("#fp-examples"), page.locator("#fp-example .fp-tokens")
    expect(tokens).to_have_count(0)
    card.locator("summary").first.click()
    trained = tokens.locator(".fp-trained")
    expect(trained.first).to_be_visible(timeout=TIMEOUT)
    assert "".join(trained.all_inner_texts()) == "At noon.<|im_end|>"
    expect(card).to_contain_text("3.jsonl, line 1")
    expect(card).to_contain_text("ends with <|im_end|>")
    assert trained.first.get_attribute("title").startswith("Token")

    page.locator("#data-max_length input").first.fill("12")
    expect(tokens.locator(".fp-cut-mark")).to_have_text("max_length 12", timeout=TIMEOUT)
    expect(card.locator(".fp-lengths figcaption")).to_contain_text("max_length is 12.", timeout=TIMEOUT)
    card.get_by_role("button", name="1 equal to an earlier one").click()
    expect(card).to_contain_text("3.jsonl, line 2", timeout=TIMEOUT)
    card.get_by_role("button", name="1 unusable").click()
    expect(card.locator(".fp-example-problem")).to_contain_text("System role not supported", timeout=TIMEOUT)
    page.locator("#fp-example-next").click()
    expect(card).to_contain_text("The data files have fewer examples than that.", timeout=TIMEOUT)
    expect(page.locator("#fp-example-next")).to_be_disabled()
    card.get_by_role("button", name="Longest").click()
    expect(card).to_contain_text("3.jsonl, line 1", timeout=TIMEOUT)
    card.get_by_role("button", name="Random").click()
    assert page.locator("#fp-example-number").input_value() in ("1", "2", "3")

    (tmp_path / "pairs.jsonl").write_text('{"prompt": "When?", "chosen": "At noon.", "rejected": "At dusk."}\n')
    change(page, {"train.stage": "dpo", "data.files": str(tmp_path / "pairs.jsonl"), "data.max_length": 1024})
    expect(tokens).to_have_count(2, timeout=TIMEOUT)
    for sequence, rest in zip(tokens.all(), ("noon.", "dusk."), strict=True):
        same, _, different = sequence.inner_text().partition("differs from here")
        assert "When?" in same and "At" in same and rest in different

    turns = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "At noon.", "weight": 0.25}]
    (tmp_path / "weights.jsonl").write_text(json.dumps({"messages": turns}))
    change(page, {"train.stage": "sft", "data.files": str(tmp_path / "weights.jsonl")})
    expect(tokens.locator(".fp-weight-mark")).to_have_text("weight 0.25", timeout=TIMEOUT)
    assert trained.first.get_attribute("title").endswith(", weight 0.25")


def test_from_a_dropped_file_to_a_run(page, server, tmp_path):
    """A CSV with foreign column names is dropped, its columns are chosen by clicking, its mask is seen, its cut fixed,
    and the run trains on it."""
    before = [run.id for run in runs(server.runs)]
    settings = {"data.chat_template": "chatml", "train.max_steps": 2, "save.strategy": "no", "data.max_length": 64}
    open_draft(page, server, tmp_path, 3, **settings)
    answers = [f"Um {n} Uhr." for n in range(1, 40)]
    answers[10:20] = ["Nie. " * 40] * 10
    rows = [f"{n},Wann fährt Zug {n}?,{answer}\n" for n, answer in enumerate(answers, 1)]
    drop(page, "#fp-section-data", "fahrplan.csv", "nr,frage,antwort\n" + "".join(rows))
    stored = server.runs / ".uploads" / "fahrplan.csv"
    expect(page.locator("#data-files textarea")).to_have_value(str(stored))

    page.get_by_role("button", name="Choose columns").click()
    menus = page.locator("#fp-columns")
    expect(menus.locator("tr").first).to_contain_text("1")
    expect(menus.get_by_label("Use of column frage")).to_have_value("")
    menus.get_by_label("Use of column frage").select_option("Prompt")
    expect(page.locator("#data-prompt_column textarea, #data-prompt_column input")).to_have_value("frage")
    menus.get_by_label("Use of column antwort").select_option("Completion")
    trained = page.locator("#fp-example .fp-trained")
    expect(trained.first).to_be_visible(timeout=TIMEOUT)
    assert "".join(trained.all_inner_texts()).startswith("Um 1 Uhr.")
    expect(page.locator("[data-code=DAT002], [data-code=DAT003]")).to_have_count(0)
    page.locator("#fp-undo").click()
    expect(menus.get_by_label("Use of column antwort")).to_have_value("")
    menus.get_by_label("Use of column antwort").select_option("Completion")

    too_long = page.locator("[data-code=DAT009]")
    expect(too_long).to_contain_text("26% of the examples are longer than", timeout=TIMEOUT)
    too_long.get_by_role("button", name="Set max length to 256").click()
    expect(too_long).to_have_count(0)
    start = page.locator("#fp-start")
    expect(start).to_be_enabled(timeout=TIMEOUT)
    start.click()
    page.wait_for_selector('.fp-run[data-state="done"]', timeout=TIMEOUT)
    (run,) = (run for run in runs(server.runs) if run.id not in before)
    assert run.result()["steps"] == 2
    assert page.request.get(f"{server.url}/api/uploads").json()["files"][0]["runs"][0]["id"] == run.id
    assert not processes.run_processes(run.path)


@pytest.mark.soak
def test_two_datasets_are_mixed_and_a_second_run_starts_from_the_cache(page, server, tmp_path):
    """A dataset is added with a weight, and the first run tokenizes both; the second run does not tokenize again."""
    question, answer = TALK["messages"]
    rows = [{"messages": [question | {"content": f"When {n}? " * 30}, answer]} for n in range(EXAMPLES)]
    (tmp_path / "many.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = {"data.chat_template": "chatml", "train.max_steps": 2, "save.strategy": "no"}
    open_draft(page, server, tmp_path, 3, **settings, **{"data.files": str(tmp_path / "many.jsonl")})
    page.locator("#fp-datasets").get_by_role("button", name="Add a dataset").click()
    card_field(page, 1, "source").select_option("builtin")
    card_field(page, 1, "weight").fill("2")
    expect(page.locator("#fp-datasets")).to_contain_text("examples per epoch from", timeout=TIMEOUT)
    draft, logs = page.url, []
    for _ in range(2):
        before = set(runs(server.runs))
        start = page.locator("#fp-start")
        expect(start).to_be_enabled(timeout=TIMEOUT)
        start.click()
        page.wait_for_selector('.fp-run[data-state="done"]', timeout=TIMEOUT)
        (run,) = (each for each in runs(server.runs) if each.path not in {known.path for known in before})
        logs.append((run.path / LOG).read_text())
        assert run.result()["steps"] == 2 and not processes.run_processes(run.path)
        page.goto(draft)
        page.wait_for_selector("body[data-ready]", timeout=TIMEOUT)
    first, second = logs
    mixed = [line.partition(" ")[2] for line in first.splitlines() if "Dataset 2" in line]
    assert mixed and all(line in second for line in mixed)
    reused = "Reusing the cached tokenized dataset"
    assert reused not in first and reused in second


@pytest.mark.soak
def test_a_template_that_never_stops_is_found_before_the_start(page, server, tmp_path):
    settings = {"data.chat_template_file": str(tmp_path / "endless.jinja")}
    (tmp_path / "endless.jinja").write_text(NO_SYSTEM.replace("<|im_end|>", "\n"))
    open_draft(page, server, tmp_path, 3, copies=1, **settings)
    endless, card = page.locator("[data-code=DAT025]"), page.locator("#fp-examples")
    expect(endless).to_contain_text("In 2 of 3 checked examples", timeout=TIMEOUT)
    card.locator("summary").first.click()
    expect(card.locator(".fp-trained").first).to_be_visible(timeout=TIMEOUT)
    assert "<|im_end|>" not in "".join(card.locator(".fp-trained").all_inner_texts())
    endless.get_by_role("button", name="ChatML").click()
    expect(endless).to_have_count(0, timeout=TIMEOUT)
    expect(card).to_contain_text("ends with <|im_end|>", timeout=TIMEOUT)
