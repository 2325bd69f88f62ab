"""The card "Your model" of a run's page: what it is, its code, its download, and training further."""

import fcntl
import io
import json
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from fake_hub import GOOD
from playwright.sync_api import expect
from same_page import show_run
from test_journeys import SLOW_TIMEOUT, value, wait_for_status

from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import probe
from backend.runs import LOCK, LOG, PROGRESS, RESULT, TOKEN, jobs

sys.path.append(str(Path(__file__).parent.parent / "unit"))
from failed_runs import ended, planted_run

FULL = {"method.kind": "full", "model.builtin": "tiny-llama"}
QUANTIZE = {"step": None, "format": "bnb-nf4", "merge": ""}
FILES = {"config.json": {"architectures": ["LlamaForCausalLM"]}, "tokenizer_config.json": {"chat_template": "x"}}


def plant(server, name):
    """A run that has finished, with a model of 2 MB."""
    run = planted_run(server.runs, edit(RunSpec(), FULL), probe(Path.cwd()), name)
    folder = run.path / "model"
    folder.mkdir()
    for file, content in FILES.items():
        (folder / file).write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(bytes(2_000_000))
    ended(run, end="done", exit_code=0)
    (run.path / RESULT).write_text(json.dumps({"steps": 3, "model": "model"}))
    return run


def test_the_card_of_a_trained_model(shared, page):
    run = plant(shared, "trained")
    show_run(page, run)
    card = page.get_by_role("region", name="Your model")
    expect(card).to_contain_text("Full weights, 2 MiB", timeout=SLOW_TIMEOUT)
    expect(card).to_contain_text(str(run.path / "model"))
    expect(card.locator("pre")).to_be_hidden()
    card.get_by_text("Python code that uses the model").click()
    expect(card.locator("pre")).to_contain_text("AutoModelForCausalLM.from_pretrained(folder")
    link = card.get_by_role("link", name="Download")
    response = page.request.get(link.get_attribute("href"))
    assert response.headers["content-disposition"].startswith(f'attachment; filename="{run.id}')
    with zipfile.ZipFile(io.BytesIO(response.body())) as archive:
        assert sorted(name.rpartition("/")[2] for name in archive.namelist()) == sorted([*FILES, "model.safetensors"])
    card.get_by_role("button", name="Train further").click()
    wait_for_status(page, "")
    page.wait_for_function("footplate.values()['model.source'] === 'path'")
    assert value(page, "model.source") == "path" and value(page, "model.path") == str(run.path / "model")
    assert value(page, "method.kind") == "full"


def test_an_adapter_is_continued_or_merged_and_trained_further(shared, page):
    run = plant(shared, "adapter")
    (run.path / "model/model.safetensors").unlink()
    (run.path / "model/config.json").unlink()
    base = {"base_model_name_or_path": "tiny-llama", "peft_type": "LORA", "r": 4, "lora_alpha": 6.0}
    (run.path / "model/adapter_config.json").write_text(json.dumps(base))
    (run.path / "model/adapter_model.safetensors").write_bytes(bytes(1000))
    samples = [{"prompt": "2 + 2?", "reference": "4", "before": "no", "after": "4"}]
    (run.path / RESULT).write_text(json.dumps({"steps": 3, "model": "model", "samples": samples}))
    show_run(page, run)
    card = page.get_by_role("region", name="Your model")
    expect(card).to_contain_text("Adapter for", timeout=SLOW_TIMEOUT)
    card.get_by_role("button", name="Generations before and after").click()
    expect(page.locator(".fp-samples")).to_be_in_viewport()
    expect(card.get_by_role("button", name="Merge into base model")).to_be_visible()
    job = plant_merge(run)
    page.evaluate("() => footplate.showView('runs')")
    show_run(page, run)
    expect(card).to_contain_text("Verified. Loaded from its files", timeout=SLOW_TIMEOUT)
    expect(card).to_contain_text("same most likely next token at 99.8% of 512 positions")
    link = card.get_by_role("link", name="Download merged model")
    response = page.request.get(link.get_attribute("href"))
    assert f'filename="{run.id}-merged.zip"' in response.headers["content-disposition"]
    card.get_by_role("button", name="Train merged model further").click()
    page.wait_for_function("path => footplate.values()['model.path'] === path", arg=str(job.path / "model"))
    show_run(page, run)
    card.get_by_role("button", name="Train further").click(timeout=SLOW_TIMEOUT)
    page.wait_for_function("path => footplate.values()['lora.adapter_path'] === path", arg=str(run.path / "model"))
    assert value(page, "lora.r") == 4 and value(page, "lora.alpha") == 6
    show_run(page, run)
    card.get_by_role("button", name="Delete merged model").click(timeout=SLOW_TIMEOUT)
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(card.get_by_role("button", name="Merge into base model")).to_be_visible(timeout=SLOW_TIMEOUT)
    assert not job.path.exists()


