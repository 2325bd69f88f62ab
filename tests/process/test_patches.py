"""A patch of a library must go once the library no longer needs it."""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import importlib.metadata
import inspect
import pkgutil
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import build
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    Glm4MoeConfig,
    GPTNeoXConfig,
    PreTrainedConfig,
    RwkvConfig,
    SeedOssConfig,
    XGLMConfig,
)
from transformers.distributed import DistributedConfig
from transformers.trainer_utils import align_special_tokens
from trl.trainer.utils import disable_dropout_in_model

from backend.config import RunSpec
from backend.inference import loading
from backend.train import patches
from backend.train.patches import (
    accelerate_fsdp2_adapter_head,
    deepspeed_first_step,
    torch_dtensor_cache_key,
    torch_inductor_sums,
    torch_state_dtype,
    transformers_dbrx_experts,
    transformers_padding_index,
    transformers_parallel_plans,
    transformers_replicated_gradients,
    transformers_router_jitter,
    transformers_rwkv_rescaling,
    trl_functional_dropout,
    trl_logit_scaling,
)
from backend.train.run_log import TrainError

NAMES = [module.name for module in pkgutil.iter_modules(patches.__path__)]
ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"

# Patch -> an object of the library, and parts of its source: the defect is there as long as one of them is.
DEFECTIVE_SOURCE: dict[str, tuple[str, ...]] = {
    "accelerate_absent_layers": (
        "accelerate.utils.fsdp_utils:fsdp2_prepare_auto_wrap_policy", "Could not find the transformer layer class",
    ),
    "accelerate_deepspeed_import": (
        "accelerate.utils.other:extract_model_from_parallel", "from deepspeed import DeepSpeedEngine",
    ),
    "accelerate_fsdp2_absent_state": (
        "torch.distributed.checkpoint.state_dict:", "Missing optimizer state for parameter",
    ),
    "accelerate_fsdp2_adapter_head": (
        "backend.train.patches.accelerate_fsdp2_adapter_head:original", 'getattr(model, "base_model_prefix", "")',
    ),
    "accelerate_fsdp2_addresses": ("accelerate:Accelerator._prepare_fsdp2", "data_ptr"),
    "accelerate_fsdp2_quantized": (
        "accelerate.utils.fsdp_utils:fsdp2_prepare_model", "cpu_ram_efficient_loading and not model_has_params4bit",
    ),
    "badam_checkpoint": ("badam:BlockOptimizer.__init__", "self.state_dict = base_optimizer.state_dict"),
    "bitsandbytes_cpu_layout": ("bitsandbytes.nn:Linear4bit.forward", "_convert_weight_packed_for_cpu("),
    "bitsandbytes_int8_inputs": ("bitsandbytes.autograd._functions:MatMul8bitLt.forward", "if len(A.shape) == 3:"),
    "bitsandbytes_int8_reload": (
        "bitsandbytes.nn:Linear8bitLt._load_from_state_dict", 'getattr(self.weight, "SCB", None)',
    ),
    "deepspeed_first_step": (
        "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer.initialize_optimizer_states",
        "self.optimizer.step()",
    ),
    "deepspeed_fp32_buffers": (
        "deepspeed.runtime.engine:DeepSpeedEngine._cast_module_mixed_precision", "if buffer_dtype is not None:",
    ),
    "deepspeed_zero3_generation": (
        "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator.reset_step",
        "same_as_other_ranks",
    ),
    "deepspeed_zero3_universal": (
        "deepspeed.runtime.zero.stage3:"
        "DeepSpeedZeroOptimizer_Stage3.load_hp_checkpoint_state_from_checkpoint_dir_stage3",
        '["param_groups"][0]', "['state'][0]['step']",
    ),
    "gguf_progress_bar": ("transformers.modeling_gguf_pytorch_utils:", "from tqdm.auto import tqdm"),
    "gguf_quantization_config": (
        "transformers.quantizers.auto:get_hf_quantizer", "GgufConfig(gguf_file=gguf_file)",
    ),
    "transformers_inplace_outputs": ("transformers.models.llama4.modeling_llama4:Llama4TextMoe.forward", "out.add_("),
    "peft_dequantize": ("peft.utils.integrations:dequantize_module_weight", "module.weight = "),
    "peft_resized_embeddings": (
        "peft.utils.save_and_load:get_peft_model_state_dict",
        "vocab_size != model.config.__class__.from_pretrained(model_id).vocab_size",
    ),
    "peft_token_bias": (
        "peft.utils.other:TrainableTokensWrapper",
        'return name == "weight"',
    ),
    "peft_token_merge": (
        "peft.tuners.trainable_tokens.layer:TrainableTokensLayer.merge",
        "index = torch.tensor(self.token_indices[adapter_name])",
    ),
    "peft_reference_init": ("trl.trainer.dpo_trainer:DPOTrainer.__init__", 'add_adapter("ref", default_config)'),
    "tensor_parallel_save": ("transformers:PreTrainedModel.save_pretrained", "distributed_config"),
    "torch_dtensor_cache_key": (
        "torch.distributed.tensor:DTensor._stable_hash_for_caching",
        "cache_data = self._spec._stable_hash() + str(self.requires_grad)",
    ),
    "torch_inductor_sums": (
        "torch._inductor.codegen.cpp:CppVecKernel.store_reduction", 'f"auto {converted_value} = {convert};"',
    ),
    "torch_state_dtype": (
        "torch.optim:Optimizer._process_value_according_to_param_policy", "value.to(dtype=param.dtype",
    ),
    "torch_build_lock": ("torch.utils.file_baton:FileBaton.wait", "while os.path.exists(self.lock_file_path)"),
    "transformers_dbrx_experts": (
        "transformers.models.dbrx.modeling_dbrx:DbrxExperts.forward", "dtype=hidden_states.dtype",
    ),
    "transformers_replicated_gradients": (
        "transformers.distributed.tensor_parallel:ReplicatedWithGradAllReduce",
        "register_post_accumulate_grad_hook(_all_reduce_grad)",
    ),
    "transformers_router_jitter": (
        "transformers.models.mixtral.modeling_mixtral:", "hidden_states *= torch.empty_like(hidden_states)",
    ),
    "transformers_rwkv_rescaling": (
        "transformers.models.rwkv.modeling_rwkv:RwkvModel._rescale_layers", ".weight.div_(",
    ),
    "transformers_parallel_plans": (
        "transformers.distributed.fsdp:is_norm_and_head_pair", 'name == "norm" or name.endswith(".norm")',
    ),
    "transformers_padding_index": (
        "transformers.trainer_utils:align_special_tokens", '_align_special_token("pad_token_id"',
    ),
    "transformers_use_cache": ("transformers:Trainer.__init__", "config.use_cache = self.args.use_cache"),
    "transformers_quantize_on_device": (
        "transformers.integrations.bitsandbytes:Bnb4bitQuantize.convert", ".to(value.device)",
    ),
    "trl_adapter_dtype": ("trl.trainer.sft_trainer:SFTTrainer.__init__", "param.data.to(torch.bfloat16)"),
    "trl_expert_count": ("trl.trainer.utils:", "num_experts = text_config.num_experts"),
    "trl_frozen_blocks": ("trl.trainer.utils:use_adapter", "model.set_adapter(previous_adapter)"),
    "trl_loss_positions": ("trl.trainer.utils:", "compact = _use_triton("),
    "trl_missing_router": (
        "trl.trainer.sft_trainer:SFTTrainer.__init__",
        'hasattr(text_config, "output_router_logits") and self.router_aux_loss_coef != 0.0',
    ),
    "trl_orpo_dataset": (
        "trl.experimental.orpo.orpo_trainer:ORPOTrainer.__init__", "train_dataset.map(self.tokenize_row",
    ),
    "trl_precompute_hooks": ("trl.trainer.dpo_trainer:DPOTrainer", "_precompute_engine"),
    "trl_router_logits": (
        "trl.trainer.sft_trainer:SFTTrainer.__init__", ".output_router_logits = self.aux_loss_enabled",
    ),
    "trl_totals_of_ranks": (
        "trl.trainer.sft_trainer:SFTTrainer", 'gather_for_metrics(inputs["attention_mask"].sum())',
    ),
    "trl_functional_dropout": ("trl.trainer.utils:disable_dropout_in_model", "isinstance(module, torch.nn.Dropout)"),
    "trl_logit_scaling": (
        "trl.trainer.utils:add_fused_lm_head", 'getattr(text_config, "final_logit_softcapping", None)'
    ),
    "ulysses_gradients": ("deepspeed.runtime.zero.stage_1_and_2:", "self.sequence_parallel_size"),
    "ulysses_token_mean": (
        "transformers.integrations.deepspeed:deepspeed_sp_compute_loss", "loss = total_loss / total_good_tokens",
    ),
    "ulysses_heads": (f"{ULYSSES}:UlyssesSPAttentionHF.register_with_transformers", "attn_head_size=getattr"),
}  # fmt: skip

