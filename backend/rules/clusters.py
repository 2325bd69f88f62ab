"""Rules about jobs on a cluster."""

from __future__ import annotations

from dataclasses import replace

from backend.launch.clusters.answers import UNKNOWN_GPU
from backend.launch.clusters.slurm import minutes, time_text
from backend.machine import GIB, Gpu
from backend.rules.base import Case, Example, Fix, Violation, advice, error, warning
from backend.rules.examples import DEMO, TWO_H100
from backend.runs.throughput import duration
from backend.wording import counted

SLURM_SPEC = {"launch.place": "slurm"}
RAY_SPEC = {"launch.place": "ray", "parallel.strategy": "ddp", "launch.nnodes": 2}
PARTITION = replace(TWO_H100, name="Slurm partition gpu")
RAY_CLUSTER = replace(TWO_H100, name="Ray cluster")
ON_KUBERNETES = {"launch.place": "kubernetes"}
LONG_JOB = {**SLURM_SPEC, "slurm.time_limit": "5", "train.duration": "steps", "train.max_steps": 1_000_000}
IN_POD = {**ON_KUBERNETES, "kubernetes.image": "registry/footplate:1", "kubernetes.volumes": ("runs=/runs",)}


def _here(case: Case) -> tuple[Fix, ...]:
    """The fix that makes a job a run on this machine; with fewer nodes, its batches are smaller."""
    count = case.run.nnodes
    cost = f"one node instead of {count}, so a smaller global batch size" if count > 1 else ""
    return (Fix("Run on this machine", {"launch.place": "local"}, safe=False, cost=cost),)


@error(
    "CLU001",
    fields=("launch.place", "slurm.partition"),
    title="The cluster cannot run this job",
    source="Slurm: sinfo and sbatch --test-only on this machine; Ray: GET /api/v0/nodes of its dashboard; "
    "Kubernetes: GET /api/v1/nodes, and POST of the job with dryRun=All",
    manual_fix="If the job requests what the cluster does not have, change it in the section Devices and strategy.",
    fails_on=Example(SLURM_SPEC, facts=replace(DEMO, place_problem="Slurm has no partition gpu. It has main.")),
    passes_on=Example(SLURM_SPEC),
    at_start=True,
)
def cluster_refuses_the_job(case: Case) -> Violation | None:
    """Slurm lists its partitions, and sbatch --test-only says whether the job could ever start; Ray lists its nodes.
    Kubernetes lists its nodes and validates the job without creating it. A job that requests more than the nodes have
    is refused, or waits forever."""
    facts = case.facts
    if case.spec.launch.place == "local" or not facts.place_problem:
        return None
    if facts.is_place_known:
        return Violation(facts.place_problem, _here(case))
    reach = "If this machine cannot reach the cluster, start Footplate on one that can, such as a login node."
    said = f"{facts.place_problem.rstrip('.')}."
    return Violation(said, _here(case), title="Footplate cannot ask the cluster for its nodes", manual_fix=reach)


@error(
    "CLU002",
    fields=("launch.gpu_model",),
    title="The GPUs of the cluster are unknown",
    source="sinfo --format=%G: a generic resource may have no type, as in gpu:8",
    manual_fix="Set launch.gpu_model to the product name of the GPUs, such as H100, or a name with the memory, such as "
    "MI300X 192GB.",
    fails_on=Example(SLURM_SPEC, replace(PARTITION, gpus=(Gpu(0, UNKNOWN_GPU, 80 * GIB, 80 * GIB),))),
    passes_on=Example(SLURM_SPEC, PARTITION),
    at_start=True,
)
def cluster_gpus_unknown(case: Case) -> Violation | None:
    """Slurm does not report which GPUs a partition has unless its administrator has configured their type, and Ray
    names only types that it knows. Kubernetes has the type if a GPU operator or the cloud has labeled the nodes. The
    memory and bf16 units of the GPUs decide whether a run fits and works."""
    if case.spec.launch.place == "local" or not any(gpu.name == UNKNOWN_GPU for gpu in case.gpus):
        return None
    message = f"{case.machine.name} has GPUs of a type that the cluster does not report or Footplate does not know."
    return Violation(message, _here(case))


@warning(
    "CLU003",
    fields=("launch.nnodes",),
    title="The cluster has fewer nodes than the run",
    source="Ray: GET /api/v0/nodes of its dashboard; Kubernetes: GET /api/v1/nodes",
    fails_on=Example(RAY_SPEC, RAY_CLUSTER),
    passes_on=Example(RAY_SPEC, replace(RAY_CLUSTER, nodes=2)),
    at_start=True,
)
def too_few_nodes(case: Case) -> Violation | None:
    """A job of Ray or Kubernetes waits until the cluster has as many nodes as it needs. Only an autoscaler adds nodes
    automatically."""
    waits = case.spec.launch.place in ("ray", "kubernetes") and not case.facts.place_problem
    if not waits or case.run.nnodes <= (count := case.machine.nodes):
        return None
    usable = counted(count, "usable node")
    message = (
        f"This run needs {case.run.nnodes} nodes, but the {case.machine.name} has only {usable}. The run waits until "
        "nodes are added, by an autoscaler or by hand."
    )
    return Violation(message, (Fix(f"Use {counted(count, 'node')}", {"launch.nnodes": count}, safe=False),))


