"""The machine that a run is for: devices, memory, cores, disk, packages; probed here, or read from YAML.

Floor 1. Imports: below.
"""

from backend.machine.files import described, machines, parse, read
from backend.machine.kinds import GIB, Gpu, Machine, describe
from backend.machine.probing import probe

__all__ = ["GIB", "Gpu", "Machine", "describe", "described", "machines", "parse", "probe", "read"]
