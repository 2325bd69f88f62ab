"""Drafts and presets: two tabs have two drafts, and values of a demo preset do not stay with other data."""

from __future__ import annotations

import json
import time

import pytest
from fake_hub import BAD, GOOD
from playwright.sync_api import expect
from same_page import settled
from served import new_context


@pytest.fixture
def context(chromium):
    context = new_context(chromium)
    yield context
    context.close()


@pytest.fixture
def page(same_page):
    same_page.show_build()
    return same_page.page


def opened(context, url):
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    settled(page)
    return page


def fill(page, name, text):
    page.locator(f"#{name.replace('.', '-')} :is(input, textarea)").first.fill(str(text))
    settled(page)


def value(page, name):
    return page.evaluate("name => footplate.values()[name]", name)


def test_two_tabs_have_two_drafts(page, shared):
    """The second tab continues with the values of the first, and then neither changes the other's."""
    first, context = page, page.context
    first.locator("#fp-machine").select_option("laptop")
    fill(first, "train.max_steps", 7)
    second = opened(context, shared.url)
    assert value(second, "train.max_steps") in (7, "7")
    assert second.locator("#fp-machine").input_value() == "laptop"
    fill(second, "train.max_steps", 8)
    assert first.url != second.url
    assert int(value(first, "train.max_steps")) == 7


@pytest.mark.soak
def test_a_duplicated_tab_has_its_own_draft(context, shared):
    first = opened(context, shared.url)
    fill(first, "train.max_steps", 7)
    duplicate = opened(context, first.url)
    fill(duplicate, "train.max_steps", 9)
    address = duplicate.url
    assert address != first.url
    duplicate.reload()
    duplicate.wait_for_selector("body[data-ready]")
    assert duplicate.url == address and int(value(duplicate, "train.max_steps")) == 9
    assert int(value(first, "train.max_steps")) == 7


@pytest.mark.soak
def test_a_tab_comes_back_to_its_draft(context, shared):
    """The form is hidden until the draft is there: an edit of its default values would begin another draft. The rules
    and the help know no draft; a link to a preset wants none."""
    page, url = opened(context, shared.url), shared.url
    fill(page, "train.max_steps", 7)
    steps = page.locator("#train-max_steps input").first
    page.route("**/api/drafts/*", lambda route: route.fulfill(status=503, body="{}"))
    page.reload()
    expect(page.locator(".fp-status-text")).to_have_text("Loading failed")
    expect(steps).to_be_hidden()
    page.unroute_all()
    page.goto(f"{url}/rules")
    page.route("**/api/drafts/*", lambda route: (time.sleep(0.5), route.continue_()))
    page.get_by_role("link", name="Build", exact=True).click(no_wait_after=True)
    steps.wait_for(state="attached")
    expect(steps).to_be_hidden()
    page.wait_for_selector("body[data-ready]")
    expect(steps).to_be_visible()
    assert int(value(page, "train.max_steps")) == 7
    settled(page)
    page.goto(f"{url}/?preset=lora-80gb")
    page.wait_for_selector("body[data-ready]")
    assert value(page, "model.source") == "hub" and "preset=lora-80gb" in page.url


BEFORE, DURING, AFTER = 0, 10, 150  # ms after the key: the check of the edit is sent, runs, and is done


@pytest.mark.parametrize(
    ("how", "delays"),
    [
        ("close", [BEFORE]),
        pytest.param("close", [DURING, AFTER], marks=pytest.mark.soak),
        pytest.param("reload", [BEFORE, DURING, AFTER], marks=pytest.mark.soak),
        pytest.param("no server", [BEFORE, DURING, AFTER], marks=pytest.mark.soak),
    ],
)
def test_the_last_key_before_leaving_is_kept(context, shared, how, delays):
    """At any moment: before the check of the edit is sent, while it runs, and after it."""
    page = opened(context, shared.url)
    typed = ""
    for delay in delays:
        field = page.locator("#logging-run_name :is(input, textarea)")
        field.focus()
        page.keyboard.press("End")
        if how == "no server":
            page.route("**/api/check", lambda route: route.abort())
            page.route("**/api/drafts/*", lambda route: route.abort())
        page.keyboard.type("<b")
        typed += "<b"
        page.wait_for_timeout(delay)
        if how == "close":
            address = page.url
            page.close()
            page = context.new_page()
            page.goto(address)
        else:
            page.unroute_all()
            page.reload()
        page.wait_for_selector("body[data-ready]")
        assert value(page, "logging.run_name") == typed
        assert page.locator("#logging-run_name :is(input, textarea)").input_value() == typed


