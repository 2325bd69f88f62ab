"""config.json -> ModelShape in closed form, for the model types of ARCHITECTURES."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from backend import registry
from backend.modelspec.modules import ModelShape, ModuleSpec, first_equal

Config = Mapping[str, Any]


# The architectures below for which transformers 5.23 has no sequence classification model.
NO_SEQUENCE_CLASSIFICATION = ("granite", "olmoe")
# What transformers 5.23 lacks for some of the architectures below: fields of ModelShape.
LACKING: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"unsupported_attentions": ("sdpa",)},  # soft-capped attention scores
    "gpt2": {"unsupported_attentions": ("flex_attention",), "tensor_parallel_plan": ""},
    "olmoe": {"unsupported_attentions": ("flex_attention",)},
}


class UnknownArchitecture(ValueError):
    """The parameters of this config cannot be counted; the message is the reason, as the end of a sentence."""


class NotCausalLM(UnknownArchitecture):
    """The config belongs to a model that AutoModelForCausalLM does not train as a decoder."""


def check_causal(config: Config) -> None:
    """Raise NotCausalLM for keys that let the tokens of a causal type attend to later ones (transformers 5.23)."""
    text = config.get("text_config") or config
    kind, bidirectional = str(text.get("model_type") or ""), text.get("use_bidirectional_attention")
    encoder = "is an encoder, not a causal language model"
    # masking_utils.py, create_causal_mask: is_causal is a key of every config. Embedding models are published with it.
    if not text.get("is_causal", True):
        raise NotCausalLM(f"{kind} with is_causal {json.dumps(text['is_causal'])} {encoder}")
    if bidirectional and bidirectional != "vision":  # EmbeddingGemma; "vision" is about the tokens of an image
        raise NotCausalLM(f"{kind} with use_bidirectional_attention {json.dumps(bidirectional)} {encoder}")
    # doge/modeling_doge.py, DogeCDMoE: `view(2, tokens, -1)` mixes the router logits of different tokens.
    if kind == "doge" and text.get("is_moe"):
        raise NotCausalLM("transformers routes each token of a doge mixture of experts (is_moe) by later tokens, too")


def from_config(config: Config) -> ModelShape:
    """The shape that a config.json describes. Raises UnknownArchitecture with the reason."""
    config = config.get("text_config") or config
    kind = str(config.get("model_type") or "")
    if not kind:
        raise UnknownArchitecture("config.json has no model_type")
    has_experts = any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    if has_experts and not isinstance(ARCHITECTURES.get(kind), Mixture):
        raise UnknownArchitecture(f"Footplate has no formula for the mixture-of-experts architecture {kind}")
    if kind not in ARCHITECTURES:
        raise UnknownArchitecture(f"Footplate has no formula for the architecture {kind}")
    try:
        return first_equal(ARCHITECTURES[kind](config))
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        if isinstance(error, UnknownArchitecture):
            raise
        raise UnknownArchitecture(
            f"config.json of the {kind} model has a value that is not a number: {error}"
        ) from None


def _number(config: Config, *names: str, default: int | None = None) -> int:
    """The first of these keys that config.json has. Raises UnknownArchitecture if it has none of them."""
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    if default is None:
        raise UnknownArchitecture(f"config.json has no {names[0]}")
    return default


def _linear(path: str, inputs: int, outputs: int, bias: bool = False) -> ModuleSpec:
    return ModuleSpec(path, inputs * outputs + (outputs if bias else 0), inputs, outputs)


def _common(config: Config, head_dim: int | None = None, inner: str = "intermediate_size") -> dict[str, Any]:
    """The values that nearly every config.json has, under one of their common names."""
    hidden = _number(config, "hidden_size", "n_embd")
    heads = _number(config, "num_attention_heads", "n_head")
    architectures = config.get("architectures") or [str(config["model_type"])]
    return {
        "layers": _number(config, "num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _number(config, "num_key_value_heads", default=heads),
        "head_dim": _number(config, "head_dim", default=head_dim or hidden // heads),
        "intermediate": _number(config, inner, default=4 * hidden),
        "vocabulary": _number(config, "vocab_size"),
        "max_positions": _number(config, "max_position_embeddings", "n_positions", default=0),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        "architecture": str(architectures[0]),
        "model_type": str(config["model_type"]),
        **prequantized(config.get("quantization_config") or {}),
        "activation": str(config.get("hidden_act") or config.get("activation_function") or ""),
        "has_sliding_window": _has_sliding_window(config),
        "sliding_window": int(config.get("sliding_window", WINDOWS.get(str(config["model_type"]))) or 0),
        **LACKING.get(str(config["model_type"]), {}),
    }


WINDOWS = {"mistral": 4096, "gemma2": 4096, "gemma3_text": 4096}  # defaults of the config classes


def _has_sliding_window(config: Config) -> bool:
    """Whether some layers have sliding-window attention; source: transformers 5.23 models/*/configuration_*.py."""
    kind = str(config.get("model_type"))
    if config.get("layer_types"):
        return any(name != "full_attention" for name in config["layer_types"])
    if kind in ("qwen2", "qwen3", "smollm3") and not config.get("use_sliding_window"):
        return False
    window_unused = kind in ("qwen2", "qwen3") and _number(config, "num_hidden_layers") <= int(
        config.get("max_window_layers", 28)
    )
    return bool(config.get("sliding_window", WINDOWS.get(kind))) and not window_unused


def prequantized(quantization_config: Config) -> dict[str, int]:
    """Bits and group size of a prequantized checkpoint; empty if it is dequantized while it is loaded."""
    stored = quantization_config
    row = registry.PREQUANTIZED.get(str(stored.get("quant_method") or ""))
    if row is None or not row.is_trainable:
        return {}
    if row.label == "bitsandbytes":
        eight_bit = stored.get("load_in_8bit")
        return {"weight_bits": 8, "group_size": 0} if eight_bit else {"weight_bits": 4, "group_size": 64}
    inner = (stored.get("quant_config") or {}).get("weight_quant_params") or {}  # as HQQ nests it
    group_size = int(stored.get("group_size") or inner.get("group_size") or 128)
    bits = int(stored.get("bits") or stored.get("w_bit") or inner.get("nbits") or 4)
    return {"weight_bits": bits, "group_size": max(0, group_size)}


@dataclass(frozen=True)
class Llama:
    """An architecture like Llama's: its biases and norms, and the defaults of keys that config.json may omit."""

    qkv_bias: bool | None = None  # None: as attention_bias in config.json
    o_bias: bool | None = None
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qk_norm: str = ""  # norms of queries and keys: "head" over one head, "all" over all heads
    tied: bool = False
    head_dim: int | None = None
    fused: bool = False  # one linear for q, k and v, one for gate and up

    def __call__(self, config: Config) -> ModelShape:
        """The shape of the model with this config."""
        sizes = _common(config, self.head_dim)
        hidden, query_size = sizes["hidden"], sizes["heads"] * sizes["head_dim"]
        tied = bool(config.get("tie_word_embeddings", self.tied))
        vocabulary = sizes["vocabulary"] * hidden
        layer = (*self._attention(config, sizes), *self._mlp(config, sizes))
        layer += tuple(ModuleSpec(name, hidden) for name in self.norms)
        if self.qk_norm:
            kv_size = sizes["kv_heads"] * sizes["head_dim"]
            widths = (query_size, kv_size) if self.qk_norm == "all" else (sizes["head_dim"],) * 2
            layer += (ModuleSpec("self_attn.q_norm", widths[0]), ModuleSpec("self_attn.k_norm", widths[1]))
        others = (
            ModuleSpec("model.embed_tokens", vocabulary),
            ModuleSpec("model.norm", hidden),
            ModuleSpec("lm_head", 0 if tied else vocabulary, hidden, sizes["vocabulary"]),
        )
        return ModelShape(**sizes, tied=tied, gated_mlp=True, layer=layer, non_layer_modules=others)

    def _attention(self, config: Config, sizes: Mapping[str, Any]) -> tuple[ModuleSpec, ...]:
        hidden, query_size = sizes["hidden"], sizes["heads"] * sizes["head_dim"]
        kv_size = sizes["kv_heads"] * sizes["head_dim"]
        attention_bias = bool(config.get("attention_bias", False))
        bias = attention_bias if self.qkv_bias is None else self.qkv_bias
        output = _linear("self_attn.o_proj", query_size, hidden, attention_bias if self.o_bias is None else self.o_bias)
        if self.fused:
            return _linear("self_attn.qkv_proj", hidden, query_size + 2 * kv_size, bias), output
        parts = (("q", query_size), ("k", kv_size), ("v", kv_size))
        return *(_linear(f"self_attn.{name}_proj", hidden, size, bias) for name, size in parts), output

    def _mlp(self, config: Config, sizes: Mapping[str, Any]) -> tuple[ModuleSpec, ...]:
        hidden, inner = sizes["hidden"], sizes["intermediate"]
        bias = bool(config.get("mlp_bias", False))
        down = _linear("mlp.down_proj", inner, hidden, bias)
        if self.fused:
            return _linear("mlp.gate_up_proj", hidden, 2 * inner, bias), down
        return *(_linear(f"mlp.{name}_proj", hidden, inner, bias) for name in ("gate", "up")), down


@dataclass(frozen=True)
class Mixture(Llama):
    """An architecture like Llama's with experts, whose matrices are stacked in two parameters, and a router."""

    inner: str = "intermediate_size"  # the config key of an expert's intermediate size

    def __call__(self, config: Config) -> ModelShape:
        """The shape of the model with this config."""
        if config.get("mlp_only_layers") or int(config.get("decoder_sparse_step") or 1) != 1:
            raise UnknownArchitecture("Footplate has no formula for a model with experts in only some layers")
        experts = _number(config, "num_experts", "num_local_experts")
        experts_per_token = _number(config, "num_experts_per_tok")
        shape = super().__call__(config)
        return replace(
            shape,
            experts=experts,
            experts_per_token=experts_per_token,
            intermediate=_number(config, self.inner),
        )

    def _mlp(self, config: Config, sizes: Mapping[str, Any]) -> tuple[ModuleSpec, ...]:
        hidden, inner = sizes["hidden"], _number(config, self.inner)
        experts = _number(config, "num_experts", "num_local_experts")
        *up, down, router = registry.STACKED_EXPERTS[sizes["model_type"]]
        size = experts * inner * hidden
        return (
            ModuleSpec("mlp.experts", 2 * size, hidden, 2 * inner, experts, tuple(up)),
            ModuleSpec("mlp.experts", size, inner, hidden, experts, (down,)),
            ModuleSpec("mlp.gate", experts * hidden, hidden, experts, 1, (router,)),
        )


def _gpt2(config: Config) -> ModelShape:
    if config.get("add_cross_attention"):
        raise UnknownArchitecture("Footplate has no formula for GPT-2 with cross-attention")
    sizes = _common(config, inner="n_inner")
    hidden, inner, tied = sizes["hidden"], sizes["intermediate"], bool(config.get("tie_word_embeddings", True))
    layer = (
        _linear("attn.c_attn", hidden, 3 * hidden, True),
        _linear("attn.c_proj", hidden, hidden, True),
        _linear("mlp.c_fc", hidden, inner, True),
        _linear("mlp.c_proj", inner, hidden, True),
        ModuleSpec("ln_1", 2 * hidden),
        ModuleSpec("ln_2", 2 * hidden),
    )
    vocabulary = sizes["vocabulary"] * hidden
    others = (
        ModuleSpec("transformer.wte", vocabulary),
        ModuleSpec("transformer.wpe", sizes["max_positions"] * hidden),
        ModuleSpec("transformer.ln_f", 2 * hidden),
        ModuleSpec("lm_head", 0 if tied else vocabulary, hidden, sizes["vocabulary"]),
    )
    return ModelShape(
        **sizes, tied=tied, gated_mlp=False, layers_path="transformer.h", layer=layer, non_layer_modules=others
    )


def _gpt_neox(config: Config) -> ModelShape:
    sizes = _common(config)
    hidden, inner, tied = sizes["hidden"], sizes["intermediate"], bool(config.get("tie_word_embeddings", False))
    bias = bool(config.get("attention_bias", True))
    layer = (
        _linear("attention.query_key_value", hidden, 3 * hidden, bias),
        _linear("attention.dense", hidden, hidden, bias),
        _linear("mlp.dense_h_to_4h", hidden, inner, True),
        _linear("mlp.dense_4h_to_h", inner, hidden, True),
        ModuleSpec("input_layernorm", 2 * hidden),
        ModuleSpec("post_attention_layernorm", 2 * hidden),
    )
    vocabulary = sizes["vocabulary"] * hidden
    others = (
        ModuleSpec("gpt_neox.embed_in", vocabulary),
        ModuleSpec("gpt_neox.final_layer_norm", 2 * hidden),
        ModuleSpec("lm_head", 0 if tied else vocabulary, hidden, sizes["vocabulary"]),
    )
    return ModelShape(
        **sizes, tied=tied, gated_mlp=False, layers_path="gpt_neox.layers", layer=layer, non_layer_modules=others
    )


def _phi(config: Config) -> ModelShape:
    if config.get("qk_layernorm"):
        raise UnknownArchitecture("Footplate has no formula for Phi with norms of queries and keys")
    sizes = _common(config)
    hidden, inner, tied = sizes["hidden"], sizes["intermediate"], bool(config.get("tie_word_embeddings", False))
    query_size, kv_size = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    layer = (
        _linear("self_attn.q_proj", hidden, query_size, True),
        _linear("self_attn.k_proj", hidden, kv_size, True),
        _linear("self_attn.v_proj", hidden, kv_size, True),
        _linear("self_attn.dense", query_size, hidden, True),
        _linear("mlp.fc1", hidden, inner, True),
        _linear("mlp.fc2", inner, hidden, True),
        ModuleSpec("input_layernorm", 2 * hidden),
    )
    vocabulary = sizes["vocabulary"] * hidden
    others = (
        ModuleSpec("model.embed_tokens", vocabulary),
        ModuleSpec("model.final_layernorm", 2 * hidden),
        ModuleSpec("lm_head", sizes["vocabulary"] + (0 if tied else vocabulary), hidden, sizes["vocabulary"]),
    )
    return ModelShape(**sizes, tied=tied, gated_mlp=False, layer=layer, non_layer_modules=others)


_FOUR_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")

ARCHITECTURES: Mapping[str, Callable[[Config], ModelShape]] = {
    "llama": Llama(),
    "mistral": Llama(qkv_bias=False, o_bias=False),
    "qwen2": Llama(qkv_bias=True, o_bias=False),
    "qwen3": Llama(qk_norm="head", head_dim=128),
    "smollm3": Llama(tied=True),
    "granite": Llama(),
    "olmo2": Llama(norms=_POST_NORMS, qk_norm="all"),
    "gemma": Llama(tied=True, head_dim=256),
    "gemma2": Llama(norms=_FOUR_NORMS, tied=True, head_dim=256),
    "gemma3_text": Llama(norms=_FOUR_NORMS, qk_norm="head", tied=True, head_dim=256),
    "phi3": Llama(qkv_bias=False, o_bias=False, fused=True),
    "phi": _phi,
    "mixtral": Mixture(qkv_bias=False, o_bias=False),
    "qwen3_moe": Mixture(qk_norm="head", inner="moe_intermediate_size"),
    "olmoe": Mixture(qk_norm="all"),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
