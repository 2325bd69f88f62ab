"""The machine that a run is for: devices, memory, cores, disk, packages; detected, or described in YAML.

Imports registry, config.options, paths.
"""

from backend.machine.descriptions import known_gpu, machine_from_mapping, machines, parse, read
from backend.machine.detection import probe
from backend.machine.types import GIB, Gpu, Machine, describe

__all__ = [
    "GIB",
    "Gpu",
    "Machine",
    "describe",
    "known_gpu",
    "machine_from_mapping",
    "machines",
    "parse",
    "probe",
    "read",
]
