"""Weights that FSDP2 shards, gathered while each rank generates as many outputs as it likes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import init_device_mesh
from training_runs import make_spec
from transformers import AutoModelForCausalLM, LlamaConfig

from backend.train.unsharded import unsharded_model


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # of transformers, torch and accelerate, as in logging_setup.py
@pytest.mark.parametrize("adapter", [False, True])
def test_the_weights_stay_gathered_after_an_output(one_rank: Any, adapter: bool) -> None:
    """A rank with one batch more than the others would otherwise gather the root's weights alone, and wait forever."""
    config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    fully_shard(model.model.layers[0], mesh=one_rank)
    fully_shard([model.model.norm, model.lm_head], mesh=one_rank)  # cannot be the root of FSDP
    if adapter:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    fully_shard(model, mesh=one_rank)
    register_fsdp_forward_method(model, "generate")  # as the Trainer does
    trainer = SimpleNamespace(
        model=model, model_wrapped=model, accelerator=SimpleNamespace(unwrap_model=lambda each: each)
    )
    spec = make_spec({"parallel.strategy": "fsdp2"})
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    with unsharded_model(spec, trainer) as whole:
        for _ in range(2):
            whole.generate(max_new_tokens=2, bos_token_id=1, pad_token_id=0)
            assert all(group.is_unsharded for group in groups)
    assert not any(group.is_unsharded for group in groups)
    assert "generate" in vars(model), "it is registered again"