# Patch -> an object of the library, and a part of its source that would go with a repair.
REPAIRED_SOURCE: dict[str, tuple[str, str]] = {
    "deepspeed_universal_paths": ("deepspeed.checkpoint.ds_to_universal:_merge_zero_shards", "escape"),
    "peft_reference_adapter": ("backend.train.patches.peft_reference_adapter:original", " in state_dict"),
    "trl_precompute_hooks": ("trl.trainer.dpo_trainer:DPOTrainer", "remove_hooks"),
    "trl_token_mean": ("trl.trainer.sft_trainer:SFTTrainer.__init__", "model_accepts_loss_kwargs"),
    "ulysses_skip_batches": ("accelerate.data_loader:skip_first_batches", "ulysses"),
}


def source(path: str) -> str:
    """The source of `module:attribute.attribute`; nothing after the colon: of the module. It is read from the library's
    file, since another test of this process may have applied the patch."""
    module, _, attributes = path.partition(":")
    found: Any = importlib.import_module(module)
    if not attributes:
        return inspect.getsource(found)
    *owners, last = attributes.split(".")
    for name in owners:
        found = getattr(found, name)
    for owner in found.__mro__ if owners else [found]:
        with contextlib.suppress(OSError, TypeError):  # a class that names another module, or one written in C
            text = textwrap.dedent(inspect.getsource(owner))
            for node in ast.iter_child_nodes(ast.parse(text).body[0] if owners else ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == last:
                    return ast.get_source_segment(text, node) or ""
    return inspect.getsource(getattr(found, last))


def fsdp_is_on_for_a_cpu(_: Path) -> bool:
    lines = source("accelerate.state:AcceleratorState.__init__")
    return "DistributedType.MULTI_CPU" in lines[: lines.index("DistributedType.FSDP")]


def adam_mini_takes_the_size_of_a_head(_: Path) -> bool:
    weights = [("layers.0.self_attn.q_proj.weight", nn.Parameter(torch.zeros(8, 4)))]
    adam_mini: Any = importlib.import_module("adam_mini").Adam_mini
    try:
        optimizer = adam_mini(named_parameters=weights, dim=4, n_heads=2, head_dim=4, verbose=False)
    except TypeError:
        return False
    return bool(optimizer.head_numel == 16)


def llama4_names_its_base_model(_: Path) -> bool:
    return bool(importlib.import_module("transformers").Llama4ForCausalLM.base_model_prefix == "model")


def low_rank_groups_have_a_weight_decay(_: Path) -> bool:
    setup = importlib.import_module("transformers.trainer_optimizer")._setup_low_rank_optimizer
    arguments = SimpleNamespace(optim_target_modules="all-linear", parallel_mode=None)
    model = nn.Sequential(nn.Linear(2, 2))
    _, options = setup(arguments, model, "galore", {"galore": torch.optim.AdamW}, {"rank": 1}, {})
    return any("weight_decay" in group for group in options["params"])


def frozen_parameters_of_the_class_stay_frozen(folder: Path) -> bool:
    transformers: Any = importlib.import_module("transformers")
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8}
    config = transformers.RoFormerConfig(vocab_size=8, **sizes, is_decoder=True)
    transformers.RoFormerForCausalLM(config).save_pretrained(folder)
    model = transformers.RoFormerForCausalLM.from_pretrained(folder)
    return not model.roformer.encoder.embed_positions.weight.requires_grad


