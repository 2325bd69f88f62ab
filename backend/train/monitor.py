"""Watches a training: measures every rank now and then, and reports spikes, drops, slow ranks and a full disk.

A measurement takes milliseconds. What the figures mean is decided by backend/runs/health.py.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from backend.runs import MONITOR, STOP, health, request_stop
from backend.runs.events import SAVED
from backend.runs.files import write_json
from backend.train import device
from backend.train.context import TrainContext

FIRST_SECONDS, MEASURE_SECONDS = 1.0, 20.0  # until the first measurement; the pause doubles up to the second number
KEPT_DURATIONS = 4096  # of steps; from then on a random sample of the run's steps
MATRIX, REPEATS = {"cpu": 256}, 20  # of the matmul that each rank is timed with
LARGE_MATRIX = 1024


class StepTimes:
    """The durations of all steps of this start, in bounded memory: a uniform random sample (algorithm R)."""

    def __init__(self) -> None:
        self._kept: list[float] = []
        self._count = 0
        self._random = random.Random(0)  # separate: the training's random numbers must not change

    def add(self, seconds: float) -> None:
        """Take note of a step."""
        self._count += 1
        if len(self._kept) < KEPT_DURATIONS:
            self._kept.append(seconds)
        elif (place := self._random.randrange(self._count)) < KEPT_DURATIONS:
            self._kept[place] = seconds

    def percentiles(self) -> dict[str, float]:
        """The median (p50) and p95; {} before the first step."""
        ordered = sorted(self._kept)
        return {f"p{p}": ordered[p * (len(ordered) - 1) // 100] for p in (50, 95)} if ordered else {}


class Monitor:
    """What one rank knows about the health of a run. `add` and the events matter on rank 0 only."""

    def __init__(self, context: TrainContext) -> None:
        self.group, self.run_log, self.folder = context.group, context.run_log, context.folder
        self.family, self.stops = context.run.device, context.spec.train.stop_on_spike
        self._dtype = torch.float32 if self.family == "cpu" else device.DTYPES[context.run.compute_dtype]
        can_add_workers = not (context.spec.data.streaming and context.spec.train.dataloader_num_workers)
        self._curves, self._ranks, self._disk = health.Curves(), health.Ranks(can_add_workers), health.Disk()
        self._checkpoint_bytes = 0
        self._fetching = self._cpu = 0.0  # seconds, since the last measurement
        self._last, self._pause = 0.0, FIRST_SECONDS
        self._times, self._busy = StepTimes(), 0.0  # seconds of the steps since the last measurement
        self._measured: dict[str, Any] = {}
        self._latest: dict[str, float] = {}

    def begin(self, here: torch.device) -> None:
        """Start to measure `here`, the device of this rank. The matmul multiplies ones: random numbers would change the
        training."""
        size = MATRIX.get(self.family, LARGE_MATRIX)
        self._device, self._matrix = here, torch.ones(size, size, device=here, dtype=self._dtype)
        self._product = torch.empty_like(self._matrix)
        self._last, self._cpu = time.monotonic(), time.process_time()

    def fetch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches`, with the time that this rank waits for them."""
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._fetching += time.perf_counter() - began
            yield batch

    def end_step(self, seconds: float) -> None:
        """Take note of the duration of a step."""
        self._times.add(seconds)
        self._busy += seconds

    def is_due(self) -> bool:
        """Whether rank 0 wants a measurement."""
        return time.monotonic() - self._last >= self._pause

    def measure(self, step: int) -> None:
        """Measure all ranks. A collective call, right after a step."""
        self._pause = min(2 * self._pause, MEASURE_SECONDS)
        ranks = self.group.gather_on_step(self._measurement())
        self._busy = 0.0
        if self.group.rank:
            return
        self._measured = {"step": step, "time": time.time(), "ranks": ranks}
        self._write()
        self._latest = _summary(ranks)
        for alert in (*self._ranks.add(ranks), *self._check_disk()):
            self._report(alert, step)

    def _write(self) -> None:
        """Write the last measurement, with the step times of the whole start until now."""
        if times := self._times.percentiles():
            self._measured["step_seconds"] = times
        with contextlib.suppress(OSError):  # a full disk
            write_json(self.folder / MONITOR, self._measured)

    def add(self, point: Mapping[str, Any], step: int) -> dict[str, float]:
        """Check a logged point; returns what was measured since the last one, to be added to this point."""
        for alert in self._curves.add(point):
            self._report(alert, step)
        latest, self._latest = self._latest, {}
        return latest

    def end(self, step: int) -> None:
        """Check the whole training when it ends. Nothing is left to stop."""
        self.stops = False
        if self._measured:  # a run shorter than the first pause was never measured
            self._write()
        for alert in self._curves.end():
            self._report(alert, step)

    def saved(self, checkpoint: Path, step: int) -> None:
        """Take note of a complete checkpoint."""
        with contextlib.suppress(OSError):
            self._checkpoint_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        self.run_log.event(SAVED, step, f"Saved {checkpoint.name}.")
        for alert in self._check_disk():
            self._report(alert, step)

    def _check_disk(self) -> list[health.Alert]:
        try:
            return self._disk.add(shutil.disk_usage(self.folder).free, self._checkpoint_bytes)
        except OSError:  # a network file system that is away for a moment
            return []

    def _report(self, alert: health.Alert, step: int) -> None:
        self.run_log.info(f"Warning at step {step}: {alert.text}")
        self.run_log.event(alert.kind, step, alert.text)
        if self.stops and alert.kind in health.SPIKES and not (self.folder / STOP).exists():
            with contextlib.suppress(OSError):  # a full disk, on which no checkpoint can be saved either
                request_stop(self.folder, f"save\n{alert.text}\n")

    def _measurement(self) -> dict[str, Any]:
        now, cpu = time.monotonic(), time.process_time()
        passed = max(now - self._last, 1e-9)
        found = {
            "host": socket.gethostname(),
            "device": self.family if self.family == "cpu" else str(self._device),
            "probe": self._probe_seconds(),
            "data": self._fetching / max(self._busy, self._fetching, 1e-9),
            "cores": (cpu - self._cpu) / passed,
            "memory": device.memory_bytes(self.family),
            "peak": device.peak_bytes(self.family),
            **_gpu_figures(self.family, self._device),
        }
        self._last, self._cpu, self._fetching = now, cpu, 0.0
        return found

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _probe_seconds(self) -> float:
        """Seconds of the same small work on every rank, without waiting for another one."""
        device.synchronize(self.family)
        began = time.perf_counter()
        for _ in range(REPEATS):
            torch.mm(self._matrix, self._matrix, out=self._product)
        device.synchronize(self.family)
        return (time.perf_counter() - began) / REPEATS


def _gpu_figures(family: str, here: torch.device) -> dict[str, float]:
    """Utilization in percent and power in watts of an NVIDIA GPU, as far as NVML knows them."""
    found: dict[str, float] = {}
    if family == "cuda":
        # Without NVML, torch raises several kinds of errors (2.13); a figure that is missing must not end a run.
        with contextlib.suppress(Exception):
            found["utilization"] = float(torch.cuda.utilization(here))
        with contextlib.suppress(Exception):
            found["power"] = torch.cuda.power_draw(here) / 1000
    return found


def _summary(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """What a measurement adds to a point of the metrics: the worst rank of each figure."""
    found = {
        "data_wait": round(max(rank["data"] for rank in ranks), 4),
        "memory_gb": round(max(rank["memory"] for rank in ranks) / 1e9, 3),
    }
    for key, name in (("utilization", "gpu_utilization"), ("power", "gpu_power")):
        values = [rank[key] for rank in ranks if key in rank]
        if values:
            found[name] = round(statistics.fmean(values), 1)
    return found
