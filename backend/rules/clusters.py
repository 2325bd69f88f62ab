"""Rules about jobs on a cluster."""

from __future__ import annotations

from dataclasses import replace

from backend.launch.answers import UNKNOWN_GPU
from backend.machine import GIB, Gpu
from backend.rules.base import Case, Example, Fix, Violation, counted, rule
from backend.rules.examples import DEMO, TWO_H100

SLURM_SPEC = {"launch.place": "slurm"}
RAY_SPEC = {"launch.place": "ray", "parallel.strategy": "ddp", "launch.nnodes": 2}
HERE = Fix("Run on this machine", {"launch.place": "local"}, safe=False, cost="on one node")
PARTITION = replace(TWO_H100, name="Slurm partition gpu")
RAY_CLUSTER = replace(TWO_H100, name="Ray cluster")


@rule(
    "CLU001",
    "error",
    fields=("launch.place", "slurm.partition"),
    title="The cluster cannot run this job",
    source="Slurm: sinfo and sbatch --test-only on this machine; Ray: GET /api/v0/nodes of its dashboard",
    fixes=(HERE,),
    manual_fix="Change what the job requests in the section Devices, such as partition, nodes, CPUs or time limit.",
    fails_on=Example(SLURM_SPEC, facts=replace(DEMO, place_problem="Slurm has no partition gpu. It has main.")),
    passes_on=Example(SLURM_SPEC),
    at_start=True,
)
def cluster_refuses_the_job(case: Case) -> str | None:
    """Slurm lists its partitions, and sbatch --test-only says whether the job could ever start; Ray lists its nodes. A
    job that requests more than its nodes have is refused, or waits forever."""
    return case.facts.place_problem or None if case.spec.launch.place != "local" else None


@rule(
    "CLU002",
    "error",
    fields=("launch.gpu_model",),
    title="The GPUs of the cluster are unknown",
    source="sinfo --format=%G: a generic resource may have no type, as in gpu:8",
    fixes=(HERE,),
    manual_fix="Set launch.gpu_model to the product name of the GPUs, such as H100, or a name with the memory, such as "
    "MI300X 192GB.",
    fails_on=Example(SLURM_SPEC, replace(PARTITION, gpus=(Gpu(0, UNKNOWN_GPU, 80 * GIB, 80 * GIB),))),
    passes_on=Example(SLURM_SPEC, PARTITION),
    at_start=True,
)
def cluster_gpus_unknown(case: Case) -> str | None:
    """Slurm does not report which GPUs a partition has unless its administrator has configured their type, and Ray
    names only types that it knows. The memory and bf16 units of the GPUs decide whether a run fits and works."""
    if case.spec.launch.place == "local" or not any(gpu.name == UNKNOWN_GPU for gpu in case.gpus):
        return None
    return f"{case.machine.name} has GPUs whose type the cluster does not report, or that is not known here."


@rule(
    "CLU003",
    "warning",
    fields=("launch.nnodes",),
    title="The Ray cluster has fewer nodes than the run",
    source="GET /api/v0/nodes of Ray's dashboard",
    fails_on=Example(RAY_SPEC, RAY_CLUSTER),
    passes_on=Example(RAY_SPEC, replace(RAY_CLUSTER, nodes=2)),
    at_start=True,
)
def too_few_ray_nodes(case: Case) -> Violation | None:
    """A Ray job waits until the cluster has as many nodes as it reserves. Only an autoscaler adds them by itself."""
    if case.spec.launch.place != "ray" or case.facts.place_problem or case.run.nnodes <= case.machine.nodes:
        return None
    count = case.machine.nodes
    message = (
        f"This run needs {case.run.nnodes} nodes, and the Ray cluster has {count} that it can use. The run waits until "
        "an autoscaler or a person adds nodes."
    )
    return Violation(message, (Fix(f"Use {counted(count, 'node')}", {"launch.nnodes": count}, safe=False),))