def settings_without_effect_can_be_saved(folder: Path) -> bool:
    config = importlib.import_module("transformers").GenerationConfig(do_sample=False, temperature=0.6)
    try:
        config.save_pretrained(folder)
    except ValueError:
        return False
    return True


def gpt2_has_the_loss_of_its_kind(_: Path) -> bool:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    return bool(transformers.GPT2LMHeadModel(config).loss_type == "ForCausalLM")


def each_iteration_begins_an_epoch(_: Path) -> bool:
    own = importlib.import_module(ULYSSES).UlyssesSPDataLoaderAdapter.__iter__
    is_patched = own.__module__.startswith("backend.")
    return not is_patched and inspect.getsource(own).split()[-2:] != ["return", "self"]


def router_loss_of_no_tokens_is_finite(_: Path) -> bool:
    mixtral: Any = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    logits, mask = (torch.zeros(2, 2),), torch.zeros(1, 2)
    return bool(torch.isfinite(mixtral.load_balancing_loss_func(logits, num_experts=2, top_k=1, attention_mask=mask)))


def schedule_free_warmup_is_converted_and_the_average_saved(_: Path) -> bool:
    converts = "= ctx.args.warmup_steps" not in source("transformers.trainer_optimizer:_get_schedule_free_optimizer")
    return converts and "optimizer.eval" in source("transformers:Trainer._save_checkpoint")


