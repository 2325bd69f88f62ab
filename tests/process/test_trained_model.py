"""A trained model: the Python code that the page shows for it, executed as it is, and the dtype of its weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import huggingface_hub
import pytest
import torch
from fork_server import ForkServer
from parameters import soak_except
from training_runs import ignore_progress, log_text, make_spec

from backend.config import RunSpec
from backend.config.options import edit
from backend.models import trained
from backend.runs.folder import Run
from backend.train import model

# Runs code.py as `python -c` would, with its output in output.txt.
RUN_CODE = """
import contextlib, runpy
with open("output.txt", "w") as file, contextlib.redirect_stdout(file):
    runpy.run_path("code.py", run_name="__main__")
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
QUICK = ("reward adapter",)


@pytest.mark.parametrize("kind", soak_except(KINDS, QUICK))
def test_the_shown_code_uses_the_model(fork_server: ForkServer, root: Path, kind: str) -> None:
    name = kind.replace(" ", "-")
    folder = fork_server.train(root / name, make_spec({**SHORT, **KINDS[kind]}))
    found = trained.find(Run(folder))
    assert found and found.step is None
    assert bool(found.base) == ("adapter" in kind)
    output = run_code(fork_server, root / f"{name}-shown", found.code)
    if "reward" in kind:
        assert_scores_a_batch(fork_server, log_text(folder), folder, found.code)
        assert float(output.strip().splitlines()[-1]) == pytest.approx(0, abs=100)
    else:
        assert output.strip(), "the tiny model generates some text"


def run_code(fork_server: ForkServer, folder: Path, code: str) -> str:
    """The output of Python code that is executed in the new `folder`."""
    folder.mkdir()
    (folder / "code.py").write_text(code)
    (folder / "run.py").write_text(RUN_CODE)
    assert fork_server.run(folder, script=str(folder / "run.py")) == 0, log_text(folder)[-2000:]
    return (folder / "output.txt").read_text()


def assert_scores_a_batch(fork_server: ForkServer, log: str, folder: Path, code: str) -> None:
    """As the page and the log of an adapter say: a batch needs a padding token, which the base model's config may not
    have."""
    calls = re.findall(r"Load the reward model with (.*)\.$", log, re.MULTILINE)
    assert len(calls) == (folder / "model/adapter_config.json").exists()
    logged = f"from transformers import AutoModelForSequenceClassification\nfolder = {str(folder / 'model')!r}\n"
    batch = "print(model(**tokenizer(['One.', 'A longer text.'], padding=True, return_tensors='pt')).logits.shape)\n"
    for name, text in (("page", code + batch), *(("log", f"{code}{logged}model = {call}\n{batch}") for call in calls)):
        assert "torch.Size([2, 1])" in run_code(fork_server, folder.with_name(f"{folder.name}-{name}"), text)


def test_a_model_of_the_hub_is_saved_in_the_dtype_of_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub's cache has a folder per commit."""
    place = tmp_path / "hub" / "models--some--model"
    for revision, commit, dtype in (("main", "a" * 40, "bfloat16"), ("v2", "b" * 40, "float16")):
        (place / "snapshots" / commit).mkdir(parents=True)
        (place / "snapshots" / commit / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": dtype}))
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / revision).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub = {"model.source": "hub", "model.hub_id": "some/model", "method.kind": "full"}
    specs = [edit(RunSpec(), {**hub, "model.revision": revision}) for revision in ("main", "v2")]
    dtypes = [model.saved_dtype(spec, model.locate(spec, ignore_progress)) for spec in specs]
    assert dtypes == [torch.bfloat16, torch.float16]
