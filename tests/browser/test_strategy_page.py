"""Devices and strategy: chips, the picker and the placement picture on a machine with two nodes."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect
from same_page import settled

from backend.inspect import inspect_inputs
from backend.machine import machines
from backend.paths import HOME
from backend.presets import presets
from backend.rules import Case
from backend.tasks.compare import variants


@pytest.fixture
def page(same_page):
    """The preset of an 8B model on two nodes, with its machine."""
    same_page.show_build("2x8x80gb", "two-nodes")
    expect(current(same_page.page)).to_have_text("FSDP2, replicated (HSDP)")
    return same_page.page


def line(page, name):
    return page.locator(".fp-strategy").filter(has=page.get_by_text(name, exact=True))


def current(page):
    return page.locator(".fp-strategy:has(input:checked) .fp-strategy-name")


def value(page, name):
    return page.evaluate("name => footplate.values()[name]", name)


def test_lines_have_the_figures_of_the_comparison(page):
    spec = next(preset.spec for preset in presets() if preset.name == "two-nodes")
    case = Case(spec, machines()["2x8x80gb"], inspect_inputs(spec, HOME))
    expected = variants(case)
    expect(page.locator(".fp-strategy-name")).to_have_text([variant.name for variant in expected])
    for variant in expected:
        texts = line(page, variant.name).locator(".fp-n").all_inner_texts()
        if variant.error:
            expect(line(page, variant.name)).to_contain_text("Cannot run:")
            assert texts == ["", "", ""]
        else:
            assert abs(float(texts[0].split()[0]) - variant.device_bytes / 2**30) <= 0.51, (variant.name, texts)
            expect(line(page, variant.name)).to_contain_text(variant.verdict)
    best = line(page, "ZeRO-1")
    expect(best.locator(".fp-strategy-badge")).to_be_visible()
    expect(page.locator(".fp-strategy-best")).to_contain_text("Recommended: ZeRO-1. It needs")


def test_the_time_and_the_other_machines(page):
    """The card shows the prediction of the chosen strategy, and a line for each machine once that is opened."""
    card = page.locator("#fp-time")
    speed = line(page, "FSDP2, replicated (HSDP)").locator(".fp-n").last.inner_text()
    expect(card.locator(".fp-figure")).to_have_text(f"{speed} tokens/s")
    expect(card.locator(".fp-time-picture li").first).to_contain_text("Linear layers")
    expect(card.locator(".fp-range")).to_contain_text("The time per step may be up to 1.45 times shorter or longer")
    card.get_by_text("Other machines").click()
    rows = card.locator(".fp-time-machines tbody tr")
    expect(rows.locator("td:first-child:not(.fp-dim)")).to_have_count(1 + len(machines()))
    expect(rows.filter(has_text="Two nodes with eight 80 GB GPUs")).to_contain_text(speed)
    expect(rows.filter(has_text="A laptop").locator("+ tr")).to_contain_text("Cannot run")
    fewer = rows.filter(has_text="Four 80 GB")
    expect(fewer.locator("+ tr")).to_contain_text("With 4 processes per node and")
    fewer.get_by_role("button").click()
    expect(page.locator("#fp-machine")).to_have_value("4x80gb")
    expect(fewer.get_by_role("button")).to_have_count(0)
    page.locator("#fp-machine").select_option("")
    settled(page)
    expect(card).to_be_hidden()


def test_the_head_names_the_memory_that_lines_are_measured_against(page):
    head = page.locator(".fp-strategy-memory")
    expect(head).to_have_text("Memory per GPU (80 GiB available)")
    page.locator("#fp-presets").select_option("first-run")
    page.locator("#fp-machine").select_option("")
    settled(page)
    # Two processes share the RAM that a single one has for itself.
    expect(head).to_have_text(re.compile(r"^Memory per process \([\d.]+ to [\d.]+ GiB available\)$"))
    sizes = "[[1.5, 3.4], [23.6, 80], [0.5, 2], [8, 8]]"
    ranges = page.evaluate(
        f"""async () => {{
          const {{ rangeText }} = await import("./footplate/build/strategies.js");
          return {sizes}.map((pair) => rangeText(...pair.map((size) => size * 2 ** 30)));
        }}"""
    )
    assert ranges == ["1.5 to 3.4 GiB", "24 to 80 GiB", "512 MiB to 2.0 GiB", "8.0 GiB"]


def test_a_click_chooses_a_strategy_and_changes_the_picture(page):
    command = page.locator("#fp-preview-text")
    expect(page.locator("#fp-build .fp-column")).to_have_count(16)
    expect(page.locator("#fp-build .fp-placement-caption")).to_contain_text(
        "In groups of 8, each GPU shards weights, gradients"
    )
    line(page, "ZeRO-1").click()
    settled(page)
    expect(current(page)).to_have_text("ZeRO-1")
    assert (value(page, "parallel.strategy"), value(page, "launch.nnodes")) == ("zero1", 2)
    expect(page.locator("#fp-build .fp-placement-caption")).to_contain_text(
        "In groups of 16, each GPU shards optimizer state, and sends"
    )
    page.get_by_role("tab", name="deepspeed.json").click()
    expect(command).to_contain_text('"stage": 1')
    line(page, "Single process").click()
    settled(page)
    expect(page.locator(".fp-status-text")).to_contain_text("Cannot run")
    expect(line(page, "Single process")).to_contain_text("Does not fit")
    expect(page.locator("#fp-build .fp-column")).to_have_count(1)
    expect(page.locator("#fp-build .fp-column-limit")).to_have_count(1)


def test_choosing_keeps_the_global_batch_size_and_can_be_undone(page):
    summary = page.locator(".fp-status-more")
    expect(summary).to_contain_text("64 examples per step")
    line(page, "FSDP2 with context parallelism").click()
    settled(page)
    expect(summary).to_contain_text("64 examples per step")
    assert (value(page, "parallel.context_parallel_size"), value(page, "parallel.replicate_size")) == (2, 1)
    expect(page.locator(".fp-toast")).to_contain_text("Gradient accumulation steps: 2 \u2192 4")
    page.locator(".fp-toast").get_by_role("button", name="Undo").click()
    settled(page)
    expect(current(page)).to_have_text("FSDP2, replicated (HSDP)")
    assert value(page, "train.gradient_accumulation_steps") == 2


@pytest.mark.soak
def test_going_through_a_single_process_keeps_batch_and_nodes(page):
    summary = page.locator(".fp-status-more")
    for name in ("Single process", "DDP", "Single process", "ZeRO-2", "FSDP2, replicated (HSDP)"):
        figures = line(page, name).locator(".fp-n").all_inner_texts()
        line(page, name).click()
        settled(page)
        expect(current(page)).to_have_text(name)
        expect(summary).to_contain_text("64 examples per step")
        assert line(page, name).locator(".fp-n").all_inner_texts() == figures
    assert (value(page, "launch.nnodes"), value(page, "parallel.replicate_size")) == (2, 2)


@pytest.mark.soak
def test_a_small_batch_is_divided_and_a_larger_one_is_said(page):
    summary = page.locator(".fp-status-more")
    page.locator("#fp-machine").select_option("")
    page.locator("#fp-presets").select_option("first-run")
    settled(page)
    for name in ("DDP", "Single process"):
        line(page, name).click()
        settled(page)
        expect(summary).to_contain_text("4 examples per step")
    for name in ("DDP", "Single process"):  # faster than the check responds
        page.evaluate("name => document.querySelector(`.fp-strategy input[aria-label^='${name}']`).click()", name)
    settled(page)
    expect(summary).to_contain_text("4 examples per step")
    page.locator("#fp-machine").select_option("8x80gb")
    settled(page)
    line(page, "DDP").click()
    settled(page)
    expect(page.locator(".fp-toast")).to_contain_text("It trains on ")
    expect(page.locator(".fp-toast")).to_contain_text("instead of 4 examples per step")


@pytest.mark.soak
def test_hsdp_follows_the_number_of_nodes(page):
    page.get_by_role("button", name="Node 1", exact=True).click()
    settled(page)
    expect(page.locator(".fp-status-text")).not_to_contain_text("Cannot run")
    expect(current(page)).to_have_text("FSDP2")
    page.get_by_role("button", name="Node 1", exact=True).click()
    settled(page)
    expect(current(page)).to_have_text("FSDP2")


def test_an_error_of_the_strategy_goes_with_it(page):
    picker = page.locator("#fp-strategies")
    line(page, "Tensor parallelism with FSDP2").click()
    settled(page)
    expect(picker).to_have_attribute("data-level", "error")
    line(page, "FSDP2").click()
    settled(page)
    assert picker.get_attribute("data-level") is None


def test_pointing_at_a_device_shows_its_groups(page):
    columns, caption = page.locator("#fp-build .fp-column"), page.locator("#fp-build .fp-placement-caption")
    height = caption.bounding_box()["height"]
    columns.nth(11).hover()
    expect(caption).to_contain_text("GPU 3 of node 1 is rank 11.")
    expect(caption).to_contain_text("With ranks 8 to 15 it shards weights, gradients and optimizer state, and sends")
    expect(caption).to_contain_text("With ranks 3 and 11 it averages gradients, and sends")
    assert caption.bounding_box()["height"] == height  # nothing below moves
    groups = columns.evaluate_all("nodes => nodes.map((node) => node.dataset.group)")
    assert groups == ["none"] * 3 + ["replicate"] + ["none"] * 4 + ["shard"] * 3 + ["self"] + ["shard"] * 4
    page.locator("#fp-build h3", has_text="Memory").hover()
    assert set(columns.evaluate_all("nodes => nodes.map((node) => node.dataset.group)")) == {""}
    columns.first.focus()
    page.keyboard.press("ArrowRight")
    expect(caption).to_contain_text("GPU 1 of node 0 is rank 1.")


PICTURE = """async ([placement, capacity, measured]) => {
  const { placementPicture } = await import("./footplate/placement.js");
  const memory = { placement, capacity_bytes: capacity, device_bytes: 2 ** 30, high_bytes: 2 ** 30 };
  const figure = placementPicture(memory, { measured });
  const lines = () => [...figure.querySelectorAll(".fp-placement-caption span")].map((s) => s.textContent);
  const overview = lines();
  const column = figure.querySelector(".fp-column");
  column.dispatchEvent(new Event("pointerenter"));
  const hidden = [...figure.querySelectorAll("svg > text")].map((node) => node.textContent).pop();
  const names = [figure.querySelector("svg").getAttribute("aria-label"), column.getAttribute("aria-label")];
  return { overview, described: lines(), hidden, names, legend: figure.querySelector(".fp-kinds").textContent };
}"""


def picture(page, nodes, per_node, capacity=2**31, measured=(), **changes):
    """The texts of a placement picture."""
    placement = {"noun": "NPU", "plural": "NPUs", "nodes": nodes, "per_node": per_node, "ids": [], "kinds": []}
    return page.evaluate(PICTURE, [{**placement, "groups": [], "host_bytes": 0, **changes}, capacity, measured])


def test_what_does_not_fit_in_the_picture_is_counted(page):
    assert picture(page, 5, 2)["hidden"] == "and 1 more node like these"
    assert picture(page, 6, 2)["hidden"] == "and 2 more nodes like these"
    assert picture(page, 2, 17)["hidden"] == "and 1 more NPU on each node"
    assert picture(page, 1, 24)["hidden"] == "and 8 more NPUs"
    assert picture(page, 6, 20)["hidden"] == "and 4 more NPUs on each node, and 2 more nodes like these"


def test_the_legend_has_the_highest_measured_peak(page):
    assert picture(page, 1, 1, measured=[2**30])["legend"] == "Measured peak1.0 GiB"
    assert picture(page, 1, 2, measured=[2**30, 3 * 2**30])["legend"] == "Highest measured peak3.0 GiB"
    assert picture(page, 1, 2, measured=[None, None])["legend"] == ""


def test_picture_names_the_devices_and_the_known_capacity(page):
    assert picture(page, 1, 1)["names"] == ["Memory of one NPU: 1.0 GiB of 2.0 GiB", "NPU 0: 1.0 GiB of 2.0 GiB"]
    assert picture(page, 1, 2)["names"][0] == "Memory of 2 NPUs: 1.0 GiB of 2.0 GiB each"
    process = {"noun": "process", "plural": "processes"}
    names = ["Memory of 2 processes: 1.0 GiB each", "Process 0: 1.0 GiB"]
    assert picture(page, 1, 2, capacity=0, **process)["names"] == names


def test_traffic_with_host_ram_has_a_line_while_nothing_and_something_is_pointed_at(page):
    group = {"name": "shard", "size": 2, "stride": 1, "text": "shards weights", "bytes": 2**20}
    line = "Each NPU exchanges 1 MiB with host RAM per step."
    for groups in ([], [group]):
        found = picture(page, 1, 2, groups=groups, host_bytes=2**20)
        assert len(found["overview"]) == len(found["described"])
        assert found["overview"][-1] == found["described"][-1] == line
        assert line not in picture(page, 1, 2, groups=groups)["overview"]


def test_arrow_keys_choose_a_strategy(page):
    page.locator(".fp-strategy input:checked").focus()
    page.keyboard.press("ArrowUp")
    settled(page)
    expect(current(page)).to_have_text("FSDP2")
    for _ in range(2):  # faster than the check responds
        page.keyboard.press("ArrowUp")
    settled(page)
    expect(current(page)).to_have_text("ZeRO-3 with sequence parallelism")
    assert page.evaluate("() => document.activeElement.getAttribute('aria-label')").startswith("ZeRO-3 with sequence")
    assert value(page, "parallel.sequence_parallel_size") == 2
    assert value(page, "parallel.offload_param") == "none"


def test_chips_select_nodes_and_devices(page):
    chips = page.locator(".fp-gpu[aria-pressed=true]:not(.fp-node)")
    expect(chips).to_have_count(16)
    page.get_by_role("button", name="Node 1", exact=True).click()
    settled(page)
    expect(chips).to_have_count(8)
    assert (value(page, "launch.nnodes"), value(page, "launch.rendezvous")) == (1, "standalone")
    page.get_by_role("button", name=re.compile("^GPU 0 of node 0")).click()
    settled(page)
    assert value(page, "launch.devices") == "1, 2, 3, 4, 5, 6, 7"
    assert value(page, "launch.nproc_per_node") == 7
    expect(page.locator("#fp-build .fp-column")).to_have_count(7)
    page.get_by_role("button", name=re.compile("^GPU 0 of node 0")).click()
    page.get_by_role("button", name=re.compile("^GPU 5 of node 1")).click()
    settled(page)
    assert (value(page, "launch.devices"), value(page, "launch.nnodes")) == ("", 2)
    expect(chips).to_have_count(16)
    assert page.locator("#launch-devices").is_hidden()  # ids are never typed


@pytest.mark.soak
def test_one_device_needs_no_strategy_and_several_do(page):
    page.locator("#fp-machine").select_option("4x80gb")
    page.locator("#fp-presets").select_option("lora-80gb")
    settled(page)
    expect(current(page)).to_have_text("Single process")
    for gpu in (1, 2):
        page.get_by_role("button", name=re.compile(f"^GPU {gpu}:")).click()
        settled(page)
    expect(current(page)).to_have_text("DDP")
    assert (value(page, "launch.nproc_per_node"), value(page, "launch.devices")) == (3, "")
    for gpu in (0, 2):
        page.get_by_role("button", name=re.compile(f"^GPU {gpu}:")).click()
        settled(page)
    expect(current(page)).to_have_text("Single process")
    assert value(page, "launch.devices") == "1"


@pytest.mark.soak
def test_clicks_before_the_next_report_all_count(page):
    page.locator("#fp-machine").select_option("4x80gb")
    page.locator("#fp-presets").select_option("lora-80gb")
    settled(page)
    chips = "document.querySelectorAll('.fp-gpu:not(.fp-node)')"
    page.evaluate(f"() => [1, 2].forEach((gpu) => {chips}[gpu].click())")
    settled(page)
    assert (value(page, "launch.nproc_per_node"), value(page, "parallel.strategy")) == (3, "ddp")
    expect(page.locator(".fp-gpu[aria-pressed=true]")).to_have_count(3)


def test_second_node_needs_a_strategy(page):
    page.locator("#fp-presets").select_option("lora-80gb")
    settled(page)
    expect(current(page)).to_have_text("Single process")
    page.get_by_role("button", name="Node 1", exact=True).click()
    settled(page)
    expect(current(page)).to_have_text("DDP")
    expect(page.locator("#fp-build .fp-column")).to_have_count(2)
    assert (value(page, "launch.nnodes"), value(page, "launch.rendezvous")) == (2, "static")


@pytest.mark.soak
def test_elastic_run_stays_elastic(page):
    page.evaluate("() => footplate.edited('launch.rendezvous', 'elastic')")
    settled(page)
    page.get_by_role("button", name=re.compile("^GPU 0 of node 0")).click()
    settled(page)
    node = page.get_by_role("button", name="Node 1", exact=True)
    node.click()
    settled(page)
    assert value(page, "launch.rendezvous") == "standalone"
    page.evaluate("() => footplate.edited('launch.rendezvous', 'elastic')")
    node.click()
    settled(page)
    assert (value(page, "launch.nnodes"), value(page, "launch.rendezvous")) == (2, "elastic")


def test_focus_stays_on_a_column_when_the_picture_is_drawn_again(page):
    page.locator("#fp-build .fp-column").first.focus()
    page.keyboard.press("ArrowRight")
    page.evaluate("() => footplate.edited('train.learning_rate', 0.00002)")
    settled(page)
    assert page.evaluate("() => document.activeElement.getAttribute('aria-label')").startswith("GPU 1 of node 0")


def test_a_model_of_unknown_size_still_has_strategies(page):
    field = page.locator("#model-hub_id").get_by_role("textbox")
    field.fill("somebody/unknown-model")
    settled(page)
    expect(line(page, "ZeRO-3")).to_contain_text("Memory unknown")
    line(page, "ZeRO-3").click()
    settled(page)
    assert value(page, "parallel.strategy") == "zero3"


def test_link_of_a_finding_leads_to_the_picker(page):
    page.locator("#fp-search").fill("parallel.strategy")
    page.keyboard.press("Enter")
    expect(page.locator(".fp-strategy input:checked")).to_be_focused()


@pytest.mark.soak
def test_a_run_on_one_node_stays_there_on_a_cluster(page):
    """The lines are about one node too, and so is the global batch size that they keep. Undo restores more nodes."""
    page.locator("#fp-presets").select_option("lora-80gb")
    settled(page)
    page.evaluate("() => footplate.edited('launch.place', 'slurm')")
    settled(page)
    figures = line(page, "DDP").locator(".fp-n").all_inner_texts()
    line(page, "DDP").click()
    settled(page)
    assert (value(page, "parallel.strategy"), value(page, "launch.nnodes")) == ("ddp", 1)
    assert line(page, "DDP").locator(".fp-n").all_inner_texts() == figures
    page.evaluate("() => footplate.edited('launch.nnodes', 4)")
    page.evaluate("() => footplate.edited('launch.place', 'local')")
    page.locator("#fp-undo").click()
    settled(page)
    assert (value(page, "launch.place"), value(page, "launch.nnodes")) == ("slurm", 4)
    page.evaluate("() => footplate.edited('parallel.strategy', 'single')")
    assert value(page, "launch.nnodes") == 1
    page.locator("#fp-undo").click()
    settled(page)
    assert (value(page, "parallel.strategy"), value(page, "launch.nnodes")) == ("ddp", 4)