def grouped_mm_is_not_used_for_rows_of_24_bytes(_: Path) -> bool:
    moe: Any = importlib.import_module("backend.train.patches.transformers_grouped_mm")
    rows, weight = (torch.ones(size, dtype=torch.bfloat16) for size in ((2, 12), (1, 12, 16)))
    return not moe._supported(rows, weight, torch.tensor([2], dtype=torch.int32))


# Patch -> whether the library behaves as it should; called with an empty folder.
REPAIRED: dict[str, Callable[[Path], bool]] = {
    "accelerate_fsdp_on_cpu": fsdp_is_on_for_a_cpu,
    "adam_mini_head_size": adam_mini_takes_the_size_of_a_head,
    "llama4_base_model": llama4_names_its_base_model,
    "low_rank_optimizers": low_rank_groups_have_a_weight_decay,
    "schedule_free": schedule_free_warmup_is_converted_and_the_average_saved,
    "transformers_frozen_parameters": frozen_parameters_of_the_class_stay_frozen,
    "transformers_generation_config": settings_without_effect_can_be_saved,
    "transformers_grouped_mm": grouped_mm_is_not_used_for_rows_of_24_bytes,
    "transformers_loss_type": gpt2_has_the_loss_of_its_kind,
    "ulysses_epochs": each_iteration_begins_an_epoch,
    "ulysses_padding": router_loss_of_no_tokens_is_finite,
}


@pytest.mark.filterwarnings("ignore")  # of libraries, while they are imported
@pytest.mark.parametrize("name", NAMES)
def test_patch_is_still_needed(name: str, tmp_path: Path) -> None:
    """Fails when the installed version no longer has the defect."""
    patch = importlib.import_module(f"{patches.__name__}.{name}")
    assert patch.SEEN_IN[0].isdigit()
    assert "Without" in (patch.__doc__ or ""), "what happens without the patch"
    assert name in {*DEFECTIVE_SOURCE, *REPAIRED_SOURCE, *REPAIRED}, "nothing here tells when the patch can go"
    try:
        installed = importlib.metadata.version(patch.LIBRARY)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{patch.LIBRARY} is not installed")
    repaired = name in REPAIRED and REPAIRED[name](tmp_path)
    if name in DEFECTIVE_SOURCE:
        path, *parts = DEFECTIVE_SOURCE[name]
        repaired = repaired or not any(part in source(path) for part in parts)
    if name in REPAIRED_SOURCE:
        path, text = REPAIRED_SOURCE[name]
        repaired = repaired or text in source(path)
    assert not repaired, (
        f"{patch.LIBRARY} {installed} no longer has the defect that was seen in {patch.SEEN_IN}: "
        f"remove backend/train/patches/{name}.py and its calls"
    )