def plant_merge(run):
    """A merge of the run's adapter as it is after its end; tests/process/test_merge.py merges for real."""
    job = jobs.create(run, jobs.MERGE, {"step": None}, {}, {})
    (job.path / LOCK).touch()
    saved = {"same_argmax": 0.998, "positions": 512, "kl_mean": 1e-5, "kl_max": 1e-4}
    certificate = {"status": "verified", "limits": [], "dtype": "bf16", "adapter_to_saved": saved}
    (job.path / "model").mkdir()
    for file, content in FILES.items():
        (job.path / "model" / file).write_text(json.dumps(content))
    (job.path / "model/model.safetensors").write_bytes(bytes(2_000_000))
    (job.path / RESULT).write_text(json.dumps({"model": "model", "certificate": certificate}))
    (job.path / "state.json").write_text(json.dumps({"end": "done", "exit_code": 0}))
    return job


def test_a_model_is_published_after_a_summary(shared, page):
    run = plant(shared, "published")
    token = Path(shared.variables["HF_HOME"]) / "token"
    token.parent.mkdir(exist_ok=True)
    token.write_text(GOOD)
    show_run(page, run)
    card, dialog = page.get_by_role("region", name="Your model"), page.get_by_role("dialog")
    card.get_by_role("button", name="Publish").click(timeout=SLOW_TIMEOUT)
    dialog.get_by_role("button", name="Review files").click()
    expect(dialog).to_contain_text("Choose one destination")
    dialog.get_by_label("Repository").fill("trains")
    dialog.get_by_role("button", name="Review files").click()
    expect(dialog).to_contain_text("Creates the private repository ada/trains.", timeout=SLOW_TIMEOUT)
    expect(dialog.get_by_role("row")).to_contain_text(["README.md", "config.json", "model.safetensors", "token"])
    dialog.get_by_text("README.md, the model card").click()
    expect(dialog.locator("pre")).to_contain_text('model_id = "ada/trains"')
    dialog.get_by_role("button", name="Publish").click()
    link = card.get_by_role("link", name="ada/trains", exact=True)
    expect(link).to_be_visible(timeout=SLOW_TIMEOUT)
    address = link.get_attribute("href")
    assert address == f"{shared.variables['HF_ENDPOINT']}/ada/trains"
    assert page.request.get(address.replace("/ada", "/api/models/ada")).json()["private"]
    card.get_by_role("button", name="Remove from list").click()
    expect(card.get_by_text("Uploads the model or an export to the Hugging Face Hub")).to_be_visible()
    token.unlink()


