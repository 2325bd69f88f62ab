"""Architectures that the libraries cannot train, freeze by layers, quantize, shard or load, on small models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import build, tokens
from parameters import soak_except
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_runs import environment
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    BltConfig,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from transformers.models.auto import modeling_auto
from trl.trainer.utils import add_fused_lm_head

from backend import registry
from backend.paths import HOME
from backend.train.decoder_layers import decoder_layers
from backend.train.describe_model import describe
from backend.train.patches import accelerate_fsdp2_adapter_head, bitsandbytes_cpu_layout
from cited import cites

pytestmark = pytest.mark.filterwarnings("ignore")


def build_decoder(kind: str) -> Any:
    """A small model of a type of encoders, as a decoder."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=300, is_decoder=True, attention_type="original_full", **sizes)
    for size in ("embedding_size", "input_embedding_size", "output_embedding_size"):
        if hasattr(config, size):
            setattr(config, size, 32)
    config.default_language = "en_XX"  # of xmod
    return AutoModelForCausalLM.from_config(config)


@cites("MDL009")
def test_trl_leaves_out_layers_of_encoders_that_are_decoders() -> None:
    known = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys() & registry.UNTRAINABLE.keys() - {"reformer"}
    differs = set()
    for kind in (*sorted(known), "bert-generation"):
        model, ids = build_decoder(kind).eval(), torch.arange(3, 43)[None]
        with torch.no_grad():
            for value in model.parameters():
                value.normal_(0, 0.3)
            logits = model(input_ids=ids, use_cache=False).logits
            own = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
            add_fused_lm_head(model)
            fused = model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids), fused_lm_head=True).loss
        differs |= {kind} if abs(own - fused) > 1e-4 else set()
    assert len(known) == 15 and differs == known


@cites("MDL009")
def test_trl_leaves_out_layers_before_the_output_layer() -> None:
    assert registry.UNTRAINABLE["modernbert-decoder"].startswith("TRL")
    model, ids = build("modernbert-decoder").eval(), torch.tensor([tokens(40)])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.float()
        own = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
        add_fused_lm_head(model)
        fused = model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids), fused_lm_head=True).loss
    assert abs(own - fused) > 1e-3


@cites("MDL009")
def test_reformer_trains_on_multiples_of_its_chunk_length_only() -> None:
    with pytest.raises(ValueError, match="has to be a multiple of least common multiple chunk_length"):
        build("reformer").train()(input_ids=torch.tensor([tokens(94)]))


@cites("MDL010")
def test_no_list_has_the_number_of_layers() -> None:
    assert {"blt", "hrm_text"} == registry.NO_LAYER_LIST
    assert not hasattr(BltConfig().get_text_config(), "num_hidden_layers")
    assert decoder_layers(build("hrm_text")) == ("", 0)


@cites("MTH020")
def test_new_tokens_do_not_fit_the_tables_of_blt_and_moshi() -> None:
    assert {"blt", "moshi"} == registry.NO_NEW_TOKENS.keys()
    model = build("blt")
    model.resize_token_embeddings(new := model.get_input_embeddings().num_embeddings + 1)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[5, new - 1]]), use_cache=False)
    moshi = build("moshi")
    assert moshi.get_input_embeddings().num_embeddings == moshi.config.vocab_size + 1
    moshi.resize_token_embeddings(size := moshi.config.vocab_size + 9)
    assert moshi.get_input_embeddings().num_embeddings == moshi.config.vocab_size == size, "so it cannot be built again"


@cites("PRC020")
def test_the_router_of_inkling2_needs_fp32_weights() -> None:
    assert {"inkling2_text"} == registry.NO_PURE_BF16
    with pytest.raises(RuntimeError, match="expected m1 and m2 to have the same dtype"):
        build("inkling2_text").bfloat16()(input_ids=torch.tensor([tokens(9)]))


@cites("STR070")
def test_layerdrop_skips_layers_at_random() -> None:
    """Each process draws on its own, so their weights without a gradient differ."""
    model, skipped = build("opt"), set()
    model.model.decoder.layerdrop = 0.5
    for seed in range(8):
        torch.manual_seed(seed)
        model.zero_grad()
        model(input_ids=(ids := torch.tensor([tokens(9)])), labels=ids).loss.backward()
        skipped.add(frozenset(name for name, weight in model.named_parameters() if weight.grad is None))
    assert len(skipped) > 1


@cites("STR071")
def test_accelerate_finds_no_norm_before_the_output_layer() -> None:
    find = accelerate_fsdp2_adapter_head.original
    assert find(build("llama")) is not None and find(build("openai-gpt")) is None


@cites("QNT020")
@pytest.mark.parametrize("is_training", [True, False])
def test_gemma3n_reads_quantized_weights_in_training(tmp_path: Path, is_training: bool) -> None:
    build("gemma3n_text").save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    bitsandbytes_cpu_layout.apply(model)
    model.train(is_training)
    if is_training:
        with pytest.raises(RuntimeError, match=r"cannot be multiplied|can't be cast"):
            model(input_ids=torch.tensor([tokens(40)]), use_cache=False)
    else:
        model(input_ids=torch.tensor([tokens(40)]), use_cache=False)


@cites("MDL013")
@pytest.mark.parametrize("kind", soak_except(("jetmoe", "ctrl", "llama", "opt"), ("jetmoe", "llama")))
def test_activation_checkpointing_is_refused(kind: str, tmp_path: Path) -> None:
    """By the Trainer, before the first step."""
    model = build(kind)
    arguments = TrainingArguments(tmp_path, activation_checkpointing=True, max_steps=1, use_cpu=True, report_to="none")
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": tokens(9), "labels": tokens(9)}])
    if describe(model.config.to_dict())["activation_checkpointing"]:
        trainer.train()
    else:
        with pytest.raises(ValueError, match="does not support activation checkpointing"):
            trainer.train()
    assert describe(model.config.to_dict())["activation_checkpointing"] == (kind in ("llama", "opt"))


