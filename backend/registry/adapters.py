"""LoRA: target modules, initializations, and MoE models whose experts are stacked weights."""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.types import Choice, LoraInit, is_residual

LORA_TARGETS: Mapping[str, Choice] = {
    "all-linear": Choice("All linear layers", "Best quality for its size."),
    "attention": Choice("Attention projections", "Only q, k, v and o projections: smaller, slightly weaker."),
    "custom": Choice("By name", "The modules in lora.target_modules."),
}
ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")

LORA_INITS: Mapping[str, LoraInit] = {
    "default": LoraInit("Default", "Kaiming-uniform A and zero B, so that training starts at the base model."),
    "gaussian": LoraInit(
        "Gaussian",
        "Normally distributed A and zero B, so that training starts at the base model.",
        init_lora_weights="gaussian",
    ),
    "orthogonal": LoraInit(
        "Orthogonal",
        "Random orthogonal A and B with a product of zero; the rank must be even.",
        init_lora_weights="orthogonal",
    ),
    "pissa": LoraInit(
        "PiSSA",
        "The principal singular components of each weight, which are subtracted from the weight: converges faster.",
        init_lora_weights="pissa",
    ),
    "pissa_fast": LoraInit(
        "PiSSA, fast SVD",
        "PiSSA with 16 subspace iterations instead of a full SVD: seconds instead of minutes.",
        init_lora_weights="pissa_niter_16",
    ),
    "olora": LoraInit(
        "OLoRA",
        "From a QR decomposition of each weight; B times A is subtracted from the weight: converges faster.",
        init_lora_weights="olora",
    ),
}

CONV1D_MODELS = ("gpt2", "openai-gpt")  # model types whose blocks have transposed weights: transformers' Conv1D

# Model types whose experts are stacked weights that peft 0.21 adapts, by the names of the linear layers that they
# replaced: two that were fused and must be targeted together, the third, and the router.
_WEIGHTS = ("w1", "w3", "w2", "gate")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "gate")
STACKED_EXPERTS: Mapping[str, tuple[str, str, str, str]] = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), _WEIGHTS),
    **dict.fromkeys(("qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "olmoe", "flex_olmo"), _PROJECTIONS),
    **dict.fromkeys(("glm4_moe", "dots1", "ernie4_5_moe", "hunyuan_v1_moe"), _PROJECTIONS),
    **dict.fromkeys(("exaone_moe", "cohere2_moe"), _PROJECTIONS),
}


def same_base_weights(*inits: object) -> bool:
    """Whether adapters with these values of init_lora_weights belong to the same base weights as loaded: the adapters
    of a checkpoint replace the initial ones."""
    return not any(map(is_residual, inits))
