"""What a Slurm cluster says before a job is submitted: the nodes of its partition, and why it would refuse the job."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from backend.config import RunSpec
from backend.launch.clusters import slurm
from backend.launch.clusters.answers import as_machine, gpus, kept, ram_of_job, relied_on
from backend.machine import GIB, Machine
from backend.resolve import ResolvedRun
from backend.runs.follower import ClusterError
from backend.runs.slurm import call, sbatch
from backend.wording import counted, data_size

MAX_IN_WORDS = 6  # kinds of nodes that a message lists


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
    sentence, or ''. Raises ClusterError."""
    found = partitions()
    names = _partition_names(spec)
    matching = [part for part in found if (part.name in names if names else part.is_default)]
    if not found:
        return here, "The command sinfo lists no partition that this user can use."
    known = {part.name for part in found}
    if not matching or not known.issuperset(names):
        listed = ", ".join(sorted(known))
        if names:
            missing = ", ".join(name for name in names if name not in known)
            return here, f"Slurm has no partition {missing}. It has {listed}. {in_words(found)}"
        return here, f"Slurm has no default partition: set slurm.partition to one of {listed}. {in_words(found)}"
    largest, count = _described(spec, matching)
    devices = gpus(largest.gpus, spec.launch.gpu_model or largest.gpu_type)
    ram = ram_of_job(largest.ram_bytes, spec.slurm.memory_gib)
    described = as_machine(here, f"Slurm partition {largest.name}", devices, count, largest.cores, ram)
    longest, asked = max(slurm.minutes(part.time_limit) for part in matching), spec.slurm.time_limit
    if asked and slurm.minutes(asked) > longest:
        allowed = f"The partition {largest.name} allows {largest.time_limit}, and the job requests {asked}."
        return described, f"{allowed} {in_words(matching)}"
    return described, ""


def _described(spec: RunSpec, matching: Sequence[Partition]) -> tuple[Partition, int]:
    """The nodes that a job in one of these partitions can rely on, and their number. With conditions that only Slurm
    can read, the largest nodes of each partition are meant."""
    least = spec.slurm.memory_gib * GIB
    kinds = [part for part in matching if part.ram_bytes >= least or not part.ram_bytes] or list(matching)
    if spec.slurm.constraint or spec.slurm.extra:
        of_name = {part.name: part for part in sorted(kinds, key=lambda part: (part.gpus, part.cores))}
        kinds = list(of_name.values())
    chosen, _ = relied_on(spec, kinds, spec.slurm.cpus)
    return chosen, sum(part.nodes for part in matching if part.name == chosen.name)


def refusal(spec: RunSpec, run: ResolvedRun, nodes: Machine) -> str:
    """Why sbatch would refuse the job, or could never start it, as a sentence; '' if it accepts it."""
    script = f"#!/bin/sh\n{slurm.header(spec, run, nodes)}\n"
    try:
        kept(script, lambda: sbatch("--test-only", script=script, text=script))
    except ClusterError as error:
        text = str(error).removeprefix("sbatch: ").removeprefix("allocation failure: ")
        text = text if text.endswith(".") else f"Slurm refuses the job: {text}."
        return f"{text} {_known_partitions(_partition_names(spec))}".rstrip()
    return ""


def _partition_names(spec: RunSpec) -> list[str]:
    """The partitions of which the job may use any; empty for the cluster's default. sbatch reads the variable where its
    script names none."""
    names = spec.slurm.partition or os.environ.get("SBATCH_PARTITION", "")
    return [name for name in names.split(",") if name]


def _known_partitions(names: Sequence[str]) -> str:
    """The partitions of a job in words; all of them if it names none that exists, and '' if Slurm does not say."""
    try:
        found = partitions()
    except ClusterError:
        return ""  # `machine` reports it
    return in_words([part for part in found if (part.name in names if names else part.is_default)] or found)


def in_words(found: Sequence[Partition]) -> str:
    """What partitions have and allow, as a sentence; '' without any."""
    kinds = [
        f"{part.name}: {counted(part.nodes, 'node')} with {counted(part.cores, 'CPU core')}, "
        f"{_ram_and_gpus(part)}, and {_limit(part.time_limit)}"
        for part in found[:MAX_IN_WORDS]
    ]
    more = f"; {len(found) - MAX_IN_WORDS} more are not shown" if len(found) > MAX_IN_WORDS else ""
    return f"sinfo reports {'; '.join(kinds)}{more}." if kinds else ""


def _ram_and_gpus(part: Partition) -> str:
    """The RAM and the GPUs of each node."""
    ram = f"{data_size(part.ram_bytes)} of RAM" if part.ram_bytes else "an unknown amount of RAM"
    return f"{ram}, {counted(part.gpus, f'{part.gpu_type} GPU'.strip()) if part.gpus else 'no GPUs'}"


def _limit(text: str) -> str:
    """A time limit of sinfo: 1-12:00:00 is 1 day 12 hours."""
    total = slurm.minutes(text)
    if total == math.inf:
        return "no time limit"
    days, rest = divmod(int(total), 24 * 60)
    numbers = ((days, "day"), (rest // 60, "hour"), (rest % 60, "minute"))
    words = " ".join(counted(number, unit) for number, unit in numbers if number)
    return f"a time limit of {words or 'less than a minute'}"


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
    """Number and type of the GPUs in a list of generic resources: gpu:h100:8(S:0-1) -> (8, h100). A type may be a
    number, as in gpu:3090:8, and a part of a GPU with media engines has a plus: gpu:1g.10gb+me:1."""
    total, kind = 0, ""
    for match in re.finditer(r"\bgpu:(?:([\w.+-]+):)?(\d+)(?![\w.:+-])", text):
        total, kind = total + int(match[2]), kind or match[1] or ""
    return total, kind
