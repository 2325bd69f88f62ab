"""Starts real trainings for tests: the tiny model, torchrun with gloo, and the proof that nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend.config import RunSpec
from backend.config.options import edit
from backend.launch.plan import plan
from backend.machine import Machine
from backend.paths import HOME
from backend.resolve import resolve
from backend.runs import METRICS, RESULT, RUN_MARKER, SKIP_CHECKS, STOP, Plan, processes
from backend.train.engines import TrainEngine, train_engine

SMALL = {
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
ROUNDING = 5e-6
# Other batch shapes and other numbers of processes also add gradients up in a different order, and AdamW turns the
# rounding of a gradient near 0 into a step of the size of the learning rate. Measured: 4e-6 at most, and 1e-5 with a
# learning rate of 1e-2.
REORDERED = 1e-4
THREADS = os.environ.get("FOOTPLATE_TEST_THREADS") or "1"  # of each training process: `make test THREADS=2`
# Several trainings in one process: the libraries are imported once. What it runs is backend.train's own main.
MANY = """
import sys
from backend.train.__main__ import exit, main
for line in sys.argv[1:]:
    sys.argv[1:] = line.split("|")
    main()
exit.exit_now()
"""


def a_spec(changes: Mapping[str, Any] = {}) -> RunSpec:
    return edit(RunSpec(), {**SMALL, **changes})


def an_engine(spec: RunSpec, world_size: int = 1, device: str = "cpu") -> TrainEngine:
    """The engine that trains `spec` in `world_size` processes."""
    return train_engine(spec, replace(resolve(spec, Machine()), device=device), world_size)


def nothing(text: str, share: float | None) -> None:
    """Is told how far a model is."""


def a_folder(root: Path, name: str, changes: Mapping[str, Any]) -> Path:
    return lay(plan(a_spec(changes), Machine()), root / name)


def lay(made: Plan, folder: Path) -> Path:
    """The new folder, with the files of a plan."""
    folder.mkdir(parents=True)
    for file, body in made.files.items():
        (folder / file).write_text(body, encoding="utf-8")
    return folder


def without_checks(made: Plan) -> Plan:
    """The plan as `run --skip-checks` starts it: the trainer runs no rules, so it is the library that fails."""
    return replace(made, env={**made.env, SKIP_CHECKS: "1"})


def environment(folder: Path, cache: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(HOME), os.environ.get("PYTHONPATH")]))
    own = {"FOOTPLATE_CACHE": str(cache), "OMP_NUM_THREADS": THREADS, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    own |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", RUN_MARKER: str(folder)}
    # DeepSpeed builds parts of itself on first use, a minute; a folder of the tests' own, since a build that is killed
    # leaves a lock on which all later ones wait for ever.
    own |= {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(HOME / ".cache/torch_extensions")}
    own["CXX"] = str(HOME / "tests/process/quick-c++")
    return {**os.environ, **own}


class Launch:
    """A torchrun of several ranks over one folder."""

    def __init__(self, folder: Path, cache: Path, ranks: int, *arguments: str) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        self.log = (folder / "log.txt").open("ab")
        self.process = subprocess.Popen(
            [*command, "-m", "backend.train", ".", *arguments],
            cwd=folder,
            env=environment(folder, cache),
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def wait_for(self, what: Callable[[], object], seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None, f"ended early:\n{text(self.folder)}"
            assert time.monotonic() < until, f"waited in vain:\n{text(self.folder)}"
            time.sleep(0.01)

    def done(self, code: int = 0) -> None:
        """It ends with `code`, and no process of it is left."""
        try:
            assert self.process.wait(180) == code, text(self.folder)
        finally:
            self.end()

    def end(self) -> None:
        left = {} if self.process.poll() is not None else {self.process.pid: "launcher"}
        left = left or processes.run_processes(self.folder)
        processes.terminate(self.folder, sigterm_seconds=0)
        self.process.wait(30)
        self.log.close()
        assert not left, f"processes were left behind: {left}"

    def kill(self) -> None:
        """As the system's memory killer would: everything at once, with no chance to tidy up."""
        processes.terminate(self.folder, sigterm_seconds=0)
        self.process.wait(30)
        self.log.close()
        assert not processes.run_processes(self.folder)


def together(cache: Path, *lines: str | Path) -> str:
    """Run folders (with arguments behind a |) one after another in one process; the log."""
    first = Path(str(lines[0]).split("|")[0])
    ended = subprocess.run(
        [sys.executable, "-c", MANY, *map(str, lines)],
        cwd=first,
        env=environment(first, cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert not processes.run_processes(first)
    return ended.stdout


def mostly_soak(names: Iterable[str], kept: Collection[str]) -> list[Any]:
    """Parameters of which those `kept` belong to `make test`, and all to the long proofs."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.soak) for name in names]


def text(folder: Path) -> str:
    return (folder / "log.txt").read_text(encoding="utf-8", errors="replace")


def points(folder: Path) -> list[dict[str, Any]]:
    path = folder / METRICS
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss, as a reader of the curves sees them: points after a resumed step are outdated."""
    found: dict[int, float] = {}
    for point in points(folder):
        if point.get("event") == "resumed":
            found = {step: loss for step, loss in found.items() if step <= point["step"]}
        elif "loss" in point:
            found[point["step"]] = point["loss"]
    return found


def same_losses(expected: Any, within: float = ROUNDING) -> Any:
    """Equal to losses (a mapping, or one) of the same training within `within`: ROUNDING or REORDERED."""
    return pytest.approx(expected, rel=0, abs=within)


def last_step(folder: Path) -> int:
    return max(losses(folder), default=0)


def result(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / RESULT).read_text()))


def ask_to_stop(folder: Path, word: str) -> None:
    (folder / STOP).write_text(word)
