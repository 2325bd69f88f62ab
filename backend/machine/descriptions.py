"""Machines described in YAML, so that a laptop can check a run for a cluster.

Floor 1. Imports: kinds, catalog, options (SpecError), paths. Some lie under presets/machines, known by their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from backend import registry
from backend.config.options import Problem, SpecError
from backend.machine.types import GIB, Gpu, Machine
from backend.paths import PRESETS

MACHINES = PRESETS / "machines"

# Marketing name -> (GiB, compute capability), so that a machine file may say just "H100".
GPUS: Mapping[str, tuple[int, tuple[int, int]]] = {
    "V100": (32, (7, 0)),
    "T4": (16, (7, 5)),
    "A100": (80, (8, 0)),
    "A10": (24, (8, 6)),
    "A40": (48, (8, 6)),
    "RTX 3090": (24, (8, 6)),
    "RTX 4090": (24, (8, 9)),
    "L4": (24, (8, 9)),
    "L40S": (48, (8, 9)),
    "H100": (80, (9, 0)),
    "H200": (141, (9, 0)),
    "B200": (180, (10, 0)),
    "RTX 5090": (32, (12, 0)),
}

KEYS = ("name", "device", "nodes", "gpus", "ram_gib", "cores", "disk_gib", "python", "versions", "cpu_bf16", "nvlink")
GPU_KEYS = ("name", "count", "memory_gib", "free_gib", "capability")


def machines(folder: Path = MACHINES) -> dict[str, Machine]:
    """The machines that come with Footplate, by the names of their files; the smallest first."""
    found = {path.stem: read(path) for path in folder.glob("*.yaml")}
    return dict(sorted(found.items(), key=lambda item: _size(item[1])))


def _size(machine: Machine) -> tuple[int, int]:
    """Devices of all nodes, and the bytes of one."""
    return machine.nodes * len(machine.gpus), machine.gpus[0].total_bytes if machine.gpus else 0


def read(source: str | Path) -> Machine:
    """A machine from a YAML file, or of that name. Raises SpecError naming the file and what is wrong in it.

    `gpus` is a list of {name, count, memory_gib, capability}; the last two may be left out for names in GPUS.
    `nvlink` says whether it joins each with all others.
    """
    path = Path(source)
    if not path.is_file() and (MACHINES / f"{source}.yaml").is_file():
        path = MACHINES / f"{source}.yaml"
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = ", ".join(machines())
        raise SpecError([Problem("", f"{path}: no such file, and no such machine ({names})")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem("", f"{path}: cannot be read: {error}")]) from None
    except SpecError as error:
        raise SpecError([Problem(p.field, f"{p.message} ({path})") for p in error.problems]) from None


def parse(text: str) -> Machine:
    """A machine from YAML text, as `described`. Raises SpecError."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _wrong("", f"is no YAML: {' '.join(str(error).split())}") from None
    return described(value)


def described(value: Any) -> Machine:
    """A machine from a table of KEYS. Raises SpecError."""
    if not isinstance(value, dict):
        raise _wrong("", f"is no machine: a machine has some of {', '.join(KEYS)}")
    for key in value:
        if key not in KEYS:
            raise _wrong(str(key), f"is nothing that a machine has; known are {', '.join(KEYS)}")
    gpus = _gpus(value.get("gpus") or [])
    device = str(value.get("device") or ("cuda" if gpus else "cpu"))
    if device not in registry.DEVICES:
        raise _wrong("device", f"must be one of {', '.join(registry.DEVICES)}")
    if device != "cpu" and not gpus:
        raise _wrong("gpus", f"is empty, but device is {device}: list the devices, or write device: cpu")
    if device == "cpu" and gpus:
        raise _wrong("device", "is cpu, but gpus are listed: leave one of the two out")
    ram = _bytes(value, "ram_gib", 64)
    versions = value.get("versions") or {}
    if not isinstance(versions, dict):
        raise _wrong("versions", "must be a table: package name, version")
    return Machine(
        device=device,
        gpus=_linked(gpus, value.get("nvlink")),
        nodes=_count(value, "nodes", 1),
        ram_bytes=ram,
        ram_free_bytes=ram,
        cores=_count(value, "cores", 16),
        disk_free_bytes=_bytes(value, "disk_gib", 1024),
        python=str(value.get("python") or "python"),
        versions={str(k): str(v) for k, v in versions.items()},
        name=str(value.get("name") or "described machine"),
        cpu_bf16=value.get("cpu_bf16") is True,
    )


def _wrong(name: str, message: str) -> SpecError:
    return SpecError([Problem(name, message)])


def _count(table: Mapping[str, Any], key: str, default: int) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(key, "must be a whole number of at least 1")
    return value


def _bytes(table: Mapping[str, Any], key: str, default: float) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise _wrong(key, "must be a number of GiB above 0")
    return int(value * GIB)


def _gpus(rows: Any) -> tuple[Gpu, ...]:
    if not isinstance(rows, list):
        raise _wrong("gpus", "must be a list, one row a kind: - {name: H100, count: 8}")
    found: list[Gpu] = []
    for row in rows:
        if not isinstance(row, dict) or not set(row) <= set(GPU_KEYS):
            raise _wrong("gpus", f"a row is a table of {', '.join(GPU_KEYS)}; this is not: {row!r}")
        name = str(row.get("name") or "GPU")
        known = next((GPUS[k] for k in sorted(GPUS, key=len, reverse=True) if k in name), None)
        if known is None and "memory_gib" not in row:
            raise _wrong("gpus", f"says no memory_gib for {name!r}; it may be left out for {', '.join(GPUS)}")
        size, capability = known or (0, (0, 0))
        total = _bytes(row, "memory_gib", size)
        free = _bytes(row, "free_gib", total / GIB)
        capability = _capability(row["capability"]) if "capability" in row else capability
        found += [Gpu(len(found) + i, name, total, free, capability) for i in range(_count(row, "count", 1))]
    return tuple(found)


def _linked(gpus: tuple[Gpu, ...], nvlink: Any) -> tuple[Gpu, ...]:
    """With links to all others, or none; left out, nobody knows."""
    if nvlink is None:
        return gpus
    if not isinstance(nvlink, bool):
        raise _wrong("nvlink", "must be true or false")
    return tuple(replace(g, links=tuple(o.id for o in gpus if o.id != g.id) if nvlink else ()) for g in gpus)


def _capability(value: Any) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d)", str(value))
    if not match:
        raise _wrong("gpus", f"capability must be written as 9.0 or 8.6, not {value!r}")
    return int(match[1]), int(match[2])
