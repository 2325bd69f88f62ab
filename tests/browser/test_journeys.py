"""User journeys on a real server in a real browser, with real training of a tiny model."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect
from same_page import same_page_of
from served import serving

from backend.config.options import by_name
from backend.runs import METRICS, SPEC
from backend.runs.folder import ALIVE, Run, runs
from backend.runs.processes import run_processes

SLOW_TIMEOUT = 400_000  # ms; other tests use the same cores, and libraries load for ten seconds


def open_page(page, server, query=""):
    page.goto(f"{server.url}/{query}")
    page.wait_for_selector("body[data-ready]")
    wait_for_status(page, "Can run|Cannot run")


def wait_for_status(page, pattern):
    page.wait_for_function(
        "pattern => new RegExp(pattern).test(document.querySelector('#fp-status[data-fresh=yes] .fp-status-text')"
        "?.textContent || 'not yet')",
        arg=pattern,
    )


def show_more_options(page, key):
    page.locator(f"#fp-section-{key} .fp-more").click()


def open_section(page, key):
    head = page.locator(f"#fp-section-{key} .fp-head")
    if head.get_attribute("aria-expanded") == "false":
        head.click()


def type_value(page, name, value):
    """Type into a field as a user does."""
    field = page.locator(f"#{name.replace('.', '-')} :is(input, textarea)").first
    field.click()
    field.press("Control+a")
    field.press_sequentially(str(value))


def choose(page, name, value):
    """Click the label of a value, in a menu or in segments."""
    label = dict(by_name()[name].choices)[value]
    if name == "parallel.strategy":
        page.locator(".fp-strategy").filter(has=page.get_by_text(label, exact=True)).click()
        return
    field = page.locator(f"#{name.replace('.', '-')}")
    if field.locator("input[type=radio]").count():
        field.get_by_text(label, exact=True).click()
    else:
        field.locator("input").click()
        field.get_by_role("option", name=label).first.click()


def value(page, name):
    return page.evaluate("name => footplate.values()[name]", name)


def use_tiny_model(page, steps, evaluate=False):
    """Change the preset First run to train the tiny model for `steps`."""
    choose(page, "model.builtin", "tiny-llama")
    type_value(page, "train.max_steps", steps)
    open_section(page, "evaluation")
    type_value(page, "eval.num_generations", 2)
    type_value(page, "eval.max_new_tokens", 4)
    if not evaluate:
        choose(page, "eval.strategy", "no")
    open_section(page, "checkpoint")
    type_value(page, "save.steps", 5)
    wait_for_status(page, "^Can run")


def start_run(page, server):
    page.click("#fp-start")
    page.wait_for_url(re.compile("run=2"), timeout=SLOW_TIMEOUT)
    identity = re.search(r"run=([^&]+)", page.url).group(1)
    return Run(server.runs / identity)


def wait_for_state(page, name, timeout=SLOW_TIMEOUT):
    page.wait_for_selector(f'.fp-run[data-state="{name}"]', timeout=timeout)


def wait_for_chart_step(page, step):
    """Wait until the text of a chart names this step."""
    test = "step => new RegExp(`Latest .* at step ${step}`).test(document.querySelector('#fp-run-page').textContent)"
    page.wait_for_function(test, arg=str(step), timeout=SLOW_TIMEOUT)


def steps_on_disk(run):
    lines = (run.path / METRICS).read_text().splitlines()
    return [p["step"] for p in map(json.loads, lines) if "loss" in p]


@pytest.fixture
def build(same_page):
    """The Build view, as after the first load."""
    same_page.show_build()
    return same_page.page


@pytest.fixture(scope="module")
def warm_server(tmp_path_factory, session_fork_server):
    """Its runs start within a second."""
    folder = tmp_path_factory.mktemp("journeys")
    with serving(folder / "runs", FOOTPLATE_TEST_PYTHON=str(session_fork_server.python)) as server:
        yield server


@pytest.fixture(scope="module")
def page_of_journeys(warm_server, chromium):
    with same_page_of(chromium, warm_server.url) as same:
        yield same


@pytest.fixture
def warm_build(page_of_journeys):
    """The Build view of `warm_server`, as after the first load."""
    page_of_journeys.begin()
    page_of_journeys.show_build()
    yield page_of_journeys.page
    assert page_of_journeys.errors == []


def test_preview_has_a_command_per_node(build):
    """Options appear for several nodes; an invalid node rank is an error that one click fixes."""
    page = build
    open_section(page, "launch")
    assert not page.locator("#launch-rendezvous").is_visible()
    choose(page, "parallel.strategy", "ddp")
    assert not page.locator("#launch-master_addr").is_visible()
    choose(page, "launch.rendezvous", "static")
    wait_for_status(page, "^Cannot run")
    type_value(page, "launch.master_addr", "10.0.0.1")
    type_value(page, "launch.node_rank", 5)
    wait_for_status(page, "^Cannot run")
    card = page.locator('.fp-finding[data-code="NOD001"]')
    card.locator(".fp-fix button").click()
    wait_for_status(page, "^Can run")
    assert value(page, "launch.node_rank") == 1
    tabs = page.locator("#fp-preview-tabs")
    assert "--node-rank=1" in page.locator("#fp-preview-text").inner_text()
    tabs.get_by_text("node-0", exact=True).click()
    assert "--node-rank=0" in page.locator("#fp-preview-text").inner_text()
    assert not tabs.get_by_text("node-1", exact=True).count()


@pytest.mark.soak
def test_preset_error_fix_start_reload_results(warm_server, warm_build):
    """A complete journey: preset, an error, one click fixes it, start, loss decreases, reload, results."""
    page = warm_build
    assert page.locator("#fp-presets").input_value() == "first-run"
    use_tiny_model(page, 12, evaluate=True)
    open_section(page, "launch")
    show_more_options(page, "launch")
    choose(page, "launch.launcher", "python")
    choose(page, "parallel.strategy", "ddp")
    wait_for_status(page, "^Cannot run")
    assert page.locator("#fp-start").is_disabled()
    card = page.locator('.fp-finding[data-level="error"]').first
    card.locator(".fp-fix button").first.click()
    wait_for_status(page, "^Can run")
    assert (value(page, "launch.launcher"), value(page, "parallel.strategy")) != ("python", "ddp")
    command = page.locator("#fp-preview-text").inner_text()
    page.evaluate("window.scrollTo(0, 400)")
    assert page.evaluate("window.scrollY") > 100
    run = start_run(page, warm_server)
    assert page.evaluate("window.scrollY") == 0
    assert run.plan().command() == command
    wait_for_state(page, "running")
    wait_for_chart_step(page, "[1-9]")
    page.reload()
    page.wait_for_selector("body[data-ready]")
    wait_for_state(page, "done")
    text = page.locator("#fp-run-page").inner_text()
    assert "Exact match" in text
    expect(page.locator(".fp-model")).to_contain_text("Adapter for")
    assert "at step 12" in text
    result = run.result()
    assert re.search(r"Peak memory\s+\d+ MiB\s+estimated \d+ MiB", text)
    assert f"{100 * result['exact_match_before']:.3g}%" in text
    assert steps_on_disk(run) == list(range(1, 13))
    losses = [json.loads(line).get("loss") for line in (run.path / METRICS).read_text().splitlines()]
    losses = [x for x in losses if x is not None]
    assert losses[-1] < losses[0]
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator("#fp-runs-page tr", has_text=run.name)).to_be_visible()


def test_stop_with_checkpoint_and_resume_during_which_the_server_crashes(warm_server, warm_build):
    """The run continues without the server; the page reconnects by itself and shows all points and lines."""
    page = warm_build
    # The other journey types and clicks its values.
    values = {"model.builtin": "tiny-llama", "train.max_steps": 60, "eval.strategy": "no", "save.steps": 50}
    page.evaluate("(values) => Object.entries(values).forEach((each) => footplate.edited(...each))", values)
    wait_for_status(page, "^Can run")
    run = start_as_previewed(page, warm_server)
    wait_for_chart_step(page, "[1-9]")
    page.get_by_role("button", name="Stop and save").click()
    dialog = page.locator("dialog .fp-dialog-row button").last
    if dialog.count():
        dialog.click()
    wait_for_state(page, "stopped")
    assert not run_processes(run.path)
    saved = run.checkpoints()
    assert saved and saved[-1] == steps_on_disk(run)[-1] < 60
    page.get_by_role("button", name="Copy into form", exact=True).click()
    expect(page.locator(".fp-toast")).to_contain_text("The new run would start at step 0.")
    page.get_by_role("button", name=f"Resume from checkpoint-{saved[-1]}").click()
    folder = run.path / "checkpoints" / f"checkpoint-{saved[-1]}"
    expect(page.locator("#save-resume_path textarea, #save-resume_path input").first).to_have_value(str(folder))
    page.go_back()
    page.get_by_role("button", name=re.compile("^Resume")).click()
    page.wait_for_selector('.fp-run:not([data-state="stopped"])')
    wait_until(run, lambda: len(steps_on_disk(run)) > saved[-1])
    warm_server.kill()
    before = len(steps_on_disk(run))
    wait_until(run, lambda: len(steps_on_disk(run)) > before)
    assert len(steps_on_disk(run)) > before, "the run stopped with the server"
    warm_server.start()
    wait_for_state(page, "done")  # the open page reconnected by itself
    wait_for_chart_step(page, 60)
    events = [json.loads(line) for line in (run.path / METRICS).read_text().splitlines()]
    assert {"resumed"} == {e["event"] for e in events if "event" in e}
    assert [e["step"] for e in events if "event" in e][-1] == saved[-1]
    assert steps_on_disk(run) == list(range(1, 61))
    series = page.evaluate("id => footplate.get(`api/runs/${id}/series?n=1000`)", run.id)["series"]["loss"]["x"]
    assert series == list(range(1, 61))
    assert_result_and_log_are_shown(page, run)


def start_as_previewed(page, server):
    """Start a run, which has the command of the preview, and whose page is shown from its top."""
    command = page.locator("#fp-preview-text").inner_text()
    page.evaluate("window.scrollTo(0, 400)")
    run = start_run(page, server)
    assert page.evaluate("window.scrollY") == 0
    assert run.plan().command() == command
    return run


def assert_result_and_log_are_shown(page, run):
    page.wait_for_timeout(1500)
    assert re.search(r"Peak memory\s+\d+ MiB\s+estimated \d+ MiB", page.locator("#fp-run-page").inner_text())
    expect(page.locator(".fp-model")).to_contain_text("Adapter for")
    if (library := page.get_by_role("button", name="Library messages")).is_visible():
        library.click()
    shown = page.locator(".fp-log").inner_text().replace("\u200b", "")
    # A rank that writes half a line at a time gets torchrun's prefix at its end too.
    lines = [line.replace("[default0]:", "") for line in (run.path / "log.txt").read_text().splitlines()]
    assert [x.rstrip() for x in shown.splitlines() if x.strip()] == [x.rstrip() for x in lines if x.strip()]
    assert len(lines) > 60


def wait_until(run, condition):
    """Wait while the run lives."""
    deadline = time.monotonic() + SLOW_TIMEOUT / 1000
    while not condition() and run.state in ALIVE and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.soak  # tests/process/test_supervisor.py has it with torchrun, and test_failed_run_page.py its page
def test_a_killed_rank_fails_the_run_with_its_cause(server, page):
    open_page(page, server)
    use_tiny_model(page, 500)
    run = start_run(page, server)
    wait_for_chart_step(page, "[1-9]")
    commands = {p.pid: Path(f"/proc/{p.pid}/cmdline").read_bytes() for p in run_processes(run.path)}
    ranks = [
        pid for pid, words in commands.items() if words.endswith(b"-m\0backend.train\0.\0") and b".run\0" not in words
    ]
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGKILL)
    wait_for_state(page, "failed")
    assert re.search("SIGKILL|signal 9", page.locator(".fp-failure").inner_text())
    assert not run_processes(run.path)


@pytest.mark.soak  # test_drafts_page.py has reloads and tabs, tests/process/test_server_process.py has the restart
def test_edits_survive_reload_restart_and_second_tab(server, page):
    open_page(page, server)
    type_value(page, "lora.r", 77)
    type_value(page, "logging.run_name", "my <b>run</b>")
    server.kill()
    server.start()
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert value(page, "lora.r") == 77
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("body[data-ready]")
    assert value(other, "lora.r") == 77
    assert value(other, "logging.run_name") == "my <b>run</b>"
    assert other.locator("#logging-run_name :is(input, textarea)").input_value() == "my <b>run</b>"


def test_hidden_fields_keep_their_values(build):
    page = build
    type_value(page, "lora.r", 33)
    choose(page, "method.kind", "full")
    page.wait_for_selector("#lora-r", state="hidden")
    page.wait_for_timeout(300)
    assert "lora_rank" not in page.evaluate("() => footplate.script()")
    choose(page, "method.kind", "lora")
    page.wait_for_selector("#lora-r", state="visible")
    assert value(page, "lora.r") == 33


def test_invalid_values_are_named_and_kept(build):
    page = build
    type_value(page, "train.per_device_train_batch_size", 3.7)
    wait_for_status(page, "^Cannot run")
    expect(page.locator("#fp-findings")).to_contain_text("integer")
    assert page.locator("#train-per_device_train_batch_size").get_attribute("data-level") == "error"
    type_value(page, "train.per_device_train_batch_size", 4)
    wait_for_status(page, "^Can run")
    choose(page, "data.source", "files")
    page.locator("#data-files textarea").fill("/nowhere/rows.jsonl")
    wait_for_status(page, "^Cannot run")
    expect(page.locator("#fp-findings")).to_contain_text("/nowhere/rows.jsonl")


def test_a_malformed_example_is_named_by_file_and_line(build, tmp_path):
    rows = tmp_path / "rows.jsonl"
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows.write_text("\n".join([json.dumps(good)] * 6 + ['{"messages": ']) + "\n")
    page = build
    choose(page, "data.source", "files")
    page.locator("#data-files textarea").fill(str(rows))  # each key would begin a check
    wait_for_status(page, "^Cannot run")
    expect(page.locator("#fp-findings")).to_contain_text(f"{rows}, line 7")
    assert page.locator("#fp-start").is_disabled()


def test_import_export_round_trip(build, tmp_path):
    page = build
    path = tmp_path / "mine.yaml"
    text = "train:\n  learning_rate: 0.0007\n  lr_scheduler_type: linear\nlogging:\n  run_name: (\u6a21\u578b)\n"
    path.write_text(text)
    page.locator("#fp-import-file").set_input_files(path)
    page.wait_for_function("() => footplate.values()['train.learning_rate'] == 0.0007")
    wait_for_status(page, "Can run")
    with page.expect_download() as download:
        page.click("#fp-export")
    assert download.value.path().read_text() == text and download.value.suggested_filename == "\u6a21\u578b.yaml"
    path.write_text("train:\n  learning_rte: 1\n")
    page.locator("#fp-import-file").set_input_files(path)
    expect(page.locator(".fp-toast")).to_contain_text("learning_rte")
    assert value(page, "train.learning_rate") == 0.0007


def test_no_horizontal_scrolling(build):
    page = build
    for width in (390, 800, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        for tab in ("build", "runs"):
            page.evaluate("tab => footplate.showView(tab)", tab)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (width, tab)


@pytest.mark.soak
def test_the_exported_script_gives_the_same_losses(server, page):
    """The preview's script in a clean shell, and run.sh: the same loss at every step as the page's run."""
    open_page(page, server)
    use_tiny_model(page, 6)
    script = page.evaluate("() => footplate.script()")
    run = start_run(page, server)
    wait_for_state(page, "done")
    field = re.search(r"^cd (\S+)$", script, re.MULTILINE).group(1)
    command = ["env", "-i", "PATH=/usr/bin:/bin", f"HOME={os.environ['HOME']}", "OMP_NUM_THREADS=1"]
    if cache := os.environ.get("FOOTPLATE_CACHE"):
        command.append(f"FOOTPLATE_CACHE={cache}")
    subprocess.run([*command, "bash", "-c", script], check=True, capture_output=True, timeout=180)
    # The clean shell inherits no CPU and no THREADS of `make`; at a loss near 7, 5e-6 is ten units of the last place.
    first = pytest.approx(losses_of(run.path), rel=0, abs=5e-6)
    assert losses_of(Path(field)) == first
    assert (Path(field) / SPEC).read_text() == (run.path / SPEC).read_text()
    subprocess.run([*command, run.path / "run.sh", "--from-scratch"], check=True, capture_output=True, timeout=180)
    assert losses_of(run.path)[-12:] == first  # 6 steps, each with its loss
    assert [r.id for r in runs(server.runs)] == [run.id]


def losses_of(folder):
    points = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [number for p in points if "loss" in p for number in (p["step"], p["loss"])]  # flat, for pytest.approx


@pytest.mark.soak
def test_switching_strategies_keeps_all_values(build):
    """From DDP to ZeRO-3 with offload to FSDP2 and back: each shows its own options, which keep their values."""

    def visible(*names):
        return [name for name in names if page.locator(f'[id="{name.replace(".", "-")}"]').is_visible()]

    names_ = (
        "parallel.ddp_find_unused_parameters",
        "parallel.offload_optimizer",
        "parallel.nvme_path",
        "parallel.replicate_size",
    )
    page = build
    open_section(page, "launch")
    show_more_options(page, "launch")
    choose(page, "parallel.strategy", "ddp")
    assert visible(*names_) == ["parallel.ddp_find_unused_parameters"]
    type_value(page, "parallel.bucket_cap_mb", 31)
    choose(page, "parallel.strategy", "zero3")
    assert visible(*names_) == ["parallel.offload_optimizer"]
    choose(page, "parallel.offload_optimizer", "nvme")
    assert visible(*names_) == ["parallel.offload_optimizer", "parallel.nvme_path"]
    type_value(page, "parallel.nvme_path", "/nowhere")
    wait_for_status(page, "^Cannot run")
    page.wait_for_selector('.fp-finding:has-text("folder /nowhere")')
    choose(page, "parallel.strategy", "fsdp2")
    assert visible(*names_) == ["parallel.replicate_size"]
    type_value(page, "parallel.replicate_size", 2)
    choose(page, "parallel.strategy", "zero3")  # the line without offloading
    assert visible(*names_) == ["parallel.offload_optimizer"]
    choose(page, "parallel.offload_optimizer", "nvme")
    assert (
        page.locator('[id="parallel-nvme_path"] input, [id="parallel-nvme_path"] textarea').input_value() == "/nowhere"
    )
    choose(page, "parallel.strategy", "ddp")
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert value(page, "parallel.replicate_size") == 2
    assert value(page, "parallel.nvme_path") == "/nowhere"
    assert value(page, "parallel.bucket_cap_mb") == 31


def test_module_names_are_inserted_by_a_click(build):
    page = build
    choose(page, "model.builtin", "tiny-llama")
    choose(page, "lora.targets", "custom")
    wait_for_status(page, "Cannot run")
    names = page.locator("#lora-target_modules .fp-names")
    expect(names.get_by_role("button")).to_have_text(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    names.evaluate("(box) => [...box.children].filter((b) => /[qv]_proj/.test(b.textContent)).map((b) => b.click())")
    page.wait_for_function("() => footplate.values()['lora.target_modules'] === 'q_proj, v_proj'")
    expect(names.get_by_role("button", name="q_proj")).to_have_attribute("aria-pressed", "true")
    wait_for_status(page, "Can run")
    names.get_by_role("button", name="q_proj").click()
    expect(page.locator("#lora-target_modules input")).to_have_value("v_proj")


def test_a_run_can_be_planned_for_a_cluster(build):
    """The preset's machine is a click away; then the run is exported instead of started, and the report is about
    that machine."""
    page = build
    page.locator("#fp-presets").select_option("full-8b-fsdp2")
    expect(page.get_by_role("button", name="Plan for its machine")).to_be_visible()
    page.locator("#fp-findings").get_by_role("button", name="Plan for eight 80 GB GPUs").click()
    page.wait_for_function("() => /^On eight 80 GB GPUs/.test(document.querySelector('.fp-status-more').textContent)")
    wait_for_status(page, "Can run")
    expect(page.locator("#fp-start")).to_be_hidden()
    expect(page.locator("#fp-preset-about button, .fp-preset-machine")).to_have_count(0)
    with page.expect_download() as download:
        page.locator("#fp-export-plan").click()
    assert "strategy: fsdp2" in download.value.path().read_text()
    name = download.value.suggested_filename
    expect(page.locator(".fp-toast")).to_contain_text(f"use footplate run {name} on the target machine")
    page.locator("#fp-machine").select_option("")
    expect(page.locator("#fp-start")).to_be_visible()
    expect(page.locator("#fp-export-plan")).to_be_hidden()


def test_pasted_text_is_used(build):
    """Text that arrives without a key stroke: pasted, dropped or completed by the browser."""
    page = build
    choose(page, "model.source", "hub")
    wait_for_status(page, "Cannot run")
    page.locator("#model-hub_id input").click()
    page.keyboard.insert_text("Qwen/Qwen3-8B")
    page.wait_for_function("() => footplate.values()['model.hub_id'] === 'Qwen/Qwen3-8B'")
    page.wait_for_function("() => !document.querySelector('[data-code=MDL002]')")
    type_value(page, "train.per_device_train_batch_size", 3)
    page.wait_for_function("() => footplate.values()['train.per_device_train_batch_size'] === 3")
    assert value(page, "model.hub_id") == "Qwen/Qwen3-8B"
    page.locator("#model-hub_id input").fill("")
    page.wait_for_selector("[data-code=MDL002]")
