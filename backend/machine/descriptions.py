"""Machines described in YAML, so that a laptop can check a run for a cluster.

Machines in presets/machines can be referred to by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from backend.config.options import Problem, SpecError
from backend.config.yaml_text import load_yaml, syntax_problem
from backend.machine.keys import GPU_KEYS, KEYS, MAX_GPU_GIB, MAX_GPUS, MIN_GIB, Key, from_field, read_keys, to_field
from backend.machine.types import GIB, Gpu, Machine
from backend.paths import PRESETS

MACHINES = PRESETS / "machines"
HOW_TO_DESCRIBE = "Run footplate machine on that machine, and use all of its output"

# Product name -> (GiB, compute capability), so that a machine file may contain only "H100". Where a GPU has several
# sizes and its name says none, the larger one; that of MI250 is half of the card, which is two devices.
GPUS: Mapping[str, tuple[int, tuple[int, int]]] = {
    "V100": (32, (7, 0)),
    "V100S": (32, (7, 0)),
    "T4": (16, (7, 5)),
    "A100": (80, (8, 0)),
    "A800": (80, (8, 0)),
    "A30": (24, (8, 0)),
    "A10": (24, (8, 6)),
    "A10G": (24, (8, 6)),
    "A40": (48, (8, 6)),
    "RTX 3090": (24, (8, 6)),
    "RTX A5000": (24, (8, 6)),
    "RTX A6000": (48, (8, 6)),
    "RTX 4090": (24, (8, 9)),
    "RTX 6000 Ada": (48, (8, 9)),
    "L4": (24, (8, 9)),
    "L40": (48, (8, 9)),
    "L40S": (48, (8, 9)),
    "H100": (80, (9, 0)),
    "H100 NVL": (94, (9, 0)),
    "H800": (80, (9, 0)),
    "GH200": (96, (9, 0)),
    "H200": (141, (9, 0)),
    "H20": (96, (9, 0)),
    "H20-3e": (141, (9, 0)),
    "B200": (180, (10, 0)),
    "GB200": (185, (10, 0)),
    "B300": (268, (10, 3)),
    "GB300": (277, (10, 3)),
    "RTX 5090": (32, (12, 0)),
    "RTX PRO 6000": (96, (12, 0)),
    "MI210": (64, (0, 0)),
    "MI250": (64, (0, 0)),
    "MI250X": (64, (0, 0)),
    "MI300A": (128, (0, 0)),
    "MI300X": (192, (0, 0)),
    "MI325X": (256, (0, 0)),
    "MI350X": (288, (0, 0)),
    "MI355X": (288, (0, 0)),
}


def known_gpu(name: str) -> tuple[str, int, tuple[int, int]] | None:
    """(product name, GiB, compute capability) of a name such as a100, nvidia_h100_80gb_hbm3 or "A100 40GB"; None if it
    is unknown and has no size, as "X9 12GB" has. A size in the name takes precedence over the usual one. A number
    alone, as in Slurm's gpu:3090:8, is that of an RTX."""
    words = re.sub(r"[_-]", " ", name.upper())
    matches = [key for key in GPUS if re.search(rf"(?<![A-Z0-9]){_pattern(key)}(?![A-Z0-9])", words)]
    # A part of a GPU (MIG) may have both sizes in its name: A100-SXM4-40GB-MIG-3g.20gb.
    size = re.search(r"\dG\.(\d+)GB", words) or re.search(r"(?<![A-Z0-9])(\d+) ?GI?B?\b", words)
    if not matches:
        return (words, int(size[1]), (0, 0)) if size else None
    key = max(matches, key=len)
    if key == "GH200" and "HBM" not in words:  # NVIDIA's name, GH200 480GB, has the memory of its CPU
        size = None
    return key, int(size[1]) if size else GPUS[key][0], GPUS[key][1]


def _pattern(key: str) -> str:
    """A regular expression for a product name, also written without spaces."""
    spaces_optional = re.sub("[ -]", " ?", key.upper())
    return re.sub(r"^RTX \?", "(RTX ?)?", spaces_optional)


def machines(folder: Path = MACHINES) -> dict[str, Machine]:
    """The machines in presets/machines by file name, smallest first."""
    found = {path.stem: read(path) for path in folder.glob("*.yaml")}
    return dict(sorted(found.items(), key=lambda item: _size(item[1])))


def _size(machine: Machine) -> tuple[int, int]:
    """Number of devices on all nodes, and the memory of one."""
    return machine.nodes * len(machine.gpus), machine.gpus[0].total_bytes if machine.gpus else 0


def read(source: str | Path) -> Machine:
    """A machine from a YAML file, or by its name in presets/machines. Raises SpecError with the file and the problem.

    `gpus` is a list of mappings with GPU_KEYS; memory and capability are optional for names in GPUS.
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


@lru_cache(maxsize=64)
def parse(text: str) -> Machine:
    """A machine from YAML or JSON text. Raises SpecError."""
    return machine_from_mapping(load(text))


def load(text: str) -> Any:
    """The value of a description's text, which has not been checked yet. Raises SpecError."""
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        problem = syntax_problem(error)
    else:
        if isinstance(value, dict):
            return value
        problem = "it has no keys" if text.strip() else "it is empty"
    if "NVIDIA-SMI" in text:
        problem = "it is the table of nvidia-smi, which has neither host RAM nor CPU cores"
    raise SpecError([Problem("", f"The text is not a machine description: {problem}. {HOW_TO_DESCRIBE}")])


