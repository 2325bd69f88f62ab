"""Rules about jobs on a Slurm cluster."""

from __future__ import annotations

from dataclasses import replace

from backend.launch.slurm_cluster import UNKNOWN_GPU
from backend.machine import GIB, Gpu
from backend.rules.base import Case, Example, Fix, rule
from backend.rules.examples import DEMO, TWO_H100

SLURM_SPEC = {"launch.place": "slurm"}
HERE = Fix("Run on this machine", {"launch.place": "local"}, safe=False, cost="on one node")
PARTITION = replace(TWO_H100, name="Slurm partition gpu")


@rule(
    "SLM001",
    "error",
    fields=("launch.place", "slurm.partition"),
    title="Slurm cannot run this job",
    source="sinfo and sbatch --test-only on this machine",
    fixes=(HERE,),
    manual_fix="Change what the job requests in the section Devices, such as partition, nodes or time limit.",
    fails_on=Example(SLURM_SPEC, facts=replace(DEMO, place_problem="Slurm has no partition gpu. It has main.")),
    passes_on=Example(SLURM_SPEC),
    at_start=True,
)
def slurm_refuses_the_job(case: Case) -> str | None:
    """Slurm lists its partitions, and sbatch --test-only says whether the job could ever start. A job that requests
    more than its partition has is refused, or waits forever."""
    return case.facts.place_problem or None if case.spec.launch.place == "slurm" else None


@rule(
    "SLM002",
    "error",
    fields=("slurm.gpu_model",),
    title="The GPUs of the partition are unknown",
    source="sinfo --format=%G: a generic resource may have no type, as in gpu:8",
    fixes=(HERE,),
    manual_fix="Set slurm.gpu_model to the product name of the GPUs, such as H100, or a name with the memory, such as "
    "MI300X 192GB.",
    fails_on=Example(SLURM_SPEC, replace(PARTITION, gpus=(Gpu(0, UNKNOWN_GPU, 80 * GIB, 80 * GIB),))),
    passes_on=Example(SLURM_SPEC, PARTITION),
    at_start=True,
)
def slurm_gpus_unknown(case: Case) -> str | None:
    """Slurm does not report which GPUs a partition has unless its administrator has configured their type. Their memory
    and bf16 units decide whether a run fits and works."""
    if case.spec.launch.place != "slurm" or not any(gpu.name == UNKNOWN_GPU for gpu in case.gpus):
        return None
    return f"{case.machine.name} has GPUs whose type Slurm does not report, or that is not known here."