def test_a_comma_is_a_decimal_point(page):
    field = page.locator("#train-learning_rate input").first
    field.fill("")
    field.press_sequentially("0,001")
    assert field.input_value() == "0.001" and float(value(page, "train.learning_rate")) == 0.001
    field.fill("")
    field.press_sequentially("1,000")
    assert field.input_value() == "1000", "it may separate thousands"
    # In the card of a dataset, and in the fields of jobs, such as the temperature of a chat.
    page.locator("#fp-datasets").get_by_role("button", name="Add a dataset").click()
    weight = page.locator("#data-sources-1-weight input")
    weight.fill("")
    weight.press_sequentially("0,5")
    assert weight.input_value() == "0.5" and json.loads(value(page, "data.sources"))[1]["weight"] == 0.5
    samples = page.locator("#data-sources-1-max_samples input")
    samples.evaluate("node => node.closest('details').open = true")
    samples.fill("0")
    samples.press("End")
    samples.press_sequentially(",5")
    assert samples.input_value() == "05", "an integer"
    page.evaluate(
        """async () => {
          const { createNumberField } = await import("./footplate/run/run_jobs.js");
          const field = createNumberField("Temperature", { step: "any" });
          document.querySelector("#fp-build").append(field.node);
          field.input.focus();
        }"""
    )
    page.keyboard.type("0,7")
    assert page.evaluate("() => document.activeElement.value") == "0.7"
    page.evaluate("() => document.activeElement.closest('label').remove()")
    settled(page)


def test_undo_and_redo_of_the_whole_form(page):
    before = value(page, "lora.r")
    page.locator("#lora-r input").first.fill("")
    page.locator("#lora-r input").first.type("77", delay=5)  # one change
    presets = page.locator("#fp-presets")
    presets.select_option("lora-80gb")
    page.wait_for_function("() => footplate.values()['lora.r'] != 77")
    page.locator("#fp-status").click()  # the focus is in no text field
    page.keyboard.press("Control+z")
    page.wait_for_function("() => footplate.values()['lora.r'] == 77")
    assert presets.input_value() == "first-run" and "preset=first-run" in page.url, "the preset of these values"
    page.keyboard.press("Control+Shift+z")
    assert presets.input_value() == "lora-80gb"
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+z")
    assert value(page, "lora.r") == before
    expect(page.locator("#lora-r input").first).to_have_value(str(before))
    expect(page.locator(".fp-toast")).to_contain_text("Undone: LoRA rank")
    page.keyboard.press("Control+Shift+z")
    assert value(page, "lora.r") == 77
    page.locator("#fp-undo").click()
    assert value(page, "lora.r") == before


def test_history_goes_back_to_earlier_values(context, shared):
    """With the button of a version, and with Undo as far as it goes. A notification stays under the pointer."""
    page = opened(context, shared.url)
    expect(page.locator("#fp-undo")).to_be_disabled()
    fill(page, "train.max_steps", 41)
    page.locator("#fp-versions").click()
    dialog = page.locator("dialog.fp-versions")
    item = dialog.locator("li").filter(has_text="Max steps: 41")
    item.first.get_by_role("button", name="Go back to this").click()
    settled(page)
    assert int(value(page, "train.max_steps")) == 40
    for steps in (41, 40):
        page.locator("#fp-undo").click()
        assert int(value(page, "train.max_steps")) == steps
    expect(page.locator("#fp-undo")).to_be_disabled()
    page.clock.install()
    page.evaluate("() => footplate.notify('done')")
    note = page.locator(".fp-toast", has_text="done")
    note.hover()
    page.clock.run_for(60_000)
    expect(note).to_be_visible()
    page.mouse.move(5, 5)
    page.clock.run_for(20_000)
    expect(note).to_have_count(0)


