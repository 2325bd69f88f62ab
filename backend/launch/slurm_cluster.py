"""What a Slurm cluster says before a job is submitted: the nodes of its partition, and why it would refuse the job.

Imports config, machine, resolve, runs.slurm, launch.slurm, launch.answers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from backend.config import RunSpec
from backend.launch import slurm
from backend.launch.answers import as_machine, gpus, kept
from backend.machine import Machine
from backend.resolve import ResolvedRun
from backend.runs.follower import ClusterError
from backend.runs.slurm import call


@dataclass(frozen=True)
class Partition:
    """A partition of sinfo. Cores, memory (0: unknown) and GPUs are those of one node; a partition with several kinds
    of nodes is listed several times."""

    name: str
    is_default: bool
    nodes: int
    cores: int
    ram_bytes: int
    gpus: int
    gpu_type: str
    time_limit: str = "infinite"


def machine(spec: RunSpec, here: Machine) -> tuple[Machine, str]:
    """The nodes that the job of `spec` runs on, with the packages of this machine; and why they are not known, as a
    sentence, or ''."""
    try:
        found = partitions()
    except ClusterError as error:
        return here, str(error)
    name = spec.slurm.partition
    matching = [part for part in found if (part.name == name if name else part.is_default)]
    if not matching:
        known = ", ".join(sorted({part.name for part in found}))
        if name:
            return here, f"Slurm has no partition {name}. It has {known}."
        return here, f"Slurm has no default partition: set slurm.partition to one of {known}."
    largest = max(matching, key=lambda part: (part.gpus, part.cores))
    devices = gpus(largest.gpus, spec.launch.gpu_model or largest.gpu_type)
    count = sum(part.nodes for part in matching)
    described = as_machine(here, f"Slurm partition {largest.name}", devices, count, largest.cores, largest.ram_bytes)
    longest, asked = max(slurm.minutes(part.time_limit) for part in matching), spec.slurm.time_limit
    if asked and slurm.minutes(asked) > longest:
        return described, f"The partition {largest.name} allows {largest.time_limit}, and the job requests {asked}."
    return described, ""


def refusal(spec: RunSpec, run: ResolvedRun, nodes: Machine) -> str:
    """Why sbatch would refuse the job, or could never start it, as a sentence; '' if it accepts it."""
    script = f"#!/bin/sh\n{slurm.header(spec, run, nodes)}\n"
    try:
        kept(script, lambda: call("sbatch", "--test-only", text=script))
    except ClusterError as error:
        text = str(error).removeprefix("sbatch: ").removeprefix("allocation failure: ")
        return text if text.endswith(".") else f"Slurm refuses the job: {text}."
    return ""


def partitions() -> tuple[Partition, ...]:
    """All partitions. Raises ClusterError."""
    found: tuple[Partition, ...] = kept(
        "sinfo", lambda: parse(call("sinfo", "--noheader", "--format=%P|%c|%m|%G|%D|%l"))
    )
    return found


def parse(output: str) -> tuple[Partition, ...]:
    """The partitions in the output of sinfo: name, cores, MiB of RAM, generic resources, number of nodes, time
    limit."""
    found = []
    for line in output.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 6:
            continue
        name, cores, memory, resources, nodes, limit = fields
        mib = _number(memory)
        ram = mib * 2**20 if mib > 1 else 0  # Slurm's default, where the administrator has configured nothing
        is_default = name.endswith("*")
        sizes = (_number(nodes), _number(cores), ram)
        found.append(Partition(name.rstrip("*"), is_default, *sizes, *_gres(resources), limit))
    return tuple(found)


def _number(text: str) -> int:
    """The number that a size of sinfo begins with: 64+ if the nodes differ."""
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def _gres(text: str) -> tuple[int, str]:
    """Number and type of the GPUs in a list of generic resources: gpu:h100:8(S:0-1) -> (8, h100)."""
    total, kind = 0, ""
    for match in re.finditer(r"\bgpu(?::([A-Za-z][\w.-]*))?(?::(\d+))", text):
        total, kind = total + int(match[2]), kind or match[1] or ""
    return total, kind
