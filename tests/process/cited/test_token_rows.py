"""Rows of the embeddings for added tokens: behavior of peft and transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer, models
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM, PhiConfig, PhiForCausalLM, PreTrainedTokenizerFast

from cited import cites

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
IDS = torch.tensor([[3, 60, 4]])


@cites("MDL016")
def test_decode_leaves_out_special_tokens() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    tokenizer.add_tokens([AddedToken("<end>", special=True), AddedToken("<tool>")])
    ids = tokenizer.convert_tokens_to_ids(["<tool>", "<end>"])
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool>"


@cites("MTH012", "STR059")
def test_sharded_embeddings_have_no_single_rows(group: None) -> None:
    """Neither can peft put rows into them, nor can transformers add some."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    adapted: Any = get_peft_model(model, LoraConfig(r=2, trainable_token_indices={"embed_tokens": [60]}))
    adapted(input_ids=IDS)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    embedding = model.get_input_embeddings().token_adapter
    for module, name in ((embedding.base_layer, "weight"), (embedding.trainable_tokens_delta, "default")):
        shards = distribute_tensor(getattr(module, name).detach(), mesh, [Shard(0)])
        setattr(module, name, torch.nn.Parameter(shards))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        adapted(input_ids=IDS)
    whole = LlamaForCausalLM(LlamaConfig(**SIZES))
    weight = distribute_tensor(whole.get_input_embeddings().weight.detach(), mesh, [Shard(0)])
    whole.get_input_embeddings().weight = torch.nn.Parameter(weight)
    with pytest.raises(RuntimeError):
        whole.resize_token_embeddings(65)


@cites("MTH013")
def test_an_output_layer_with_trained_rows_has_no_bias() -> None:
    model = PhiForCausalLM(PhiConfig(**SIZES)).eval()
    torch.nn.init.constant_(model.lm_head.bias, 1.0)
    before = model(input_ids=IDS).logits.detach()
    adapted: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["dense"], trainable_token_indices={
        "lm_head": [60]}))  # fmt: skip
    assert torch.allclose(adapted.eval()(input_ids=IDS).logits, before - 1, atol=1e-5)


@cites("MTH013")
def test_a_tied_output_layer_in_full_has_no_trained_rows() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    config = LoraConfig(r=2, modules_to_save=["lm_head"], trainable_token_indices={"embed_tokens": [60]})
    adapted: Any = get_peft_model(model, config)
    with pytest.raises(ValueError, match="wraps an unknown layer type"):
        adapted(input_ids=IDS)


@cites("MTH014")
def test_new_rows_get_the_mean() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    mean = model.get_input_embeddings().weight.detach().mean(0)
    model.resize_token_embeddings(66)
    rows = model.get_input_embeddings().weight.detach()[64:]
    assert torch.allclose(rows, mean.expand(2, -1), atol=1e-4)
