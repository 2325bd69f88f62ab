"""The clusters that a run's job can be submitted to: how a plan becomes a job, and what the cluster says before the
start: its nodes, and why it would not run the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from backend.config import RunSpec
from backend.inspect.facts import InputFacts
from backend.launch.clusters import kubernetes, kubernetes_nodes, ray, ray_nodes, slurm, slurm_nodes
from backend.machine import Machine
from backend.resolve import ResolvedRun, resolve
from backend.runs import Plan
from backend.runs.follower import ClusterError


class Job(Protocol):
    """A module that makes the jobs of one kind of cluster."""

    def as_job(self, made: Plan, spec: RunSpec, run: ResolvedRun, machine: Machine) -> Plan:
        """The plan of one node as a job that the cluster starts on all of them."""

    def cpus(self, spec: RunSpec, run: ResolvedRun, machine: Machine) -> int:
        """CPUs of the job on each node."""


class Nodes(Protocol):
    """A module that asks one kind of cluster."""

    def machine(self, spec: RunSpec, here: Machine) -> tuple[Machine, str]:
        """The nodes that the job of `spec` runs on, with the packages of this machine; and why they are not known, as a
        sentence, or ''. Raises ClusterError if the cluster does not say which nodes it has."""

    def refusal(self, spec: RunSpec, run: ResolvedRun, nodes: Machine) -> str:
        """Why the cluster would refuse the job, or could never start it, as a sentence, or ''."""


# A place of a run -> its modules.
CLUSTERS: Mapping[str, tuple[Job, Nodes]] = {
    "slurm": (slurm, slurm_nodes),
    "ray": (ray, ray_nodes),
    "kubernetes": (kubernetes, kubernetes_nodes),
}


def job_of(spec: RunSpec) -> Job | None:
    """The module that makes the job of `spec`; None for a run on this machine."""
    return CLUSTERS[spec.launch.place][0] if spec.launch.place in CLUSTERS else None


def cores(spec: RunSpec, run: ResolvedRun, machine: Machine) -> int:
    """CPU cores that the run has on each node: those of its job, or all of this machine."""
    job = job_of(spec)
    return job.cpus(spec, run, machine) if job else machine.cores


def ask(spec: RunSpec, here: Machine, facts: InputFacts) -> tuple[Machine, InputFacts]:
    """The machine that the checks are about, and the facts with the cluster's objection. A run on this machine, or one
    that is planned for a described machine, asks no cluster."""
    if spec.launch.place not in CLUSTERS or here.name:
        return here, facts
    _, cluster = CLUSTERS[spec.launch.place]
    try:
        machine, problem = cluster.machine(spec, here)
    except ClusterError as error:
        return here, replace(facts, place_problem=str(error), is_place_known=False)
    problem = problem or cluster.refusal(spec, resolve(spec, machine, facts), machine)
    return machine, replace(facts, place_problem=problem)
