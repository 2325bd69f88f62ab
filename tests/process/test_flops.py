"""FLOPs per token against torch's own counter, on models that are small but not square."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from training_runs import make_spec
from transformers import AutoConfig, AutoModelForCausalLM

from backend.modelspec import flops_per_token, from_config

SIZES = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 64, "head_dim": 16,
}  # fmt: skip
LENGTH = 8
ATTENTION = 12 * SIZES["num_hidden_layers"] * SIZES["hidden_size"] * LENGTH  # per token, which does not count


def counted(model_type: str, method: str, **more: Any) -> tuple[float, int | None]:
    """FLOPs per token of a forward and a backward pass: torch's count, and ours."""
    config = AutoConfig.for_model(model_type, **SIZES, **more)
    config.architectures = ["ForCausalLM"]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if method == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        model.enable_input_require_grads()  # otherwise the first layer needs no gradient of its input
    tokens = torch.randint(0, SIZES["vocab_size"], (2, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens).logits.sum().backward()
    spec = make_spec({"method.kind": method, "lora.r": 4, "lora.targets": "all-linear"})
    return counter.get_total_flops() / tokens.numel(), flops_per_token(spec, from_config(config.to_dict()))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_dense(method: str, tied: bool) -> None:
    real, ours = counted("llama", method, tie_word_embeddings=tied)
    assert ours is not None and abs(real - ATTENTION - ours) < 0.02 * ours, (real, ours)


def test_mixture_of_experts() -> None:
    """Only the experts of a token count. This implementation computes each expert for its own tokens."""
    real, ours = counted("qwen3_moe", "full", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
                         experts_implementation="eager")  # fmt: skip
    assert ours is not None and abs(real - ATTENTION - ours) < 0.02 * ours, (real, ours)


def test_part_of_the_layers() -> None:
    assert counted("llama", "full")[1] and flops_per_token(make_spec({"method.kind": "freeze"}), from_config(
        AutoConfig.for_model("llama", **SIZES, architectures=["LlamaForCausalLM"]).to_dict())) is None  # fmt: skip