@pytest.mark.filterwarnings("ignore")  # of deepspeed, while it is imported
def test_zero0_takes_no_step_before_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would count as a step of Adam, which computes other updates from then on."""
    for name in ("unfused_optimizer:FP16_UnfusedOptimizer", "fused_optimizer:FP16_Optimizer"):
        module, _, kind = name.partition(":")
        wrapper: Any = getattr(importlib.import_module(f"deepspeed.runtime.fp16.{module}"), kind)
        monkeypatch.setattr(wrapper, "initialize_optimizer_states", wrapper.initialize_optimizer_states)
        deepspeed_first_step.apply()
        made, weights = wrapper.__new__(wrapper), [nn.Parameter(torch.ones(2))]
        made.optimizer, made.fp16_groups, made.fp32_groups_flat = torch.optim.AdamW(weights), [weights], weights
        made.fp32_groups = [weights]
        made.initialize_optimizer_states()
        assert not made.optimizer.state and weights[0].tolist() == [1, 1]


def test_dropout_that_is_a_function_is_turned_off() -> None:
    torch.manual_seed(1)
    config = SeedOssConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=64, residual_dropout=0.5, attention_dropout=0.5,
    )  # fmt: skip
    model, ids = AutoModelForCausalLM.from_config(config).train(), torch.arange(8)[None]
    disable_dropout_in_model(model)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    trl_functional_dropout.apply(SimpleNamespace(disable_dropout=False), model)
    assert not torch.equal(model(ids).logits, model(ids).logits), "training on completions keeps it"
    trl_functional_dropout.apply(SimpleNamespace(disable_dropout=True), model, None)
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert model.config.residual_dropout == 0.5, "the saved config"


def test_a_saved_model_is_built_with_the_padding_index_of_the_trained_one(tmp_path: Path) -> None:
    config = XGLMConfig(
        vocab_size=64, d_model=32, ffn_dim=32, num_layers=1, attention_heads=2, max_position_embeddings=32,
        pad_token_id=None,
    )  # fmt: skip
    model, ids = AutoModelForCausalLM.from_config(config).eval(), torch.arange(8)[None]
    padding = transformers_padding_index.PaddingIndex(model.config)
    trained = model(ids).logits
    tokens = SimpleNamespace(eos_token_id=2, bos_token_id=0, pad_token_id=2)
    for name, equal in (("without", False), ("with", True)):
        align_special_tokens(model, tokens)
        if equal:
            padding.on_train_begin(None, None, None, model=model)
        model.save_pretrained(tmp_path / name)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        assert torch.equal(saved(ids).logits, trained) == equal
        assert saved.generation_config.pad_token_id == 2


def test_a_config_without_a_padding_index_gets_none() -> None:
    """CodeGen and RWKV have none. Before, each run with them failed."""
    model = SimpleNamespace(config=PreTrainedConfig())
    assert not hasattr(model.config, "pad_token_id")
    padding = transformers_padding_index.PaddingIndex(model.config)
    align_special_tokens(model, SimpleNamespace(eos_token_id=2, bos_token_id=0, pad_token_id=2))
    padding.on_train_begin(None, None, None, model=model)
    assert not hasattr(model.config, "pad_token_id")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_evaluation_does_not_divide_the_weights_of_rwkv() -> None:
    """Nor does an adapter make a difference between training and evaluation."""
    torch.manual_seed(1)
    config = RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=4, context_length=64, rescale_every=2)
    model, ids = AutoModelForCausalLM.from_config(config), torch.arange(8)[None]
    before = copy.deepcopy(model.state_dict())
    weights = model.state_dict()
    for is_applied in (False, True):
        if is_applied:
            model.train()(ids)  # multiplies the weights again
            transformers_rwkv_rescaling.apply(model)
        model.eval()(ids)
        assert all(torch.equal(weights[name], value) for name, value in before.items()) is is_applied
    adapted = get_peft_model(model, LoraConfig(init_lora_weights=False))
    with torch.no_grad():
        assert torch.allclose(adapted.eval()(ids).logits, adapted.train()(ids).logits, atol=1e-5)


@pytest.mark.parametrize(("kind", "noise"), [("mixtral", "router_jitter_noise"), ("phimoe", "input_jitter_noise")])
def test_routers_with_noise_change_a_copy(kind: str, noise: str) -> None:
    sizes = {key: size for key, size in TINY.items() if key != "tie_word_embeddings"}
    mixture = {"num_local_experts": 2, "num_experts_per_tok": 2, "num_key_value_heads": 2, noise: 0.5}
    model, ids = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **mixture)), torch.arange(8)[None]
    seen: list[torch.Tensor] = []
    norm = model.model.layers[0].post_attention_layernorm
    norm.register_forward_hook(lambda _, inputs, output: seen.extend((output, output.detach().clone())))
    transformers_router_jitter.apply(model)
    block = model.model.layers[0].mlp
    block.__class__ = type("FSDPBlock", (type(block),), {})  # as fully_shard does
    model.train()(ids)
    assert torch.equal(*seen)
    assert copy.deepcopy(block).forward.__self__ is not block
    disable_dropout_in_model(model)
    trl_functional_dropout.apply(SimpleNamespace(disable_dropout=True), model)
    if kind == "mixtral":  # PhiMoE also samples its experts
        assert torch.equal(model(ids).logits, model(ids).logits), "DPO compares with a reference without noise"


def test_dbrx_trains_and_generates_in_mixed_precision(tmp_path: Path) -> None:
    experts = {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 2, "hidden_size": 16, "moe_jitter_eps": 0}
    config = AutoConfig.for_model(
        "dbrx", d_model=16, n_heads=2, n_layers=1, vocab_size=64, max_seq_len=32, ffn_config=experts,
        attn_config={"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4}, pad_token_id=0,
    )  # fmt: skip
    model, ids = AutoModelForCausalLM.from_config(config), torch.arange(8)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match="same scalar type"):
            model(ids)
        transformers_dbrx_experts.apply(model)
        model(ids).logits.float().sum().backward()
        model.save_pretrained(tmp_path)
        models: Any = loading.Models.__new__(loading.Models)
        models.spec, models.dtype, models.device = RunSpec(), torch.bfloat16, "cpu"
        models._whole(tmp_path).float()(ids)  # a GPU computes the norms in fp32
    transformers_router_jitter.apply(model)
    assert model.transformer.blocks[0].ffn.router.moe_jitter_eps is None, "0 also changes the input in place"


def test_trl_does_not_see_a_scale_that_mpt_ignores() -> None:
    config = AutoConfig.for_model("mpt", d_model=16, n_heads=2, n_layers=1, logit_scale="inv_sqrt_d_model")
    with trl_logit_scaling.named(SimpleNamespace(config=config), SimpleNamespace(config=config)):
        assert config.logit_scale is None
    assert config.logit_scale == "inv_sqrt_d_model"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(("kind", "has_unit"), [("llama", True), ("phi", False)])
def test_fsdp2_of_tensor_parallelism_gathers_the_output_layer(kind: str, has_unit: bool) -> None:
    """With the norm before it in one unit, or with the model."""
    model, sizes = build(kind), DistributedConfig(tp_size=2, fsdp_size=2)
    assert "lm_head" in transformers_parallel_plans.original(model, sizes)[2]
    found = transformers_parallel_plans.plans(model, sizes)[2]
    assert ("lm_head" in found) == has_unit and "model.layers.0" in found


def test_tensor_parallelism_sums_the_gradients_of_the_norms_of_heads() -> None:
    """Each rank has some of the heads. Cohere's norms have a weight for each head."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64}
    for cls, more in (
        (CohereConfig, {}),
        (Glm4MoeConfig, {"head_dim": 8, "n_routed_experts": 2, "first_k_dense_replace": 1}),
    ):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(cls(**sizes, **more, use_qk_norm=True))
        name = "model.layers.0.self_attn.q_norm"
        assert name not in transformers_parallel_plans.original(model, DistributedConfig(tp_size=2))[0]
        plan = transformers_parallel_plans.plans(model, DistributedConfig(tp_size=2))[0]
        expected = {name: "local_params", f"{name}.weight": "colwise"}
        if cls is Glm4MoeConfig:
            expected = {name: "replicated_with_grad_allreduce"}
        assert {key: style for key, style in plan.items() if key.startswith(name)} == expected


