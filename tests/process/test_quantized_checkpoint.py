"""`footplate export-model --format bnb-nf4` and the like: a quantized checkpoint is kept only if, loaded in a new
process, it is still the trained model. test_gguf.py has one of them, for `make test`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from training_runs import make_spec
from transformers import AutoModelForCausalLM

from backend.export import merge as merging
from backend.export import quantized
from backend.export.comparison import TEXTS
from backend.export.exporter import Export
from backend.export.quantized import QuantizedExport, Trained, certify
from backend.models.quantized import FORMATS
from backend.runs import CERTIFICATE, JOBS, MODEL, RESULT, STOP
from backend.runs.folder import Run
from backend.train.run_log import RunLog, Stopped, TrainError

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, bitsandbytes and torchao
TRAINED = {"train.learning_rate": 2e-2, "train.max_steps": 4, "save.final_model": True}


@pytest.fixture(scope="module")
def adapter(fork_server: ForkServer, root: Path) -> Path:
    """A run that has trained an adapter, with its merge `m`."""
    run = fork_server.train(root / "quantized-adapter", make_spec(TRAINED))
    (run / JOBS / "m").mkdir(parents=True)
    merging.Merge(Run(run), None, run / JOBS / "m", RunLog(run / JOBS / "m")).run_all()
    return run


@pytest.fixture
def export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer
) -> Callable[[Path, str], dict[str, Any]]:
    """Exports a run in the folder `job`."""
    monkeypatch.setattr(sys, "executable", str(fork_server.python))

    def make(run: Path, format: str) -> dict[str, Any]:
        folder = tmp_path / "job"
        folder.mkdir(exist_ok=True)
        (folder / "quantize.json").write_text(json.dumps({"step": None, "format": format, "merge": "m"}))
        return QuantizedExport(Run(run), folder, RunLog(folder)).run_all()

    return make


@pytest.mark.soak
@pytest.mark.parametrize("format", FORMATS)
def test_a_verified_checkpoint(
    adapter: Path, export: Callable[[Path, str], dict[str, Any]], tmp_path: Path, format: str
) -> None:
    certificate = export(adapter, format)["certificate"]
    folder = tmp_path / "job" / MODEL
    assert json.loads((folder / CERTIFICATE).read_text()) == certificate
    if format == "bnb-nf4":
        assert (certificate["status"], certificate["limits"]) == ("verified", [])
    else:  # embeddings are most of this model
        assert certificate["status"] == "verified with limitations" and "Embeddings" in certificate["limits"][0]
    assert certificate["stop_tokens"] == ["<|im_end|>"]
    assert 0 < certificate["trained_to_checkpoint"]["kl_mean"] < certificate["trained_to_base"]["kl_mean"]
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == ("torchao" if format.startswith("torchao") else "bitsandbytes")
    full = (adapter / JOBS / "m" / MODEL / "model.safetensors").stat().st_size
    assert (folder / "model.safetensors").stat().st_size < full and (folder / "chat_template.jinja").exists()
    left = [path.name for path in (tmp_path / "job").iterdir()]
    assert sorted(left) == [MODEL, "progress.json", "quantize.json"]


@pytest.mark.soak
def test_a_checkpoint_that_differs_or_cannot_be_loaded(
    adapter: Path, export: Callable[[Path, str], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the base model, so that the adapter is missing; then without its weights. A stop leaves nothing."""
    base = Path(json.loads((adapter / MODEL / "adapter_config.json").read_text())["base_model_name_or_path"])
    with monkeypatch.context() as patch:
        patch.setattr(Export, "_weights", lambda *_: base)
        with pytest.raises(TrainError, match="differs from the trained model and was deleted"):
            export(adapter, "torchao-int8")
    certificate = json.loads((tmp_path / "job" / RESULT).read_text())["certificate"]
    assert any("cannot rule out that the adapter is missing" in each for each in certificate["differences"])
    with monkeypatch.context() as patch:
        patch.setattr(QuantizedExport, "_quantize", lambda job, *_: (job.folder / "unchecked").mkdir(exist_ok=True))
        with pytest.raises(TrainError, match=r"transformers cannot load the quantized checkpoint, so it was deleted: "):
            export(adapter, "torchao-int8")
    (tmp_path / "job" / STOP).write_text("discard")
    with pytest.raises(Stopped):
        export(adapter, "torchao-int8")
    assert not {MODEL, "unchecked", quantized.BATCHES} & {path.name for path in (tmp_path / "job").iterdir()}


@pytest.mark.soak
def test_a_model_that_the_package_refuses(
    adapter: Path, export: Callable[[Path, str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **options: Any) -> Any:
        if "quantization_config" in options:
            raise RuntimeError("no kernel for this layer\nmore")
        return load(*_, **options)

    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(TrainError, match=r"bitsandbytes cannot quantize this model: no kernel for this layer$"):
        export(adapter, "bnb-int8")


FAULTS = {
    "tokens": "different token IDs, or has a different chat template",
    "template": "different token IDs, or has a different chat template",
    "stops": "Stop tokens that only one of them has: token 7",
    "noise": r"and at most 0\.2 is accepted\. Four bits .* Export as .*int8.* \(torchao-int8\)\.",
    "base": "cannot rule out that the adapter is missing",
}


class Tokenizer:
    chat_template = "template"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, 2]}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"token {number}" for number in ids]


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_what_differs_is_named(fault: str) -> None:
    torch.manual_seed(0)
    logits = 5 * torch.randn(200, 50)
    base = (logits + 0.3 * torch.randn_like(logits)).log_softmax(-1)
    observed = Trained(Tokenizer(), None, [5], [], [logits.log_softmax(-1)], [base], "")
    rounded = (logits + (3 if fault == "noise" else 0.05) * torch.randn_like(logits)).log_softmax(-1)
    said: dict[str, Any] = {"ids": [[1, 2] for _ in TEXTS], "template": "template", "stops": [5]}
    said |= {"tokens": {"ids": [[1]]}, "template": {"template": ""}, "stops": {"stops": [5, 7]}}.get(fault, {})
    certificate = certify(observed, [base if fault == "base" else rounded], said, "bnb-nf4")
    if fault:
        assert certificate["status"] == "differs"
        assert any(re.search(FAULTS[fault], each) for each in certificate["differences"])
    else:
        assert certificate["status"] == "verified" and certificate["differences"] == []
