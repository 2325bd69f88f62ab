"""Limits of the values of a config.json: larger values would take minutes and gigabytes to count, or are not numbers.

The limits are far above every known model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 32
MAX_ENTRIES = 100_000
MAX_LIST = 20_000  # length of lists of numbers, such as one for each layer
LAYERS, EXPERTS, HEADS, WIDTH, VOCABULARY = 4096, 65_536, 65_536, 2**24, 2**28
MAX_PARAMETERS = 10**15
LIMITS: Mapping[str, int] = {
    **dict.fromkeys(
        (
            "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_encoder_layers",
            "encoder_layers", "decoder_layers", "depth", "num_blocks", "num_nextn_predict_layers",
        ),
        LAYERS,
    ),
    **dict.fromkeys(
        (
            "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "moe_num_experts",
            "num_experts_per_tok", "num_shared_experts",
        ),
        EXPERTS,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads", "num_kv_heads",
            "encoder_attention_heads", "decoder_attention_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(
        (
            "hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "d_ff", "ffn_dim", "head_dim",
            "moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank", "v_head_dim",
            "qk_rope_head_dim", "qk_nope_head_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "embed_dim",
            "mlp_dim", "word_embed_proj_dim", "embedding_size",
        ),
        WIDTH,
    ),
    "vocab_size": VOCABULARY,
    "type_vocab_size": VOCABULARY,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"), 2**40),
}  # fmt: skip
POSITIVE = ("num_hidden_layers", "n_layer", "hidden_size", "n_embd", "vocab_size")  # positive in a language model
# Models whose embeddings get pad_token_id as padding_idx, which must be a token; -1 is the last one.
WITH_PADDING_INDEX = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "smollm3", "granite", "olmo2", "olmoe", "gemma",
    "gemma2", "gemma3_text", "phi", "phi3",
)  # fmt: skip
OBJECTS = ("text_config", "quantization_config", "vision_config", "audio_config")


def config_problem(config: Mapping[str, Any]) -> str:
    """A value that no model can have, as a sentence that names the field; '' if there is none."""
    for count, (path, value, depth) in enumerate(_values(config), 1):
        if depth > MAX_DEPTH:
            return f"config.json is nested more than {MAX_DEPTH} levels deep."
        if count > MAX_ENTRIES:
            return f"config.json has more than {MAX_ENTRIES:,} values."
        if problem := _problem(path, value):
            return f"config.json: {problem}."
    return _padding_problem(config)


def _padding_problem(config: Mapping[str, Any]) -> str:
    token, size = config.get("pad_token_id"), config.get("vocab_size")
    if config.get("model_type") not in WITH_PADDING_INDEX or not isinstance(token, int) or not isinstance(size, int):
        return ""
    if -size <= token < size:
        return ""
    return (
        f"config.json: pad_token_id is {token:,}, but the vocabulary has {size:,} tokens (vocab_size), so the model "
        "cannot be loaded."
    )


def _values(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """(dotted path, value, depth) of every value, without recursion."""
    left: list[tuple[str, Any, int]] = [("", config, 0)]
    while left:
        path, value, depth = left.pop()
        if path:
            yield path, value, depth
        if isinstance(value, Mapping):
            left += [(f"{path}.{key}" if path else str(key), part, depth + 1) for key, part in value.items()]
        elif isinstance(value, list):
            left += [(f"{path}[]", part, depth + 1) for part in value]


def _problem(path: str, value: Any) -> str:
    name = path.rpartition(".")[2]
    if name in OBJECTS and not isinstance(value, Mapping | None):
        return f"{path} must be an object, but is {_shown(value)}"
    if name in ("layer_types", "architectures") and not _is_list_of_texts(value):
        return f"{path} must be a list of at most {MAX_LIST:,} names, but is {_shown(value)}"
    if path == "model_type" and not isinstance(value, str):
        return f"{path} must be a string, but is {_shown(value)}"
    if name not in LIMITS or value is None:
        return ""
    lowest = 1 if name in POSITIVE and path.removeprefix("text_config.") == name else 0
    if isinstance(value, list) and len(value) > MAX_LIST:
        return f"{path} has {len(value):,} values; at most {MAX_LIST:,} are supported"
    wrong = next(
        (part for part in (value if isinstance(value, list) else [value]) if not _fits(part, lowest, name)), None
    )
    if wrong is None:
        return ""
    return f"{path} must be an integer from {lowest} to {LIMITS[name]:,}, but is {_shown(wrong)}"


def _fits(value: Any, lowest: int, name: str) -> bool:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value is None or (is_integer and lowest <= value <= LIMITS[name])


def _is_list_of_texts(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, list) and len(value) <= MAX_LIST and all(isinstance(part, str) for part in value)


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**30:
        return f"{value:,}"
    text = (
        repr(value)[:200]
        if not isinstance(value, int) or abs(value) < 10**100
        else f"a number of {value.bit_length()} bits"
    )
    return text if len(text) <= 60 else f"{text[:57]}..."