@error(
    "CLU004",
    fields=("launch.place", "kubernetes.image", "kubernetes.volumes"),
    title="A Kubernetes job needs an image and a volume",
    source="https://kubernetes.io/docs/concepts/workloads/pods/: a container needs an image, and keeps no files",
    manual_fix="Set kubernetes.image to an image with Footplate, and kubernetes.volumes to the volume claim with the "
    "runs folder, such as runs=/runs.",
    fails_on=Example(ON_KUBERNETES),
    passes_on=Example(IN_POD),
)
def incomplete_pod(case: Case) -> Violation | None:
    """The pods run the trainer from an image, and share the run's folder through a volume."""
    if case.spec.launch.place != "kubernetes":
        return None
    cluster = case.spec.kubernetes
    missing = [name for name in ("image", "volumes") if not getattr(cluster, name)]
    return Violation(f"The Kubernetes job has no {' and no '.join(missing)}.", _here(case)) if missing else None


@error(
    "CLU005",
    fields=("kubernetes.kubeflow_runtime", "kubernetes.secret", "kubernetes.priority_class"),
    title="A TrainJob has no secret and no priority class",
    source="Kubeflow Trainer 2.3: PodSpecPatch and ContainerPatch of trainer.kubeflow.org/v1alpha1",
    fixes=(Fix("Use a Job", {"kubernetes.kubeflow_runtime": ""}, safe=False, cost="Kubeflow does not manage it"),),
    manual_fix="Set the secret and the priority class in the training runtime, and leave kubernetes.secret and "
    "kubernetes.priority_class empty.",
    fails_on=Example({**IN_POD, "kubernetes.kubeflow_runtime": "torch-distributed", "kubernetes.secret": "tokens"}),
    passes_on=Example({**IN_POD, "kubernetes.secret": "tokens"}),
)
def missing_in_train_job(case: Case) -> str | None:
    """A TrainJob can change only some settings of the pods of its training runtime."""
    cluster = case.spec.kubernetes
    if case.spec.launch.place != "kubernetes" or not cluster.kubeflow_runtime:
        return None
    chosen = [f"kubernetes.{name}" for name in ("secret", "priority_class") if getattr(cluster, name)]
    return f"A TrainJob cannot set {' and '.join(chosen)}." if chosen else None


@warning(
    "CLU008",
    fields=("slurm.time_limit", "slurm.requeue"),
    title="The time limit of the Slurm job is shorter than the predicted time of the run",
    source="sbatch(1): --time; the time estimate",
    fixes=(Fix("Continue automatically after the time limit", {"slurm.requeue": True}),),
    fails_on=Example({**LONG_JOB, "slurm.requeue": False}, TWO_H100, DEMO),
    passes_on=Example(LONG_JOB, TWO_H100, DEMO),
)
def job_shorter_than_run(case: Case) -> Violation | None:
    """Slurm ends a job at its time limit. Without slurm.requeue, the run does not continue, and has only the
    checkpoints that it saved before. The limit is compared with the lower end of the predicted time."""
    slurm = case.spec.slurm
    if case.spec.launch.place != "slurm" or slurm.requeue or not slurm.time_limit or case.time.run_seconds is None:
        return None
    least, predicted, _ = case.time.run_seconds
    if least <= 60 * minutes(slurm.time_limit):
        return None
    limit = duration(60 * minutes(slurm.time_limit))
    message = (
        f"slurm.time_limit ends the job after {limit}, and slurm.requeue is off. The run is predicted to take "
        f"{duration(predicted)}, at least {duration(least)}, so it would end unfinished."
    )
    return Violation(message, _sufficient_limit(case))


@advice(
    "CLU009",
    fields=("slurm.time_limit",),
    title="No time limit is set for the Slurm job",
    source="sbatch(1): --time; slurm.conf(5): SchedulerType, sched/backfill; the time estimate",
    fails_on=Example({**LONG_JOB, "slurm.time_limit": ""}, TWO_H100, DEMO),
    passes_on=Example(LONG_JOB, TWO_H100, DEMO),
)
def job_without_time_limit(case: Case) -> Violation | None:
    """Without a time limit, a job has the limit of its partition. Slurm starts a job earlier if its limit shows that it
    ends before the devices are needed for another one (backfill)."""
    if case.spec.launch.place != "slurm" or case.spec.slurm.time_limit or not _sufficient_limit(case):
        return None
    _, predicted, most = case.time.run_seconds or (0.0, 0.0, 0.0)
    message = (
        f"slurm.time_limit is empty, so the job has the time limit of its partition. The run is predicted to take "
        f"{duration(predicted)}, at most {duration(most)}."
    )
    return Violation(message, _sufficient_limit(case))


def _sufficient_limit(case: Case) -> tuple[Fix, ...]:
    """The fix that sets a time limit above the predicted range; none if the time of the run is not predicted."""
    if (seconds := case.time.time_limit) is None:
        return ()
    text = time_text(seconds)
    return (Fix(f"Set time limit to {text}", {"slurm.time_limit": text}, cost="longer jobs may wait longer"),)
