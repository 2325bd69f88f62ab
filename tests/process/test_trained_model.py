"""The Python code that the page shows for a trained model, executed as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import make_run_folder, train_in_one_process

from backend.runs import trained
from backend.runs.folder import Run

SHORT = {"train.max_steps": 2, "save.final_model": True}
KINDS = {
    "adapter": {"method.kind": "lora"},
    "full": {"method.kind": "full"},
    "text": {"method.kind": "full", "train.stage": "pretraining"},
    "reward adapter": {"method.kind": "lora", "train.stage": "reward", "data.builtin": "train-pairs"},
    "reward": {"method.kind": "full", "train.stage": "reward", "data.builtin": "train-pairs"},
    "merged": {"method.kind": "lora", "save.merge_adapter": True},
}
QUICK = ("adapter",)


@pytest.mark.parametrize(
    "kind", [*QUICK, *(pytest.param(name, marks=pytest.mark.soak) for name in KINDS if name not in QUICK)]
)
def test_the_shown_code_uses_the_model(root: Path, cache: Path, kind: str) -> None:
    folder = make_run_folder(root, kind.replace(" ", "-"), {**SHORT, **KINDS[kind]})
    train_in_one_process(cache, folder)
    found = trained.find(Run(folder))
    assert found and found.step is None
    assert bool(found.base) == ("adapter" in kind)
    env = {**os.environ, "FOOTPLATE_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", found.code], cwd=root, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if "reward" in kind:
        assert float(done.stdout.strip().splitlines()[-1]) == pytest.approx(0, abs=100)
    else:
        assert done.stdout.strip(), "the tiny model generates some text"