def test_secrets_are_not_kept_in_the_browser(page):
    page.route("**/api/check", lambda route: route.abort())
    page.evaluate("() => footplate.edited('launch.env', 'HF_TOKEN=hf_secret')")
    page.evaluate("() => footplate.edited('logging.run_name', 'mine')")
    kept = page.evaluate("() => JSON.stringify({ ...localStorage })")
    assert "mine" in kept and "hf_secret" not in kept
    page.unroute("**/api/check")
    page.evaluate("() => footplate.edited('launch.env', 'HF_TOKEN=hf_secret\\nNCCL_DEBUG=INFO')")
    settled(page)
    page.reload()
    expect(page.locator(".fp-toast", has_text="because secrets are not stored: HF_TOKEN.")).to_be_visible()
    expect(page.locator("#launch-env textarea")).to_have_value("NCCL_DEBUG=INFO")
    # Earlier values with the variable that the form has now are no other values, wherever its line is.
    texts = page.evaluate(
        """async () => {
          const { withSecretsOf } = await import("./footplate/build/drafts.js");
          const env = (text) => ({ "launch.env": text });
          return ["HF_TOKEN=x\\nA=1", "HF_TOKEN=x"].map(
            (now) => withSecretsOf(env("A=1"), ["HF_TOKEN"], env(now)).values["launch.env"],
          );
        }"""
    )
    assert texts == ["HF_TOKEN=x\nA=1", "A=1\nHF_TOKEN=x"]


@pytest.mark.soak
def test_a_hugging_face_token_is_tested_and_stored(page, same_page, shared):
    """A refused download opens the field. What is typed is in one request, and nowhere in the page after that."""
    token = page.locator("#fp-hub-token")
    expect(token).to_be_hidden()
    page.locator("#model-source").get_by_text("Hugging Face Hub", exact=True).click()
    fill(page, "model.hub_id", "big/gated")
    expect(token).to_be_visible()
    expect(token.get_by_label("Hugging Face token")).to_be_hidden()
    page.get_by_role("button", name="Download the model's config.json").click()
    expect(token).to_contain_text("need a token; none is stored")
    field, answer = token.get_by_label("Hugging Face token"), token.get_by_role("status")
    expect(field).to_be_focused()
    for typed, model, text in (
        (BAD, "big/gated", "is not accepted by the Hub"),
        (GOOD, "big/gated", "has no access to big/gated. Request access on the model's page"),
        (GOOD, "ada/open", "belongs to the account ada, which has access to ada/open"),
    ):
        fill(page, "model.hub_id", model)
        field.fill(typed)
        token.get_by_role("button", name="Test").click()
        expect(answer).to_contain_text(text)
    field.press("Enter")
    expect(answer).to_contain_text("Stored. This token is valid")
    expect(field).to_have_value("")
    stored = shared.runs.parent / "hf" / "token"
    assert stored.read_text() == GOOD and stored.stat().st_mode & 0o777 == 0o600
    expect(token).to_contain_text(f"Runs use the token that is stored in {stored}")
    token.get_by_role("button", name="Test").click()
    expect(answer).to_contain_text("The stored token is valid")
    everything = page.evaluate(
        "() => document.documentElement.outerHTML + JSON.stringify([{ ...localStorage }, { ...sessionStorage },"
        " footplate.values()]) + [...document.querySelectorAll('input')].map((input) => input.value).join()"
    )
    assert GOOD not in everything and BAD not in everything
    page.locator("#fp-versions").click()
    assert "hf_" not in page.locator("dialog.fp-versions").inner_text()
    stored.unlink()
    same_page.leave()


def test_the_name_follows_the_model_until_it_is_typed(page):
    name = page.locator("#logging-run_name :is(input, textarea)")
    expect(name).to_have_value("")
    expect(name).to_have_attribute("placeholder", "smollm2-135m-instruct LoRA")
    page.locator("#model-builtin input").click()
    page.get_by_role("option", name="Tiny").first.click()
    settled(page)
    expect(name).to_have_attribute("placeholder", "tiny-llama LoRA")
    fill(page, "logging.run_name", "mine")
    page.locator("#model-builtin input").click()
    page.get_by_role("option", name="SmolLM2").first.click()
    settled(page)
    expect(name).to_have_value("mine")


