"""Model folders and architectures: what transformers and peft do with those that the rules refuse."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build, packing_leaks
from bitsandbytes.nn import Int8Params
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from backend.config import RunSpec
from backend.config.options import edit
from backend.modelspec import ARCHITECTURES, NO_SEQUENCE_CLASSIFICATION
from backend.train.adapters import lora_config
from backend.train.run_log import TrainError
from cited import cites

pytestmark = pytest.mark.filterwarnings("ignore")
BERT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99}


@cites("MDL014")
def test_padding_outside_of_the_vocabulary() -> None:
    nn.Embedding(99, 8, padding_idx=98)
    with pytest.raises(AssertionError, match="Padding_idx must be within num_embeddings"):
        nn.Embedding(99, 8, padding_idx=99)


@cites("MDL007")
def test_missing_weights_are_initialized_at_random(tmp_path: Path, tiny: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ".layers.3." not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    name = "model.layers.3.mlp.up_proj.weight"
    assert name in loaded and not loaded[name].equal(weights[name])
    wider = {name: torch.cat([weight, weight]) for name, weight in weights.items()}
    save_file(wider, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match=r"(?i)mismatch"):
        AutoModelForCausalLM.from_pretrained(folder)


@cites("MDL008")
def test_an_encoder_sees_the_token_that_it_should_predict() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("bert", **BERT)).eval()
    ids = torch.arange(5, 15)[None]
    changed = ids.clone()
    changed[0, -1] = 50
    with torch.no_grad():
        before, after = (model(tokens).logits[0, 0] for tokens in (ids, changed))
    assert (before - after).abs().max() > 1e-4, "the first position depends on the last token"
    assert "t5" not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForCausalLM.from_config(AutoConfig.for_model("t5"))


@cites("ADP011")
def test_architectures_without_layers_that_are_named_attention() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 99, "state_size": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **small))
    spec = edit(RunSpec(), {"lora.targets": "attention"})
    with pytest.raises(TrainError, match="has no linear layers with attn or attention in their name"):
        lora_config(spec, model)


def test_peft_takes_gated_attention_for_the_experts() -> None:
    """Therefore ADP010 refuses attention targets for these architectures."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 99, "num_dense_layers": 0, "num_experts": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("afmoe", **small))
    config = lora_config(edit(RunSpec(), {"lora.targets": "attention"}), model)
    with pytest.raises(ValueError, match="gate_proj without also targeting up_proj"):
        get_peft_model(model, config)


@cites("ADP012")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_peft_takes_dense_and_shared_layers_for_the_experts() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "n_routed_experts": 4, "n_group": 2}
    small |= {"intermediate_size": 48, "moe_intermediate_size": 16, "num_attention_heads": 2, "q_lora_rank": 16}
    small |= {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
    small |= {"first_k_dense_replace": 1, "num_experts_per_tok": 2, "topk_group": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **small))
    adapted = get_peft_model(model, lora_config(edit(RunSpec(), {}), model))
    names = {name.partition(".lora_A")[0] for name, _ in adapted.named_parameters() if ".lora_A" in name}
    assert any(name.endswith("layers.0.self_attn.o_proj") for name in names)
    assert any(".layers.1.mlp.experts" in name for name in names)
    assert not [name for name in names if ".layers.0.mlp." in name or "shared_experts" in name]


@cites("MDL017")
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_the_keys_of_latent_attention_are_not_repeated(kind: str) -> None:
    model, ids = build(kind), torch.arange(3, 11)[None]
    layers = [module for module in model.modules() if hasattr(module, "num_key_value_groups")]
    assert layers and all(layer.num_key_value_groups == 1 for layer in layers)
    model(input_ids=ids, use_cache=False)
    for layer in layers:  # as with half as many num_key_value_heads as num_attention_heads
        layer.num_key_value_groups = 2
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        with pytest.raises(RuntimeError, match="must match"):
            model(input_ids=ids, use_cache=False)


@cites("STG009")
def test_architectures_without_a_sequence_classification_model() -> None:
    lacking = {kind for kind in ARCHITECTURES if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES}
    assert lacking == {*NO_SEQUENCE_CLASSIFICATION}
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForSequenceClassification.from_config(AutoConfig.for_model("granite"))


@cites("ADP010")
def test_peft_refuses_some_layers_of_mamba() -> None:
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=1, vocab_size=99)
    model = AutoModelForCausalLM.from_config(config)
    for targets in ("all-linear", ["out_proj"]):
        with pytest.raises(ValueError, match="out_proj"):
            get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=targets))


@cites("QNT020")
def test_rwkv_rescales_its_weights_for_inference() -> None:
    model: Any = build("rwkv")
    assert model.config.rescale_every > 0
    for block in model.rwkv.blocks:
        weight = block.attention.output.weight.data
        block.attention.output.weight = Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    model.eval()
    with pytest.raises(AttributeError, match="div_"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


@cites("QNT020")
@pytest.mark.parametrize("kind", ["mamba", "gemma3n_text", "dots3_note_text", "hy_v4", "roc_bert"])
def test_architectures_without_quantization(kind: str, tmp_path: Path) -> None:
    build(kind).save_pretrained(tmp_path)
    options = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=options).train()
    with pytest.raises(RuntimeError, match=r"Char|output type signed char|is a view"):
        model(input_ids=torch.arange(3, 11)[None], use_cache=False)


@cites("DAT020", "DAT021")
def test_some_architectures_do_not_isolate_packed_sequences() -> None:
    """tests/process/test_architectures.py measures all of them."""
    assert packing_leaks(build("llama")) == 0
    for kind in ("mamba", "biogpt", "deepseek_v4"):
        assert packing_leaks(build(kind)) > 1e-3
    with pytest.raises(ValueError, match="without `causal_conv1d`"):
        packing_leaks(build("qwen3_next"))


@cites("DAT022")
def test_a_packed_batch_must_fit_into_the_attention_mask_of_gpt_neo() -> None:
    small = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}
    config = AutoConfig.for_model("gpt_neo", **small, vocab_size=99, max_position_embeddings=16)
    model = AutoModelForCausalLM.from_config(config)
    for length in (8, 12):
        ids, positions = torch.ones(1, 2 * length, dtype=torch.long), torch.arange(length).repeat(2)[None]
        with nullcontext() if length == 8 else pytest.raises(RuntimeError, match="must match the size"):
            model(input_ids=ids, position_ids=positions, use_cache=False)


@cites("MDL012", "MDL015")
def test_code_of_a_model_folder_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, executed = tmp_path / "model", tmp_path / "executed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    (folder / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import PretrainedConfig\n"
        f"Path({str(executed)!r}).touch()\nclass Own(PretrainedConfig):\n    model_type = 'own'\n"
    )
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
    assert not executed.exists()
    AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert executed.exists()
