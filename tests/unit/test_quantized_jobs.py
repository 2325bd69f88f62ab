"""Starting to export a quantized checkpoint: what is refused, with the way to fix it, and which one belongs to a
model."""

import json
from importlib import metadata
from pathlib import Path

import pytest
from failed_runs import ended, planted_run

from backend import registry
from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import probe
from backend.models import quantized, trained
from backend.runs import LOCK, RESULT
from backend.runs.folder import Run, RunError


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """Makes runs that have finished, with full weights and this config.json; no job is started."""
    monkeypatch.setattr(Run, "start", lambda self, timeouts: None)

    def make(config, adapter=None, **changes):
        run = planted_run(tmp_path / "runs", edit(RunSpec(), changes), probe(Path.cwd()), "run")
        write(run.path / "model", {"adapter_config.json": adapter} if adapter else {"config.json": config})
        ended(run, end="done", exit_code=0)
        (run.path / RESULT).write_text(json.dumps({"steps": 3, "model": "model"}))
        return run

    return make


def write(folder, files):
    folder.mkdir(parents=True)
    weights = "adapter_model.safetensors" if "adapter_config.json" in files else "model.safetensors"
    for name, content in {**files, "tokenizer_config.json": {}, weights: {}}.items():
        (folder / name).write_text(json.dumps(content))


def test_what_is_refused(plant, monkeypatch):
    for name, reason in registry.UNQUANTIZABLE.items():
        with pytest.raises(RunError, match=f"The architecture {name} {reason}"):
            quantized.start(plant({"model_type": name}), None, "bnb-nf4")
    with pytest.raises(RunError, match="already quantized"):
        quantized.start(plant({"quantization_config": {"quant_method": "gptq"}}), None, "bnb-nf4")
    with pytest.raises(RunError, match="Reward models cannot be exported"):
        quantized.start(plant({}, **{"train.stage": "reward"}), None, "bnb-nf4")
    with pytest.raises(RunError, match=r"that is not merged into its base model\. Merge it first"):
        quantized.start(plant({}, {"base_model_name_or_path": "tiny-llama"}), None, "bnb-nf4")
    run = plant({})
    assert [entry["format"] for entry in quantized.menu()] == list(quantized.FORMATS)
    assert quantized.menu()[0]["text"].startswith("torchao int8: 8 bits, weights only, closest to the trained model")
    monkeypatch.setattr(metadata, "version", lambda name: "0.1" if name == "torchao" else "9")
    names = ["bnb-int8", "bnb-nf4", "torchao-int8", "torchao-fp8"]  # what this machine cannot write comes last
    assert [entry["format"] for entry in quantized.menu()] == names
    assert quantized.menu()[2]["text"].endswith("(needs torchao 0.15.0 or later; torchao 0.1 is installed)")
    with pytest.raises(RunError, match=r"needs torchao 0\.15\.0 or later; torchao 0\.1 is installed\. Install it"):
        quantized.start(run, None, "torchao-int8")


def test_checkpoints_of_a_model(plant):
    run = plant({"model_type": "llama"})
    model, job = trained.find(run), quantized.start(run, None, "bnb-nf4")
    assert json.loads((job.path / "quantize.json").read_text()) == {"step": None, "format": "bnb-nf4", "merge": ""}
    (job.path / LOCK).touch()
    (job.path / RESULT).write_text(json.dumps({"model": "model", "certificate": {"status": "verified"}}))
    (job.path / "state.json").write_text(json.dumps({"end": "done", "exit_code": 0}))
    write(job.path / "model", {"config.json": {}})
    assert quantized.start(run, None, "bnb-nf4").id == job.id
    assert [found.id for found in quantized.find_all(run, model)] == [job.id]
    shown = quantized.as_json(job)
    assert shown["label"] == "bitsandbytes NF4" and shown["model"]["folder"] == str(job.path / "model")
    (job.path / "model/model.safetensors").unlink()
    assert quantized.as_json(job)["model"] is None
