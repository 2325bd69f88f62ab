"""What a Kubernetes cluster says before a job is submitted: its nodes, and why it would refuse the job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from backend.config import RunSpec
from backend.launch.clusters import kubernetes
from backend.launch.clusters.answers import as_machine, gpus, kept, ram_of_job, relied_on
from backend.machine import GIB, Machine
from backend.resolve import ResolvedRun
from backend.runs import Plan
from backend.runs.follower import ClusterError
from backend.runs.kubernetes import Forbidden, api, filled
from backend.wording import data_size

# Labels by which GPU operators and clouds name the GPUs of a node.
GPU_LABELS = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator")
# Names of Google's clouds that do not say which of two sizes the GPU has.
GKE_GPUS = {"nvidia-tesla-a100": "A100 40GB", "nvidia-tesla-v100": "V100 16GB"}
UNITS: Mapping[str, float] = {
    "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "": 1,
}  # fmt: skip
LARGEST_NODE = 8  # GPUs of a node, where the user may not list nodes


@dataclass(frozen=True)
class Node:
    """A node that runs pods, and the resources that it has for them, whether in use or not."""

    cores: int
    ram_bytes: int
    gpus: int
    gpu_type: str
    labels: Mapping[str, str]
    taints: tuple[str, ...]


def machine(spec: RunSpec, here: Machine) -> tuple[Machine, str]:
    """The nodes that the job of `spec` runs on, with the packages of this machine; and why they are not known, as a
    sentence, or ''. A user who may not list nodes says with launch.gpu_model what they are. Raises ClusterError."""
    try:
        found = nodes(spec.kubernetes.gpu_resource)
    except Forbidden:
        return _unlisted(spec, here), ""
    labels = dict(line.split("=") for line in spec.kubernetes.node_labels)
    tolerated = {re.split("[=:]", line)[0] for line in spec.kubernetes.tolerations} | {spec.kubernetes.gpu_resource}
    matching = [node for node in found if labels.items() <= node.labels.items() and tolerated.issuperset(node.taints)]
    if not matching:
        what = f" with the labels {', '.join(spec.kubernetes.node_labels)}" if labels else ""
        taints = sorted({taint for node in found for taint in node.taints} - tolerated)
        why = f" Set kubernetes.tolerations: the cluster's nodes have the taints {', '.join(taints)}." if taints else ""
        return here, f"The Kubernetes cluster has no node{what} that can run the pods.{why}"
    wanted = spec.kubernetes.memory_gib * GIB
    fitting = [node for node in matching if node.ram_bytes >= wanted]
    node, count = relied_on(spec, fitting or matching, spec.kubernetes.cpus)
    devices = gpus(node.gpus, spec.launch.gpu_model or node.gpu_type)
    ram = ram_of_job(node.ram_bytes, spec.kubernetes.memory_gib)
    described = as_machine(here, "Kubernetes cluster", devices, count, node.cores, ram)
    if not fitting:
        most = data_size(max(node.ram_bytes for node in matching))
        return described, (
            f"Each pod would request {spec.kubernetes.memory_gib} GiB of RAM, and the nodes of the Kubernetes cluster "
            f"have at most {most}."
        )
    return described, ""


def _unlisted(spec: RunSpec, here: Machine) -> Machine:
    """Nodes as the user describes them: those of launch.gpu_model, or without GPUs."""
    count = max(LARGEST_NODE, spec.launch.nproc_per_node) if spec.launch.device != "cpu" else 0
    devices = gpus(count, spec.launch.gpu_model)
    cores, ram = max(here.cores, spec.kubernetes.cpus), ram_of_job(0, spec.kubernetes.memory_gib)
    return as_machine(here, "Kubernetes cluster", devices, spec.launch.nnodes, cores, ram)


def refusal(spec: RunSpec, run: ResolvedRun, nodes: Machine) -> str:
    """Why the cluster would refuse the job, as a sentence; '' if it accepts it. Asks for a dry run of the same
    manifest."""
    if not spec.kubernetes.image:
        return ""  # a rule reports this
    wanted = kubernetes.cpus(spec, run, nodes)
    if wanted > nodes.cores:
        most = f"the nodes of the Kubernetes cluster that could run it have at most {nodes.cores}"
        return f"Each pod would request {wanted} CPUs, and {most}."
    objects = kubernetes.manifest(Plan((nodes.python,)), spec, run, nodes)
    text = yaml.safe_dump_all(objects)
    try:
        kept((api().host, text), lambda: [api().create(each, True) for each in filled(text, "footplate-check", "/")])
    except ClusterError as error:
        return str(error)
    return ""


def nodes(gpu_resource: str) -> tuple[Node, ...]:
    """The nodes that run pods. Raises ClusterError."""
    cluster = api()
    rows = kept((cluster.host, "nodes"), lambda: cluster.items(cluster.core.list_node))
    return tuple(parse(rows, gpu_resource))


def parse(rows: Iterable[Mapping[str, Any]], gpu_resource: str) -> Iterable[Node]:
    """The nodes among the objects that the cluster lists."""
    for row in rows:
        spec, labels = row.get("spec", {}), row["metadata"].get("labels", {})
        if spec.get("unschedulable"):
            continue
        amounts = row["status"]["allocatable"]
        kind = next((labels[label] for label in GPU_LABELS if label in labels), "")
        taints = tuple(each["key"] for each in spec.get("taints", ()) if each.get("effect") != "PreferNoSchedule")
        yield Node(
            int(amount(amounts.get("cpu", "0"))), int(amount(amounts.get("memory", "0"))),
            int(amount(amounts.get(gpu_resource, "0"))), GKE_GPUS.get(kind, kind), labels, taints,
        )  # fmt: skip


def amount(text: str) -> float:
    """A quantity of Kubernetes, such as 7910m or 131911984Ki; 0 if it is not one."""
    found = re.fullmatch(r"([\d.]+)([A-Za-z]*)", str(text))
    return float(found[1]) * UNITS.get(found[2], 0) if found else 0
