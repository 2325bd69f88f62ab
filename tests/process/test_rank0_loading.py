"""FSDP2 loads the weights on rank 0 and broadcasts them to the other ranks (cpu_ram_efficient_loading). Losses, shards,
resuming and saved models of all strategies are tested in test_strategies.py."""

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
from training_runs import REORDERING_TOLERANCE, log_text, losses, make_spec, result, same_losses
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

FULL = {"method.kind": "full"}
FREEZE = {"method.kind": "freeze", "method.freeze_trainable_layers": 1}
LORA = {"method.kind": "lora", "lora.r": 4}
DPO = {"train.stage": "dpo", "data.builtin": "train-pairs"}
LOAD_ON_EVERY_RANK = {"parallel.extra_config": '{"cpu_ram_efficient_loading": false}'}


def tie_embeddings(folder: Path) -> None:
    """Tie the input embeddings and the output layer."""
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder, tie_word_embeddings=True)).save_pretrained(folder)


def tie_in_config_only(folder: Path) -> None:
    """The config ties the embeddings, but the file has two different weights, which only a rank that reads the file
    sees."""
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder, tie_word_embeddings=False)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


def write_deepseek_with_buffer(folder: Path) -> None:
    """A DeepSeek-V3, whose router keeps a correction bias as a buffer."""
    vocab_size = LlamaConfig.from_pretrained(folder).vocab_size
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    attention_ranks = {"first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 16}
    torch.manual_seed(1)
    config = DeepseekV3Config(vocab_size=vocab_size, **sizes, **heads, **experts, **attention_ranks)
    DeepseekV3ForCausalLM(config).save_pretrained(folder)


@dataclass
class TrainedRuns:
    """Runs by name; each is trained once, on first use."""

    root: Path
    fork_server: ForkServer
    made: dict[str, Path] = field(default_factory=dict)

    def run(self, name: str, changes: Mapping[str, Any], ranks: int, model: Callable[[Path], None] | None) -> Path:
        name = f"{name}-{ranks}"
        if name not in self.made:
            parallel_options = {"parallel.strategy": "fsdp2", "launch.nproc_per_node": ranks} if ranks else {}
            model_options = {"model.source": "path", "model.path": str(self.model(model))} if model else {}
            spec = make_spec(
                {
                    "train.per_device_train_batch_size": 4 // max(ranks, 1),
                    **parallel_options,
                    **model_options,
                    **changes,
                }
            )
            self.made[name] = self.fork_server.train(self.root / name, spec, ranks)
        return self.made[name]

    def model(self, make: Callable[[Path], None]) -> Path:
        folder = self.root / f"model-{make.__name__}"
        if not folder.exists():
            shutil.copytree(self.root / "cache/models/tiny-llama", folder)
            make(folder)
        return folder


@pytest.fixture(scope="module")
def trained(root: Path, fork_server: ForkServer) -> TrainedRuns:
    return TrainedRuns(root, fork_server)


def loaded_bytes(folder: Path) -> list[int]:
    """Bytes of weights in the memory of each rank after loading the model."""
    return [rank["loaded_bytes"] for rank in result(folder)["ranks"]]


# Name -> (options, change to the model).
RANK0_LOADED: dict[str, tuple[Mapping[str, Any], Callable[[Path], None] | None]] = {
    "freeze": (FREEZE, None),
    "tied": (FULL, tie_embeddings),
    "tied-lora": (LORA, tie_embeddings),
    "dora": ({**LORA, "lora.use_dora": True}, None),
    "dpo-lora": ({**LORA, **DPO}, None),
    "dpo-full": ({**FULL, **DPO}, None),
    "reward": ({**LORA, "train.stage": "reward", "data.builtin": "train-pairs"}, None),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", RANK0_LOADED)
def test_only_rank_0_reads_the_weights(trained: TrainedRuns, name: str) -> None:
    """Randomly initialized weights (a reward model's head, LoRA A) are those of rank 0 on every rank."""
    changes, model = RANK0_LOADED[name]
    single, two_ranks = (trained.run(name, changes, ranks, model) for ranks in (0, 2))
    assert losses(two_ranks) == same_losses(losses(single), REORDERING_TOLERANCE)
    assert loaded_bytes(two_ranks) == [*loaded_bytes(single), 0]


LOADED_BY_EVERY_RANK: dict[str, tuple[Mapping[str, Any], Callable[[Path], None] | None]] = {
    "pissa": ({**LORA, "lora.init": "pissa"}, None),
    "tied-in-config-only": (FULL, tie_in_config_only),
    "router-buffer": (FULL, write_deepseek_with_buffer),
    "disabled": ({**FULL, **LOAD_ON_EVERY_RANK}, None),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", LOADED_BY_EVERY_RANK)
def test_every_rank_reads_weights_that_cannot_be_broadcast(trained: TrainedRuns, name: str) -> None:
    changes, model = LOADED_BY_EVERY_RANK[name]
    single_changes = {key: value for key, value in changes.items() if key not in LOAD_ON_EVERY_RANK}
    single, two_ranks = trained.run(name, single_changes, 0, model), trained.run(name, changes, 2, model)
    assert losses(two_ranks) == same_losses(losses(single), REORDERING_TOLERANCE)
    assert loaded_bytes(two_ranks) == 2 * loaded_bytes(single)
    assert ("Every rank reads the weights" in log_text(two_ranks)) == (model is not None), (
        "the log reports it if the cause is in the weight file"
    )


def test_trainable_copy_of_a_tied_weight_is_refused(trained: TrainedRuns) -> None:
    """Broadcasting would tie it again and silently train a different model."""
    options = {**LORA, "lora.modules_to_save": ("embed_tokens",), "parallel.strategy": "fsdp2"}
    model_options = {
        "model.source": "path",
        "model.path": str(trained.model(tie_embeddings)),
        "launch.nproc_per_node": 2,
    }
    folder = trained.root / "trainable-copy"
    write_run(folder, make_spec({**options, **model_options}))
    assert trained.fork_server.run(folder, 2) != 0
    assert "cannot shard a trainable copy of a tied weight" in log_text(folder)
