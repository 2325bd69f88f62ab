"""The speed of this machine's CPU, which a worker process measures with torch while no run of Footplate trains.

A measurement is kept for some minutes. Then the next check requests a new one, and uses the old one until it is there.
While a run trains, or other programs use much of the CPU, the rates of the last calm measurement are used.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend.inspect.worker import Result, WorkerCache, installed_versions, may_start
from backend.paths import cache_folder
from backend.runs.processes import run_processes

FORMAT = 2  # raise it when the result of backend.train.measure_cpu changes: it is part of the cache key
FRESH_SECONDS = 300
CALM_CORES = 0.3  # cores that other programs may use during a measurement
LOADED_CORES = 1.0  # load average from which other programs count as using the CPU
SECONDS = 40.0  # the most that a measurement takes
ASK_AGAIN_SECONDS = 5  # after a request at which a run was training
PENDING = "the speed of this CPU is being measured for models of this size; the predicted time appears afterward"
UNMEASURED = (
    "the speed of this CPU has not been measured for models of this size yet, and cannot be measured while {} trains"
)


@dataclass(frozen=True)
class CpuSpeed:
    """What one process of a run reaches with its threads. In FLOP/s: `matmul` (linear layers), `small` (LoRA's
    matrices) and `attention`; in bytes/s: `activations` (operations on each element, with new results) and `memory`
    (large arrays); in seconds: `logit` (cross entropy, forward and backward) and `layer` (starting the operations of a
    decoder layer, forward and backward).

    `processes` share the cores. `busy`: cores that other programs use, of `cores`. `note`: why the rates are older, a
    sentence; '' if they are not.
    """

    matmul: float
    small: float
    attention: float
    activations: float
    memory: float
    logit: float
    layer: float
    processes: int = 1
    busy: float = 0.0
    cores: int = 1
    note: str = ""

    @property
    def is_busy(self) -> bool:
        """Whether other programs use so much of the CPU that the run may take longer."""
        return self.busy > CALM_CORES


class CpuSpeeds(WorkerCache):
    """Measurements of this CPU. The last calm one of each kind is kept on disk."""

    name, task, format = "cpuspeeds", "measuring the CPU", FORMAT
    _trained: str = ""  # the run that trained at the last request, until another one is answered

    def get(self, request: Mapping[str, Any], start: bool, wait_seconds: float = 0) -> dict[str, Any]:
        """The InputFacts `cpu`, `cpu_unknown` and `cpu_pending`. Returns immediately, or after at most
        `wait_seconds`."""
        key = _key(request)
        kept = self.kept(key)
        if kept and time.time() - kept["time"] < FRESH_SECONDS:
            return {"cpu": _speed(kept, kept, request)}
        now = f"{key}-{int(time.time() // FRESH_SECONDS)}"
        found = self.find(now, {"cpu": dict(request)}, start)
        if found is None and wait_seconds > 0 and start:
            found = self.wait_for(now, {"cpu": dict(request)}, wait_seconds, lambda _: None)
        if found is None or isinstance(found, str):
            if kept:
                return {"cpu": _old_speed(kept, request), "cpu_pending": found is None and start}
            if found is None and not start:
                return {}
            waiting = UNMEASURED.format(_run(self._trained)) if self._trained else PENDING
            reason = f"the CPU could not be measured: {found}" if found else waiting
            return {"cpu_unknown": reason, "cpu_pending": found is None}
        self._trained = found["training"]
        if kept and (found["training"] or CALM_CORES < found["busy"] > kept["busy"]):
            return {"cpu": _speed(kept, found, request)}
        if found["training"]:
            return {"cpu_unknown": UNMEASURED.format(_run(found["training"]))}
        return {"cpu": _speed(found, found, request)}

    def kept(self, key: str) -> Result | None:
        """The last calm measurement; None without one."""
        try:
            found = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing or incomplete
            return None
        return found if isinstance(found, dict) and found.get("format") == self.format else None

    def _look_up(self, key: str) -> Result | str | None:
        """If the run that trained at an earlier request has ended, the worker is asked again."""
        found = super()._look_up(key)
        if isinstance(found, dict) and found.get("training") and time.time() - found["time"] > ASK_AGAIN_SECONDS:
            if run_processes(Path(found["training"])):
                return found
            with self._changed:
                self._known.pop(key, None)
            return None
        return found

    def _store(self, key: str, result: Result) -> None:
        """Keep the rates for later checks, unless earlier ones were measured on a calmer machine."""
        name = key.partition("-")[0]
        kept = self.kept(name)
        if not result["training"] and not (kept and CALM_CORES < result["busy"] > kept["busy"]):
            super()._store(name, result)


def _key(request: Mapping[str, Any]) -> str:
    text = json.dumps([FORMAT, installed_versions("torch", "transformers"), _cores(), request], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _speed(measured: Result, now: Result, request: Mapping[str, Any]) -> CpuSpeed:
    """The rates of `measured` for a run with the processes of `request`, and what else uses the CPU `now`."""
    note = ""
    if measured is not now:
        why = f"{_run(now['training'])} trains" if now["training"] else "other programs use the CPU"
        minutes = max(1, round((now["time"] - measured["time"]) / 60))
        note = f"The CPU speed was measured {minutes:,} min ago; it cannot be measured again while {why}."
    return CpuSpeed(**measured["rates"], processes=request["processes"], busy=now["busy"], cores=_cores(), note=note)


def _old_speed(kept: Result, request: Mapping[str, Any]) -> CpuSpeed:
    """The rates of an old measurement, with what uses the CPU now: the load of the last minute, in which the short work
    of the page itself does not count. The load is that of all cores of the host, so it says nothing if this process may
    use only some of them."""
    minutes = max(1, round((time.time() - kept["time"]) / 60))
    has_all = hasattr(os, "getloadavg") and _cores() == os.cpu_count()
    load = min(os.getloadavg()[0], _cores()) if has_all else 0.0
    busy = load if load >= LOADED_CORES else 0.0
    return replace(_speed(kept, kept, request), busy=busy, note=f"The CPU speed was measured {minutes:,} min ago.")


def _run(path: str) -> str:
    return f"the run {Path(path).name} in {Path(path).parent}"


@lru_cache(maxsize=8)
def _speeds(folder: Path) -> CpuSpeeds:
    return CpuSpeeds(folder, seconds=SECONDS, idle_seconds=30)  # its libraries take memory that a run may need


def inspect_cpu(request: Mapping[str, Any], start: bool, seconds: float) -> dict[str, Any]:
    """The InputFacts about the speed of this CPU for a request to `backend.train.measure_cpu`. `start`: measure it if
    no fresh measurement is kept, and wait for that up to `seconds`."""
    return _speeds(cache_folder()).get(request, start, seconds) if may_start(os.environ) else {}
