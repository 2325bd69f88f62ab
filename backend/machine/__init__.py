"""The machine that a run is for: devices, memory, cores, disk, packages; probed here, or read from YAML.

Floor 1. Imports: below.
"""

from backend.machine.descriptions import described, machines, parse, read
from backend.machine.detection import probe
from backend.machine.types import GIB, Gpu, Machine, describe

__all__ = ["GIB", "Gpu", "Machine", "describe", "described", "machines", "parse", "probe", "read"]
