"""Combinations that libraries cannot train by themselves: Footplate prepares the model, the optimizer or the folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import architectures
import pytest
from fork_server import ForkServer, rank_count
from parameters import soak_except
from training_runs import losses, make_spec

from backend.machine import Machine
from backend.preflight import preflight


@dataclass(frozen=True)
class Launch:
    """Options, and the type of the model; '': tiny-llama."""

    changes: Mapping[str, Any]
    kind: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


def trained_embeddings(kind: str, module: str, **more: Any) -> Launch:
    """LayerNorm with frozen bf16 weights after embeddings that are trained in fp32: no kernel of a CPU has both."""
    freeze = {"method.kind": "freeze", "method.freeze_extra_modules": (module,)}
    return Launch({"precision.compute": "bf16", **freeze}, kind, more)


LAUNCHES = {
    # DeepSpeed copies the weights as bytes, and a decomposition leaves strides that do not allow it.
    "olora-rank-1-zero3": Launch({"parallel.strategy": "zero3", "lora.init": "olora", "lora.r": 1}),
    "olora-rank-1-zero3-reference": Launch(
        {"parallel.strategy": "zero3", "lora.init": "olora", "lora.r": 1}
        | {"train.stage": "kto", "data.builtin": "train-pairs"}
    ),
    "olora-rank-1-zero2": Launch({"parallel.strategy": "zero2", "lora.init": "olora", "lora.r": 1}),
    "embeddings-gpt2": trained_embeddings("gpt2", "wte"),
    "embeddings-starcoder2": trained_embeddings("starcoder2", "embed_tokens"),
    "embeddings-phi-fsdp2": trained_embeddings("phi", "embed_tokens", **{"parallel.strategy": "fsdp2"}),
    "modules-to-save-gpt2": Launch({"precision.compute": "bf16", "lora.modules_to_save": ("wte",)}, "gpt2"),
}
ADAM_MINI = {"method.kind": "full", "train.optim": "adam_mini"}
DIVIDED = ("bloom", "gpt_neox", "gpt2", "opt", "olmo2")  # norms named after embeddings or the output, and others
BEST = {
    "parallel.strategy": "fsdp2",
    "parallel.state_dict_type": "sharded",
    "save.load_best_model_at_end": True,
    "save.strategy": "steps",
    "save.steps": 1,
    "eval.strategy": "steps",
    "eval.steps": 1,
    "launch.nproc_per_node": 2,
}


def launch(case: Launch, tiny: Path, server: ForkServer, root: Path) -> Path:
    """Train three steps; no rule refuses it."""
    model: dict[str, Any] = {}
    if case.kind:
        folder = architectures.save(architectures.build(case.kind), tiny, root / "model")
        model = {"model.source": "path", "model.path": str(folder)}
    spec = make_spec({"launch.nproc_per_node": 2, **model, **case.changes, **case.more})
    errors = {finding.code for finding in preflight(spec, Machine(), root).findings if finding.level == "error"}
    assert not errors
    return server.train(root / "run", spec, rank_count(spec))


@pytest.mark.parametrize("name", soak_except(LAUNCHES, ("embeddings-gpt2",)))
def test_trains(name: str, tiny: Path, fork_server: ForkServer, tmp_path: Path) -> None:
    found = losses(launch(LAUNCHES[name], tiny, fork_server, tmp_path))
    assert len(found) == 3 and None not in found.values()


@pytest.mark.parametrize("kind", soak_except(DIVIDED, ("gpt_neox",)))
def test_adam_mini_trains(kind: str, tiny: Path, fork_server: ForkServer, tmp_path: Path) -> None:
    found = losses(launch(Launch(ADAM_MINI, kind), tiny, fork_server, tmp_path))
    assert len(found) == 3 and found[3] < found[1]


@pytest.mark.soak
@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_last_checkpoint_of_sharded_fsdp2_can_be_the_best(
    method: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    """Before, the ranks looked for its folder before one of them had made it, and disagreed on which checkpoint is the
    best."""
    run = fork_server.train(tmp_path / "run", make_spec({**BEST, "method.kind": method}), 2)
    state = json.loads((run / "checkpoints/checkpoint-3/trainer_state.json").read_text())
    assert state["best_global_step"] == 3 and state["best_model_checkpoint"].endswith("checkpoint-3")
