"""Which adapters llama.cpp can load as GGUF LoRA with a GGUF file of their base model."""

from __future__ import annotations

import re

from backend.inspect.weights import tensor_shapes
from backend.models.trained import ADAPTER, TrainedModel, is_residual, other_parts
from backend.runs import json_values

WEIGHTS = "adapter_model.safetensors"
LORA = re.compile(r"\.lora_(?:[AB]\.weight|embedding_[AB])$")
EMBEDDINGS = re.compile(r"\.lora_embedding_[AB]$|(?:^|\.)(?:lm_head|embed_out)\.lora_[AB]\.weight$")


def problem(model: TrainedModel) -> str:
    """Why llama.cpp cannot load the adapter of `model` as a LoRA adapter: a sentence; '' if it can. Raises
    WeightsError."""
    if not model.base:
        return "The model has full weights and no adapter."
    config = json_values.read(model.folder / ADAPTER)
    if (kind := config.get("peft_type")) != "LORA":
        return f"llama.cpp loads LoRA adapters only; this adapter has the type {kind or 'unknown'}."
    if is_residual(config):
        return (
            "An adapter in a checkpoint of PiSSA or OLoRA belongs to base weights that this initialization changed. "
            "The final model of the run is converted to an adapter of the original base model, and can be exported."
        )
    parts = other_parts(config) + (["LoRA matrices of stacked experts"] if config.get("target_parameters") else [])
    names = tensor_shapes(model.folder / WEIGHTS)
    if others := [name for name in names if not LORA.search(name)]:
        parts = parts or [f"weights that are not LoRA matrices, such as {others[0]}"]
    elif embeddings := [name for name in names if EMBEDDINGS.search(name)]:
        parts = parts or [f"LoRA matrices of embeddings or of the LM head, such as {embeddings[0]}"]
    has = " and ".join(parts)
    return f"llama.cpp loads LoRA matrices of linear layers only; this adapter has {has}." if parts else ""
