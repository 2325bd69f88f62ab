"""A trained model: the Python code that the page shows for it, executed as it is, and the dtype of its weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import make_run_folder, train_in_one_process

from backend.runs import trained
from backend.runs.folder import Run

# The dtypes in which full fine-tuning saves each revision of a model on the Hub.
SAVED_DTYPES = """
from backend.config import RunSpec
from backend.config.options import edit
from backend.train import model
for revision in ("main", "v2"):
    hub = {"model.source": "hub", "model.hub_id": "some/model", "model.revision": revision, "method.kind": "full"}
    spec = edit(RunSpec(), hub)
    print(model.saved_dtype(spec, model.locate(spec, print)))
"""
SHORT = {"train.max_steps": 2, "save.final_model": True}
KINDS = {
    "adapter": {"method.kind": "lora"},
    "full": {"method.kind": "full"},
    "text": {"method.kind": "full", "train.stage": "pretraining"},
    "reward adapter": {"method.kind": "lora", "train.stage": "reward", "data.builtin": "train-pairs"},
    "reward": {"method.kind": "full", "train.stage": "reward", "data.builtin": "train-pairs"},
    "merged": {"method.kind": "lora", "save.merge_adapter": True},
}
QUICK = ("adapter", "reward adapter")


@pytest.mark.parametrize(
    "kind", [*QUICK, *(pytest.param(name, marks=pytest.mark.soak) for name in KINDS if name not in QUICK)]
)
def test_the_shown_code_uses_the_model(root: Path, cache: Path, kind: str) -> None:
    folder = make_run_folder(root, kind.replace(" ", "-"), {**SHORT, **KINDS[kind]})
    log = train_in_one_process(cache, folder)
    found = trained.find(Run(folder))
    assert found and found.step is None
    assert bool(found.base) == ("adapter" in kind)
    env = {**os.environ, "FOOTPLATE_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", found.code], cwd=root, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if "reward" in kind:
        assert_scores_a_batch(log, folder / "model", found.code, {**env, "CUDA_VISIBLE_DEVICES": ""})
        assert float(done.stdout.strip().splitlines()[-1]) == pytest.approx(0, abs=100)
    else:
        assert done.stdout.strip(), "the tiny model generates some text"


def assert_scores_a_batch(log: str, folder: Path, code: str, env: dict[str, str]) -> None:
    """As the page and the log say: a batch needs a padding token, which the base model's config may not have."""
    (call,) = re.findall(r"Load the reward model with (.*)\.$", log, re.MULTILINE)
    logged = f"from transformers import AutoModelForSequenceClassification\nfolder = {str(folder)!r}\nmodel = {call}\n"
    batch = "print(model(**tokenizer(['One.', 'A longer text.'], padding=True, return_tensors='pt')).logits.shape)\n"
    for text in (code + batch, code + logged + batch):
        done = subprocess.run(
            [sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0 and "torch.Size([2, 1])" in done.stdout, done.stderr[-2000:]


def test_a_model_of_the_hub_is_saved_in_the_dtype_of_its_revision(tmp_path: Path) -> None:
    """The Hub's cache has a folder per commit."""
    place = tmp_path / "hub" / "models--some--model"
    for revision, commit, dtype in (("main", "a" * 40, "bfloat16"), ("v2", "b" * 40, "float16")):
        (place / "snapshots" / commit).mkdir(parents=True)
        (place / "snapshots" / commit / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": dtype}))
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / revision).write_text(commit)
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SAVED_DTYPES], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["torch.bfloat16", "torch.float16"], done.stderr[-2000:]
