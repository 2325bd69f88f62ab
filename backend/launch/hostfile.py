"""DeepSpeed's hostfile and its --include: who takes part, with which slots.

Floor 1. Imports nothing of ours. Pure. Sources: deepspeed 0.19 launcher/runner.py, _parse_hostfile and
parse_resource_filter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from backend.config import RunSpec

Slots = Mapping[str, tuple[int, ...]]


class HostfileError(ValueError):
    """What is wrong, in one sentence."""


def hosts(lines: Sequence[str]) -> Slots:
    """Host -> its slots, in order. Raises HostfileError."""
    found: dict[str, tuple[int, ...]] = {}
    for line in lines:
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", line)
        if not match:
            raise HostfileError(f"{line!r} is no line of a hostfile: write a name and its slots, worker-1 slots=4.")
        if match[1] in found:
            raise HostfileError(f"{match[1]} stands there twice.")
        found[match[1]] = tuple(range(int(match[2])))
    if not found:
        raise HostfileError("It is empty: write a host a line, worker-1 slots=4.")
    return found


def chosen(lines: Sequence[str], include: str) -> Slots:
    """Those of the hostfile that `include` leaves, in the hostfile's order. Raises HostfileError."""
    there = hosts(lines)
    if not include:
        return there
    wanted: dict[str, tuple[int, ...]] = {}
    for part in include.split("@"):
        match = re.fullmatch(r"([^\s:]+)(?::(\d+(?:,\d+)*))?", part.strip())
        if not match:
            raise HostfileError(f"{part!r} is no part of an include: write worker-1@worker-2:0,1.")
        name, slots = match[1], tuple(int(slot) for slot in (match[2] or "").split(",") if slot)
        if name not in there:
            raise HostfileError(f"{name} is not in the hostfile, which has {', '.join(there)}.")
        if missing := [slot for slot in slots if slot not in there[name]]:
            raise HostfileError(f"{name} has {len(there[name])} slots, from 0 on: there is no slot {missing[0]}.")
        wanted[name] = tuple(sorted({*wanted.get(name, ()), *(slots or there[name])}))
    return {name: wanted[name] for name in there if name in wanted}


def same_slots(names: Sequence[str], ids: Sequence[int]) -> str:
    """An include of the same slots on each host; empty where no ids are given."""
    slots = ",".join(map(str, ids))
    heads = (line.split()[0] for line in names if not line.startswith("#"))
    return "@".join(f"{name}:{slots}" for name in heads) if slots else ""


def include_argument(spec: RunSpec) -> str:
    """The value of --include for `spec`: the hosts and slots that are set, or the device ids on every host."""
    return spec.launch.include or same_slots(spec.launch.hostfile, spec.launch.devices)
