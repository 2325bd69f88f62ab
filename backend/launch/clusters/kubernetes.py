"""Kubernetes: the manifest of a run's job.

An Indexed Job has one pod per node, and a headless Service gives them names. With a Kubeflow runtime the manifest is a
TrainJob instead. torchrun reads nodes, node rank and master address from PET_* variables, so that one command serves
all nodes. Each pod runs `kubernetes_node.py`. {JOB_NAME} and {RUN_FOLDER} are filled in when the run is submitted or
exported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from backend.config import RunSpec
from backend.config.processes import DEFAULT_PORT
from backend.launch.clusters.share import cpus_of_gpus, with_python
from backend.machine import Machine
from backend.resolve import ResolvedRun
from backend.runs import KUBERNETES_JOB, Plan
from backend.runs.kubernetes import ATTEMPTS, FOLDER, JOB, NAME
from backend.runs.kubernetes_node import COMES_BACK

Tree = dict[str, Any]

KEPT_SECONDS = 86_400  # how long a job that has ended is kept for kubectl
CONTAINER = "node"  # its name in Kubeflow's runtimes
LABELS = {"app.kubernetes.io/managed-by": "footplate"}
QUEUE = "kueue.x-k8s.io/queue-name"
ADDED = ("containers", "volumes", "tolerations")  # lists of extra_pod_spec that remove nothing
COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
STOP_SECONDS = 30  # to end the processes after the checkpoint of a stop


def as_job(made: Plan, spec: RunSpec, run: ResolvedRun, machine: Machine) -> Plan:
    """The plan of one node as that of a job on all nodes: its command submits the job and waits for its end."""
    text = "---\n".join(yaml.safe_dump(part, sort_keys=False, width=120) for part in manifest(made, spec, run, machine))
    command = (machine.python, "-m", "backend.runs.kubernetes")
    return replace(made, argv=command, files={**made.files, KUBERNETES_JOB: text}, other_nodes={}, devices={})


def cpus(spec: RunSpec, run: ResolvedRun, machine: Machine) -> int:
    """CPUs that the job requests on each node."""
    return spec.kubernetes.cpus or max(1, int(0.9 * cpus_of_gpus(run, machine)))


def manifest(made: Plan, spec: RunSpec, run: ResolvedRun, machine: Machine) -> list[Tree]:
    """The objects of the job. `made`: the plan of one node."""
    trainer = _container(made, spec, run, machine)
    if spec.kubernetes.kubeflow_runtime:
        return [_train_job(spec, run, trainer)]
    job = _job(spec, run, trainer)
    return [job, _service(spec)] if run.nnodes > 1 else [job]


def _container(made: Plan, spec: RunSpec, run: ResolvedRun, machine: Machine) -> Tree:
    """The container of each pod."""
    cluster = spec.kubernetes
    variables = {**made.defaults, **made.env, JOB: NAME, ATTEMPTS: str(spec.launch.max_restarts)}
    amounts: Tree = {"cpu": str(cpus(spec, run, machine))}
    limits: Tree = {}
    if cluster.memory_gib:
        amounts["memory"] = limits["memory"] = f"{cluster.memory_gib}Gi"
    if run.device != "cpu":
        limits[cluster.gpu_resource] = str(run.nproc_per_node)
    others = (line.split("=") for line in cluster.resources)
    limits |= {name: amount for name, amount in others if name not in limits}  # as many GPUs as there are processes
    return {
        "name": CONTAINER,
        "image": cluster.image,
        "workingDir": FOLDER,
        "command": [cluster.python, "-m", "backend.runs.kubernetes_node", "--"],
        "args": [*map(_literal, with_python(made.argv, machine, cluster.python))],
        "env": [{"name": name, "value": _literal(value)} for name, value in variables.items()],
        **({"envFrom": [{"secretRef": {"name": cluster.secret}}]} if cluster.secret else {}),
        "resources": {"requests": {**amounts, **limits}, **({"limits": limits} if limits else {})},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path, _ in _volumes(cluster.volumes)],
    }


def _literal(text: str) -> str:
    """A text as Kubernetes reads it in arguments and variables, where $(NAME) is a variable and $$ is a $."""
    return text.replace("$", "$$")


def _pod(spec: RunSpec) -> Tree:
    """The spec of each pod, without its container."""
    cluster = spec.kubernetes
    gpu_taint = {"key": cluster.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    chosen: Tree = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(spec.save.stop_timeout) + STOP_SECONDS,
        "nodeSelector": dict(line.split("=") for line in cluster.node_labels),
        "tolerations": [gpu_taint, *map(_toleration, cluster.tolerations)],
        "priorityClassName": cluster.priority_class,
        "serviceAccountName": cluster.service_account,
        "volumes": [{"name": name, **source} for name, _, source in _volumes(cluster.volumes)],
    }
    return {key: value for key, value in chosen.items() if value}


def _volumes(lines: Iterable[str]) -> list[tuple[str, str, Tree]]:
    """(name, path in the pod, source) of each volume. /dev/shm of a container has 64 MiB otherwise, too little for
    DataLoader workers and NCCL."""
    found = []
    for number, line in enumerate(lines):
        source, _, path = line.partition("=")
        if source.startswith("/"):
            found.append((f"volume-{number}", path, {"hostPath": {"path": source}}))
        else:
            found.append((f"volume-{number}", path, {"persistentVolumeClaim": {"claimName": source}}))
    return [*found, ("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})]


def _toleration(line: str) -> Tree:
    taint, _, effect = line.partition(":")
    key, equals, value = taint.partition("=")
    found = {"key": key, "operator": "Equal" if equals else "Exists", "value": value, "effect": effect}
    return {name: text for name, text in found.items() if text}


def _metadata(spec: RunSpec) -> Tree:
    cluster = spec.kubernetes
    labels = {**LABELS, **({QUEUE: cluster.queue} if cluster.queue else {})}
    return {"name": NAME, **({"namespace": cluster.namespace} if cluster.namespace else {}), "labels": labels}


def _job(spec: RunSpec, run: ResolvedRun, container: Tree) -> Tree:
    """An Indexed Job. Kubernetes replaces a pod that it has evicted, or whose exit code says that it comes back."""
    rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": COMPLETION_INDEX}}}
    master = f"{NAME}-0.{NAME}" if run.nnodes > 1 else "localhost"
    nodes = {"PET_NNODES": str(run.nnodes), "PET_MASTER_ADDR": master, "PET_MASTER_PORT": _port(spec)}
    env = [*({"name": name, "value": value} for name, value in nodes.items()), rank, *container["env"]]
    on_exit = {"containerName": CONTAINER, "operator": "In", "values": [COMES_BACK]}
    pod = {**_pod(spec), **({"subdomain": NAME} if run.nnodes > 1 else {}), "containers": [{**container, "env": env}]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(spec),
        "spec": {
            "completionMode": "Indexed",
            "completions": run.nnodes,
            "parallelism": run.nnodes,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            **({"suspend": True} if spec.kubernetes.queue else {}),
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onExitCodes": on_exit},
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {"metadata": {"labels": LABELS}, "spec": _with_extra(pod, spec)},
        },
    }


def _port(spec: RunSpec) -> str:
    return str(spec.launch.master_port or DEFAULT_PORT)


def _service(spec: RunSpec) -> Tree:
    """Gives host names to the pods of the job; that of node 0 is the master address."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**_metadata(spec), "labels": LABELS},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": NAME},
        },
    }


