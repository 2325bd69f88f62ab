"""What the jobs of several kinds of clusters have in common: a share of each node, and another Python."""

from __future__ import annotations

from collections.abc import Sequence

from backend.config import RunSpec
from backend.config.options import edit, effective
from backend.machine import Machine
from backend.resolve import ResolvedRun, resolve


def cpus_of_gpus(run: ResolvedRun, machine: Machine) -> int:
    """The CPUs on each node in proportion to the GPUs that the run uses there, or all CPUs without GPUs."""
    share = run.nproc_per_node / len(machine.gpus) if run.device == "cuda" and machine.gpus else 1
    return max(1, int(machine.cores * min(1, share)))


def with_python(argv: Sequence[str], machine: Machine, python: str) -> tuple[str, ...]:
    """The command with the Python of a container in place of that of `machine`."""
    first, *rest = argv
    return (python if first == machine.python else first, *rest)


def as_job_spec(spec: RunSpec, machine: Machine) -> RunSpec:
    """`spec` with as many nodes, as a job whose nodes get their ranks in PET_*."""
    return edit(spec, {"launch.place": "kubernetes", "launch.nnodes": resolve(effective(spec), machine).nnodes})
