"""The machine that a run is for: devices, memory, cores, disk, packages; detected, or described in YAML."""

from backend.machine.descriptions import (
    description,
    known_gpu,
    load,
    machine_from_mapping,
    machines,
    normalize,
    parse,
    read,
)
from backend.machine.detection import cpu_name, probe
from backend.machine.packages import install_command
from backend.machine.types import GIB, Gpu, Machine, describe