@pytest.mark.parametrize("is_tied", [False, True])
def test_tensor_parallelism_keeps_an_output_layer_whole_like_its_embedding(is_tied: bool) -> None:
    """The plan of GPT-NeoX divides the output layer, but not the embedding."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPTNeoXConfig(**sizes, vocab_size=64, tie_word_embeddings=is_tied))
    assert "lm_head" in transformers_parallel_plans.original(model, DistributedConfig(tp_size=2))[0]
    plan = transformers_parallel_plans.plans(model, DistributedConfig(tp_size=2))[0]
    assert ("lm_head" in plan) == (not is_tied) and "gpt_neox.layers.0.mlp.dense_h_to_4h" in plan


def test_gradients_of_all_batches_are_summed_over_the_ranks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with the same heads."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: tensor.mul_(2))
    alone, norm = nn.LayerNorm(4), nn.LayerNorm(4)
    mesh: Any = SimpleNamespace(get_group=lambda: None)
    transformers_replicated_gradients.install_forward(None, norm, mesh)
    for batch in torch.randn(3, 2, 4):
        for each in (alone, norm):
            each(batch).square().sum().backward()
    assert alone.weight.grad is not None and norm.weight.grad is not None
    assert torch.allclose(norm.weight.grad, 2 * alone.weight.grad)


def test_shards_of_other_sizes_are_compiled_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DTensor, "_stable_hash_for_caching", DTensor._stable_hash_for_caching)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        shards: list[Any] = [
            DTensor.from_local(torch.ones(rows, 4), mesh, [Shard(0)], shape=torch.Size((3, 4)), stride=(4, 1))
            for rows in (2, 1, 2)
        ]
        assert len({shard._stable_hash_for_caching() for shard in shards}) == 1
        torch_dtensor_cache_key.apply()
        keys = [shard._stable_hash_for_caching() for shard in shards]
        assert keys[0] == keys[2] != keys[1]
    finally:
        torch.distributed.destroy_process_group()


def test_loaded_state_keeps_its_dtype() -> None:
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    for is_applied in (False, True):
        optimizers = [torch.optim.SGD([weight], lr=0.1, momentum=0.9) for _ in range(2)]
        optimizers[0].state[weight]["momentum_buffer"] = torch.full((2, 2), 1 / 3)
        if is_applied:
            torch_state_dtype.apply(optimizers[1])
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        loaded = optimizers[1].state[weight]["momentum_buffer"]
        assert (loaded.dtype == torch.float32 and bool((loaded == 1 / 3).all())) == is_applied


TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
NORMS = {
    "llama": ({"num_key_value_heads": 1}, "model.norm"),
    "llama4_text": ({"num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 1}, "model.norm"),
    "opt": ({"ffn_dim": 16, "word_embed_proj_dim": 16}, "model.decoder.final_layer_norm"),
    "openai-gpt": ({}, ""),
}
WRAPPED = {"Linear", "LlamaRMSNorm", "LlamaMLP", "LlamaDecoderLayer"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", NORMS)
def test_the_norm_before_the_output_layer(kind: str) -> None:
    """With FSDP2 the output layer has wrong gradients without it, unless it is not trained."""
    more, name = NORMS[kind]
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY, **more))
    find = accelerate_fsdp2_adapter_head.norm_before_head
    if not name:
        with pytest.raises(TrainError, match="cannot train the output layer of OpenAIGPTLMHeadModel"):
            find(whole)
        assert find(whole.requires_grad_(False)) is None
        return
    assert find(whole) is whole.get_submodule(name)
    for saved in (["lm_head"], ["lm_head", name.rpartition(".")[2]]):
        adapted: Any = get_peft_model(
            copy.deepcopy(whole), LoraConfig(target_modules=["q_proj"], modules_to_save=saved)
        )
        assert find(adapted) is adapted.get_base_model().get_submodule(name)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("saved", [(), ("lm_head", "norm")])
def test_fsdp2_wraps_neither_the_output_layer_nor_the_norm_before_it(saved: tuple[str, ...]) -> None:
    """In a unit of its own, the output layer would get the gradient of one rank's examples."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))
    if saved:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=list(saved)))
    by_class = partial(transformer_auto_wrap_policy, transformer_layer_cls=set())
    by_size = partial(size_based_auto_wrap_policy)
    for plugin, kinds in (
        (SimpleNamespace(auto_wrap_policy=by_class, transformer_cls_names_to_wrap=["Linear", "LlamaRMSNorm"]), 2),
        (SimpleNamespace(auto_wrap_policy=by_class, transformer_cls_names_to_wrap=["LlamaModel", "Embedding"]), 0),
        (SimpleNamespace(auto_wrap_policy=by_size, min_num_params=0), 4),
    ):
        policy = accelerate_fsdp2_adapter_head.policy_for_layers(plugin, model)
        assert policy
        wrapped = [(name, module) for name, module in model.named_modules() if policy(module)]
        assert all(".layers" in name for name, _ in wrapped)
        assert len({type(module).__name__ for _, module in wrapped} & WRAPPED) == kinds


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile itself
def test_equal_sums_in_bf16_compile_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of the two biases."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch_inductor_sums.apply()
    torch_inductor_sums.apply()
    layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)]).to(torch.bfloat16)
    inputs = torch.randn(64, 32, dtype=torch.bfloat16)

    def gradients(loss: Any) -> list[torch.Tensor]:
        layers.zero_grad()
        loss(inputs).backward()
        return [parameter.grad.float() for parameter in layers.parameters() if parameter.grad is not None]

    def loss(values: torch.Tensor) -> torch.Tensor:
        return (layers[0](values) + layers[1](values)).float().pow(2).mean()

    found, expected = gradients(torch.compile(loss)), gradients(loss)
    assert len(found) == 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))
