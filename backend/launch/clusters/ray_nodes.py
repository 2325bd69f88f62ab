"""What a Ray cluster says before a job is submitted: its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend.config import RunSpec
from backend.launch.clusters import ray
from backend.launch.clusters.answers import as_machine, gpus, kept, relied_on
from backend.machine import Machine
from backend.resolve import ResolvedRun
from backend.runs.follower import ClusterError
from backend.runs.ray import address, request, token

ACCELERATOR = "accelerator_type:"  # prefix of Ray's resources for types of GPUs
NODES = "/api/v0/nodes?detail=true"
MOST = 10_000  # nodes of an answer: the most that Ray allows; its default, 100, counts nodes that have ended too
LEAST = 1e-4  # of a resource: Ray's smallest fraction


@dataclass(frozen=True)
class Node:
    """A node of the cluster, and the resources that it has, whether in use or not."""

    cores: int
    gpus: int
    gpu_type: str
    ram_bytes: int
    resources: Mapping[str, float]


def machine(spec: RunSpec, here: Machine) -> tuple[Machine, str]:
    """The nodes that the job of `spec` runs on, with the packages of this machine; and why they are not known, as a
    sentence, or ''. Raises ClusterError."""
    found = nodes()
    required = ray.custom_resources(spec)
    matching = [
        node for node in found if all(node.resources.get(name, 0) >= max(n, LEAST) for name, n in required.items())
    ]
    if not matching:
        what = f" with the resources {', '.join(spec.ray.resources)}" if required else ""
        return here, f"The Ray cluster at {address()} has no node{what}."
    node, count = relied_on(spec, matching, spec.ray.cpus)
    devices = gpus(node.gpus, spec.launch.gpu_model or node.gpu_type)
    return as_machine(here, "Ray cluster", devices, count, node.cores, node.ram_bytes), ""


def refusal(spec: RunSpec, run: ResolvedRun, nodes: Machine) -> str:
    """Why no node could ever run the job, as a sentence, or ''. Fewer nodes than the run needs are no reason: Ray may
    add some, and the run waits for them."""
    wanted = ray.resources(spec, run, nodes)
    if wanted["CPU"] > nodes.cores:
        most = f"the nodes of the Ray cluster that could run the job have at most {nodes.cores}"
        return f"Each node would reserve {wanted['CPU']:g} CPUs, and {most}."
    return ""


def nodes() -> tuple[Node, ...]:
    """The nodes that are alive. Raises ClusterError."""
    found: tuple[Node, ...] = kept(("ray", address(), token()), lambda: parse(request(f"{NODES}&limit={MOST}")))
    return found


def parse(answer: Any) -> tuple[Node, ...]:
    """The living nodes in the answer of Ray's state API."""
    try:
        rows = answer["data"]["result"]["result"]
        return tuple(_node(row["resources_total"]) for row in rows if row["state"] == "ALIVE")
    except (KeyError, TypeError, AttributeError):
        raise ClusterError(f"Ray at {address()} does not list its nodes. Ray 2.9 or later is required.") from None


def _node(resources: Mapping[str, float]) -> Node:
    kind = next((name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR)), "")
    ram = resources.get("memory", 0) + resources.get("object_store_memory", 0)
    return Node(int(resources.get("CPU", 0)), int(resources.get("GPU", 0)), kind, int(ram), resources)
