"""Every optimizer that runs on a CPU: a real training looked at, its state weighed, and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from safetensors.torch import load_file
from training_runs import REORDERING_TOLERANCE, losses, make_spec, result, same_losses, soak_except
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification
from untrained_models import memory_context

from backend import registry
from backend.memory import MemoryContext
from backend.modelspec import ModuleSpec, from_config
from backend.train import optimizers

FULL = {
    "method.kind": "full",
    "train.max_steps": 4,
    "train.lr_scheduler_type": "linear",
    "train.warmup_steps": 0.0,
    "save.strategy": "steps",
    "save.steps": 2,
    "save.total_limit": 0,
    "train.projection_rank": 16,
    "train.update_proj_gap": 2,
    "train.badam_switch_block_every": 2,
    "train.weight_decay": 0.1,
}
HERE = [name for name, row in registry.OPTIMIZERS.items() if not row.devices]
KIN = {"adamw_torch", "adamw_torch_fused", "paged_adamw_32bit"}  # the same arithmetic, by different kernels
# Others are resumed by the same class, with fewer or more bits.
ONCE = {
    "adamw_torch_fused", "paged_adamw_32bit", "paged_adamw_8bit", "adamw_torch_4bit", "ademamix", "lion_32bit",
    "paged_lion_32bit", "paged_lion_8bit", "schedule_free_sgd", "sgd", "rmsprop", "adagrad",
    "galore_adafactor_layerwise",
}  # fmt: skip
RESUMED = (
    "adamw_torch",
    "adamw_bnb_8bit",
    "adafactor",
    "muon",
    "galore_adamw",
    "apollo_adamw",
    "badam",
    "schedule_free_adamw",
    "adalomo",
)
# Compiling takes a minute each; without it the same arithmetic runs step by step.
ENV = {"TORCHDYNAMO_DISABLE": "1"}
OWN = "backend.train.optimizers"
CLASSES = {
    "": ("torch.optim", "transformers.optimization", OWN),
    "adam-mini": ("adam_mini",),
    "badam": ("backend.train.patches.badam_checkpoint",),
    "bitsandbytes": ("bitsandbytes.optim",),
    "torch-optimi": ("optimi",),
    "torchao": ("torchao.optim",),
}


@pytest.fixture(scope="module")
def usual(fork_server: ForkServer, root: Path) -> dict[int, float]:
    """The losses of AdamW."""
    return losses(fork_server.train(root / "usual", make_spec(FULL)))


@pytest.fixture(scope="module")
def made(fork_server: ForkServer, root: Path) -> Callable[[str], Path]:
    """The run of an optimizer, trained when it is first asked for."""

    def run(name: str) -> Path:
        folder = root / name
        return (
            folder if folder.exists() else fork_server.train(folder, make_spec({**FULL, "train.optim": name}), env=ENV)
        )

    return run


@pytest.mark.parametrize("name", HERE)
def test_it_trains_and_weighs(name: str, made: Callable[[str], Path], usual: dict[int, float]) -> None:
    row, folder = registry.OPTIMIZERS[name], made(name)
    before = losses(folder)
    assert before[1] == same_losses(usual[1])
    assert all(loss == loss and loss < 12 for loss in before.values())
    assert (before == same_losses(usual)) is (name in KIN)
    if name != "schedule_free_radam":  # its first five steps wait for the variance
        moved(folder)
    found: dict[str, Any] = result(folder)["optimizer"][0]
    assert found["class"].startswith(CLASSES.get(row.package, (row.package.replace("-", "_"),)))
    assert estimated({"train.optim": name}).optimizer.bytes == pytest.approx(found["bytes"], rel=0.03, abs=100)


@pytest.mark.parametrize("name", soak_except([name for name in HERE if name not in ONCE], RESUMED))
def test_it_goes_on(name: str, made: Callable[[str], Path], fork_server: ForkServer) -> None:
    row, folder = registry.OPTIMIZERS[name], made(name)
    before = losses(folder)
    fork_server.resume(folder, 2, env=ENV)
    again = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [point["step"] for point in again if "loss" in point] == [1, 2, 3, 4, 3, 4]
    # Exact: the same kernels on the same machine, from a state that was saved bit by bit.
    assert (losses(folder) == before) is not row.loses_state_on_save


def moved(folder: Path) -> None:
    """A layer's weights of the second checkpoint differ from those of the first."""
    first, second = (load_file(folder / f"checkpoints/checkpoint-{step}/model.safetensors") for step in (2, 4))
    assert any(not first[name].equal(second[name]) for name in first if ".layers." in name)


def estimated(changes: Mapping[str, Any]) -> MemoryContext:
    shape = from_config(registry.BUILTIN_MODELS["tiny-llama"].config)
    return memory_context(make_spec({**FULL, **changes}), shape)


