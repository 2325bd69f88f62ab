"""Under FSDP2 one rank reads the weights and the others begin without numbers: they learn what one process learns. What
all strategies are held to (losses, parts, resume, saved models) stands in test_strategies.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer, write_run
from training_runs import REORDERING_TOLERANCE, log_text, losses, make_spec, result, same_losses, soak_except
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

FULL = {"method.kind": "full"}
FREEZE = {"method.kind": "freeze", "method.freeze_trainable_layers": 1}
LORA = {"method.kind": "lora", "lora.r": 4}
DPO = {"train.stage": "dpo", "data.builtin": "train-pairs"}
EACH = {"parallel.extra_config": '{"cpu_ram_efficient_loading": false}'}


def tied(folder: Path) -> None:
    """Input and output layer are one weight."""
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder, tie_word_embeddings=True)).save_pretrained(folder)


def twofold(folder: Path) -> None:
    """The configuration ties them, and the file holds two: what it says is known to who has read it."""
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder, tie_word_embeddings=False)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


def buffered(folder: Path) -> None:
    """A router keeps a correction among its weights that is none: a buffer."""
    words = LlamaConfig.from_pretrained(folder).vocab_size
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    ranks = {"first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 16}
    torch.manual_seed(1)
    config = DeepseekV3Config(vocab_size=words, **sizes, **heads, **experts, **ranks)
    DeepseekV3ForCausalLM(config).save_pretrained(folder)


@dataclass
class Trained:
    """Runs by name, each trained once, when it is first asked for."""

    root: Path
    fork_server: ForkServer
    made: dict[str, Path] = field(default_factory=dict)

    def run(self, name: str, changes: Mapping[str, Any], ranks: int, model: Callable[[Path], None] | None) -> Path:
        name = f"{name}-{ranks}"
        if name not in self.made:
            many = {"parallel.strategy": "fsdp2", "launch.nproc_per_node": ranks} if ranks else {}
            place = {"model.source": "path", "model.path": str(self.model(model))} if model else {}
            spec = make_spec({"train.per_device_train_batch_size": 4 // max(ranks, 1), **many, **place, **changes})
            self.made[name] = self.fork_server.train(self.root / name, spec, ranks)
        return self.made[name]

    def model(self, make: Callable[[Path], None]) -> Path:
        folder = self.root / f"model-{make.__name__}"
        if not folder.exists():
            shutil.copytree(self.root / "cache/models/tiny-llama", folder)
            make(folder)
        return folder


@pytest.fixture(scope="module")
def trained(root: Path, fork_server: ForkServer) -> Trained:
    return Trained(root, fork_server)


def loaded(folder: Path) -> list[int]:
    """Bytes of weights that each rank had in memory once the model was loaded."""
    return [rank["loaded_bytes"] for rank in result(folder)["ranks"]]


# What is trained, and of which model.
SENT: dict[str, tuple[Mapping[str, Any], Callable[[Path], None] | None]] = {
    "freeze": (FREEZE, None),
    "tied": (FULL, tied),
    "tied-lora": (LORA, tied),
    "dora": ({**LORA, "lora.use_dora": True}, None),
    "dpo-lora": ({**LORA, **DPO}, None),
    "dpo-full": ({**FULL, **DPO}, None),
    "reward": ({**LORA, "train.stage": "reward", "data.builtin": "train-pairs"}, None),
}


@pytest.mark.parametrize("name", soak_except(SENT, ("tied-lora",)))
def test_one_rank_reads(trained: Trained, name: str) -> None:
    """A reward model's head and an adapter's A begin at random, each rank's as rank 0's."""
    changes, model = SENT[name]
    one, two = (trained.run(name, changes, ranks, model) for ranks in (0, 2))
    assert losses(two) == same_losses(losses(one), REORDERING_TOLERANCE)
    assert loaded(two) == [*loaded(one), 0]


WHOLE: dict[str, tuple[Mapping[str, Any], Callable[[Path], None] | None]] = {
    "pissa": ({**LORA, "lora.init": "pissa"}, None),
    "twofold": (FULL, twofold),
    "buffered": (FULL, buffered),
    "asked": ({**FULL, **EACH}, None),
}


@pytest.mark.parametrize("name", soak_except(WHOLE, ()))
def test_where_weights_cannot_be_sent_each_rank_reads(trained: Trained, name: str) -> None:
    changes, model = WHOLE[name]
    alone = {key: value for key, value in changes.items() if key not in EACH}
    one, two = trained.run(name, alone, 0, model), trained.run(name, changes, 2, model)
    assert losses(two) == same_losses(losses(one), REORDERING_TOLERANCE)
    assert loaded(two) == 2 * loaded(one)
    assert ("Every rank reads the weights" in log_text(two)) == (model is not None), "what only the file tells is said"


def test_a_trained_copy_of_a_tied_weight_is_not_sent(trained: Trained) -> None:
    """Sent, it would be tied again, and another model trained without a word."""
    copied = {**LORA, "lora.modules_to_save": ("embed_tokens",), "parallel.strategy": "fsdp2"}
    place = {"model.source": "path", "model.path": str(trained.model(tied)), "launch.nproc_per_node": 2}
    folder = trained.root / "copied"
    write_run(folder, make_spec({**copied, **place}))
    assert trained.fork_server.run(folder, 2) != 0
    assert "cannot shard a trainable copy of a tied weight" in log_text(folder)
