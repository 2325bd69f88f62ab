"""Precisions on a CPU: the dtypes of weights, gradients and optimizer state."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from parameters import soak_except
from safetensors.torch import load_file
from training_runs import THREADS, log_text, losses, make_spec, result, same_losses

from backend.train import device

SAVING = {
    "train.warmup_steps": 0.0,
    "save.strategy": "steps",
    "save.steps": 2,
    "save.total_limit": 0,
    "save.final_model": True,
    "eval.num_generations": 2,
    "eval.max_new_tokens": 4,
}


KERNELS = """
import torch
print("kernels", torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
"""


def test_training_processes_get_the_kernels_and_threads_of_make(fork_server: ForkServer, tmp_path: Path) -> None:
    """`make test CPU=avx2 THREADS=2`."""
    (tmp_path / "script.py").write_text(KERNELS)
    assert fork_server.run(tmp_path, script=str(tmp_path / "script.py")) == 0, log_text(tmp_path)
    (kernels, threads) = log_text(tmp_path).split("kernels ")[1].split()[:2]
    assert threads == THREADS
    assert kernels.lower() == (os.environ.get("FOOTPLATE_TEST_CPU") or kernels.lower())


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)


@pytest.mark.parametrize("method", soak_except(["full", "lora"], ("full",)))
def test_pure_bf16_weights_and_state_are_bf16(method: str, fork_server: ForkServer, tmp_path: Path) -> None:
    spec = make_spec({**SAVING, "method.kind": method, "precision.compute": "pure_bf16"})
    folder = fork_server.train(tmp_path / "run", spec)
    before = losses(folder)
    name = "model" if method == "full" else "adapter_model"
    step = folder / "checkpoints/checkpoint-2"
    for saved in (step, folder / "model"):
        assert {t.dtype for t in load_file(saved / f"{name}.safetensors").values()} == {torch.bfloat16}
    state = torch.load(step / "optimizer.pt", weights_only=True)["state"]
    assert {t.dtype for t in tensors(state) if t.dim()} == {torch.bfloat16}
    trainable = result(folder)["trainable_parameters"]
    assert result(folder)["optimizer"][0]["bytes"] == pytest.approx(4 * trainable, rel=0.01)

    fork_server.resume(folder, 2)
    assert losses(folder) == before, "the same kernels on the same machine, and the state is saved without rounding"


@pytest.mark.parametrize("method", soak_except(["full", "lora"], ("lora",)))
def test_fp8_training_saves_unquantized_weights(method: str, fork_server: ForkServer, tmp_path: Path) -> None:
    """On a CPU fp8 products are emulated, with the results of a GPU, element by element: so the examples are short."""
    pytest.importorskip("torchao")
    short = {**SAVING, "method.kind": method, "data.max_length": 16, "data.loss_on": "all_tokens"}
    short |= {"eval.strategy": "no", "eval.num_generations": 0}
    fp8_run = fork_server.train(tmp_path / "fp8", make_spec({**short, "precision.compute": "fp8"}))
    bf16_run = fork_server.train(tmp_path / "bf16", make_spec({**short, "precision.compute": "bf16"}))
    first, second = losses(fp8_run), losses(bf16_run)
    assert first != same_losses(second), "fp8 layers give different losses"
    assert first == pytest.approx(second, rel=0.01)
    name = "model" if method == "full" else "adapter_model"
    one, two = (load_file(folder / f"model/{name}.safetensors") for folder in (fp8_run, bf16_run))
    assert one.keys() == two.keys()
    assert {t.dtype for t in one.values()} == {t.dtype for t in two.values()}

    fork_server.resume(fp8_run, 2)
    assert losses(fp8_run) == first, "the same kernels on the same machine, and the state is saved without rounding"


def test_fp8_replaces_all_but_the_first_and_last_layer() -> None:
    """In the model that trains, by accelerate, and in a reference model."""
    pytest.importorskip("torchao")

    layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    device.to_fp8(layers, "torchao")
    assert [type(layer).__name__ for layer in layers] == ["Linear", "Float8Linear", "Float8Linear", "Linear"]
    assert {type(p) for p in layers.parameters()} == {torch.nn.Parameter}
