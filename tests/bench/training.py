"""Training: Start to the first step, and throughput compared with the Trainer of Transformers alone."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from backend import presets
from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import probe
from backend.preflight import preflight
from backend.runs import METRICS
from backend.runs.folder import ALIVE, Run

Measurement = tuple[str, list[float], str]
STEPS = 10
CALLBACK_STEPS = 100
# A training process that notes how long the callbacks take in each step.
TIMED = """
import collections, json, sys, time
from backend.train import __main__, callbacks, exit
seconds = collections.Counter()
def timed(call):
    def run(self, args, state, *rest, **more):
        begin = time.perf_counter()
        result = call(self, args, state, *rest, **more)
        seconds[state.global_step] += time.perf_counter() - begin
        open("callbacks.json", "w").write(json.dumps(seconds))
        return result
    return run
for kind in (callbacks.ProgressCallback, callbacks.CheckpointCallback):
    for name in ("on_step_begin", "on_step_end", "on_log"):
        if name in vars(kind):
            setattr(kind, name, timed(vars(kind)[name]))
sys.argv = ["train", "."]
__main__.main()
exit.exit_now()
"""


def case(processes: int) -> RunSpec:
    """Ten steps of the default model with LoRA: no evaluation, no checkpoints."""
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


def footplate_run(folder: Path, spec: RunSpec) -> tuple[float, float, list[dict]]:
    """Run `spec`: seconds from Start to the first logged step, seconds in total, and the metrics."""
    report = preflight(spec, probe(folder), Path.cwd())
    begin, first = time.time(), 0.0
    run = Run.create(folder / "runs", "bench", report.plan, datetime.now())
    run.start()
    path = run.path / METRICS
    while run.state in ALIVE:
        if not first and path.exists() and path.stat().st_size:
            first = time.time() - begin
        time.sleep(0.02)
    assert run.state == "done", run.failure()
    return first, time.time() - begin, [json.loads(line) for line in path.read_text().splitlines()]


def first_step(folder: Path) -> Iterator[Measurement]:
    """Start to the first optimizer step, and the time before and after training."""
    for processes in (1, 2):
        firsts, arounds = [], []
        for _ in range(3):
            first, total, points = footplate_run(folder, case(processes))
            losses = [p for p in points if "loss" in p]
            firsts.append(first)
            arounds.append(total - (losses[-1]["time"] - losses[0]["time"]) * STEPS / (STEPS - 1))
        yield f"Start to first step, {processes} process(es)", firsts, "s"
        yield f"before and after training, {processes} process(es)", arounds, "s"


def throughput(folder: Path) -> Iterator[Measurement]:
    """Steps per second here and with the Trainer alone, alternating; the ratio of each pair."""
    ours, reference = [], []
    for _ in range(4):
        points = [p for p in footplate_run(folder, case(1))[2] if "loss" in p]
        ours.append((STEPS - 2) / (points[-1]["time"] - points[1]["time"]))
        reference.append(reference_trainer())
    yield "steps per second, Footplate", ours, "1/s"
    yield "steps per second, Trainer alone", reference, "1/s"
    yield "ratio", [a / b for a, b in zip(ours, reference, strict=True)], ""


def reference_trainer() -> float:
    """Steps per second of reference.py under torchrun: same model, examples, batches and adapters."""
    script = Path(__file__).with_name("reference.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "TOKENIZERS_PARALLELISM": "false"}
    out = subprocess.run([*command, str(STEPS)], env=env, capture_output=True, text=True, check=True).stdout
    return float(out.split("steps_per_second=")[1].split()[0])


def callbacks(folder: Path) -> Iterator[Measurement]:
    """What the callbacks add to a step that is logged: progress, metrics, monitoring, requests to stop."""
    spec = edit(case(1), {"model.builtin": "tiny-llama", "train.max_steps": CALLBACK_STEPS, "logging.steps": 1})
    report = preflight(spec, probe(folder), Path.cwd())
    run = Run.create(folder / "runs", "callbacks", report.plan, datetime.now())
    subprocess.run([sys.executable, "-c", TIMED], cwd=run.path, env={**os.environ, **report.plan.env}, check=True)
    spent = json.loads((run.path / "callbacks.json").read_text())
    yield "callbacks, per logged step", [1000 * seconds for step, seconds in spent.items() if int(step) > 1], "ms"
