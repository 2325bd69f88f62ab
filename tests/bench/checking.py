"""How long a check takes (rules, plan, estimate, fixes): each preset on its machine, and on one that is too small."""

import time
from collections.abc import Iterator
from pathlib import Path

from backend.config import RunSpec
from backend.machine import machines, probe
from backend.preflight import preflight
from backend.presets import presets

TIMES = 20


def measure(folder: Path) -> Iterator[tuple[str, list[float], str]]:
    """(name, values, unit) of each measurement."""
    this_machine = probe(folder)
    yield "check of the default spec", [_one(RunSpec(), this_machine, folder) for _ in range(TIMES)], "ms"
    preset_specs = {p.name: (p.spec, p.machine) for p in presets()}
    yield (
        "check of the presets on their machines",
        [_one(*preset_specs[n], folder) for n in preset_specs for _ in range(TIMES)],
        "ms",
    )
    small = machines()["1x24gb"]
    yield (
        "check of the presets on one 24 GB GPU",
        [_one(s, small, folder) for s, _ in preset_specs.values() for _ in range(5)],
        "ms",
    )


def _one(spec: RunSpec, machine: object, folder: Path) -> float:
    begin = time.perf_counter()
    preflight(spec, machine, folder)
    return 1000 * (time.perf_counter() - begin)
