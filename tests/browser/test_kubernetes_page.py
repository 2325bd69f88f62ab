"""A run on a stand-in for a Kubernetes cluster from the page: refused, waiting with a reason, evicted, continued,
stopped with a checkpoint, and resumed."""

import sys
import tempfile
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
from kubernetes_cluster import PYTHON, fake_kubernetes

pytestmark = pytest.mark.soak


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with fake_kubernetes(tmp_path / "kubernetes") as started:
        monkeypatch.setenv("KUBECONFIG", str(started.config))
        monkeypatch.setenv(follower.POLL, "0.3")
        yield started


@pytest.fixture
def server(tmp_path, cluster):
    with serving(tmp_path / "runs") as started:
        yield started


def fill_in(page):
    """A run on both nodes; a missing image and too few nodes are named."""
    fill_in_two_nodes(page, "kubernetes")
    expect(page.locator("[data-code=CLU004]")).to_contain_text("no image and no volumes")
    type_value(page, "kubernetes.image", "registry/footplate:1")
    type_value(page, "kubernetes.volumes", f"runs={tempfile.gettempdir()}")
    type_value(page, "kubernetes.python", PYTHON)
    type_value(page, "kubernetes.cpus", 1)
    type_value(page, "launch.nnodes", 3)
    expect(page.locator("[data-code=CLU003]")).to_contain_text("the Kubernetes cluster has 2")
    type_value(page, "launch.nnodes", 2)
    wait_for_status(page, "^Can run")
    expect(page.locator("[data-code^=CLU]")).to_have_count(0)
    expect(page.locator("#fp-status")).to_contain_text("On Kubernetes cluster")
    page.locator("#fp-preview-tabs").get_by_text("kubernetes.yaml", exact=True).click()
    expect(page.locator("#fp-preview-text")).to_contain_text("completionMode: Indexed")
    open_section(page, "checkpoint")
    choose(page, "save.strategy", "steps")
    type_value(page, "save.steps", 5)


def test_a_run_on_kubernetes(server, page, cluster):
    with cluster.occupied():
        open_page(page, server)
        fill_in(page)
        run = start_run(page, server)
        wait_for_state(page, "queued", 90_000)
        shown = page.locator("#fp-run-page")
        expect(shown).to_contain_text("The scheduler says: 0/2 nodes are available", timeout=SLOW_TIMEOUT)
        expect(page.get_by_role("button", name="Remove from queue")).to_be_visible()

    wait_for_state(page, "running")
    wait_for_chart_step(page, "[1-9]")
    wait_for_step(page, run, 10)
    assert run.resolved()["world_size"] == 2
    cluster.evict(0)
    wait_for_step(page, run, run.checkpoints()[-1] + 20)
    wait_for_state(page, "running")

    stopped, events = stop_resume_and_stop(page, run)
    resumed = [event["step"] for event in events if event["event"] == "resumed"]
    assert len(resumed) == 2 and resumed[1] == stopped
    assert steps_on_disk(run)[-1] < STEPS and not cluster.unended()
    wait_for_chart_step(page, "[1-9]")
