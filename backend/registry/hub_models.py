"""The config.json of popular models on the Hugging Face Hub, so that memory is estimated before a download.

The files of a downloaded model are used instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

HUB_ID = re.compile(r"(?:\b[\w.-]{1,96}\b/)?\b[\w.-]{1,96}\b", re.ASCII)
HUB_URL = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?([^/?#\s]+(?:/[^/?#\s]+)?).*", re.DOTALL
)


def is_hub_id(text: str) -> bool:
    """Whether `text` can be the id of a repository on the Hub: organization/name, or a name alone; source:
    huggingface_hub 2.4 utils/_validators.py: validate_repo_id."""
    forbidden = "--" in text or ".." in text or text.endswith(".git")
    return HUB_ID.fullmatch(text) is not None and not forbidden


def hub_id_in(text: str) -> str:
    """The id in an address such as https://huggingface.co/Qwen/Qwen3-8B; '' if there is none."""
    match = HUB_URL.fullmatch(text.strip())
    return match[1] if match and is_hub_id(match[1]) else ""


def _llama(layers: int, hidden: int, intermediate: int, heads: int, tied: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        **more,
    }


def _qwen(model_type: str, layers: int, hidden: int, intermediate: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768 if model_type == "qwen2" else 40_960,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **({"head_dim": 128} if model_type == "qwen3" else {}),
        **more,
    }


TIED = {"tie_word_embeddings": True}
OLD: dict[str, Any] = {"max_position_embeddings": 8192}
WIDE = {"vocab_size": 152_064}
MISTRAL = {
    **_llama(32, 4096, 14_336, 32),
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32_768,
    "max_position_embeddings": 32_768,
}

