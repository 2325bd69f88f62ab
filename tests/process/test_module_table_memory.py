"""The memory estimate of architectures without a closed formula, against torch's memory tracker
(test_memory_estimate.py)."""

from __future__ import annotations

from typing import Any

import pytest
from fake_tensor_step import peaks
from parameters import soak_except

from backend.config.options import parse
from backend.inspect import InputFacts
from backend.memory import OVERHEAD
from backend.modelspec.from_table import shape_from_table
from backend.rules import Case
from backend.rules.examples import gpus
from backend.train.describe_model import describe

pytestmark = pytest.mark.filterwarnings("ignore")
MAX_UNDERESTIMATE, MAX_OVERESTIMATE = 0.08, 0.12
LAYERS = 4
BASE = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4,
    "vocab_size": 32000, "max_position_embeddings": 8192, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_hidden_layers": LAYERS,
}  # fmt: skip
LATENT_ATTENTION = {"num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": 1024, "moe_intermediate_size": 1024}
CONFIGS: dict[str, dict[str, Any]] = {
    "starcoder2": {},
    "cohere2": {"layer_types": ["full_attention"] * LAYERS},
    "glm4": {"head_dim": 128},
    "ernie4_5": {"head_dim": 128},
    "diffllama": {},
    "nemotron": {"head_dim": 128},
    "glm4_moe": {"head_dim": 128, "n_routed_experts": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 1024},
    "deepseek_v3": {
        **LATENT_ATTENTION,
        "n_routed_experts": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


@pytest.mark.parametrize("kind", soak_except(CONFIGS, {"deepseek_v3"}))
@pytest.mark.parametrize(
    ("method", "batch", "checkpoints"),
    [*(pytest.param("lora", *case, marks=pytest.mark.soak) for case in ((1, False), (4, True))), ("full", 1, False)],
)
def test_estimate_matches_the_tracked_peak(kind: str, method: str, batch: int, checkpoints: bool) -> None:
    config = {"model_type": kind, **BASE, **CONFIGS[kind]}
    spec = parse(
        {
            "method.kind": method,
            "precision.compute": "bf16",
            "train.per_device_train_batch_size": batch,
            "data.max_length": 2048,
            "train.activation_checkpointing": checkpoints,
            "eval.strategy": "no",
        }
    )
    shape = shape_from_table(describe(config), config)
    assert not shape.activations_unknown
    rows = Case(spec, gpus(1, "H100", 80, (9, 0)), InputFacts(shape=shape)).estimate.rows
    estimated = sum(row.bytes for row in rows if row.where == "device" and row.name != OVERHEAD)
    error = estimated / max(peaks(spec, config, LAYERS).values()) - 1
    print(f"{error:+.1%}")
    assert -MAX_UNDERESTIMATE <= error <= MAX_OVERESTIMATE
