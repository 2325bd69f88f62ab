"""Machines described in YAML, so that a laptop can check a run for a cluster.

Imports registry, config.options (SpecError), paths. The ones in presets/machines can be referred to by name.
"""

from __future__ import annotations

import difflib
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

# Product name -> (GiB, compute capability), so that a machine file may contain only "H100".
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


def known_gpu(name: str) -> tuple[str, int, tuple[int, int]] | None:
    """(product name, GiB, compute capability) of a name such as a100, nvidia_h100_80gb_hbm3 or "A100 40GB"; None if it
    is unknown and has no size, as "MI300X 192GB" has. A size in the name comes before the usual one."""
    words = re.sub(r"[_-]", " ", name.upper())
    matches = [key for key in GPUS if re.search(rf"(?<![A-Z0-9]){key.replace(' ', ' ?')}(?![0-9])", words)]
    size = re.search(r"(\d+) ?GI?B\b", words)
    if not matches:
        return (words, int(size[1]), (0, 0)) if size else None
    key = max(matches, key=len)
    return key, int(size[1]) if size else GPUS[key][0], GPUS[key][1]


def machines(folder: Path = MACHINES) -> dict[str, Machine]:
    """The machines in presets/machines by file name, smallest first."""
    found = {path.stem: read(path) for path in folder.glob("*.yaml")}
    return dict(sorted(found.items(), key=lambda item: _size(item[1])))


def _size(machine: Machine) -> tuple[int, int]:
    """Number of devices on all nodes, and the memory of one."""
    return machine.nodes * len(machine.gpus), machine.gpus[0].total_bytes if machine.gpus else 0


def read(source: str | Path) -> Machine:
    """A machine from a YAML file, or by its name in presets/machines. Raises SpecError with the file and the problem.

    `gpus` is a list of {name, count, memory_gib, capability}; the last two are optional for names in GPUS. `nvlink`:
    whether NVLink connects all GPUs.
    """
    path = Path(source)
    if not path.is_file() and (MACHINES / f"{source}.yaml").is_file():
        path = MACHINES / f"{source}.yaml"
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = ", ".join(machines())
        raise SpecError([Problem("", f"{path}: no such file and no such machine (machines: {names})")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem("", f"{path} cannot be read: {error}")]) from None
    except SpecError as error:
        raise SpecError([Problem(p.field, f"{p.message} ({path})") for p in error.problems]) from None


def parse(text: str) -> Machine:
    """A machine from YAML text. Raises SpecError."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _error("", f"invalid YAML: {' '.join(str(error).split())}") from None
    return machine_from_mapping(value)


def machine_from_mapping(value: Any) -> Machine:
    """A machine from a mapping with KEYS. Raises SpecError."""
    if not isinstance(value, dict):
        raise _error("", f"expected keys of a machine ({', '.join(KEYS)}), but found {value!r:.80}")
    for key in value:
        if key not in KEYS:
            raise _error(str(key), f"unknown key; {_hint(str(key))}")
    gpus = _gpus(value.get("gpus") or [])
    device = str(value.get("device") or ("cuda" if gpus else "cpu"))
    if device not in registry.DEVICES:
        raise _error("device", f"must be one of {', '.join(registry.DEVICES)}, but is {device!r}")
    if device != "cpu" and not gpus:
        raise _error("gpus", f"must not be empty with device {device}: list the GPUs, or set device: cpu")
    if device == "cpu" and gpus:
        raise _error("device", "is cpu, but gpus are listed: remove one of the two")
    ram = _bytes(value, "ram_gib", 64)
    versions = value.get("versions") or {}
    if not isinstance(versions, dict):
        raise _error("versions", "must be a mapping of package names to versions")
    return Machine(
        device=device,
        gpus=_with_nvlink(gpus, value.get("nvlink")),
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


def _hint(key: str) -> str:
    """The known key that is most like `key`, or all of them."""
    close = difflib.get_close_matches(key, KEYS, n=1)
    return f"did you mean {close[0]}?" if close else f"known keys are {', '.join(KEYS)}"


def _error(name: str, message: str) -> SpecError:
    return SpecError([Problem(name, message)])


def _count(table: Mapping[str, Any], key: str, default: int) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _error(key, f"must be an integer of at least 1, but is {value!r}")
    return value


def _bytes(table: Mapping[str, Any], key: str, default: float) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise _error(key, f"must be a number of GiB greater than 0, but is {value!r}")
    return int(value * GIB)


def _gpus(entries: Any) -> tuple[Gpu, ...]:
    if not isinstance(entries, list):
        raise _error("gpus", "must be a list with one entry per GPU model: - {name: H100, count: 8}")
    found: list[Gpu] = []
    for entry in entries:
        if not isinstance(entry, dict) or not set(entry) <= set(GPU_KEYS):
            raise _error("gpus", f"each entry is a mapping with the keys {', '.join(GPU_KEYS)}, but one is {entry!r}")
        name = str(entry.get("name") or "GPU")
        known = next((GPUS[k] for k in sorted(GPUS, key=len, reverse=True) if k in name), None)
        if known is None and "memory_gib" not in entry:
            raise _error("gpus", f"memory_gib is missing for {name!r}; it is optional only for {', '.join(GPUS)}")
        size, capability = known or (0, (0, 0))
        total = _bytes(entry, "memory_gib", size)
        free = _bytes(entry, "free_gib", total / GIB)
        capability = _capability(entry["capability"]) if "capability" in entry else capability
        found += [Gpu(len(found) + i, name, total, free, capability) for i in range(_count(entry, "count", 1))]
    return tuple(found)


def _with_nvlink(gpus: tuple[Gpu, ...], nvlink: Any) -> tuple[Gpu, ...]:
    """With NVLink to all other GPUs, or to none; unknown if it is not set."""
    if nvlink is None:
        return gpus
    if not isinstance(nvlink, bool):
        raise _error("nvlink", f"must be true or false, but is {nvlink!r}")
    return tuple(replace(g, nvlink_peers=tuple(o.id for o in gpus if o.id != g.id) if nvlink else ()) for g in gpus)


def _capability(value: Any) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d)", str(value))
    if not match:
        raise _error("gpus", f"capability must be a version such as 9.0 or 8.6, but is {value!r}")
    return int(match[1]), int(match[2])
