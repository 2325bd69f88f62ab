"""train.max_hours with shards, a resumed run and a sweep: a stop at the limit whose checkpoint resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from fork_server import ForkServer
from training_runs import environment, last_step, log_text, make_spec, read_metrics
from waiting import wait_for

from backend.config import RunSpec
from backend.launch.plan import plan
from backend.machine import Machine
from backend.models.spec import read_spec
from backend.preflight import preflight
from backend.runs import RUN_MARKER, processes
from backend.runs.folder import ALIVE, Run
from backend.tasks import start_sweep, sweep
from backend.train import time_limit

SECONDS = int(os.environ.get("FOOTPLATE_LIMIT_SECONDS", 20))  # more on a machine where the first step comes later
LIMITED = {
    "train.max_hours": SECONDS / 3600, "train.max_steps": 100_000, "method.kind": "full", "launch.omp_num_threads": 1,
}  # fmt: skip


@pytest.fixture
def machine(fork_server: ForkServer, root: Path) -> Iterator[Machine]:
    """This machine, with processes that are forked, in the environment of supervisors."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(root, fork_server.cache).items():
            patch.setenv(name, value)
        patch.delenv(RUN_MARKER)
        yield Machine(cores=2, python=str(fork_server.python))


def create(root: Path, machine: Machine, spec: RunSpec) -> Run:
    return Run.create(root / "runs", spec.parallel.strategy, plan(spec, machine), datetime.now())


def stopped_at(run: Run, before: int = 0) -> int:
    """The step at which the run has stopped at its limit, after step `before`."""
    wait_for(lambda: run.state not in ALIVE, 600, lambda: log_text(run.path))
    reason = time_limit.reason(SECONDS / 3600, read_spec(run).parallel.strategy != "tensor")
    state, step = json.loads((run.path / "state.json").read_text()), last_step(run.path)
    assert run.state == "stopped" and state["cause"] == reason and reason in run.summary()["sentence"], log_text(
        run.path
    )
    assert state["exit_code"] == 0 and not state["left"] and "forced" not in state, log_text(run.path)
    assert SECONDS <= run.progress()["elapsed"] < SECONDS + 60
    assert before < step < 100_000 and run.checkpoints()[-1] == step
    assert (run.path / f"checkpoints/checkpoint-{step}/complete").exists()
    assert f"Stopped after step {step}." in log_text(run.path)
    assert not processes.run_processes(run.path) and not (run.path / "result.json").exists()
    return step


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp2", "tensor"])
def test_a_sharded_run_stops_at_its_limit_and_resumes(root: Path, machine: Machine, strategy: str) -> None:
    sharded = {"parallel.strategy": strategy, "launch.nproc_per_node": 2, "save.only_model": strategy == "tensor"}
    run = create(root, machine, make_spec({**LIMITED, **sharded}))
    run.start()
    first = stopped_at(run)
    if strategy == "tensor":  # which the Trainer does not resume
        return
    run.resume()
    assert stopped_at(run, first) > first
    assert log_text(run.path).count("Stopping. The run reached its max run time") == 2
    assert f"Resuming from checkpoint-{first}." in log_text(run.path)
    assert [point["step"] for point in read_metrics(run.path) if point.get("event") == "resumed"] == [first]


@pytest.mark.soak
def test_each_run_of_a_sweep_has_its_own_limit(root: Path, machine: Machine) -> None:
    """The second one waits for the first one, and that does not count."""
    spec = make_spec(LIMITED)
    planned = start_sweep.plan(spec, [sweep.parse("train.learning_rate=1e-4,1e-3")])
    reports = [preflight(each, machine, root) for each in planned.specs()]
    assert all(report.can_run for report in reports)
    _, started = start_sweep.start(root / "sweep", planned, reports, root)
    assert len([stopped_at(run) for run in started]) == 2
