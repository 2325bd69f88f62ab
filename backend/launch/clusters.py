"""What the cluster of a run says before a job is submitted: its nodes, and why it would not run the job."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from backend.config import RunSpec
from backend.inspect.facts import InputFacts
from backend.launch import kubernetes_cluster, ray_cluster, slurm_cluster
from backend.machine import Machine
from backend.resolve import ResolvedRun, resolve


class Answers(Protocol):
    """A module about one kind of cluster."""

    def machine(self, spec: RunSpec, here: Machine) -> tuple[Machine, str]:
        """The nodes that the job of `spec` runs on, with the packages of this machine; and why they are not known, as a
        sentence, or ''."""

    def refusal(self, spec: RunSpec, run: ResolvedRun, nodes: Machine) -> str:
        """Why the cluster would refuse the job, or could never start it, as a sentence, or ''."""


ANSWERS: dict[str, Answers] = {"slurm": slurm_cluster, "ray": ray_cluster, "kubernetes": kubernetes_cluster}


def ask(spec: RunSpec, here: Machine, facts: InputFacts) -> tuple[Machine, InputFacts]:
    """The machine that the checks are about, and the facts with the cluster's objection. A run on this machine, or one
    that is planned for a described machine, asks no cluster."""
    cluster = ANSWERS.get(spec.launch.place)
    if not cluster or here.name:
        return here, facts
    machine, problem = cluster.machine(spec, here)
    problem = problem or cluster.refusal(spec, resolve(spec, machine, facts), machine)
    return machine, replace(facts, place_problem=problem)
