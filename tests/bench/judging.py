"""How long a check takes: rules, plan, estimate and what to do, for each preset on its machine and on this one."""

import time
from collections.abc import Iterator
from pathlib import Path

from backend.config import RunSpec
from backend.config.presets import presets
from backend.machine import machines, probe
from backend.preflight import preflight

TIMES = 20


def measure(folder: Path) -> Iterator[tuple[str, list[float], str]]:
    """Milliseconds each: (what, values, unit)."""
    here = probe(folder)
    yield "check, as the page opens", [_one(RunSpec(), here, folder) for _ in range(TIMES)], "ms"
    found = {p.name: (p.spec, p.machine) for p in presets()}
    yield "check, presets on their machines", [_one(*found[n], folder) for n in found for _ in range(TIMES)], "ms"
    small = machines()["1x24gb"]
    yield "check, presets on one small GPU", [_one(s, small, folder) for s, _ in found.values() for _ in range(5)], "ms"


def _one(spec: RunSpec, machine: object, folder: Path) -> float:
    begin = time.perf_counter()
    preflight(spec, machine, folder)
    return 1000 * (time.perf_counter() - begin)
