"""The cluster that a run's job was submitted to."""

from __future__ import annotations

from pathlib import Path

from backend.runs import JOB
from backend.runs.follower import Cluster, ClusterError, is_interruption, read, stop_request, unended
from backend.runs.kubernetes import Kubernetes
from backend.runs.ray import Ray
from backend.runs.slurm import Slurm


def cluster_of(folder: Path) -> Cluster:
    """The cluster that job.json names."""
    makers = {Ray.name: Ray, Kubernetes.name: Kubernetes}
    make = makers.get(read(folder).get("cluster", ""))
    return make(folder) if make else Slurm()


def is_interrupted(folder: Path) -> bool:
    """Whether the run's cluster, and not a user, has requested that it stops."""
    return is_interruption(stop_request(folder), cluster_of(folder).interruption)


def end(folder: Path) -> None:
    """Cancel the job of a run whose follower was killed, and wait until it is gone. Raises ClusterError."""
    if not (job := unended(folder)):
        return
    cluster = cluster_of(folder)
    try:
        cluster.end(job)
    except ClusterError as error:
        raise ClusterError(f"{error} If the cluster no longer exists, delete {JOB} in {folder}.") from error
    if left := cluster.wait_for_processes():
        raise ClusterError(left)
