"""The share of a node that a job requests.

Imports machine, resolve.
"""

from __future__ import annotations

from backend.machine import Machine
from backend.resolve import ResolvedRun


def cpus_of_gpus(run: ResolvedRun, machine: Machine) -> int:
    """The CPUs that belong to the GPUs of the run on each node; without GPUs, all of a node."""
    share = run.nproc_per_node / len(machine.gpus) if run.device == "cuda" and machine.gpus else 1
    return max(1, int(machine.cores * min(1, share)))
