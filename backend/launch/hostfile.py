"""DeepSpeed's hostfile and its --include argument: the hosts and slots of a run.

Sources: deepspeed 0.19 launcher/runner.py, _parse_hostfile and parse_resource_filter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from backend.config import RunSpec
from backend.wording import counted

Slots = Mapping[str, tuple[int, ...]]


MAX_SLOTS = 1024  # of one host, the limit of launch.nproc_per_node


class HostfileError(ValueError):
    """A hostfile or --include value that DeepSpeed cannot read; the message is one sentence."""


def parse_hostfile(lines: Sequence[str]) -> Slots:
    """Host -> its slots, in order. Raises HostfileError."""
    found: dict[str, tuple[int, ...]] = {}
    for line in lines:
        if line.startswith("#"):
            continue
        match = re.match(r"(\S+)\s+slots=([0-9]+)", line)  # DeepSpeed ignores the rest, such as max_slots=8
        if not match:
            raise HostfileError(
                f"{line!r} is not a valid hostfile line: write a host and its slots, such as worker-1 slots=4."
            )
        if match[1] in found:
            raise HostfileError(f"The hostfile lists {match[1]} twice.")
        if len(match[2]) > 6 or int(match[2]) > MAX_SLOTS:
            raise HostfileError(f"The hostfile gives {match[1]} more than {MAX_SLOTS:,} slots: {match[2][:12]}.")
        found[match[1]] = tuple(range(int(match[2])))
    if not found:
        raise HostfileError("The hostfile is empty: write one host per line, such as worker-1 slots=4.")
    return found


def included_slots(lines: Sequence[str], include: str) -> Slots:
    """The hosts and slots of the hostfile that `include` selects, in the hostfile's order. Raises HostfileError."""
    available = parse_hostfile(lines)
    if not include:
        return available
    selected: dict[str, set[int]] = {}
    for part in include.split("@"):
        match = re.fullmatch(r"([^\s:]+)(?::([0-9]{1,6}(?:,[0-9]{1,6})*))?", part.strip())
        if not match:
            raise HostfileError(
                f"{part!r} is not a valid part of --include: write, for example, worker-1@worker-2:0,1."
            )
        name, slots = match[1], tuple(int(slot) for slot in (match[2] or "").split(",") if slot)
        if name not in available:
            raise HostfileError(f"{name} is not in the hostfile, which lists {', '.join(available)}.")
        if missing := [slot for slot in slots if slot >= len(available[name])]:
            size = counted(len(available[name]), "slot")
            raise HostfileError(f"{name} has {size}, numbered from 0; slot {missing[0]} does not exist.")
        selected.setdefault(name, set()).update(slots)
    return {name: tuple(sorted(selected[name])) or available[name] for name in available if name in selected}


def same_slots(lines: Sequence[str], slots: Sequence[int]) -> str:
    """An --include value with the same slots on each host of a hostfile; empty without slots."""
    joined = ",".join(map(str, slots))
    hosts = (line.split()[0] for line in lines if not line.startswith("#"))
    return "@".join(f"{host}:{joined}" for host in hosts) if joined else ""


def include_argument(spec: RunSpec) -> str:
    """The value of --include for `spec`: the hosts and slots that are set, or the device ids on every host."""
    return spec.launch.include or same_slots(spec.launch.hostfile, spec.launch.devices)
