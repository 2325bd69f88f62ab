"""transformers' plans of tensor parallelism and FSDP2 leave out weights whose gradient is that of one rank.

transformers distributed/mixin.py, `_resolve_parallel_plans`. The norms of heads (q_norm and k_norm) have the same
weights on all ranks, and a gradient of the heads on each rank, which is summed only if the plan names the norms; the
plans of GLM 4.5 and Phi do not, and that of Apertus does not name its activation, which has weights too. Cohere's norms
have a weight for each head, all of which meet the heads of one rank.

The plan divides the embedding. Gemma 4 with a vision tower reads a row of its weights, so that its embedding stays
whole. GPT-NeoX' embedding, embed_in, is not in the plan, but the output layer is, also where both share the weights.

distributed/fsdp.py, `is_norm_and_head_pair`: the output layer shares a unit with the norm before it, which is gathered
when the norm is called, only if the norm is named `norm` and nothing else stays gathered. Phi names it final_layernorm.
TRL's losses read the weights of the output layer without a call. Here such an output layer belongs to the root's unit,
which is gathered when the model is called.

Without the patch these weights get on each rank the gradient of its own heads or examples alone, or the first step
fails: that of Cohere, Gemma 4 and GPT-NeoX.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_norm_and_head_pair

LIBRARY, SEEN_IN = "transformers", "5.23.0"
INSIDE = re.compile(r"(.*\.)(?:[qk]_norm|[qk]_layernorm|query_layernorm|key_layernorm|act_fn)")
DIVIDED = ("q_proj", "qkv_proj", "query_key_value", "up_proj")  # next to them
KEPT = "keep_full_weight"  # not sharded again between the forward and the backward pass
original = PreTrainedModel._resolve_parallel_plans


def plans(model: Any, config: Any) -> tuple[dict[str, str], ...]:
    """The plans of tensor, expert and FSDP2 parallelism of a model."""
    tensor, expert, fsdp = original(model, config)
    if config.tp_size > 1:
        tensor = _with_whole_embedding(model, tensor | _inside(model, tensor))
    kept = [(name, model.get_submodule(name)) for name, style in fsdp.items() if style == KEPT]
    head = model.get_output_embeddings()
    if not is_norm_and_head_pair(kept, model):
        fsdp = {name: style for name, style in fsdp.items() if model.get_submodule(name) is not head}
    return tensor, expert, fsdp


def _inside(model: Any, plan: dict[str, str]) -> dict[str, str]:
    """What the plan lacks: norms of heads, and activations, where each rank has some of the heads or columns."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        match = INSIDE.fullmatch(name)
        if match is None or name in plan or not any(plan.get(f"{match[1]}{each}") == "colwise" for each in DIVIDED):
            continue
        shapes = {key: weight.dim() for key, weight in module.named_parameters(recurse=False)}
        if any(dimensions > 1 for dimensions in shapes.values()):  # a row for each head
            found |= {**{f"{name}.{key}": "colwise" for key in shapes}, name: "local_params"}
        elif shapes:
            found[name] = "replicated_with_grad_allreduce"
    return found


def _with_whole_embedding(model: Any, plan: dict[str, str]) -> dict[str, str]:
    """The plan without the embedding, and the output layer that shares its weights, where the model reads a row, or
    where the plan lacks the embedding."""
    text = model.config.get_text_config()
    reads_row = model.config.model_type == "gemma4" and text.hidden_size_per_layer_input
    if not reads_row and model.config.model_type != "gpt_neox":
        return plan
    tied = model.get_output_embeddings() if text.tie_word_embeddings else None
    parts = {name for name, module in model.named_modules() if module in (model.get_input_embeddings(), tied)}
    return {name: style for name, style in plan.items() if not {name, name.rpartition(".")[0]} & parts}


def apply() -> None:
    """Replace the method of all models."""
    PreTrainedModel._resolve_parallel_plans = plans
