"""A run on a cluster from the page: it waits with a reason, trains on two nodes, is interrupted, continues, is stopped
with a checkpoint, and resumed. On a Slurm cluster, a real Ray cluster of two simulated hosts, and a stand-in for a
Kubernetes cluster."""

import json
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
    show_more_options,
    start_run,
    steps_on_disk,
    type_value,
    use_tiny_model,
    wait_for_chart_step,
    wait_for_state,
    wait_for_status,
)

from backend.runs import METRICS

sys.path.append(str(Path(__file__).parent.parent / "process"))
from cluster_runs import followed
from kubernetes_cluster import PYTHON, fake_kubernetes
from ray_cluster import real_cluster
from slurm_cluster import slurm_cluster

pytestmark = pytest.mark.soak
STEPS = 2000


@pytest.fixture
def cluster(request, tmp_path):
    with request.param(tmp_path / "cluster") as started, followed(started):
        yield started


@pytest.fixture
def server(tmp_path, cluster):
    with serving(tmp_path / "runs") as started:
        yield started


def fill_in_two_nodes(page, place):
    use_tiny_model(page, STEPS)
    open_section(page, "launch")
    show_more_options(page, "launch")
    type_value(page, "launch.omp_num_threads", 1)  # both nodes are this machine
    choose(page, "parallel.strategy", "ddp")
    type_value(page, "launch.nproc_per_node", 1)
    choose(page, "launch.place", place)
    type_value(page, "launch.nnodes", 2)


def set_nodes(page, name):
    """Three nodes, which are too many, then two; and a checkpoint every five steps."""
    type_value(page, "launch.nnodes", 3)
    expect(page.locator("[data-code=CLU003]")).to_contain_text(f"the {name} has 2")
    type_value(page, "launch.nnodes", 2)
    wait_for_status(page, "^Can run")
    expect(page.locator("[data-code^=CLU]")).to_have_count(0)
    expect(page.locator("#fp-status")).to_contain_text(f"On {name}")
    open_section(page, "checkpoint")
    choose(page, "save.strategy", "steps")
    type_value(page, "save.steps", 5)


def wait_for_step(page, run, step):
    """Wait until a later step is on disk, and a step in the chart."""
    for _ in range(SLOW_TIMEOUT // 200):
        if steps_on_disk(run)[-1] > step:
            return wait_for_chart_step(page, "[0-9]+")
        page.wait_for_timeout(200)
    raise AssertionError(steps_on_disk(run)[-1])


def stop_and_save(page, run):
    page.get_by_role("button", name="Stop and save").click()
    page.locator("dialog .fp-dialog-row button").last.click()
    wait_for_state(page, "stopped")
    saved = run.checkpoints()[-1]
    assert saved == steps_on_disk(run)[-1] < STEPS
    return saved


def stop_resume_and_stop(page, run):
    """Where the first stop was, and the events in the metrics."""
    stopped = stop_and_save(page, run)
    page.get_by_role("button", name="Resume").click()
    wait_for_state(page, "running")
    wait_for_step(page, run, stopped + 1)
    stop_and_save(page, run)
    points = [json.loads(line) for line in (run.path / METRICS).read_text().splitlines()]
    return stopped, [point for point in points if "event" in point]


def fill_in_slurm(page):
    """A run on both nodes; a partition that does not exist is named."""
    fill_in_two_nodes(page, "slurm")
    type_value(page, "slurm.partition", "gpu")
    wait_for_status(page, "^Cannot run")
    expect(page.locator("[data-code=CLU001]")).to_contain_text("Slurm has no partition gpu. It has main, urgent.")
    type_value(page, "slurm.partition", "main")
    wait_for_status(page, "^Can run")
    expect(page.locator("#fp-status")).to_contain_text("On Slurm partition main")
    page.locator("#fp-preview-tabs").get_by_text("job.sh", exact=True).click()
    expect(page.locator("#fp-preview-text")).to_contain_text("#SBATCH --nodes=2")


@pytest.mark.parametrize("cluster", [slurm_cluster], indirect=True)
def test_a_run_on_slurm(server, page, cluster):
    other = cluster.command(
        "sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 999"
    )
    open_page(page, server)
    fill_in_slurm(page)
    run = start_run(page, server)

    wait_for_state(page, "queued", 90_000)
    shown = page.locator("#fp-run-page")
    expect(shown).to_contain_text("Waiting in Slurm's queue (job", timeout=SLOW_TIMEOUT)
    expect(shown).to_contain_text("Waiting for free nodes.", timeout=SLOW_TIMEOUT)
    expect(page.get_by_role("button", name="Hold")).to_be_hidden()
    expect(page.get_by_role("button", name="Remove from queue")).to_be_visible()
    cluster.command("scancel", other)

    wait_for_state(page, "running")
    wait_for_chart_step(page, "[1-9]")
    assert run.resolved()["world_size"] == 2
    cluster.command("sbatch", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=sleep 15")
    wait_for_state(page, "queued", 90_000)
    preempted = run.checkpoints()[-1]
    wait_for_state(page, "running")
    wait_for_step(page, run, preempted + 1)

    stopped, events = stop_resume_and_stop(page, run)
    assert [event["step"] for event in events] == [preempted, stopped]
    assert not cluster.unended()


def fill_in_ray(page, cluster):
    """A run on both nodes; too few nodes are named."""
    fill_in_two_nodes(page, "ray")
    type_value(page, "ray.python", cluster.python)
    set_nodes(page, "Ray cluster")
    page.locator("#fp-preview-tabs").get_by_text("ray.json", exact=True).click()
    expect(page.locator("#fp-preview-text")).to_contain_text('"nodes": 2')


@pytest.mark.parametrize("cluster", [real_cluster], indirect=True)
def test_a_run_on_ray(server, page, cluster):
    with cluster.occupied():
        open_page(page, server)
        fill_in_ray(page, cluster)
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


def fill_in_kubernetes(page):
    """A run on both nodes; a missing image and too few nodes are named."""
    fill_in_two_nodes(page, "kubernetes")
    expect(page.locator("[data-code=CLU004]")).to_contain_text("no image and no volumes")
    type_value(page, "kubernetes.image", "registry/footplate:1")
    type_value(page, "kubernetes.volumes", f"runs={tempfile.gettempdir()}")
    type_value(page, "kubernetes.python", PYTHON)
    type_value(page, "kubernetes.cpus", 1)
    set_nodes(page, "Kubernetes cluster")
    page.locator("#fp-preview-tabs").get_by_text("kubernetes.yaml", exact=True).click()
    expect(page.locator("#fp-preview-text")).to_contain_text("completionMode: Indexed")


@pytest.mark.parametrize("cluster", [fake_kubernetes], indirect=True)
def test_a_run_on_kubernetes(server, page, cluster):
    with cluster.occupied():
        open_page(page, server)
        fill_in_kubernetes(page)
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
