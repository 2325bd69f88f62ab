"""Attention, compilation, quantized weights and adapters: behavior of transformers, torch, peft and bitsandbytes."""

from __future__ import annotations

import importlib
import inspect
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import pytest
import torch
import torch._inductor.cpp_builder as cpp_builder
import transformers
import transformers.integrations.liger as liger
import transformers.modeling_utils as modeling
import transformers.quantizers.quantizer_bnb_4bit as bnb
import transformers.quantizers.quantizer_hqq as hqq
from accelerate.utils import fsdp_utils
from architectures import tiny_config
from deepspeed.runtime.zero.partition_parameters import Init
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import dora
from peft.tuners.lora.awq import AwqLoraLinear
from peft.tuners.lora.gptq import GPTQLoraLinear
from peft.utils import transformers_weight_conversion as conversion
from torch import nn
from torch._inductor.exc import InvalidCxxCompiler
from torch.distributed.fsdp._flat_param import FlatParamHandle
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    GPT2Config,
    GPT2LMHeadModel,
    GPTQConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mxfp4Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer
from transformers.trainer_utils import validate_quantization_for_training
from trl.kernels import chunked_logprob

from backend import registry
from backend.rules.kernels import TRITON_LOSS_STAGES
from backend.train import trl_trainers
from backend.train.describe_model import describe
from backend.train.quantized import is_quantized
from cited import cites

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


def llama(**more: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1, **more))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=8))


@cites("KRN002")
@pytest.mark.parametrize("version", [2, 3])
def test_flash_attention_needs_its_package(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = modeling.FLASH_ATTENTION_COMPATIBILITY_MATRIX[version]
    monkeypatch.setitem(requirements, "general_availability_check", lambda: False)
    monkeypatch.setattr(modeling, "is_kernels_available", lambda: False, raising=False)
    with pytest.raises(ImportError, match=f"the package for FlashAttention{version} doesn't seem to be installed"):
        llama(attn_implementation=f"flash_attention_{version}")._flash_attn_can_dispatch(version)


@cites("KRN004")
def test_flash_attention_warns_about_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(modeling.logger, "warning_once", messages.append)
    monkeypatch.setattr(modeling.PreTrainedModel, "_flash_attn_import_error", lambda model, **requirements: None)
    for dtype in (torch.float32, torch.bfloat16):
        llama(dtype=dtype)._flash_attn_can_dispatch(2, is_init_check=True)
    assert len(messages) == 1
    assert "only supports torch.float16 and torch.bfloat16 dtypes" in messages[0]


@cites("KRN007")
def test_liger_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "is_liger_kernel_available", lambda: False)
    with pytest.raises(ImportError, match="pip install liger-kernel"):
        liger.apply_liger_kernel(llama(), None)


@cites("KRN009")
def test_inductor_needs_a_cpp_compiler(tmp_path: Path) -> None:
    none = {"cpp.cxx": (None, str(tmp_path / "no-compiler"))}
    with cpp_builder.config.patch(none), pytest.raises(InvalidCxxCompiler):
        cpp_builder.get_cpp_compiler()