MIXTRAL = {
    **MISTRAL,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32_000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
MIXTRAL_LARGE = {
    **MIXTRAL,
    "num_hidden_layers": 56,
    "hidden_size": 6144,
    "intermediate_size": 16_384,
    "num_attention_heads": 48,
    "max_position_embeddings": 65_536,
}
QWEN_MOE = {
    **_qwen("qwen3_moe", 48, 2048, 6144, 32, num_key_value_heads=4, head_dim=128),
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
QWEN_MOE_LARGE = {
    **QWEN_MOE,
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}
LONG: dict[str, Any] = {"max_position_embeddings": 262_144}
OLMOE = {
    **_llama(16, 2048, 1024, 16, num_key_value_heads=16, vocab_size=50_304, max_position_embeddings=4096),
    "model_type": "olmoe",
    "architectures": ["OlmoeForCausalLM"],
    "num_experts": 64,
    "num_experts_per_tok": 8,
}

# Hub ID, with suffixes of other models of the same architecture after commas -> config.json.
CONFIGS: Mapping[str, dict[str, Any]] = {
    "meta-llama/Llama-3.2-1B,-Instruct": _llama(16, 2048, 8192, 32, tied=True, head_dim=64),
    "meta-llama/Llama-3.2-3B,-Instruct": _llama(28, 3072, 8192, 24, tied=True, head_dim=128),
    "meta-llama/Meta-Llama-3-8B,-Instruct": _llama(32, 4096, 14_336, 32, **OLD),
    "meta-llama/Llama-3.1-8B,-Instruct": _llama(32, 4096, 14_336, 32),
    "meta-llama/Meta-Llama-3-70B,-Instruct": _llama(80, 8192, 28_672, 64, **OLD),
    "meta-llama/Llama-3.1-70B,-Instruct": _llama(80, 8192, 28_672, 64),
    "meta-llama/Llama-3.3-70B-Instruct": _llama(80, 8192, 28_672, 64),
    "mistralai/Mistral-7B-v0.3": MISTRAL,
    "mistralai/Mistral-7B-Instruct-v0.3": MISTRAL,
    "Qwen/Qwen2.5-0.5B,-Instruct": _qwen("qwen2", 24, 896, 4864, 14, num_key_value_heads=2, **TIED),
    "Qwen/Qwen2.5-1.5B,-Instruct": _qwen("qwen2", 28, 1536, 8960, 12, num_key_value_heads=2, **TIED),
    "Qwen/Qwen2.5-3B,-Instruct": _qwen("qwen2", 36, 2048, 11_008, 16, num_key_value_heads=2, **TIED),
    "Qwen/Qwen2.5-7B,-Instruct": _qwen("qwen2", 28, 3584, 18_944, 28, num_key_value_heads=4, **WIDE),
    "Qwen/Qwen2.5-14B,-Instruct": _qwen("qwen2", 48, 5120, 13_824, 40, **WIDE),
    "Qwen/Qwen2.5-32B,-Instruct": _qwen("qwen2", 64, 5120, 27_648, 40, **WIDE),
    "Qwen/Qwen2.5-72B,-Instruct": _qwen("qwen2", 80, 8192, 29_568, 64, **WIDE),
    "Qwen/Qwen3-0.6B,-Base": _qwen("qwen3", 28, 1024, 3072, 16, **TIED),
    "Qwen/Qwen3-1.7B,-Base": _qwen("qwen3", 28, 2048, 6144, 16, **TIED),
    "Qwen/Qwen3-4B,-Base": _qwen("qwen3", 36, 2560, 9728, 32, **TIED),
    "Qwen/Qwen3-8B,-Base": _qwen("qwen3", 36, 4096, 12_288, 32),
    "Qwen/Qwen3-14B,-Base": _qwen("qwen3", 40, 5120, 17_408, 40),
    "allenai/OLMoE-1B-7B-0924,-Instruct": OLMOE,
    "mistralai/Mixtral-8x7B-v0.1": MIXTRAL,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": MIXTRAL,
    "mistralai/Mixtral-8x22B-v0.1": MIXTRAL_LARGE,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": {**MIXTRAL_LARGE, "vocab_size": 32_768},
    "Qwen/Qwen3-30B-A3B,-Base": QWEN_MOE,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": {**QWEN_MOE, **LONG},
    "Qwen/Qwen3-235B-A22B": QWEN_MOE_LARGE,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": {**QWEN_MOE_LARGE, **LONG},
    "Qwen/Qwen3-32B": _qwen("qwen3", 64, 5120, 25_600, 64),
}


def _named() -> Iterator[tuple[str, dict[str, Any]]]:
    for names, config in CONFIGS.items():
        first, *ends = names.split(",")
        for name in (first, *(first + end for end in ends)):
            yield name, config


HUB_CONFIGS: Mapping[str, Mapping[str, Any]] = {name.lower(): config for name, config in _named()}


def has_chat_template(name: str) -> bool | None:
    """Whether the tokenizer of a model in the table has a chat template: instruction-tuned models have one, and so have
    Qwen's base models. None if it is not known. Source: the tokenizer_config.json of each model on the Hub."""
    name = name.lower()
    if name not in HUB_CONFIGS:
        return None
    if name.startswith("qwen/") or "instruct" in name:
        return True
    return False if name.startswith(("meta-llama/", "mistralai/")) else None


def siblings(name: str) -> list[str]:
    """Smaller models of the same organization, model type and suffix (such as -Instruct), largest first; if several
    models have the same size, the last one in the table."""
    this = HUB_CONFIGS.get(name.lower())
    if this is None:
        return []
    sizes = {_size(config): other for other, config in _named() if _family(other) == _family(name)}
    return [sizes[size] for size in sorted(sizes, reverse=True) if size < _size(this)]


def _family(name: str) -> tuple[str, str, str]:
    """Organization, model type and suffix: meta-llama, llama, -instruct."""
    return name.lower().partition("/")[0], HUB_CONFIGS[name.lower()]["model_type"], re.sub(r"^.*\db", "", name.lower())


def _size(config: Mapping[str, Any]) -> int:
    """A number that grows with the number of parameters."""
    return int(config["num_hidden_layers"] * config["hidden_size"] * config["intermediate_size"])
