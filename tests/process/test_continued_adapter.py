"""Training that continues an adapter: it starts with exactly the weights of the adapter, whatever shards the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from safetensors.torch import load_file, save_file
from training_runs import log_text, make_spec, result

from backend.runs import BASE, MODEL, SKIP_CHECKS

WEIGHTS = "adapter_model.safetensors"
FIRST: dict[str, Any] = {
    "save.final_model": True, "lora.r": 4, "lora.alpha": 6.0, "lora.modules_to_save": ["lm_head"],
    "train.learning_rate": 0.05, "eval.num_generations": 2, "eval.max_new_tokens": 8, "train.max_steps": 6,
}  # fmt: skip
NOTHING_LEARNED = {"train.learning_rate": 1e-12, "train.max_steps": 1}
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp": {"parallel.strategy": "ddp"},
    "zero3": {"parallel.strategy": "zero3"},
    "fsdp2": {"parallel.strategy": "fsdp2"},
    "nf4": {"method.quantization": "nf4"},
}
SOAK = [pytest.param(name, marks=pytest.mark.soak) for name in ("ddp", "nf4")]


@pytest.fixture(scope="module")
def trained(fork_server: ForkServer, root: Path) -> Path:
    """A run that has trained an adapter."""
    return fork_server.train(root / "continued", make_spec(FIRST))


def continued(fork_server: ForkServer, folder: Path, adapter: Path, env: Mapping[str, str] = {}, **more: Any) -> Path:
    spec = make_spec({**FIRST, **NOTHING_LEARNED, **more, "lora.adapter_path": str(adapter)})
    return fork_server.train(folder, spec, 2 if "parallel.strategy" in more else 0, env)


@pytest.mark.parametrize("name", ["single", "zero3", "fsdp2", *SOAK])
def test_it_starts_with_the_weights_of_the_adapter(
    trained: Path, fork_server: ForkServer, tmp_path: Path, name: str
) -> None:
    run = continued(fork_server, tmp_path / "run", trained / MODEL, **STRATEGIES[name])
    before, after = (load_file(folder / MODEL / WEIGHTS) for folder in (trained, run))
    assert before.keys() == after.keys() and any("lm_head" in key for key in before)
    for key, tensor in before.items():
        assert torch.allclose(after[key].float(), tensor.float(), atol=1e-6), key
    assert f"Continuing the adapter in {trained / MODEL}." in log_text(run)
    if name == "single":
        outputs = [[sample[side] for sample in result(folder)["samples"]]
                   for folder, side in ((trained, "after"), (run, "before"))]  # fmt: skip
        assert outputs[0] == outputs[1]
        assert {sample["before"] for sample in result(trained)["samples"]}.isdisjoint(outputs[1])


def test_what_does_not_fit_is_an_error(trained: Path, fork_server: ForkServer, tmp_path: Path) -> None:
    adapter = Path(shutil.copytree(trained / MODEL, tmp_path / "copy" / MODEL))

    def error(name: str, **more: Any) -> str:
        with pytest.raises(AssertionError):
            continued(fork_server, tmp_path / name, adapter, {SKIP_CHECKS: "1"}, **more)
        return log_text(tmp_path / name).rstrip().splitlines()[-1]

    assert "trained with lora_alpha 6.0, but this run has 7.0. Set lora.alpha" in error("alpha", **{"lora.alpha": 7.0})
    assert "is missing there" in error("more", **{"lora.modules_to_save": ["lm_head", "embed_tokens"]})
    state = load_file(adapter / WEIGHTS)
    save_file(dict(list(state.items())[1:]), adapter / WEIGHTS)
    assert "1 tensor of the model is missing there" in error("less")
    base = json.loads((trained / BASE).read_text())
    (adapter.parent / BASE).write_text(json.dumps({**base, "fingerprint": "0" * 64}))
    assert "was trained on a base model with other weights" in error("base")
