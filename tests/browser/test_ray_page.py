"""A run on a real Ray cluster of two simulated hosts from the page: it waits with a reason, trains on two nodes, loses
a node, continues, is stopped with a checkpoint, and resumed."""

import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect
from served import serving
from test_journeys import (
    SLOW_TIMEOUT,
    choose,
    open_page,
    open_section,
    start_run,
    steps_on_disk,
    type_value,
    wait_for_chart_step,
    wait_for_state,
    wait_for_status,
)
from test_slurm_page import STEPS, fill_in_two_nodes, stop_resume_and_stop, wait_for_step

from backend.runs import follower

sys.path.append(str(Path(__file__).parent.parent / "process"))
from ray_cluster import real_cluster

pytestmark = pytest.mark.soak


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with real_cluster(tmp_path / "ray") as started:
        for name, value in started.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(follower.POLL, "0.3")
        yield started


@pytest.fixture
def server(tmp_path, cluster):
    with serving(tmp_path / "runs") as started:
        yield started


def fill_in(page, cluster):
    """A run on both nodes; too few nodes are named."""
    fill_in_two_nodes(page, "ray")
    type_value(page, "ray.python", cluster.python)
    type_value(page, "launch.nnodes", 3)
    expect(page.locator("[data-code=CLU003]")).to_contain_text("the Ray cluster has 2")
    type_value(page, "launch.nnodes", 2)
    wait_for_status(page, "^Can run")
    expect(page.locator("[data-code=CLU003]")).to_have_count(0)
    expect(page.locator("#fp-status")).to_contain_text("On Ray cluster")
    page.locator("#fp-preview-tabs").get_by_text("ray.json", exact=True).click()
    expect(page.locator("#fp-preview-text")).to_contain_text('"nodes": 2')
    open_section(page, "checkpoint")
    choose(page, "save.strategy", "steps")
    type_value(page, "save.steps", 5)


def test_a_run_on_ray(server, page, cluster):
    with cluster.occupied():
        open_page(page, server)
        fill_in(page, cluster)
        run = start_run(page, server)
        wait_for_state(page, "queued", 90_000)
        shown = page.locator("#fp-run-page")
        expect(shown).to_contain_text("Waiting in Ray's queue (job", timeout=SLOW_TIMEOUT)
        expect(shown).to_contain_text("which other Ray jobs use", timeout=SLOW_TIMEOUT)
        expect(page.get_by_role("button", name="Hold")).to_be_hidden()
        expect(page.get_by_role("button", name="Remove from queue")).to_be_visible()

    wait_for_state(page, "running")
    wait_for_chart_step(page, "[1-9]")
    wait_for_step(page, run, 10)
    assert run.resolved()["world_size"] == 2
    cluster.lose_node()
    wait_for_state(page, "queued", 120_000)
    expect(shown).to_contain_text("the Ray cluster has 1 of that size", timeout=SLOW_TIMEOUT)
    failed, before = run.checkpoints()[-1], steps_on_disk(run)[-1]
    cluster.restore_node()
    wait_for_state(page, "running")
    wait_for_step(page, run, before + 1)  # steps after the checkpoint are on disk from before the failure

    stopped, events = stop_resume_and_stop(page, run)
    assert [event["step"] for event in events if event["event"] == "resumed"] == [failed, stopped]
    assert steps_on_disk(run)[-1] < STEPS and not cluster.unended()
    wait_for_chart_step(page, "[1-9]")