def machine_from_mapping(value: Any) -> Machine:
    """A machine from a mapping with the keys of KEYS. Raises SpecError with every problem."""
    found, problems = read_keys(value, KEYS)
    gpus, gpu_problems = _gpus(found.get("gpus") or ())
    problems += gpu_problems
    device = found.get("device") or ("cuda" if gpus else "cpu")
    if not problems and device != "cpu" and not gpus:
        problems = [Problem("gpus", f"must not be empty with device {device}: list the GPUs, or set device: cpu")]
    if not problems and device == "cpu" and gpus:
        problems = [Problem("device", "is cpu, but gpus are listed: remove one of the two")]
    if problems:
        raise SpecError(problems)
    fields = {key.field: to_field(key, found[key.name]) for key in KEYS if key.field}
    fields |= {"device": device, "gpus": _with_nvlink(gpus, found["nvlink"]), "ram_free_bytes": fields["ram_bytes"]}
    return Machine(**fields)


def normalize(value: Mapping[str, Any]) -> dict[str, Any]:
    """A valid description, as a form may send it, with values of the right types and without what is absent."""
    found = read_keys(value, KEYS)[0]
    entries = [read_keys(entry, GPU_KEYS)[0] for entry in found["gpus"]]
    found["gpus"] = [_without_defaults(entry, GPU_KEYS) for entry in entries]
    return _without_defaults(found, KEYS)


def _without_defaults(values: Mapping[str, Any], keys: Sequence[Key]) -> dict[str, Any]:
    return {key.name: values[key.name] for key in keys if values[key.name] not in (None, key.default, [])}


def description(machine: Machine) -> dict[str, Any]:
    """The mapping that describes `machine`, without keys that have their default. GPUs of one model are one entry, with
    the memory that is free on each of them."""
    groups: dict[tuple[str, int, tuple[int, int]], list[Gpu]] = {}
    for gpu in machine.gpus:
        groups.setdefault((gpu.name, gpu.total_bytes, gpu.capability), []).append(gpu)
    entries = [_gpu_entry(gpus) for gpus in groups.values()]
    ids = {gpu.id for gpu in machine.gpus}
    peers = [gpu.nvlink_peers for gpu in machine.gpus]
    derived: dict[str, Any] = {"gpus": entries}
    if len(ids) > 1 and None not in peers:
        derived["nvlink"] = all(ids == {gpu.id, *(gpu.nvlink_peers or ())} for gpu in machine.gpus)
    values = {key.name: derived[key.name] if key.name in derived else _value(key, machine) for key in KEYS}
    return _without_defaults(values, KEYS)


def _value(key: Key, of: Machine | Gpu) -> Any:
    return from_field(key, getattr(of, key.field)) if key.field else None


def _gpu_entry(gpus: list[Gpu]) -> dict[str, Any]:
    first = replace(gpus[0], free_bytes=min(gpu.usable_bytes for gpu in gpus))
    values = {key.name: _value(key, first) for key in GPU_KEYS} | {"count": len(gpus)}
    if first.free_bytes == first.total_bytes:
        values["free_gib"] = None
    return {name: value for name, value in values.items() if value is not None}


def _gpus(entries: Any) -> tuple[tuple[Gpu, ...], list[Problem]]:
    """The GPUs of a node, and the problems of their entries."""
    if not isinstance(entries, list | tuple):
        return (), [Problem("gpus", "must be a list with one entry per GPU model: - {name: H100, count: 8}")]
    found: list[Gpu] = []
    problems: list[Problem] = []
    for number, entry in enumerate(entries[: MAX_GPUS + 1]):
        gpu, count, wrong = _gpu(entry, f"gpus.{number}.")
        problems += wrong
        if gpu:
            found += [replace(gpu, id=len(found) + i) for i in range(count)]
    if len(found) > MAX_GPUS or len(entries) > MAX_GPUS:
        problems.append(
            Problem("gpus", f"a node can have at most {MAX_GPUS} GPUs; for more, raise the number of nodes")
        )
    return tuple(found), problems


def _gpu(entry: Any, place: str) -> tuple[Gpu | None, int, list[Problem]]:
    """A GPU of an entry of `gpus`, how many there are, and the entry's problems."""
    values, problems = read_keys(entry, GPU_KEYS, place)
    if problems:
        return None, 0, problems
    known = known_gpu(values["name"])
    if values["memory_gib"] is None and (known is None or not MIN_GIB <= known[1] <= MAX_GPU_GIB):
        message = f"is missing: set it for {values['name']!r}, because it is known only for {', '.join(GPUS)}"
        return None, 0, [Problem(f"{place}memory_gib", message)]
    _, size, capability = known or ("", 0, (0, 0))
    fields = {key.field: to_field(key, values[key.name]) for key in GPU_KEYS if key.field}
    total = fields["total_bytes"] or size * GIB
    free = total if fields["free_bytes"] is None else fields["free_bytes"]
    if free > total:
        message = f"must be at most the memory of the GPU, {total / GIB:g} GiB, but is {values['free_gib']:g}"
        return None, 0, [Problem(f"{place}free_gib", message)]
    fields |= {"total_bytes": total, "free_bytes": free, "capability": fields["capability"] or capability}
    return Gpu(id=0, **fields), values["count"], []


def _with_nvlink(gpus: tuple[Gpu, ...], nvlink: bool | None) -> tuple[Gpu, ...]:
    """The GPUs with NVLink between all of them, or none of them; unknown if it is not set."""
    if nvlink is None:
        return gpus
    return tuple(replace(g, nvlink_peers=tuple(o.id for o in gpus if o.id != g.id) if nvlink else ()) for g in gpus)
