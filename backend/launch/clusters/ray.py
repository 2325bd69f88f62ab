"""Ray: what a run's job reserves and starts.

torchrun reads nodes, node rank and master address from PET_* variables, which the job's driver sets, so that one
command serves all nodes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from backend.config import RunSpec
from backend.launch.clusters.share import cpus_of_gpus
from backend.machine import Machine
from backend.resolve import ResolvedRun
from backend.runs import RAY_DRIVER, RAY_JOB, Plan

DRIVER = Path(__file__).parents[2] / "runs" / "ray_driver.py"


def as_job(made: Plan, spec: RunSpec, run: ResolvedRun, machine: Machine) -> Plan:
    """The plan of one node as that of a job on all nodes: its command submits the job and waits for its end."""
    job = {
        "nodes": run.nnodes,
        "resources": resources(spec, run, machine),
        "max_restarts": spec.launch.max_restarts,
        "ray_python": spec.ray.python,
        "python": machine.python,
        "command": made.argv,
    }
    files = {RAY_JOB: json.dumps(job, indent=2) + "\n", RAY_DRIVER: DRIVER.read_text(encoding="utf-8")}
    command = (machine.python, "-m", "backend.runs.ray")
    return replace(made, argv=command, files={**made.files, **files}, other_nodes={}, devices={})


def cpus(spec: RunSpec, run: ResolvedRun, machine: Machine) -> int:
    """CPUs that the job reserves on each node."""
    return spec.ray.cpus or cpus_of_gpus(run, machine)


def resources(spec: RunSpec, run: ResolvedRun, machine: Machine) -> dict[str, float]:
    """Everything that the job reserves on each node, by the names of Ray."""
    gpus = {"GPU": run.nproc_per_node} if run.device == "cuda" else {}
    return {**gpus, "CPU": cpus(spec, run, machine), **custom_resources(spec)}


def custom_resources(spec: RunSpec) -> dict[str, float]:
    """What the job reserves on each node in addition to CPUs and GPUs."""
    lines = (line.partition("=") for line in spec.ray.resources)
    return {name: float(amount) for name, _, amount in lines}