@cites("STR048")
def test_fsdp2_refuses_a_module_that_two_layers_share(tmp_path: Path) -> None:
    """As Zamba's layers share a block."""
    shared = nn.Linear(8, 8)
    first, second = nn.Sequential(shared, nn.Linear(8, 8)), nn.Sequential(shared, nn.Linear(8, 8))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(first, mesh=mesh)
        with pytest.raises((ValueError, TypeError), match=r"is shared with a parameter|Invariant"):
            fully_shard(second, mesh=mesh)
    finally:
        dist.destroy_process_group()


@cites("STR072")
def test_fsdp2_refuses_a_bias_that_two_units_share(tmp_path: Path) -> None:
    """As the output layer of BertGenerationDecoder and the module around it do."""
    model = build_decoder("bert-generation")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard([model.get_input_embeddings(), model.get_output_embeddings()], mesh=mesh)
        with pytest.raises(ValueError, match="is shared with a parameter"):
            fully_shard(model, mesh=mesh)(input_ids=torch.tensor([[1, 2]]))
    finally:
        dist.destroy_process_group()


@cites("STR057")
@pytest.mark.parametrize("kind", ["llama4_text", "qwen2_moe"])
def test_llama4_changes_the_output_of_a_divided_layer_in_place(kind: str, tmp_path: Path) -> None:
    """Its shared expert is divided as transformers' plan says; that of Qwen2 MoE is not changed in place."""
    blocks = [module for module in build(kind).modules() if hasattr(module, "shared_expert")]
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    hidden_states = torch.ones(1, 3, 64, requires_grad=True)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallelize_module(blocks[0].shared_expert, dist.device_mesh.init_device_mesh("cpu", (1,)), plan)
        if kind in registry.NO_TENSOR_PARALLELISM:
            with pytest.raises(RuntimeError, match="modified inplace"):
                blocks[0](hidden_states)
        else:
            blocks[0](hidden_states)
    finally:
        dist.destroy_process_group()


@cites("STR057")
@pytest.mark.parametrize("divided", [False, True])
def test_doge_adds_a_mask_for_all_heads_to_the_scores_of_some(divided: bool) -> None:
    """Each of two devices has half of the columns of these layers, and of the rows of dt_proj and o_proj."""
    attention = next(module for module in build("doge").modules() if hasattr(module, "dt_proj"))
    if divided:
        for name in ("q_proj", "k_proj", "v_proj"):
            layer = getattr(attention, name)
            setattr(attention, name, nn.Linear(layer.in_features, layer.out_features // 2))
        for name in ("dt_proj", "o_proj"):
            layer = getattr(attention, name)
            setattr(attention, name, nn.Linear(layer.in_features // 2, layer.out_features))
    angles = torch.zeros(1, 3, attention.head_dim)
    arguments = torch.ones(1, 3, attention.q_proj.in_features), (angles.cos(), angles.sin())
    if divided:
        with pytest.raises(RuntimeError, match="must match"):
            attention(*arguments)
    else:
        attention(*arguments)


@cites("STR057")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "hrm_text", "inkling2_text"])
def test_a_rank_does_not_load_its_part_of_some_weights(kind: str, tmp_path: Path) -> None:
    """Of two ranks, rank 0 has the first half of each divided dimension. Where it loads something else, the model
    computes something else, or the halves that are put together to save it are not its weights."""
    build(kind).save_pretrained(tmp_path)
    whole = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=DistributedConfig(tp_size=2))
        parts = {name: weight for name, weight in model.named_parameters() if isinstance(weight, DTensor)}
        same = [torch.equal(w.to_local(), whole[n].chunk(2, w.placements[0].dim)[0]) for n, w in parts.items()]
    finally:
        dist.destroy_process_group()
    assert parts and all(same) == (kind not in registry.NO_TENSOR_PARALLELISM)


@cites("STR057")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "weight"), [("llama", "model.norm.weight"), ("kimi_linear", "conv1d.weight")])
def test_fsdp2_over_several_groups_loads_convolutions_in_another_order(kind: str, weight: str, tmp_path: Path) -> None:
    """Rank 0 of two groups of two has the first half of a weight that only FSDP2 divides."""
    build(kind).save_pretrained(tmp_path)
    whole = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        sizes = DistributedConfig(tp_size=2, fsdp_size=2)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=sizes)
        name, part = next((n, w) for n, w in model.named_parameters() if n.endswith(weight))
        loaded = part.to_local() if isinstance(part, DTensor) else part
    finally:
        dist.destroy_process_group()
    assert torch.equal(loaded, whole[name].chunk(2)[0]) == (kind not in registry.NO_TENSOR_FSDP2)


@pytest.mark.soak
@cites("STR050")
def test_types_that_are_initialized_by_shape_cannot_be_loaded_under_zero3(tmp_path: Path) -> None:
    script, result = HOME / "tests/process/zero3_loading.py", tmp_path / "errors.json"
    kinds = {"llama", "rwkv", "youtu"}  # all types: test_architectures.py
    subprocess.run(
        [sys.executable, script, result, *kinds],
        capture_output=True, check=True, timeout=300, env=environment(tmp_path, tmp_path),
    )  # fmt: skip
    assert json.loads(result.read_text()).keys() == registry.NO_ZERO3 & kinds