@pytest.mark.soak
def test_a_review_that_is_canceled_opens_no_dialog(shared, page, tmp_path):
    run = plant(shared, "canceled")
    show_run(page, run)
    publish = page.get_by_role("region", name="Your model").get_by_role("button", name="Publish")
    dialog = page.get_by_role("dialog")
    review, cancel = (dialog.get_by_role("button", name=name) for name in ("Review files", "Cancel"))
    publish.click(timeout=SLOW_TIMEOUT)
    dialog.get_by_label("Destination").select_option("folder")
    review.click()
    expect(dialog.get_by_role("alert")).to_contain_text("Choose one destination")
    dialog.get_by_label("Empty or new folder").fill(str(tmp_path / "copy"))
    pending = []
    page.route("**/publications/summary", lambda route: pending.append(route))
    with page.expect_request("**/publications/summary"):
        review.click()
    expect(dialog.get_by_role("alert")).to_be_hidden()
    cancel.click()
    expect(publish).to_be_focused()
    with page.expect_response("**/publications/summary"):
        pending[0].continue_()
    page.unroute_all(behavior="ignoreErrors")
    page.evaluate("() => new Promise((resolve) => setTimeout(resolve, 100))")
    expect(dialog).to_have_count(0)
    publish.click()
    dialog.get_by_label("Destination").select_option("folder")
    dialog.get_by_label("Empty or new folder").fill(str(tmp_path / "copy"))
    review.click()
    expect(dialog).to_contain_text("Copies the files to the folder", timeout=SLOW_TIMEOUT)
    cancel.click()
    expect(publish).to_be_focused()


