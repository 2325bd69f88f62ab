"""The training: Start to the first step, and throughput against the bare Trainer under bare torchrun."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from backend.config import RunSpec, presets
from backend.config.options import edit
from backend.machine import probe
from backend.preflight import preflight
from backend.runs import METRICS
from backend.runs.folder import ALIVE, Run

Figure = tuple[str, list[float], str]
STEPS = 10


def case(processes: int) -> RunSpec:
    """Ten steps of the default model with LoRA and nothing beside them."""
    return edit(
        presets.read("first-run"),
        {
            "train.duration": "steps",
            "train.max_steps": STEPS,
            "train.per_device_train_batch_size": 4,
            "eval.strategy": "no",
            "eval.num_generations": 0,
            "save.strategy": "no",
            "save.final_model": False,
            "parallel.strategy": "ddp" if processes > 1 else "single",
            "launch.nproc_per_node": max(2, processes),
        },
    )


def ours(folder: Path, spec: RunSpec) -> tuple[float, float, list[dict]]:
    """Run `spec`: seconds from Start to the first point, seconds in all, and the points."""
    found = preflight(spec, probe(folder), Path.cwd())
    begin, first = time.time(), 0.0
    run = Run.create(folder / "runs", "bench", found.plan, datetime.now())
    run.start()
    path = run.path / METRICS
    while run.state in ALIVE:
        if not first and path.exists() and path.stat().st_size:
            first = time.time() - begin
        time.sleep(0.02)
    assert run.state == "done", run.failure()
    return first, time.time() - begin, [json.loads(line) for line in path.read_text().splitlines()]


def first_step(folder: Path) -> Iterator[Figure]:
    """Start to first optimizer step, and what lies around the training."""
    for processes in (1, 2):
        firsts, arounds = [], []
        for _ in range(3):
            first, whole, points = ours(folder, case(processes))
            losses = [p for p in points if "loss" in p]
            firsts.append(first)
            arounds.append(whole - (losses[-1]["time"] - losses[0]["time"]) * STEPS / (STEPS - 1))
        yield f"Start to first step, {processes} process(es)", firsts, "s"
        yield f"around the training, {processes} process(es)", arounds, "s"


def throughput(folder: Path) -> Iterator[Figure]:
    """Steps a second here and with the bare Trainer, alternating; the ratio pair by pair."""
    mine, bare = [], []
    for _ in range(4):
        points = [p for p in ours(folder, case(1))[2] if "loss" in p]
        mine.append((STEPS - 2) / (points[-1]["time"] - points[1]["time"]))
        bare.append(bare_trainer())
    yield "steps a second, here", mine, "1/s"
    yield "steps a second, bare Trainer", bare, "1/s"
    yield "ratio", [a / b for a, b in zip(mine, bare, strict=True)], ""


def bare_trainer() -> float:
    """Steps a second of tests/bench/bare.py under bare torchrun: same model, rows, batches and adapters."""
    script = Path(__file__).with_name("bare.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "TOKENIZERS_PARALLELISM": "false"}
    out = subprocess.run([*command, str(STEPS)], env=env, capture_output=True, text=True, check=True).stdout
    return float(out.split("steps_per_second=")[1].split()[0])
