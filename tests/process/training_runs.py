"""Helpers that train the tiny model for tests: specs, run folders, torchrun with gloo, and a check for leftover
processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from backend.config import RunSpec
from backend.config.options import edit
from backend.launch.plan import plan
from backend.machine import Machine
from backend.paths import HOME
from backend.resolve import resolve
from backend.runs import COMPLETE, METRICS, RESULT, RUN_MARKER, SKIP_CHECKS, STOP, Plan, processes

if TYPE_CHECKING:
    from backend.train.engines import TrainEngine

TINY_RUN = {
    "model.builtin": "tiny-llama",
    "train.duration": "steps",
    "train.max_steps": 3,
    "train.per_device_train_batch_size": 2,
    "train.learning_rate": 1e-3,
    "data.max_samples": 40,
    "data.max_length": 256,
    "eval.strategy": "no",
    "save.strategy": "no",
    "save.final_model": False,
    "launch.device": "cpu",
}
# How far losses of the tiny model (4 to 8) may differ when different kernels compute the same arithmetic. A float32 of
# this size is a multiple of 4.8e-7. Under all settings of `make soak-cpu`, fused and paged AdamW differ from AdamW by
# two such units at most; the nearest different arithmetic, AdamW with torchao's 8-bit state, differs by 2.4e-5.
ROUNDING_TOLERANCE = 5e-6
# A different batch shape or number of processes also changes the order in which gradients are summed, and AdamW turns
# the rounding error of a gradient near 0 into a step of the size of the learning rate. Measured: 4e-6 at most, and 1e-5
# with a learning rate of 1e-2.
REORDERING_TOLERANCE = 1e-4
THREADS = os.environ.get("FOOTPLATE_TEST_THREADS") or "1"  # of each training process: `make test THREADS=2`
# DeepSpeed compiles its operators on first use, which takes minutes. tests/conftest.py builds them before that.
EXTENSIONS = HOME / ".cache/torch_extensions"
# Trains several run folders in one process with backend.train's main, so that the libraries are imported once.
TRAIN_EACH_FOLDER = """
import sys
from backend.train.__main__ import exit, main
for line in sys.argv[1:]:
    sys.argv[1:] = line.split("|")
    main()
exit.exit_now()
"""


def make_spec(changes: Mapping[str, Any] = {}) -> RunSpec:
    return edit(RunSpec(), {**TINY_RUN, **changes})


def make_engine(spec: RunSpec, world_size: int = 1, device: str = "cpu") -> TrainEngine:
    """The engine that trains `spec` in `world_size` processes."""
    from backend.train.engines import train_engine  # noqa: PLC0415 - imports the libraries, which few files need

    return train_engine(spec, replace(resolve(spec, Machine()), device=device), world_size)


def ignore_progress(text: str, share: float | None) -> None:
    """A progress callback that does nothing."""


def make_run_folder(root: Path, name: str, changes: Mapping[str, Any]) -> Path:
    """Plan the tiny run with `changes` into the new folder root/name."""
    return write_plan(plan(make_spec(changes), Machine()), root / name)


def write_plan(plan_: Plan, folder: Path) -> Path:
    """Create `folder` and write the files of a plan into it."""
    folder.mkdir(parents=True)
    for file, content in plan_.files.items():
        (folder / file).write_text(content, encoding="utf-8")
    return folder


def without_checks(plan_: Plan) -> Plan:
    """The plan as `run --skip-checks` starts it: the trainer runs no rules, so an invalid spec fails in the library."""
    return replace(plan_, env={**plan_.env, SKIP_CHECKS: "1"})


def environment(folder: Path, cache: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(HOME), os.environ.get("PYTHONPATH")]))
    variables = {"FOOTPLATE_CACHE": str(cache), "OMP_NUM_THREADS": THREADS, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    variables |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", RUN_MARKER: str(folder)}
    variables |= {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(EXTENSIONS)}
    variables["CXX"] = str(HOME / "tests/process/quick-c++")
    return {**os.environ, **variables}


class TorchrunLaunch:
    """A torchrun process that trains one run folder with several ranks. `python`: or its stand-in (fork_server.py)."""

    def __init__(
        self, folder: Path, cache: Path, ranks: int, *arguments: str, python: str | Path = sys.executable
    ) -> None:
        self.folder = folder
        command = [str(python), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        self.log = (folder / "log.txt").open("ab")
        self.process = subprocess.Popen(
            [*command, "-m", "backend.train", ".", *arguments],
            cwd=folder,
            env=environment(folder, cache),
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def wait_for(self, condition: Callable[[], object], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended early:\n{log_text(self.folder)}"
            assert time.monotonic() < deadline, f"timed out:\n{log_text(self.folder)}"
            time.sleep(0.01)

    def wait_for_exit(self, code: int = 0) -> None:
        """Assert that it exits with `code` and leaves no process."""
        try:
            assert self.process.wait(180) == code, log_text(self.folder)
        finally:
            self.close()

    def close(self) -> None:
        leftovers = {} if self.process.poll() is not None else {self.process.pid: "launcher"}
        leftovers = leftovers or processes.run_processes(self.folder)
        processes.terminate(self.folder, sigterm_seconds=0)
        self.process.wait(30)
        self.log.close()
        assert not leftovers, f"processes were left behind: {leftovers}"

    def kill(self) -> None:
        """Kill all its processes at once with SIGKILL, as the kernel's OOM killer would."""
        processes.terminate(self.folder, sigterm_seconds=0)
        self.process.wait(30)
        self.log.close()
        assert not processes.run_processes(self.folder)


def train_in_one_process(cache: Path, *runs: str | Path) -> str:
    """Train run folders one after another in one process and return the log. An item is FOLDER or FOLDER|ARGUMENT."""
    first_folder = Path(str(runs[0]).split("|")[0])
    completed = subprocess.run(
        [sys.executable, "-c", TRAIN_EACH_FOLDER, *map(str, runs)],
        cwd=first_folder,
        env=environment(first_folder, cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout
    assert not processes.run_processes(first_folder)
    return completed.stdout


def make_best(checkpoint: Path, **changes: Any) -> None:
    """No later evaluation is better than that of `checkpoint`, whose eval loss becomes 0. `changes` are other values of
    its trainer_state.json, which is not taken for damaged."""
    path = checkpoint / "trainer_state.json"
    state = {**json.loads(path.read_text()), "best_metric": 0.0, **changes}
    for point in state["log_history"]:
        if "eval_loss" in point and point["step"] == state["global_step"]:
            point["eval_loss"] = 0.0
    path.write_text(json.dumps(state))
    (checkpoint / COMPLETE).write_text("")


def log_text(folder: Path) -> str:
    return (folder / "log.txt").read_text(encoding="utf-8", errors="replace")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / METRICS
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss, as the loss curve shows it: when a run resumes, later points of the earlier attempt are dropped."""
    by_step: dict[int, float] = {}
    for point in read_metrics(folder):
        if point.get("event") == "resumed":
            by_step = {step: loss for step, loss in by_step.items() if step <= point["step"]}
        elif "loss" in point:
            by_step[point["step"]] = point["loss"]
    return by_step


def same_losses(expected: Any, within: float = ROUNDING_TOLERANCE) -> Any:
    """Approximately equal to `expected`, a loss or a mapping of losses. `within`: an absolute tolerance from above."""
    return pytest.approx(expected, rel=0, abs=within)


def last_step(folder: Path) -> int:
    return max(losses(folder), default=0)


def result(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / RESULT).read_text()))


def request_stop(folder: Path, mode: str) -> None:
    (folder / STOP).write_text(mode)