def test_publishing_again_keeps_the_checkpoint_and_the_merged_model(shared, page):
    run = plant(shared, "again")
    (run.path / "model/model.safetensors").unlink()
    (run.path / "model/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "tiny-llama"}))
    (run.path / "model/adapter_model.safetensors").write_bytes(bytes(1000))
    merged = plant_merge(run)
    for name, request in (("ada/early", {"step": 2, "merge": "early"}), ("ada/final", {"step": None, "merge": ""})):
        planned = {"request": {"repository": name, **request}, "files": {}}
        job = jobs.create(run, jobs.PUBLISH, planned, {}, {})
        (job.path / LOCK).touch()
        (job.path / "state.json").write_text(json.dumps({"end": "stopped"}))
    show_run(page, run)
    dialog = page.get_by_role("dialog")
    for name, step, chosen, offered in (
        ("ada/early", 2, "early", ["", "early"]), ("ada/final", None, "", ["", merged.id])
    ):  # fmt: skip
        page.get_by_role("button", name=f"Publish again: {name}").click(timeout=SLOW_TIMEOUT)
        options = dialog.locator("label:has-text('Adapter') option").all()
        assert [option.get_attribute("value") for option in options] == offered
        expect(dialog.get_by_text("Checkpoint at step 2")).to_have_count(0 if step is None else 1)
        with page.expect_request("**/publications/summary") as request:
            dialog.get_by_role("button", name="Review files").click()
        sent = request.value.post_data_json
        assert (sent["step"], sent["merge"], sent["repository"]) == (step, chosen, name)
        dialog.get_by_role("button", name="Cancel").click()


def test_a_model_is_exported_as_gguf(shared, page):
    run = plant(shared, "exported")
    done, failed = plant_export(run, "q8_0"), plant_export(run, "f16", sentence="llama.cpp does not stop at </s> (2).")
    show_run(page, run)
    card = page.get_by_role("region", name="Your model")
    expect(card).to_contain_text("Verified with limitations. Compared in llama.cpp", timeout=SLOW_TIMEOUT)
    expect(card).to_contain_text("KL divergence 0.0083 nats per token (at most 0.03 is accepted)")
    expect(card).to_contain_text("Limitation: ① has other tokens.")
    expect(card).to_contain_text("2 of 3 weights have other types.")
    expect(card.locator(".fp-job-failure")).to_contain_text("f16: llama.cpp does not stop at </s> (2).")
    card.get_by_text("Outputs of the trained model and of llama.cpp").click()
    expect(card.locator(".fp-gguf pre")).to_contain_text("llama.cpp (reached the limit of new tokens):\nParis Paris")
    for label, body in (("Download GGUF", b"GGUF"), ("Modelfile for Ollama", b"FROM"), ("Preset for LM Studio", b"{}")):
        response = page.request.get(card.get_by_role("link", name=label).get_attribute("href"))
        assert response.body() == body and "attachment" in response.headers["content-disposition"]
    formats = card.get_by_label("GGUF format")
    assert [text.partition(":")[0] for text in formats.locator("option").all_inner_texts()] == [
        "q6_k",
        "q5_k_m",
        "q4_k_m",
        "f16",
        "bf16",
    ]
    formats.select_option("bf16")  # its name is wider than a narrow card
    window = page.viewport_size
    page.set_viewport_size({"width": 340, "height": window["height"]})
    section, menu = card.locator(".fp-job-section").first.bounding_box(), formats.bounding_box()
    assert menu["x"] + menu["width"] <= section["x"] + section["width"]
    page.set_viewport_size(window)
    page.route("**/gguf", lambda route: route.fulfill(status=409, json={"error": "Run footplate env create gguf."}))
    with page.expect_request("**/gguf") as request:
        card.get_by_role("button", name="Export as GGUF").click()
    assert request.value.post_data_json == {"step": None, "format": "bf16"}
    expect(page.locator("#fp-toasts")).to_contain_text("env create gguf", timeout=SLOW_TIMEOUT)
    page.unroute_all(behavior="ignoreErrors")
    assert_progress_keeps_the_focus(card, run, formats)
    assert_a_server_has_its_address_and_token(card, run)
    card.locator(".fp-gguf").get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(card.locator(".fp-gguf")).to_have_count(0, timeout=SLOW_TIMEOUT)
    assert not done.path.exists() and failed.path.exists()
    card.get_by_role("button", name="Delete failed export: f16").click()
    expect(card.locator(".fp-job-failure")).to_have_count(0, timeout=SLOW_TIMEOUT)
    assert not failed.path.exists()


def test_an_adapter_and_a_quantized_checkpoint_are_exported(shared, page):
    run = plant(shared, "both")
    job, quantized = plant_export(run, "lora-q8_0"), jobs.create(run, jobs.QUANTIZE, QUANTIZE, {}, {})
    (job.path / f"gguf/{run.id}-adapter.gguf").write_bytes(b"LORA")
    shutil.copytree(run.path / "model", quantized.path / "model")
    (quantized.path / LOCK).touch()
    found = {"same_argmax": 0.93, "positions": 254, "kl_mean": 0.0083}
    certificate = {"status": "verified", "limits": [], "max_kl_mean": 0.2, "trained_to_checkpoint": found}
    (quantized.path / RESULT).write_text(json.dumps({"model": "model", "certificate": certificate}))
    (quantized.path / "state.json").write_text(json.dumps({"end": "done", "exit_code": 0}))
    show_run(page, run)
    card = page.get_by_role("region", name="Your model")
    expect(card).to_contain_text("lora-q8_0, adapter 4 B, base model 4 B", timeout=SLOW_TIMEOUT)
    link = card.get_by_role("link", name="Download GGUF LoRA").get_attribute("href")
    assert page.request.get(link).body() == b"LORA"
    expect(card).to_contain_text("Verified. Loaded in a new process and compared with the trained model: KL divergence")
    formats = card.get_by_label("Format of the quantized checkpoint")
    assert [text.partition(":")[0] for text in formats.locator("option").all_inner_texts()] == [
        "torchao int8",
        "bitsandbytes LLM.int8",
        "torchao fp8",
    ]
    page.route("**/quantized", lambda route: route.fulfill(status=409, json={"error": "torchao is not installed."}))
    with page.expect_request("**/quantized") as request:
        card.get_by_role("button", name="Export quantized checkpoint").click()
    assert request.value.post_data_json == {"step": None, "format": "torchao-int8"}
    expect(page.locator("#fp-toasts")).to_contain_text("torchao is not installed", timeout=SLOW_TIMEOUT)
    page.unroute_all(behavior="ignoreErrors")
    card.get_by_role("button", name="Publish", exact=True).click()
    choices = page.get_by_role("dialog").locator("label:has-text('Adapter'), label:has-text('Full weights')")
    offered = choices.locator("option").all_inner_texts()
    assert offered == ["Full weights", "GGUF lora-q8_0", "Quantized checkpoint, bitsandbytes NF4"]
    choices.locator("select").select_option(quantized.id)
    with page.expect_request("**/publications/summary") as request:
        page.get_by_role("dialog").get_by_role("button", name="Review files").click()
    assert (request.value.post_data_json["merge"], request.value.post_data_json["exports"]) == ("", [quantized.id])
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()


def assert_progress_keeps_the_focus(card, run, menu):
    """The progress of another job neither replaces the menu, which would close it, nor takes its focus."""
    job = jobs.create(run, jobs.PUBLISH, {}, {}, {})
    with (job.path / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (job.path / PROGRESS).write_text(json.dumps({"text": "Sent 1 of 2 files.", "fraction": 0.5}))
        expect(card).to_contain_text("Sent 1 of 2 files.", timeout=SLOW_TIMEOUT)
        menu.focus()
        before = menu.element_handle()
        (job.path / PROGRESS).write_text(json.dumps({"text": "Sent 2 of 2 files.", "fraction": 1.0}))
        expect(card).to_contain_text("Sent 2 of 2 files.", timeout=SLOW_TIMEOUT)
        assert menu.evaluate("(menu, before) => menu === before && menu === document.activeElement", before)
        expect(card.get_by_role("progressbar", name="Publishing: progress")).to_have_attribute("aria-valuenow", "100")


def assert_a_server_has_its_address_and_token(card, run):
    """As its process says once llama.cpp answers; the token is sent when somebody asks for it."""
    expect(card.get_by_role("button", name="Serve this model")).to_be_enabled()
    request = {"name": run.name, "format": "q8_0", "parallel": 1, "file": "a.gguf"}
    job = jobs.create(run, jobs.SERVE, request, {}, {}, {TOKEN: "a-token-of-a-test"})
    with (job.path / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        progress = {"text": "Serving.", "address": "http://127.0.0.1:9/v1", "context": 4096, "has_tools": False}
        (job.path / PROGRESS).write_text(json.dumps(progress))
        expect(card).to_contain_text("http://127.0.0.1:9/v1", timeout=SLOW_TIMEOUT)
        expect(card).to_contain_text("context of 4,096 tokens, one request at a time")
        expect(card).not_to_contain_text("a-token-of-a-test")
        card.get_by_role("button", name="Show API token").click()
        expect(card).to_contain_text("a-token-of-a-test")
        expect(card.get_by_role("button", name="Stop serving")).to_be_enabled()


def answering(answer):
    return lambda route: route.fulfill(json=answer)


def test_vllm_serves_the_merged_model_or_says_why_not(shared, page):
    """As the API says for a machine on which vLLM is installed."""
    note = "Serving with vLLM is untested on a GPU."
    offers = {"offered": {"reason": "", "note": note, "step": 7, "merged": True}}
    offers["refused"] = {"reason": "vLLM does not support DoRA.", "note": note, "step": None, "merged": False}
    page.route("**/servers", lambda route: route.fulfill(status=409, json={"error": "Port 8080 cannot be used."}))
    for name, offer in offers.items():
        run = plant(shared, name)
        answer = page.request.get(f"{shared.url}/api/runs/{run.id}").json()
        page.route(f"**/api/runs/{run.id}", answering({**answer, "vllm": offer}))
        show_run(page, run)
        card = page.get_by_role("region", name="Your model")
        expect(card).to_contain_text(offer["reason"] or note, timeout=SLOW_TIMEOUT)
        button = card.get_by_role("button", name="with vLLM")
        if offer["reason"]:
            expect(button).to_have_count(0)
            continue
        with page.expect_request("**/servers") as request:
            button.click()
        assert request.value.post_data_json == {"engine": "vllm", "step": 7, "merged": True}
    page.unroute_all(behavior="ignoreErrors")


def test_a_reward_model_is_not_exported_as_gguf(shared, page):
    run = plant(shared, "reward")
    (run.path / "model/config.json").write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}))
    show_run(page, run)
    card = page.get_by_role("region", name="Your model")
    expect(card.get_by_role("button", name="Publish")).to_be_visible(timeout=SLOW_TIMEOUT)
    expect(card).not_to_contain_text("GGUF")