def _train_job(spec: RunSpec, run: ResolvedRun, container: Tree) -> Tree:
    """A TrainJob of Kubeflow Trainer 2, whose runtime sets PET_*. It has no working directory, so the node's program
    gets the run's folder as an argument."""
    command, trainer = container["command"], {key: container[key] for key in ("image", "args", "env")}
    pod = _pod(spec)
    pod.pop("restartPolicy")
    mounts = {"name": CONTAINER, "volumeMounts": container["volumeMounts"]}
    patch = _with_extra({**pod, "containers": [mounts]}, spec)
    job = {"name": CONTAINER, "template": {"spec": {"template": {"spec": patch}}}}
    patches = {"manager": "footplate.io/run", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(spec),
        "spec": {
            "runtimeRef": {"name": spec.kubernetes.kubeflow_runtime},
            **({"suspend": True} if spec.kubernetes.queue else {}),
            "trainer": {
                **trainer,
                "command": [*command[:-1], f"--folder={FOLDER}", command[-1]],
                "numNodes": run.nnodes,
                "numProcPerNode": run.nproc_per_node,
                "resourcesPerNode": container["resources"],
            },
            "runtimePatches": [patches],
        },
    }


def _with_extra(pod: Tree, spec: RunSpec) -> Tree:
    """The pod with the user's keys. Without the container of the run, or a volume that it mounts, nothing would be
    trained, so that containers, volumes and tolerations are added to those of the run, or to the one of their name."""
    extra: Mapping[str, Any] = json.loads(spec.kubernetes.extra_pod_spec or "{}")
    both = [key for key in ADDED if isinstance(extra.get(key), list) and key in pod]
    return {**pod, **extra, **{key: _together(pod[key], extra[key]) for key in both}}


def _together(own: Sequence[Tree], given: Sequence[Any]) -> list[Any]:
    """The entries of the run, with the keys of those that have the same name, and then the others."""
    named = {each["name"]: each for each in given if isinstance(each, Mapping) and "name" in each}
    known = {each.get("name") for each in own}
    others = [each for each in given if not isinstance(each, Mapping) or each.get("name", "") not in known]
    return [{**each, **named.get(each.get("name"), {})} for each in own] + others
