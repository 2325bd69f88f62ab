"""Where adapters are put, and how they begin.

Floor 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.types import Choice, Init

LORA_TARGETS: Mapping[str, Choice] = {
    "all-linear": Choice("All linear layers", "Learns best for its size."),
    "attention": Choice("Attention projections", "q, k, v and o: smaller and a little weaker."),
    "custom": Choice("By name", "The module names that you give."),
}
ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")

LORA_INITS: Mapping[str, Init] = {
    "default": Init(
        "Default", "As in the paper: A at random and B zero, so that training begins at the model as it is."
    ),
    "gaussian": Init("Gaussian", "A from a normal distribution, B zero.", name="gaussian"),
    "orthogonal": Init(
        "Orthogonal", "A and B at random in directions that cancel each other; an even rank.", name="orthogonal"
    ),
    "pissa": Init(
        "PiSSA",
        "The strongest directions of each weight, taken out of it: learns faster.",
        name="pissa",
        changes_base_weights=True,
    ),
    "pissa_fast": Init(
        "PiSSA, fast",
        "The same by 16 rounds of subspace iteration: seconds instead of minutes.",
        name="pissa_niter_16",
        changes_base_weights=True,
    ),
    "olora": Init(
        "OLoRA", "An orthonormal basis of each weight, taken out of it.", name="olora", changes_base_weights=True
    ),
}

# Mixtures whose experts peft 0.21 adapts as stacked weights, and the linear layers that these once were, by which it is
# told: two that became one and are named together, a third, and the router.
_WEIGHTS = ("w1", "w3", "w2", "gate")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "gate")
STACKED_EXPERTS: Mapping[str, tuple[str, str, str, str]] = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), _WEIGHTS),
    **dict.fromkeys(("qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "olmoe", "flex_olmo"), _PROJECTIONS),
    **dict.fromkeys(("glm4_moe", "dots1", "ernie4_5_moe", "hunyuan_v1_moe"), _PROJECTIONS),
    **dict.fromkeys(("exaone_moe", "cohere2_moe"), _PROJECTIONS),
}
