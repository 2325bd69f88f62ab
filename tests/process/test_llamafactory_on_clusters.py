"""LLaMA-Factory as the trainer of a job over two nodes of a cluster: stopped with a checkpoint, and resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import ON_TWO_NODES, ClusterRun, followed
from kubernetes_cluster import PYTHON, fake_kubernetes
from llamafactory_env import llamafactory_environment
from ray_cluster import real_cluster
from slurm_cluster import slurm_cluster
from test_llamafactory_trainer import WITH_LLAMAFACTORY
from training_runs import last_step, make_spec, read_metrics

from backend.launch.clusters import answers
from backend.machine import probe
from backend.preflight import preflight
from backend.runs import RUN_MARKER

pytestmark = pytest.mark.soak
POD = {"kubernetes.image": "footplate:test", "kubernetes.volumes": ("runs=/tmp",), "kubernetes.python": PYTHON}


@pytest.fixture(params=["slurm", "ray", "kubernetes"])
def place(request: pytest.FixtureRequest, root: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The options of the place, and the variable that marks its processes."""
    make: Mapping[str, Any] = {"slurm": slurm_cluster, "ray": real_cluster, "kubernetes": fake_kubernetes}
    with make[request.param](root / f"with-{request.param}") as cluster, followed(cluster):
        answers.forget()
        more = {"slurm": {}, "ray": {"ray.cpus": 1}, "kubernetes": {**POD, "kubernetes.cpus": 1}}[request.param]
        more |= {"ray.python": cluster.python} if request.param == "ray" else {}
        yield {"launch.place": request.param, **more}, "SLURM_SUBMIT_DIR" if request.param == "slurm" else RUN_MARKER


def test_a_run_on_two_nodes_stops_and_resumes(place, root, cache) -> None:  # type: ignore[no-untyped-def]
    options, mark = place
    environment = {"llamafactory.environment": str(llamafactory_environment())}
    spec = make_spec({**WITH_LLAMAFACTORY, **environment, **ON_TWO_NODES, **options, "train.max_steps": 400})
    report = preflight(spec, probe(root), root)
    assert report.can_run, report.findings
    started = ClusterRun(root, report.plan, mark)
    try:
        started.wait_for_step(3)
        started.run.stop()
        assert started.wait("stopped", "done", "failed") == "stopped", started.text
        saved = started.run.checkpoints()
        assert len(saved) == 1 and saved[0] == last_step(started.run.path) < 400
        started.run.resume()
        started.wait_for_step(saved[0] + 2)
        events = [point for point in read_metrics(started.run.path) if point.get("event") == "resumed"]
        assert [event["step"] for event in events] == saved
        assert "[default0]:" in started.text or "[default1]:" in started.text
    finally:
        started.end()
    assert not started.processes()
