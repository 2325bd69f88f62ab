"""A tiny model of every causal language model type of the installed transformers, with the tokenizer of the built-in
tiny-llama.

The config of a type is its default config with small sizes: transformers derives everything else from them, and
`overrides` has what it does not derive. Models are built on the meta device first, so that no model of full size is
ever created.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head

MAX_PARAMETERS = 20_000_000
Config = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a tiny model."""

    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    layers: int = 4
    vocabulary: int = 2048
    experts: int = 4

    @property
    def head(self) -> int:
        return self.hidden // self.heads


EVEN = Sizes()
ODD = Sizes(hidden=72, heads=9, kv_heads=3, layers=3, vocabulary=2051, experts=5)  # nothing is divisible by 2 ranks
VARIANTS = {"even": EVEN, "odd": ODD}


class CannotBuild(Exception):
    """This model type cannot be built; the message is the reason."""


def model_types() -> list[str]:
    """Every type that AutoModelForCausalLM knows."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


# Names of config fields that have the same size.
FIELDS: Mapping[str, str] = {
    "layers": "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth num_blocks",
    "hidden": "hidden_size d_model n_embd embed_dim dim lru_width width attention_hidden_size d_embed dim_model "
    "emb_dim word_embed_proj_dim embedding_size hidden_size_global",
    "heads": "num_attention_heads attention_heads swa_num_attention_heads n_head n_heads num_heads num_query_heads "
    "encoder_attention_heads decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
    "linear_num_heads linear_num_value_heads linear_num_key_heads",
    "kv_heads": "num_key_value_heads num_kv_heads kv_n_heads num_key_value_groups num_global_key_value_heads "
    "swa_num_key_value_heads",
    "head_size": "head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim kv_channels attention_head_dim global_head_dim "
    "index_head_dim dim_head attention_head_size rotary_dim d_kv d_head swa_head_dim swa_v_head_dim linear_head_dim",
    "inner": "intermediate_size ffn_dim n_inner ff_dim d_ff ffn_hidden_size expert_ffn_hidden_size "
    "shared_intermediate_size intermediate_size_mlp encoder_ffn_dim decoder_ffn_dim dff d_inner dim_ff block_ff_dim "
    "shared_expert_intermediate_size moe_shared_expert_intermediate_size dense_intermediate_size mlp_hidden_size "
    "feed_forward_proj_size",
    "expert_inner": "moe_intermediate_size expert_intermediate_size moe_ffn_hidden_size",
    "experts": "num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts n_experts",
    "active_experts": "num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k top_k_experts",
    "one": "n_group topk_group num_expert_group n_shared_experts moe_num_shared_experts num_shared_experts "
    "mamba_n_groups n_groups",
    "positions": "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx",
    "window": "sliding_window attention_window_size attention_chunk_size window_size local_attention",
    "state": "mamba_d_state state_size ssm_state_size time_step_rank mamba_dt_rank index_topk linear_key_head_dim "
    "hidden_size_per_layer_input linear_value_head_dim laurel_rank",
    "low_rank": "q_lora_rank kv_lora_rank o_lora_rank",
    "vocabulary": "vocab_size vocab_size_per_layer_input",
}


def _sizes(sizes: Sizes) -> dict[str, int]:
    """Field name -> value."""
    values = {
        "layers": sizes.layers,
        "hidden": sizes.hidden,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "head_size": sizes.hidden // sizes.heads,
        "inner": 2 * sizes.hidden,
        "expert_inner": sizes.hidden,
        "experts": sizes.experts,
        "active_experts": 2,
        "one": 1,
        "positions": 512,
        "window": 64,
        "state": 16,
        "low_rank": 32,
        "vocabulary": sizes.vocabulary,
    }
    return {name: value for kind, value in values.items() for name in FIELDS[kind].split()}


TOKENS: Config = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FILLED = ("head_dim", *TOKENS)  # fields that are set even if their default is None


def tiny_fields(cls: Any, sizes: Sizes) -> Config:
    """The fields of a config class that have a size, with small values."""
    default, small, found = cls(), _sizes(sizes), dict[str, Any]()
    for field in fields(cls):
        value = getattr(cls, field.name, None)
        number = isinstance(value, int) and not isinstance(value, bool)
        if field.name in TOKENS:
            found[field.name] = TOKENS[field.name]
        elif field.name in small and (number or (value is None and field.name in FILLED)):
            found[field.name] = small[field.name]
        elif field.name in PER_LAYER:
            kinds = list(dict.fromkeys(getattr(default, field.name, None) or ()))
            if len(kinds) > 1:
                found[field.name] = ([kinds[0]] * sizes.layers + kinds)[-sizes.layers :]
    for name in getattr(cls, "sub_configs", {}):
        if (part := getattr(default, name, None)) is not None:
            found[name] = {**tiny_fields(type(part), sizes), **overrides(part.model_type, sizes)}
            found[name]["model_type"] = part.model_type
    if "kv_lora_rank" in found and "num_key_value_heads" in found:  # multi-head latent attention
        found["num_key_value_heads"] = sizes.heads
    return found


PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type")  # a kind for each layer; every kind is kept


def overrides(kind: str, sizes: Sizes) -> Config:
    """What the default config of a type does not have, or does not derive from the sizes."""
    heads, kv_heads, hidden, experts = sizes.heads, sizes.kv_heads, sizes.hidden, sizes.experts
    head, half, layers = sizes.head, sizes.layers // 2, sizes.layers
    linear_then_hybrid = ["linear_attention"] * (layers - 2) + ["hybrid"] * 2
    conv_then_attention = ["conv"] * (layers - 1) + ["full_attention"]
    experts_of_note = {"index_n_heads": heads, "shared_experts_intermediate_size": hidden, "sliding_window": 64}
    found: Mapping[str, Config] = {
        "bamba": {"attn_layer_indices": [1], "mamba_n_heads": heads},
        "blt": {"encoder_hash_byte_group_vocab": 64},
        "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        "dbrx": {  # attn_config as in the published config.json
            "attn_config": {"kv_n_heads": kv_heads, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 2 * hidden, "moe_num_experts": experts, "moe_top_k": 2}
            | {"hidden_size": hidden},
        },
        "deepseek_v2": {"num_experts_per_tok": 2, "num_key_value_heads": heads},
        "dots1": {"n_routed_experts": experts, "num_experts_per_tok": 2, "n_shared_experts": 1},
        "dots3_note_audio_encoder": {"adapter_input_size": hidden, "adapter_out_dim": hidden},
        "dots3_note_vision_encoder": {"adapter_in_dim": hidden, "adapter_out_dim": hidden}
        | {"mlp_layer_types": ["dense"] * layers},
        "dots3_note_text": experts_of_note
        | {"swa_num_attention_heads": heads, "swa_num_key_value_heads": heads, "swa_q_lora_rank": 32}
        | {"swa_kv_lora_rank": 32, "swa_head_dim": 2 * head, "swa_qk_nope_head_dim": head}
        | {"swa_qk_rope_head_dim": head, "swa_v_head_dim": head},
        "gemma3n_text": {
            "layer_types": (["full_attention", "sliding_attention"] * 2)[:layers],
            "num_kv_shared_layers": layers - 2,
        },
        "gemma4_text": {"enable_moe_block": True, "num_experts": experts, "top_k_experts": 2}
        | {"moe_intermediate_size": hidden},
        "gpt_neo": {"attention_types": [[["global"], half], [["local"], layers - half]]},
        "granitemoehybrid": {"mamba_n_heads": heads, "num_key_value_heads": kv_heads}
        | {"layer_types": ["linear_attention"] * (layers - 1) + ["full_attention"]},
        "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
        "lfm2": {"layer_types": conv_then_attention},
        "lfm2_moe": {"layer_types": conv_then_attention},
        "mamba2": {"num_heads": 2 * heads},
        "minimax_m3_vl_text": {"layer_types": ["full_attention"] * (layers - 1) + ["minimax_m3_sparse"]},
        "nemotron": {"num_key_value_heads": kv_heads},
        "qwen4_exp_text": {"indexer_n_heads": heads, "indexer_kv_heads": 1, "indexer_head_dim": head}
        | {"indexer_budget": 64, "indexer_compress_ratio": 4, "hc_lowrank": 16, "ngram_vocab_size_base": 64}
        | {"make_ngram_vocab_size_divisible_by": 4, "split_ngram_parts": 1},
        "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "lsh"] * half},
        "xlstm": {"qk_dim_factor": 1.0},
        "xmod": {"default_language": "en_XX"},
        "zamba": {"attention_head_dim": None, "attention_hidden_size": None, "layers_block_type": linear_then_hybrid},
        "zamba2": {"n_mamba_heads": heads, "layers_block_type": linear_then_hybrid},
        "zaya": {"num_experts_per_tok": 1},
    }
    return found.get(kind, {})


def tiny_config(kind: str, sizes: Sizes = EVEN) -> Any:
    """The config of a model type. Raises what transformers raises."""
    cls = CONFIG_MAPPING[kind]
    return cls(**{**tiny_fields(cls, sizes), **overrides(kind, sizes)})


def build(kind: str, sizes: Sizes = EVEN, **arguments: Any) -> Any:
    """The model with random weights, in fp32 and in training mode; `arguments` go to from_config. Raises CannotBuild,
    or what transformers raises."""
    with torch.device("meta"):
        count = AutoModelForCausalLM.from_config(tiny_config(kind, sizes), **arguments).num_parameters()
    if count > MAX_PARAMETERS:
        raise CannotBuild(f"it has {count:,} parameters with small sizes")
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(tiny_config(kind, sizes), **arguments).train()


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids, none of which is a special token."""
    return torch.randint(3, 2000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def is_causal(model: Any) -> bool:
    """Whether the logits of a position depend on no later token: an encoder's attention is bidirectional."""
    ids = torch.tensor([tokens(12)])
    changed = ids.clone()
    changed[0, -1] += 1
    model.eval()
    with torch.no_grad():
        before, after = (model(input_ids=each, use_cache=False).logits[0, :-1] for each in (ids, changed))
    return bool((before - after).abs().max() < LEAK)


# --- Packing ---

LEAK = 1e-6  # a smaller change of a logit is rounding: a mixture computes the tokens of an expert in another order
FIRST, SECOND = 150, 190  # tokens of the two packed sequences: more than a block of sparse attention


def packing_leaks(model: Any) -> float:
    """The largest change of a logit of the second packed sequence when tokens of the first change: the first token, the
    last one, or all. 0 if the sequences are isolated. The model gets the batch and the call of TRL's SFT trainer."""
    first, second, other = tokens(FIRST), tokens(SECOND, 1), tokens(FIRST, 2)
    changed = ([other[0], *first[1:]], [*first[:-1], other[-1]], other)
    before = _logits(model, [first, second])[FIRST:]
    return max(float((_logits(model, [each, second])[FIRST:] - before).abs().max()) for each in changed)


def packing_differs(model: Any) -> float:
    """The largest difference between the logits of a sequence that is packed after another and of the same sequence
    alone. 0 if packing changes nothing."""
    second = tokens(SECOND, 1)
    packed = _logits(model, [tokens(FIRST), second])[FIRST:]
    return float((packed - _logits(model, [second], packing=False)).abs().max())


def _logits(model: Any, sequences: Sequence[Sequence[int]], packing: bool = True) -> torch.Tensor:
    """The logits of one example, as TRL's SFT trainer computes them: the backbone's output times the output layer."""
    if not hasattr(model, "footplate_outputs"):
        add_fused_lm_head(model)
        model.footplate_outputs = []
        model.base_model.register_forward_hook(lambda *call: model.footplate_outputs.append(call[2]))
    ids = [token for sequence in sequences for token in sequence]
    example = {"input_ids": ids, "labels": ids, **({"seq_lengths": list(map(len, sequences))} if packing else {})}
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=packing)([example])
    model.footplate_outputs.clear()
    with torch.no_grad():
        model.eval()(**batch, use_cache=False, fused_lm_head=True)
    hidden, head = model.footplate_outputs[-1].last_hidden_state[0], model.get_output_embeddings()
    return torch.nn.functional.linear(hidden, head.weight, head.bias)


# --- Model folders ---


def save(model: Any, tiny: Path, folder: Path) -> Path:
    """Write the model into the new `folder`, with the tokenizer of the tiny model."""
    shutil.copytree(tiny, folder)
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
    model.save_pretrained(folder)
    return folder