def plant_export(run, format, sentence=""):
    """An export as it is after its end; tests/process/test_gguf.py exports."""
    request = {"step": None, "format": format, "merge": "", "environment": ""}
    job = jobs.create(run, jobs.GGUF, request, {}, {})
    (job.path / LOCK).touch()
    certificate = {
        "status": "verified with limitations", "limits": ["① has other tokens."], "max_kl_mean": 0.03,
        "replaced": "2 of 3 weights have other types.",
        "trained_to_file": {"same_argmax": 0.93, "positions": 254, "kl_mean": 0.0083}, "stop_tokens": ["</s>"],
        "outputs": [{"prompt": "France?", "trained": {"text": "Paris", "stopped": True},
                     "llama_cpp": {"text": "Paris Paris", "stopped": False}}],
    }  # fmt: skip
    if sentence:
        (job.path / LOG).write_text(
            f"Traceback (most recent call last):\nbackend.train.run_log.TrainError: {sentence}\n"
        )
    else:
        (job.path / "gguf").mkdir()
        (job.path / "gguf/a.gguf").write_bytes(b"GGUF")
        (job.path / "gguf/Modelfile").write_bytes(b"FROM")
        (job.path / "gguf/lm-studio.preset.json").write_bytes(b"{}")
    result = {"model": "" if sentence else "gguf/a.gguf", "certificate": certificate}
    (job.path / RESULT).write_text(json.dumps(result))
    end = {"end": "failed", "exit_code": 1} if sentence else {"end": "done", "exit_code": 0}
    (job.path / "state.json").write_text(json.dumps(end))
    return job