@cites("QNT005")
@pytest.mark.parametrize("size", [1e-4, 1e-3])
@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_merging_into_quantized_weights_loses_part_of_the_update(kind: str, size: float) -> None:
    """Of an update that is small next to the weights (0.02), as in fine-tuning, half or more is lost."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(256, 256, generator=generator)
    is_8bit = kind == "int8"
    if is_8bit:
        linear = bitsandbytes.nn.Linear8bitLt(256, 256, bias=False, has_fp16_weights=False)
        linear.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to("cpu")
    else:
        linear = bitsandbytes.nn.Linear4bit(256, 256, bias=False, quant_type=kind)
        linear.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type=kind).to("cpu")
    base = nn.Sequential(linear)
    # As from_pretrained marks a quantized model.
    base.is_loaded_in_8bit, base.is_loaded_in_4bit = is_8bit, not is_8bit
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=4, target_modules=["0"]))
    layer = model.base_model.model[0]
    layer.lora_B["default"].weight.data = size * torch.randn(256, 4, generator=generator)
    update = layer.get_delta_weight("default").detach()

    def dequantized() -> torch.Tensor:
        held = layer.base_layer.weight
        if is_8bit:
            scales = layer.base_layer.state.SCB if held.SCB is None else held.SCB
            return held.data.float() * scales.float()[:, None] / 127
        return bitsandbytes.functional.dequantize_4bit(held.data, held.quant_state)

    before = dequantized()
    with pytest.warns(UserWarning, match="rounding errors"):
        layer.merge()
    error = dequantized() - before - update
    assert error.norm() > 0.5 * update.norm()


@pytest.mark.soak
@cites("KRN010")
def test_compilation_takes_longer_than_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, inputs = nn.Sequential(nn.Linear(64, 64), nn.SiLU()), torch.ones(8, 64)

    def seconds(module: Any) -> float:
        start = time.perf_counter()
        module(inputs).sum().backward()
        return time.perf_counter() - start

    eager_seconds = min(seconds(model) for _ in range(9))
    assert seconds(torch.compile(model)) > 1000 * eager_seconds


@cites("KRN011")
def test_stages_with_a_triton_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """On cuda and xpu, where Triton is available; on other devices TRL uses plain torch."""
    monkeypatch.setattr(chunked_logprob, "_TRITON_AVAILABLE", True)
    found = {kind for kind in ("cpu", "cuda", "mps", "xpu") if chunked_logprob._use_triton(torch.device(kind))}
    assert found == {"cuda", "xpu"}
    modules = {name: importlib.import_module(f"{kind.module}_trainer") for name, kind in trl_trainers.TRL.items()}
    # The call shows on a GPU only, so the test searches the source.
    fused = {name for name, module in modules.items() if "fused_lm_head=True" in inspect.getsource(module)}
    assert fused == set(TRITON_LOSS_STAGES)


@cites("KRN012")
@pytest.mark.parametrize(
    "kind", ["bloom", "mpt", "codegen", "xglm", "gptj", "gemma2", "gpt2", "olmoe", "falcon", "opt", "llama"]
)
def test_attention_implementations_of_architectures(kind: str) -> None:
    """FlashAttention is not installed, which transformers notices later."""
    refused = set()
    for name in {*registry.ATTENTIONS} - {"auto", "eager"}:
        try:
            with torch.device("meta"):
                AutoModelForCausalLM.from_config(tiny_config(kind), attn_implementation=name)
        except (ValueError, ImportError) as error:
            refused |= {name} if "does not support" in str(error) else set()
    assert refused == {*describe(tiny_config(kind).to_dict())["unsupported_attentions"]}


@cites("KRN012")
@pytest.mark.parametrize("name", registry.FLASH_ATTENTIONS)
def test_flash_attention_of_gpt_oss_is_replaced_by_a_kernel(name: str) -> None:
    """It is loaded from the Hub with the package kernels, which is not installed."""
    assert name in describe(tiny_config("gpt_oss").to_dict())["unsupported_attentions"]
    with pytest.raises(ImportError, match="`kernels` is either not installed"):
        AutoModelForCausalLM.from_config(tiny_config("gpt_oss"), attn_implementation=name)


@cites("QNT001")
def test_quantization_needs_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer = AutoHfQuantizer.from_config(BitsAndBytesConfig(load_in_4bit=True))
    quantizer.validate_environment()
    for name in ("is_bitsandbytes_available",):
        monkeypatch.setattr(bnb, name, lambda *version: False)
    with pytest.raises(ImportError, match="bitsandbytes"):
        quantizer.validate_environment()


def flattened(*tensors: torch.Tensor) -> None:
    """Flatten tensors as FSDP1 does, which itself requires an accelerator."""
    FlatParamHandle._validate_tensors_to_flatten(SimpleNamespace(_use_orig_params=True), tensors)


@cites("STR046")
def test_fsdp1_unit_has_one_dtype() -> None:
    with pytest.raises(ValueError, match=r"uniform dtype but got torch\.bfloat16 and torch\.float32"):
        flattened(torch.zeros(4).bfloat16(), torch.zeros(4))


@cites("QNT019")
@pytest.mark.parametrize(("storage", "fits"), [(torch.uint8, True), (torch.bfloat16, True), (torch.float32, False)])
def test_four_bit_weights_of_an_odd_size(storage: torch.dtype, fits: bool) -> None:
    layer = bitsandbytes.nn.Linear4bit(60, 91, quant_storage=storage)
    with nullcontext() if fits else pytest.raises(RuntimeError, match="must be divisible by 4 to view Byte as Float"):
        layer.to("cpu")


@cites("QNT015")
def test_integer_weights_are_not_sharded() -> None:
    """FSDP1 does not flatten them. For FSDP2 accelerate leaves them out, and ZeRO-3 takes parameters alone, where the
    integers of GPTQ and AWQ are buffers. Both need an engine with several devices, so the test searches the source."""
    integers = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="Cannot flatten integer dtype tensors"):
        flattened(integers)
    source = inspect.getsource(fsdp_utils.fsdp2_prepare_model)
    assert "(not param.requires_grad) and (not param.is_floating_point())" in source
    source = inspect.getsource(Init._post_init_method)
    assert "in module.named_parameters(recurse=False)" in source
    assert "buffers(" not in source


@cites("QNT009")
def test_quantized_weights_need_adapters() -> None:
    base = llama()
    base.is_quantized, base.hf_quantizer = True, SimpleNamespace(is_trainable=True, is_qat_trainable=False)
    with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
        validate_quantization_for_training(base)
    validate_quantization_for_training(get_peft_model(base, LoraConfig(target_modules=["q_proj"])))


# Formats that the library considers trainable but Footplate has not tested: their packages need a GPU, or they quantize
# only while loading.
UNTESTED_FORMATS = {"eetq", "quanto", "sinq", "mxfp8", "aqlm", "torchao", "bitnet", "fp_quant", "fouroversix"}


@cites("QNT010")
def test_untrainable_quantization_formats() -> None:
    kinds = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZER_MAPPING}
    assert set(registry.PREQUANTIZED) <= kinds
    for kind in kinds - set(registry.PREQUANTIZED) - UNTESTED_FORMATS:
        quantizer = AUTO_QUANTIZER_MAPPING[kind]
        assert quantizer.is_trainable.fget(SimpleNamespace()) is False, kind
    base = llama()
    base.is_quantized = base._hf_peft_config_loaded = False
    base.is_quantized, base.hf_quantizer = (
        True,
        SimpleNamespace(
            is_trainable=False, is_qat_trainable=False, quantization_config=SimpleNamespace(quant_method="quark")
        ),
    )
    with pytest.raises(ValueError, match="quantized with quark but that quantization method do not support training"):
        validate_quantization_for_training(get_peft_model(base, LoraConfig(target_modules=["q_proj"])))


@cites("QNT011")
@pytest.mark.parametrize(
    ("kind", "package"), [(kind, name) for kind, row in registry.PREQUANTIZED.items() for name in row.packages]
)
def test_prequantized_model_needs_its_packages(kind: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "bitsandbytes":
        return test_quantization_needs_bitsandbytes(monkeypatch)
    quantizer = AUTO_QUANTIZER_MAPPING[kind]
    module = inspect.getmodule(quantizer)
    monkeypatch.setattr(module, f"is_{package.replace('-', '_')}_available", lambda: False)
    config = SimpleNamespace(quant_method=kind, skip_modules=[])
    with pytest.raises((ImportError, RuntimeError), match=f"(?i){package}|optimum|GPU is required"):
        quantizer.validate_environment(SimpleNamespace())
        quantizer(config)


@cites("QNT012")
def test_a_second_quantization_config_is_refused() -> None:
    stored = GPTQConfig(bits=4).to_dict()
    with pytest.raises(ValueError, match="quantized with GPTQConfig but you are passing a BitsAndBytesConfig config"):
        AutoHfQuantizer.merge_quantization_configs(stored, BitsAndBytesConfig(load_in_4bit=True))


@cites("QNT013")
def test_hqq_refuses_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hqq, "is_hqq_available", lambda: True)
    config = SimpleNamespace(quant_config={}, skip_modules=[])
    with pytest.raises(ValueError, match="HQQ model with a device_map that contains a CPU or disk device"):
        hqq.HqqHfQuantizer(config).validate_environment(device_map={"": "cpu"})


@cites("QNT014")
@pytest.mark.parametrize("config", [Mxfp4Config, FineGrainedFP8Config])
def test_formats_that_are_dequantized(config: Any) -> None:
    """With dequantize=True they need no package and become unquantized weights."""
    quantizer = AutoHfQuantizer.from_config(config(dequantize=True), pre_quantized=True)
    quantizer.validate_environment()
    quantizer.quantization_config.dequantize = True
    name = "Mxfp4Dequantize" if config is Mxfp4Config else "Fp8Dequantize"
    found = [o for c in quantizer.get_weight_conversions() for o in c.operations]
    assert name in {type(operation).__name__ for operation in found}


@cites("QNT016")
@pytest.mark.parametrize("kind", [GPTQLoraLinear, AwqLoraLinear])
def test_layers_without_dora_support(kind: Any) -> None:
    """As peft creates them; a plain layer stands in for the quantized one."""
    assert kind(nn.Linear(8, 8), "default", LoraConfig(), r=4)
    with pytest.raises(ValueError, match=f"{kind.__name__} does not support DoRA yet"):
        kind(nn.Linear(8, 8), "default", LoraConfig(use_dora=True), r=4)


@cites("ADP003")
def test_olora_does_not_transpose_conv1d_weights() -> None:
    given = {"target_modules": ["c_attn"], "r": 4, "fan_in_fan_out": True}
    for start in ("pissa", "olora"):
        model = get_peft_model(gpt2(), LoraConfig(**given, init_lora_weights=start))
        if start == "pissa":
            model(torch.arange(8)[None])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.arange(8)[None])


def test_the_text_models_with_conv1d_layers_are_listed() -> None:
    sources = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    using = {path.parent.name for path in sources if "import Conv1D" in path.read_text(encoding="utf-8")}
    folders = {kind: model_type_to_module_name(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert {kind for kind, folder in folders.items() if folder in using} == set(registry.CONV1D_MODELS)


@cites("ADP006")
@pytest.mark.parametrize(("dropout", "times"), [(0.0, 0), (0.1, 1)])
def test_dora_with_dropout_computes_the_base_layer_twice(
    dropout: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], use_dora=True, lora_dropout=dropout)).train()
    base = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    weight_pointers = []
    linear = nn.functional.linear

    def counted(inputs: Any, weight: Any, *more: Any) -> Any:
        weight_pointers.append(weight.data_ptr())
        return linear(inputs, weight, *more)

    monkeypatch.setattr(dora.F, "linear", counted)
    model(input_ids=torch.arange(4)[None])
    assert weight_pointers.count(base.data_ptr()) == times + 1


@cites("MTH005")
@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_a_merged_model_has_both_of_the_weights_that_were_tied(module: str, tmp_path: Path) -> None:
    adapted = _changed_adapter(LoraConfig(target_modules=["q_proj"], modules_to_save=[module]))
    assert [name for name, p in adapted.named_parameters() if p.requires_grad and "modules_to_save" in name]
    ids = torch.arange(8)[None]
    trained = adapted(ids).logits
    assert torch.allclose(_merged(adapted, tmp_path)(ids).logits, trained, atol=1e-5)


def test_an_adapter_on_a_tied_weight_is_merged_into_both(tmp_path: Path) -> None:
    for target in ("embed_tokens", "lm_head"):
        adapted = _changed_adapter(LoraConfig(target_modules=[target]))
        ids = torch.arange(8)[None]
        trained = adapted(ids).logits
        assert not torch.allclose(_merged(adapted, tmp_path / target)(ids).logits, trained, atol=1e-2)


def _changed_adapter(config: LoraConfig) -> Any:
    """A model with tied embeddings and an adapter that was trained."""
    torch.manual_seed(0)
    adapted = get_peft_model(llama(tie_word_embeddings=True), config).eval()
    with torch.no_grad():
        for parameter in (each for each in adapted.parameters() if each.requires_grad):
            parameter.add_(torch.randn_like(parameter) / 10)
    return adapted


def _merged(adapted: Any, folder: Path) -> Any:
    adapted.merge_and_unload().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@cites("DAT010")
def test_positions_beyond_the_position_embeddings() -> None:
    model = gpt2()
    model(torch.arange(8)[None])
    with pytest.raises(IndexError):
        model(torch.arange(9)[None])


def _mixture(**more: Any) -> Qwen3MoeForCausalLM:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, num_experts=2, num_experts_per_tok=1, **more))


@cites("QNT018")
def test_experts_are_not_quantized() -> None:
    found = replace_with_bnb_linear(_mixture(), quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    packed = {name.rpartition(".")[2] for name, module in found.named_modules() if is_quantized(module)}
    assert packed == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}, "the caller excludes the output layer"
    assert found.model.layers[0].mlp.experts.gate_up_proj.is_floating_point()


@cites("ADP009")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_lora_on_experts_has_a_rank_for_each_and_is_added_to_a_copy() -> None:
    found = get_peft_model(_mixture(), LoraConfig(r=3, target_modules="all-linear"))
    outer = found.base_model.model.model.layers[0].mlp.experts  # the wrapper of down_proj, around that of gate_up_proj
    experts, kept = outer.get_base_layer(), outer.get_param()
    assert outer.lora_A["default"].weight.shape[0] == 3 * 2
    assert outer.base_layer.lora_A["default"].weight.shape[0] == 2 * 3 * 2, "gate and up projection are one parameter"
    with outer._activate_lora(["default"]):
        assert experts.down_proj.data_ptr() != kept.data_ptr()
        assert experts.down_proj.shape == kept.shape


@cites("ADP008")
def test_gate_and_up_projection_are_targets_together() -> None:
    get_peft_model(_mixture(), LoraConfig(target_modules=["gate_proj", "up_proj"]))
    with pytest.raises(ValueError, match="without also targeting up_proj"):
        get_peft_model(_mixture(), LoraConfig(target_modules=["gate_proj"]))


@cites("ADP007")
@pytest.mark.parametrize("more", [{"lora_dropout": 0.1}, {"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_lora_on_experts_rejects_dropout_dora_and_pissa(more: dict[str, Any]) -> None:
    get_peft_model(_mixture(), LoraConfig(target_modules="all-linear"))
    with pytest.raises((ValueError, AttributeError)):
        get_peft_model(_mixture(), LoraConfig(target_modules="all-linear", **more))
    for kind, layers in registry.STACKED_EXPERTS.items():
        like = conversion._MODEL_TO_CONVERSION_PATTERN[kind]
        into = conversion._MOE_TARGET_MODULE_MAPPING[like]
        assert [into[name] for name in layers] == ["gate_up_proj", "gate_up_proj", "down_proj", "gate.weight"]
        assert conversion._MOE_FUSED_TARGETS[like] == {"gate_up_proj": list(layers[:2])}


@cites("ADP014")
def test_adapters_of_layers_that_share_weights_change_them_twice() -> None:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    layers[1].weight = layers[0].weight
    inputs = torch.ones(1, 4)
    adapted = get_peft_model(
        nn.ModuleDict({"a": layers[0], "b": layers[1]}), LoraConfig(r=2, target_modules=["a", "b"])
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(1.0)
        trained = adapted.base_model.model["a"](inputs)
        merged = adapted.merge_and_unload()["a"](inputs)
    assert (merged - trained).abs().max() > 1e-3