# Bytes a weight of real states where weights, too, are bf16: three steps of the tiny model, torch 2.13.
PURE = {
    "adamw_torch": 4.0,
    "adamw_bnb_8bit": 3.277,
    "adamw_torch_8bit": 2.082,
    "adamw_torch_4bit": 1.037,
    "paged_adamw_32bit": 8.0,
    "adam_mini": 2.013,
    "stable_adamw": 6.0,
    "ademamix": 12.0,
    "adafactor": 0.047,
    "lion_32bit": 4.0,
    "muon": 2.832,
    "galore_adamw": 1.337,
    "galore_adafactor": 0.201,
    "apollo_adamw": 1.337,
    "badam": 1.754,
    "schedule_free_sgd": 2.0,
    "grokadamw": 6.0,
}


@pytest.mark.parametrize("name", PURE)
def test_state_beside_bf16_weights(name: str) -> None:
    found = estimated({"train.optim": name, "precision.compute": "pure_bf16"})
    assert found.optimizer.bytes / found.trainable_count == pytest.approx(PURE[name], rel=0.03)


# Bytes a rank and a weight on two ranks of FSDP2, which keeps the shapes of matrices.
@pytest.mark.parametrize(("name", "each"), [("adamw_torch", 4.0), ("muon", 2.832), ("adam_mini", 2.013)])
def test_state_is_spread(name: str, each: float) -> None:
    found = estimated({"train.optim": name, "parallel.strategy": "fsdp2", "launch.nproc_per_node": 2})
    assert found.optimizer.bytes / found.run.optimizer_shards / found.trainable_count == pytest.approx(each, rel=0.03)


@pytest.mark.parametrize("how", ["std", "reverse_std", "left", "right", "full"])
def test_sides_of_a_projection(how: str) -> None:
    """The state of one matrix, as GaLore itself makes it."""
    galore = pytest.importorskip("galore_torch")
    state = estimated({"train.optim": "galore_adamw", "train.galore_proj_type": how}).optimizer
    for rows, columns in ((352, 128), (128, 352)):
        weight = torch.nn.Parameter(torch.randn(rows, columns))
        told = {"rank": 16, "update_proj_gap": 2, "scale": 1.0, "proj_type": how}
        made = galore.GaLoreAdamW([{"params": [weight], **told}], no_deprecation_warning=True)
        weight.grad = torch.randn(rows, columns)
        made.step()
        leaf = ModuleSpec("model.layers.0.mlp.up_proj", rows * columns, columns, rows)
        assert state._tensor_bytes(leaf) == optimizers.state_summary(made)["bytes"]


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero0", marks=pytest.mark.soak)])
def test_a_state_that_was_made_early_follows_the_weights(strategy: str, root: Path, fork_server: ForkServer) -> None:
    """Adagrad makes its state when it is made itself; an engine then puts other weights in the place of those."""
    early = {**FULL, "train.optim": "adagrad"}
    one = losses(fork_server.train(root / f"early-1-{strategy}", make_spec(early)))
    more = {**early, "parallel.strategy": strategy, "train.per_device_train_batch_size": 1}
    folder = fork_server.train(root / f"early-2-{strategy}", make_spec(more), 2)
    assert losses(folder) == same_losses(one, REORDERING_TOLERANCE)
    fork_server.resume(folder, 2, 2)
    assert losses(folder) == same_losses(one, REORDERING_TOLERANCE)


def test_muon_orthogonalises_the_layers_alone() -> None:
    spec = make_spec({**FULL, "train.optim": "muon", "train.learning_rate": 0.01, "train.weight_decay": 0.0})
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=64, **small))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = optimizers.MAKERS["muon"](spec, model, set(before))
    torch.manual_seed(3)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    made.step()
    steps = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    hidden = torch.linalg.svdvals(steps["model.layers.0.mlp.up_proj.weight"])  # oblong: no direction is near zero
    assert hidden.min() > 0.3 * hidden.max(), "all directions alike"
    assert steps["lm_head.weight"].abs().allclose(torch.tensor(0.01), rtol=1e-3), "Adam's first step is the rate"


def test_a_schedule_free_run_ends_with_its_average(fork_server: ForkServer, tmp_path: Path) -> None:
    """Warm-up is a share of all steps, and not of one; the trained model is the average."""
    more = {"train.optim": "schedule_free_adamw", "save.final_model": True, "train.warmup_steps": 0.5}
    folder = fork_server.train(tmp_path / "run", make_spec({**FULL, **more}))
    state = torch.load(folder / "checkpoints/checkpoint-4/optimizer.pt", weights_only=True)
    group = state["param_groups"][0]
    assert (group["warmup_steps"], group["train_mode"], group["k"]) == (2, False, 4)
    whole, kept = (load_file(folder / where / "model.safetensors") for where in ("model", "checkpoints/checkpoint-4"))
    assert all(whole[name].equal(kept[name]) for name in whole), "nothing is computed between the two files"


def test_muon_takes_no_single_rows() -> None:
    """A reward's head gives one number: it is a vector, and FSDP2 has no row of it for every rank."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=32, num_labels=1, pad_token_id=0, **sizes))
    made = optimizers.MAKERS["muon"](make_spec({**FULL, "train.optim": "muon"}), model, set())
    heights = {
        kind: [p.shape[0] for g in made.param_groups if g["orthogonal"] is kind for p in g["params"]]
        for kind in (True, False)
    }
    assert 1 in heights[False]
    assert heights[True]
    assert 1 not in heights[True]
