"""Training that continues an adapter: it starts with exactly the weights of the adapter, whatever shards the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import build, save
from fork_server import ForkServer
from parameters import soak_except
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from training_runs import log_text, make_spec, result

from backend.runs import BASE, MODEL, SKIP_CHECKS
from backend.train import continued_adapter
from backend.train.device import ProcessGroup
from backend.train.run_log import TrainError

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


@pytest.fixture(scope="module")
def trained(fork_server: ForkServer, root: Path) -> Path:
    """A run that has trained an adapter."""
    return fork_server.train(root / "continued", make_spec(FIRST))


def continued(fork_server: ForkServer, folder: Path, adapter: Path, env: Mapping[str, str] = {}, **more: Any) -> Path:
    spec = make_spec({**FIRST, **NOTHING_LEARNED, **more, "lora.adapter_path": str(adapter)})
    return fork_server.train(folder, spec, 2 if "parallel.strategy" in more else 0, env)


@pytest.mark.parametrize("name", soak_except(STRATEGIES, ("single",)))
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


def test_a_run_resumes_without_the_adapter_that_it_continued(
    trained: Path, fork_server: ForkServer, tmp_path: Path
) -> None:
    """Its own checkpoint has the weights, so the run that trained the adapter may be deleted."""
    adapter = Path(shutil.copytree(trained / MODEL, tmp_path / "adapter"))
    steps: dict[str, Any] = {"train.max_steps": 2, "save.strategy": "steps", "save.steps": 1}
    run = continued(fork_server, tmp_path / "run", adapter, **steps)
    shutil.rmtree(adapter)
    fork_server.resume(run, 1)
    shutil.rmtree(run / "checkpoints")
    assert fork_server.run(run, 0, "--from-scratch") != 0 and "The adapter to continue cannot be used" in log_text(run)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_resumed_run_keeps_its_reference(tmp_path: Path) -> None:
    """DPO and KTO compare with the adapter that the run continued. The engines save only what is trained."""
    config, at, copy = LoraConfig(r=2, target_modules=["q_proj"]), tmp_path / "adapter", tmp_path / "checkpoint-1"
    trained, *resumed = (get_peft_model(build("llama"), config) for _ in range(3))
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    trained.save_pretrained(at)
    trained.add_adapter("ref", config)
    spec = make_spec({"train.stage": "dpo", "data.builtin": "train-pairs", "lora.adapter_path": str(at)})
    context: Any = SimpleNamespace(spec=spec, group=ProcessGroup(), first=lambda work: work())
    for model in resumed:  # the second one when the adapter is gone
        model.add_adapter("ref", config)
        continued_adapter.restore_reference(context, model, copy)
        for name, parameter in model.named_parameters():
            if ".ref." in name:
                assert torch.equal(parameter, trained.get_parameter(name.replace(".ref.", ".default.")))
        model.save_pretrained(copy)
        shutil.rmtree(at, ignore_errors=True)
    shutil.rmtree(copy)
    with pytest.raises(TrainError, match=r"the reference model of DPO is the adapter in .* not there anymore"):
        continued_adapter.restore_reference(context, resumed[0], copy)


def test_adapters_on_stacked_experts(fork_server: ForkServer, tiny: Path, tmp_path: Path) -> None:
    """peft gives them ranks of their own (rank_pattern), which no option sets."""
    save(build("qwen3_moe"), tiny, tmp_path / "base")
    model: dict[str, Any] = {"model.source": "path", "model.path": str(tmp_path / "base"), "lora.modules_to_save": ()}
    first = fork_server.train(tmp_path / "first", make_spec({**FIRST, **model}))
    run = continued(fork_server, tmp_path / "run", first / MODEL, **model)
    before, after = (load_file(folder / MODEL / WEIGHTS) for folder in (first, run))
    assert before.keys() == after.keys() and any("experts" in key for key in before)
    assert all(torch.allclose(after[key], tensor, atol=1e-6) for key, tensor in before.items())


def test_what_does_not_fit_is_an_error(trained: Path, fork_server: ForkServer, tmp_path: Path) -> None:
    adapter = Path(shutil.copytree(trained / MODEL, tmp_path / "copy" / MODEL))

    def error(name: str, **more: Any) -> str:
        with pytest.raises(AssertionError):
            continued(fork_server, tmp_path / name, adapter, {SKIP_CHECKS: "1"}, **more)
        return log_text(tmp_path / name).rstrip().splitlines()[-1]

    assert "trained with lora_alpha 6.0, but this run has 7.0. Set lora.alpha" in error("alpha", **{"lora.alpha": 7.0})
    more = error("more", **{"lora.modules_to_save": ["lm_head", "embed_tokens"]})
    assert "is missing there" in more and "Use the base model and the adapter options" in more
    state = load_file(adapter / WEIGHTS)
    save_file(dict(list(state.items())[1:]), adapter / WEIGHTS)
    assert "1 tensor of the model is missing there" in error("less")
    base = json.loads((trained / BASE).read_text())
    (adapter.parent / BASE).write_text(json.dumps({**base, "fingerprint": "0" * 64}))
    assert "was trained on a base model with other weights" in error("base")