@pytest.mark.parametrize("is_reloaded", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_values_of_a_demo_preset_are_offered_to_be_replaced(page, tmp_path, is_reloaded):
    data = tmp_path / "mine.jsonl"
    example = {"prompt": "Which train?", "completion": "The 7:32 to Basel."}
    data.write_text("".join(json.dumps(example) + "\n" for _ in range(300)))
    offer = page.locator("#fp-preset-offer")
    expect(offer).to_be_hidden()
    page.locator("#data-source").get_by_text("Local files", exact=True).click()
    fill(page, "data.files", data)
    expect(offer).to_contain_text("values are still from the preset First run")
    expect(offer).to_contain_text("Learning rate: 3e-3 \u2192 2e-4")
    if is_reloaded:
        page.reload()
        page.wait_for_selector("body[data-ready]")
        settled(page)
        expect(offer).to_be_visible()
    offer.get_by_role("button").click()
    settled(page)
    assert float(value(page, "train.learning_rate")) == 0.0002
    assert value(page, "train.duration") == "epochs"
    expect(offer).to_be_hidden()
    page.locator(".fp-toast").get_by_role("button", name="Undo").click()
    settled(page)
    assert float(value(page, "train.learning_rate")) == 0.003


def test_wrong_columns_are_one_finding(page, tmp_path):
    """And no safe fix turns off the validation for it."""
    data = tmp_path / "wrong.jsonl"
    data.write_text("".join(json.dumps({"kunde": f"Frage {i}", "meldung": f"Antwort {i}"}) + "\n" for i in range(200)))
    page.locator("#data-source").get_by_text("Local files", exact=True).click()
    fill(page, "data.files", data)
    settled(page)
    expect(page.locator(".fp-finding")).to_have_count(1)
    expect(page.locator(".fp-finding h3")).to_have_text("The columns of a data file are not recognized")
    expect(page.locator(".fp-finding")).to_contain_text("has columns that match no data format")
    expect(page.locator(".fp-finding")).to_contain_text("Choose a data format, and name the columns to use.")
    expect(page.locator("#fp-fix-all")).to_be_hidden()
    expect(page.locator(".fp-status-text")).to_have_text("Cannot run: 1 error")


def test_what_can_run_code_in_an_imported_file_needs_consent(page, tmp_path):
    path = tmp_path / "run.yaml"
    env = "{LD_PRELOAD: /tmp/x.so, NCCL_DEBUG: INFO}"
    path.write_text(f"model: {{trust_remote_code: true}}\nslurm: {{setup: module load x}}\nlaunch: {{env: {env}}}\n")
    page.locator("#fp-import-file").set_input_files(path)
    for text in (
        "Shell commands before training: module load x",
        "Environment variables: LD_PRELOAD=/tmp/x.so",
        "Trust remote code (the file turns it on; it stays off here)",
    ):
        expect(page.locator(".fp-toast")).to_contain_text(text)
    assert value(page, "launch.env") == "NCCL_DEBUG=INFO" and not value(page, "slurm.setup")
    page.get_by_role("button", name="Apply these settings").click()
    settled(page)
    expect(page.locator(".fp-toast").last).to_contain_text(
        "Shell commands before training has no effect now. Shown when Run on is Slurm."
    )
    assert value(page, "launch.env").splitlines() == ["LD_PRELOAD=/tmp/x.so", "NCCL_DEBUG=INFO"]
    assert value(page, "slurm.setup") == "module load x"
    assert value(page, "model.trust_remote_code") in (False, "false")


def test_start_waits_for_a_preset_that_loads(page):
    held, started = [], []
    page.route("**/api/presets/*", lambda route: held.append(route))
    page.route("**/api/runs", lambda route: (started.append(route.request.post_data_json), route.abort()))
    page.locator("#fp-presets").select_option("continued-pretraining")
    page.locator("#fp-start").click()
    page.wait_for_timeout(500)
    assert not started
    held.pop().continue_()
    page.wait_for_function("() => footplate.values()['train.stage'] === 'pretraining'")
    page.locator(".fp-toast[data-level=error]").wait_for()
    assert [body["values"]["train.stage"] for body in started] == ["pretraining"]


def test_a_start_after_an_edit_is_another_start(page):
    """A retry after a lost response has the same key, so that it starts nothing twice."""
    keys = []
    page.route("**/api/runs", lambda route: (keys.append(route.request.post_data_json["key"]), route.abort()))
    for steps in (7, 7, 8):
        fill(page, "train.max_steps", steps)
        with page.expect_request("**/api/runs"):
            page.locator("#fp-start").click()
        page.locator(".fp-toast[data-level=error]").wait_for()
        page.get_by_role("button", name="Dismiss").click()
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.soak
def test_undo_keeps_what_was_edited_since(page, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train: {max_steps: 11, learning_rate: 0.003}\nlora: {r: 4}\nmodel: {trust_remote_code: true}\n")
    before = value(page, "lora.r")
    page.locator("#fp-import-file").set_input_files(path)
    page.wait_for_function("() => footplate.values()['lora.r'] == 4")
    settled(page)
    fill(page, "train.learning_rate", 0.5)
    page.locator(".fp-toast").get_by_role("button", name="Undo").click()
    settled(page)
    assert value(page, "lora.r") == before and float(value(page, "train.learning_rate")) == 0.5


def test_back_changes_the_view_and_not_the_form(page):
    """Earlier entries of the browser's history have another machine, and a run that the next one no longer waits for. A
    link to a hidden option leads to what shows it."""
    page.evaluate(
        """async () => {
          const { selectPredecessor } = await import("./footplate/build/build.js");
          footplate.showView("runs");
          selectPredecessor("an-earlier-run");
          footplate.showView("build");
          selectPredecessor("");
        }"""
    )
    page.locator("#fp-machine").select_option("8x80gb")
    settled(page)
    page.go_back()
    expect(page.locator("#fp-runs-page")).to_be_visible()
    assert "after=" not in page.url and "machine=8x80gb" in page.url
    page.get_by_role("link", name="Build", exact=True).click()
    expect(page.locator("#fp-after")).to_have_count(0)
    assert "after=" not in page.url and page.locator("#fp-machine").input_value() == "8x80gb"
    page.evaluate("async () => (await import('./footplate/build/form.js')).goTo('model.hub_id')")
    expect(page.locator(".fp-toast")).to_contain_text("is hidden. Shown when")
    assert page.evaluate("() => document.activeElement.closest('.fp-field').id") == "model-source"


def test_a_response_that_breaks_off_is_no_response(page):
    """A connection may be lost in the middle of a response: the page tries again, as it does without a response."""
    error = page.evaluate(
        """async () => {
          const { get } = await import("./footplate/api.js");
          const original = window.fetch;
          const body = new ReadableStream({ start: (control) => control.error(new TypeError("network error")) });
          window.fetch = async () => new Response(body, { headers: { "content-type": "application/json" } });
          const found = await get("api/runs").catch(({ message, offline }) => ({ message, offline }));
          window.fetch = original;
          return found;
        }"""
    )
    assert error == {"message": "The server does not respond.", "offline": True}


def test_the_duration_of_a_run_follows_the_clock_of_the_server(page):
    """Its start is a time by that clock, and the browser's may be wrong."""
    durations = page.evaluate(
        """async () => {
          const { get } = await import("./footplate/api.js");
          const { valueOf } = await import("./footplate/runs/runs_search.js");
          const original = window.fetch;
          const durations = [];
          for (const ahead of [3600, 0]) { // seconds
            const now = new Date(Date.now() + 1000 * ahead);
            const headers = { "content-type": "application/json", date: now.toUTCString() };
            window.fetch = async () => new Response("[]", { headers });
            await get("api/machines");
            durations.push(valueOf({ id: "a", state: "running", started: now / 1000 - 60 }, "duration"));
          }
          window.fetch = original;
          return durations;
        }"""
    )
    assert durations == pytest.approx([60, 60], abs=3)


@pytest.mark.soak
def test_device_ids_have_a_field_on_a_machine_without_gpus(page, tmp_path):
    """Where there are no chips to click, an imported value can be seen and deleted."""
    path = tmp_path / "run.yaml"
    ids = page.locator("#launch-devices")
    expect(ids).to_be_hidden()
    path.write_text("launch: {devices: '0,1'}\n")
    page.locator("#fp-import-file").set_input_files(path)
    expect(ids.locator("input")).to_have_value("0, 1")
    expect(ids).to_be_visible()
    settled(page)
    page.locator("#fp-search").fill("device ids")
    page.keyboard.press("Enter")
    expect(ids.locator("input")).to_be_focused()
    fill(page, "launch.devices", "")
    expect(ids).to_be_hidden()


@pytest.mark.soak
def test_a_preset_that_cannot_be_loaded_changes_nothing(page):
    held = []
    fill(page, "train.max_steps", 7)
    page.route("**/api/presets/*", lambda route: held.append(route))
    page.locator("#fp-presets").select_option("lora-80gb")
    page.wait_for_timeout(500)
    assert page.locator("#fp-status").get_attribute("data-fresh") == "no"
    held.pop().abort()
    settled(page)
    assert value(page, "train.max_steps") in (7, "7")
    assert page.locator("#fp-presets").input_value() == "first-run"
