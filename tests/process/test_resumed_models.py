"""A run of an architecture whose weights transformers converts: it resumes with equal losses, and the model that it
saves at the end is the best one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from architectures import build, save
from fork_server import ForkServer
from training_runs import (
    REORDERING_TOLERANCE,
    log_text,
    losses,
    make_best,
    make_spec,
    read_metrics,
    result,
    same_losses,
)

STEPS, BEST = 4, 2
RUN = {
    "method.kind": "full", "train.max_steps": STEPS, "train.learning_rate": 1e-2, "eval.strategy": "steps",
    "eval.steps": 1, "data.validation_split": 0.2, "save.strategy": "steps", "save.steps": 1, "save.total_limit": 0,
    "save.final_model": True, "save.load_best_model_at_end": True,
}  # fmt: skip
# One step with a learning rate of 0: its validation loss is that of the model before training.
EVALUATION = {
    **RUN,
    "train.max_steps": 1,
    "train.warmup_steps": 2,
    "save.strategy": "no",
    "save.load_best_model_at_end": False,
}
RANKS = {"single": 0, "hsdp": 4}
# Text gives the vision tower no gradient.
MODELS = {"gemma3": {"parallel.ddp_find_unused_parameters": True}}
SPECS: Mapping[str, Mapping[str, Any]] = {
    "single": {},
    "fsdp2-sharded": {"parallel.strategy": "fsdp2", "parallel.state_dict_type": "sharded"},
    "hsdp": {"parallel.strategy": "fsdp2", "parallel.replicate_size": 2},
}
KINDS = ("mixtral", "qwen3_moe", "deepseek_v3", "gemma3")
WITH_ROUTER_LOSS = ("mixtral", "qwen3_moe")  # the config of deepseek_v3 has no coefficient
ENGINES = ("zero0", "zero1", "zero2", "zero3", "fsdp2", "fsdp2-sharded", "hsdp")
CASES = [
    *((kind, strategy) for strategy in ("single", "ddp") for kind in KINDS),
    *((kind, strategy) for strategy in ENGINES for kind in ("qwen3_moe", "deepseek_v3")),
]


def options(strategy: str) -> dict[str, Any]:
    ranks = RANKS.get(strategy, 2)
    return {**SPECS.get(strategy, {"parallel.strategy": strategy}), "launch.nproc_per_node": ranks or 1}


@pytest.fixture(scope="module")
def models(root: Path, tiny: Path) -> Any:
    def find(kind: str) -> dict[str, str]:
        folder = root / f"model-{kind}"
        if not folder.exists():
            save(build(kind), tiny, folder)
        return {"model.source": "path", "model.path": str(folder), **MODELS.get(kind, {})}

    return find


def eval_losses(folder: Path) -> dict[int, float]:
    return {point["step"]: point["eval_loss"] for point in read_metrics(folder) if "eval_loss" in point}


def evaluation(folder: Path, changes: Mapping[str, Any], ranks: int, fork_server: ForkServer) -> float:
    """The validation loss of the model that a run has saved, from another run."""
    shutil.rmtree(folder.with_suffix(".evaluated"), ignore_errors=True)
    model = {"model.source": "path", "model.path": str(folder / "model")}
    other = fork_server.train(
        folder.with_suffix(".evaluated"), make_spec({**EVALUATION, **MODELS["gemma3"], **changes, **model}), ranks
    )
    return float(eval_losses(other)[1])


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "strategy"), CASES)
def test_resumes_and_saves_the_best_model(
    kind: str, strategy: str, root: Path, models: Any, fork_server: ForkServer
) -> None:
    ranks = RANKS.get(strategy, 2)
    spec = {**RUN, **models(kind), **options(strategy)}
    folder = fork_server.train(root / f"{kind}-{strategy}", make_spec(spec), ranks)
    whole, evaluated = losses(folder), eval_losses(folder)
    assert evaluated[BEST] > evaluated[STEPS] + 0.1
    assert ("includes the router's auxiliary loss" in log_text(folder)) is (kind in WITH_ROUTER_LOSS)
    assert (result(folder).get("router_loss_weight", 0) > 0) is (kind in WITH_ROUTER_LOSS)
    best = folder / f"checkpoints/checkpoint-{BEST}"
    make_best(best, best_model_checkpoint=str(best), best_global_step=BEST)
    fork_server.resume(folder, BEST, ranks)
    assert losses(folder) == whole
    assert eval_losses(folder) == evaluated
    assert (result(folder)["model_step"], result(folder)["eval_loss"]) == (BEST, 0)
    assert evaluation(folder, options(strategy), ranks, fork_server) == evaluated[BEST]


METHODS: Mapping[str, Mapping[str, Any]] = {
    "lora": {"method.kind": "lora", "lora.modules_to_save": ("lm_head",)},
    "freeze": {"method.kind": "freeze", "method.freeze_trainable_layers": 2},
    "reward": {"train.stage": "reward", "data.builtin": "train-pairs"},
    "reward-lora": {"train.stage": "reward", "data.builtin": "train-pairs", "method.kind": "lora"},
    "dpo-lora": {"train.stage": "dpo", "data.builtin": "train-pairs", "method.kind": "lora"},
}


@pytest.mark.soak
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "zero3", "fsdp2", "fsdp2-sharded"])
def test_every_method_resumes(strategy: str, method: str, root: Path, models: Any, fork_server: ForkServer) -> None:
    """Adapters with modules that are trained in full, frozen layers, the head of a reward model."""
    ranks = RANKS.get(strategy, 2)
    spec = {**RUN, **models("qwen3_moe"), **options(strategy), **METHODS[method]}
    folder = fork_server.train(root / f"{method}-{strategy}", make_spec(spec), ranks)
    whole = losses(folder)
    fork_server.resume(folder, BEST, ranks)
    assert losses(folder) == whole


@pytest.mark.soak
def test_tensor_parallel_loads_the_best_model(root: Path, fork_server: ForkServer) -> None:
    """It cannot resume, but every rank loads its part of a whole file. The learning rate rises until training
    diverges."""
    rising = {"train.lr_scheduler_type": "constant_with_warmup", "train.warmup_steps": 8, "train.learning_rate": 1.0}
    spec = {**RUN, **rising, **options("tensor"), "save.only_model": True}
    folder = fork_server.train(root / "tensor", make_spec(spec), 2)
    evaluated = eval_losses(folder)
    best = min(evaluated, key=lambda step: evaluated[step])
    assert best < STEPS and (result(folder)["eval_loss"], result(folder)["model_step"]) == (evaluated[best], best)
    assert evaluation(folder, {}, 0, fork_server) == same_losses(evaluated[best], REORDERING_TOLERANCE)
