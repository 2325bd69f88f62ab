"""The clusters that know the jobs of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from backend.runs import JOB
from backend.runs.follower import Cluster, ClusterError, answer, is_interruption, read, stop_request, unended
from backend.runs.kubernetes import Kubernetes
from backend.runs.ray import Ray
from backend.runs.slurm import Slurm

CLUSTERS: Mapping[str, Callable[[Path], Cluster]] = {
    Slurm.name: lambda _: Slurm(),
    Ray.name: Ray,
    Kubernetes.name: Kubernetes,
}


def is_interrupted(folder: Path) -> bool:
    """Whether a cluster, and not a user, has requested that the run stops."""
    request = stop_request(folder)
    return any(is_interruption(request, cluster.interruption) for cluster in (Slurm, Ray, Kubernetes))


def end(folder: Path) -> None:
    """Cancel the job of a run whose follower was killed, and wait until it is gone. Raises ClusterError."""
    if not (job := unended(folder)):
        return
    forget = f"If the cluster no longer exists, delete {JOB} in {folder}."
    make = CLUSTERS.get(name := str(read(folder).get("cluster", "")))
    if not make:
        raise ClusterError(f"{JOB} names the unknown cluster {name!r}. {forget}")
    cluster = make(folder)
    try:
        answer(cluster.end, job)
    except ClusterError as error:
        raise ClusterError(f"{error} {forget}") from error
    if left := cluster.wait_for_processes():
        raise ClusterError(left)