def test_the_menu_of_models_has_the_newest_until_someone_chooses(shared, page):
    """A page that was open while the run trained does not keep the first checkpoint for chats and evaluations."""
    show_run(page, plant(shared, "chosen"))
    chosen = """async () => {
      const { createModelMenu } = await import("/footplate/run/run_jobs.js");
      const menu = createModelMenu(), drawn = (steps) => (menu.draw(steps), menu.step());
      const newest = [drawn([20]), drawn([40, 20]), drawn([null, 40, 20])];
      menu.node.value = "40";
      menu.node.dispatchEvent(new Event("change"));
      return [newest, drawn([null, 60, 40]), drawn([null, 60])];
    }"""
    assert page.evaluate(chosen) == [[20, 40, None], 40, None]


def test_a_run_without_a_model_has_no_card(shared, page):
    run = plant(shared, "unfinished")
    (run.path / "model/model.safetensors").unlink()
    show_run(page, run)
    expect(page.locator(".fp-run h2")).to_have_text("unfinished", timeout=SLOW_TIMEOUT)
    expect(page.locator(".fp-model")).to_be_hidden()


def test_nothing_of_the_previous_run_stays_while_another_is_opened(shared, page):
    first, second = plant(shared, "first"), plant(shared, "second")
    show_run(page, first)
    expect(page.locator(".fp-run-placement")).to_be_visible(timeout=SLOW_TIMEOUT)
    page.route(f"**/api/runs/{second.id}", lambda route: None)  # no response
    page.evaluate("id => footplate.showView('run', id)", second.id)
    expect(page.locator(".fp-run-placement")).to_be_hidden()
    expect(page.locator(".fp-model")).to_be_hidden()
    page.unroute_all(behavior="ignoreErrors")
