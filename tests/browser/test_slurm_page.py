"""A run on a Slurm cluster from the page: it waits with a reason, trains on two nodes, is preempted, continues, is
stopped with a checkpoint, and resumed."""

import json
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
    show_more_options,
    start_run,
    steps_on_disk,
    type_value,
    use_tiny_model,
    wait_for_chart_step,
    wait_for_state,
    wait_for_status,
)

from backend.runs import METRICS, follower

sys.path.append(str(Path(__file__).parent.parent / "process"))
from slurm_cluster import slurm_cluster

pytestmark = pytest.mark.soak
STEPS = 2000


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with slurm_cluster(tmp_path / "slurm") as started:
        for name, value in started.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(follower.POLL, "0.3")
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


def fill_in(page):
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


def test_a_run_on_slurm(server, page, cluster):
    other = cluster.command(
        "sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 999"
    )
    open_page(page, server)
    fill_in(page)
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
