"""Rules about quantized base models: quantized by bitsandbytes while loading, or published in a quantized format."""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.memory import quantized
from backend.memory.context import DTYPE_BYTES
from backend.modelspec import ModuleSpec, names_of
from backend.rules.base import Case, Example, Fix, Violation, advice, error, names, warning
from backend.rules.common_fixes import DDP, ZERO2
from backend.rules.examples import DEMO, H100, INSTALLED, LAPTOP, LOCAL_MODEL, MOE, SMOL, T4, TWO_H100
from backend.rules.requirements import (
    missing_package,
    prequantized,
    quantization,
    unsupported_capability,
    unsupported_device,
    without,
)

UNQUANTIZED = Fix(
    "Set quantization to none",
    {"method.quantization": "none"},
    safe=False,
    cost="two to four times the weight memory",
)
NF4 = Fix("Use 4-bit NF4", {"method.quantization": "nf4"}, safe=False, cost="coarser than 8-bit")
DEFAULT_INIT = Fix(
    "Use the default initialization", {"lora.init": "default"}, safe=False, cost="may converge more slowly"
)
NO_DORA = Fix("Turn off DoRA", {"lora.use_dora": False}, safe=False, cost="plain LoRA")
NF4_SPEC, INT8_SPEC = {"method.quantization": "nf4"}, {"method.quantization": "int8"}
FULL_SPEC = {"method.kind": "full", "train.learning_rate": 1e-5}
GPTQ_H100 = replace(H100, versions={**INSTALLED, "gptqmodel": "5.6.0", "optimum": "2.0.0"})
HQQ_H100 = replace(H100, versions={**INSTALLED, "hqq": "0.2.8"})
BNB_MODEL, GPTQ_MODEL, AWQ_MODEL, HQQ_MODEL, FP8_MODEL = (
    replace(DEMO, quant_method=name) for name in ("bitsandbytes", "gptq", "awq", "hqq", "fp8")
)


def _quantization(case: Case) -> registry.Quantization:
    """The quantization that is applied while loading; it has an effect for LoRA only."""
    kind = case.spec.method.quantization if case.spec.method.kind == "lora" else "none"
    return registry.QUANTIZATIONS[kind]


def _trainable_format(case: Case) -> registry.PrequantizedFormat | None:
    """The format of a model that was published quantized and stays quantized in training."""
    row = registry.PREQUANTIZED.get(case.facts.quant_method)
    return row if row and row.is_trainable else None


def quantized_base(case: Case) -> str:
    """'The base model is quantized: ...', or '' if it is not."""
    row, published = _quantization(case), _trainable_format(case)
    if row.bits:
        return f"The base model is quantized while loading (method.quantization is {row.label})"
    return f"The model was published with {published.label} weights" if published else ""


@error(
    "QNT002",
    fields=("lora.init", "method.quantization"),
    title="This LoRA initialization needs an unquantized base model",
    source="peft 0.21 lora/layer.py: pissa_init raises TypeError; orthogonal_init creates a trained parameter of the "
    "base weight's dtype; olora_init quantizes the base weight again, which on a small model changed the logits as "
    "much as the quantization itself (nf4, fp4, int8)",
    fixes=(DEFAULT_INIT, UNQUANTIZED),
    fails_on=Example({**NF4_SPEC, "lora.init": "pissa"}),
    passes_on=Example({**NF4_SPEC, "lora.init": "gaussian"}),
    proof="launch",
)
def lora_init_on_quantized_base(case: Case) -> str | None:
    """PiSSA and OLoRA compute the adapter from the base weights and subtract it from them. PEFT refuses PiSSA for
    quantized weights. With OLoRA it quantizes the remainder again, which changes the model before training begins.
    Orthogonal initialization gives the adapter the dtype of the base weights, which must be a floating-point one."""
    if case.spec.method.kind != "lora" or case.spec.lora.init in ("default", "gaussian") or not quantized_base(case):
        return None
    label = registry.LORA_INITS[case.spec.lora.init].label
    return f"{quantized_base(case)}, and lora.init is {label}, which needs floating-point weights."


@error(
    "QNT003",
    fields=("method.quantization", "parallel.strategy"),
    title="8-bit weights cannot be sharded",
    source="bitsandbytes 0.50 nn/modules.py, Linear8bitLt: under FSDP2 the layer no longer finds its scales "
    "(weight.CB); under ZeRO-3 it keeps its whole weight next to its shard",
    fixes=(DDP, NF4),
    fails_on=Example({**INT8_SPEC, "parallel.strategy": "fsdp2"}, TWO_H100),
    passes_on=Example({**NF4_SPEC, "parallel.strategy": "fsdp2"}, TWO_H100),
    proof="launch",
)
def int8_base_sharded(case: Case) -> str | None:
    """bitsandbytes keeps the scales of 8-bit weights as attributes of the weight tensor, and sharding replaces that
    tensor. 4-bit weights can be sharded: Footplate stores them in the compute dtype (bnb_4bit_quant_storage), and each
    layer keeps their scales."""
    if not case.strategy.shards_weights or _quantization(case).bits != 8:
        return None
    return f"{case.strategy.label} shards the base weights, and method.quantization is {_quantization(case).label}."


@error(
    "QNT005",
    fields=("save.merge_adapter", "method.quantization"),
    title="An adapter cannot be merged into a quantized base model",
    source="peft 0.21 lora/bnb.py: merging quantizes the sum again, and rounding undoes a part of the training",
    fixes=(
        Fix("Save only the adapter", {"save.merge_adapter": False}, cost="run footplate merge after training"),
        UNQUANTIZED,
    ),
    fails_on=Example({**NF4_SPEC, "save.final_model": True, "save.merge_adapter": True}),
    passes_on=Example(NF4_SPEC),
)
def merge_into_quantized_base(case: Case) -> str | None:
    """Merging would quantize the sum of base weights and adapter again, and rounding would undo a part of the training.
    After the run, `footplate merge` or *Merge into base model* on the run's page merges the adapter into the
    dequantized weights, which it was trained on."""
    save = case.spec.save
    if not (save.merge_adapter and save.final_model) or case.spec.method.kind != "lora" or not quantized_base(case):
        return None
    return f"{quantized_base(case)}, and save.merge_adapter is on."


@error(
    "QNT006",
    fields=("lora.modules_to_save", "method.quantization"),
    title="modules_to_save contains quantized layers",
    source="transformers 5.23 trainer_utils.py: quantized weights take no gradient steps",
    fixes=(UNQUANTIZED,),
    fails_on=Example({**NF4_SPEC, "lora.modules_to_save": ("up_proj",)}),
    passes_on=Example({**NF4_SPEC, "lora.modules_to_save": ("norm",)}),
    proof="launch",
)
def modules_to_save_quantized(case: Case) -> Violation | None:
    """Modules in modules_to_save are trained as full copies, and quantized weights cannot take gradient steps. Norms,
    embeddings and the output layer are not quantized and can be listed."""
    listed = case.spec.lora.modules_to_save
    if not listed or not quantized_base(case) or not case.shape or case.spec.method.kind != "lora":
        return None
    layers = quantized.quantized_modules(case.spec, case.shape, listed)
    quantized_names = {name for leaf in layers for name in names_of(leaf.path)}
    wrong = [name for name in listed if name in quantized_names]
    if not wrong:
        return None
    kept = {"lora.modules_to_save": tuple(name for name in listed if name not in wrong)}
    message = f"{quantized_base(case)}, and lora.modules_to_save lists {names(wrong)}, which would be quantized."
    fix = Fix(f"Remove {names(wrong)} from modules_to_save", kept, safe=False, cost="trained through adapters only")
    return Violation(message, (fix,))


@error(
    "QNT009",
    fields=("method.kind", "model.path", "model.hub_id"),
    title="A model with quantized weights can only be trained with adapters",
    source="transformers 5.23 trainer_utils.py: validate_quantization_for_training",
    fixes=(Fix("Use LoRA", {"method.kind": "lora"}, safe=False),),
    fails_on=Example({**LOCAL_MODEL, **FULL_SPEC}, GPTQ_H100, GPTQ_MODEL),
    passes_on=Example(LOCAL_MODEL, GPTQ_H100, GPTQ_MODEL),
)
def full_training_of_prequantized_model(case: Case) -> str | None:
    """A gradient step is far smaller than the distance between two values of a quantized weight, so transformers
    refuses to train such weights without adapters."""
    row = _trainable_format(case)
    if row is None or case.spec.method.kind == "lora":
        return None
    method = registry.METHODS[case.spec.method.kind].label
    return f"The model's weights are quantized with {row.label}, and the training method is {method}."


@error(
    "QNT010",
    fields=("model.path", "model.hub_id"),
    title="This quantization format cannot be trained",
    source="transformers 5.23 quantizers: is_trainable; it can also be true for AQLM, BitNet, EETQ, FP-Quant, "
    "FourOverSix, MXFP8, Quanto, SINQ and torchao, whose training Footplate has not verified",
    manual_fix="Use the unquantized version of the model; method.quantization can quantize it while loading.",
    fails_on=Example(LOCAL_MODEL, facts=replace(DEMO, quant_method="quark")),
    passes_on=Example(LOCAL_MODEL, GPTQ_H100, GPTQ_MODEL),
)
def untrainable_quantization_format(case: Case) -> str | None:
    """Many quantization formats have kernels for inference only, without a backward pass. Footplate accepts the formats
    that it has verified."""
    kind = case.facts.quant_method
    if not kind or kind in registry.PREQUANTIZED:
        return None
    supported = names([row.label for row in registry.PREQUANTIZED.values()])
    return f"The model's quantization_config has quant_method {kind}; supported formats are {supported}."


@error(
    "QNT012",
    fields=("method.quantization", "model.path", "model.hub_id"),
    title="The model is already quantized",
    source="transformers 5.23 quantizers/auto.py: two different configurations are refused",
    fails_on=Example({**LOCAL_MODEL, **NF4_SPEC}, GPTQ_H100, GPTQ_MODEL),
    passes_on=Example(LOCAL_MODEL, GPTQ_H100, GPTQ_MODEL),
)
def quantized_twice(case: Case) -> Violation | None:
    """Weights are quantized once: by whoever published the model, or by bitsandbytes while loading. transformers
    refuses a second, different quantization config."""
    kind, row = case.facts.quant_method, _quantization(case)
    if not kind or not row.bits:
        return None
    published, cost = prequantized(case), "the model keeps its own quantization"
    if published and published.dequantized_on_load:
        cost = f"the model is converted to {case.run.compute_dtype} while loading"
    message = f"The model's config.json has quant_method {kind}, and method.quantization is {row.label}."
    return Violation(message, (replace(UNQUANTIZED, cost=cost),))


@advice(
    "QNT014",
    fields=("model.path", "model.hub_id"),
    title="The quantized weights are dequantized while loading",
    source="transformers 5.23 quantizer_mxfp4.py, quantizer_finegrained_fp8.py, quantizer_compressed_tensors.py: "
    "dequantize=True",
    manual_fix="To train on quantized weights, use an unquantized model and set method.quantization.",
    fails_on=Example(LOCAL_MODEL, facts=FP8_MODEL),
    passes_on=Example(LOCAL_MODEL),
)
def dequantized_on_load(case: Case) -> str | None:
    """Footplate does not train on quantized weights of these formats: MXFP4 has no backward pass in transformers, and
    FP8 and compressed-tensors have one with some kernels only. Converted to the compute dtype, the weights take as much
    memory as those of an unquantized model, and every training method works."""
    row = registry.PREQUANTIZED.get(case.facts.quant_method)
    if row is None or not row.dequantized_on_load:
        return None
    return f"The model is stored in {row.label} and will be converted to {case.run.compute_dtype} while loading."


@error(
    "QNT015",
    fields=("parallel.strategy", "model.path", "model.hub_id"),
    title="The weights of a prequantized model cannot be sharded",
    source="accelerate 1.15 utils/fsdp_utils.py leaves integer weights out of FSDP2; torch 2.13 FSDP1 cannot flatten "
    "them; deepspeed 0.19 runtime/zero/partition_parameters.py partitions no buffers, which hold GPTQ and AWQ weights",
    fixes=(ZERO2, DDP),
    manual_fix="Alternatively, use the unquantized model with method.quantization nf4, which can be sharded.",
    fails_on=Example({**LOCAL_MODEL, "parallel.strategy": "fsdp2"}, TWO_H100, BNB_MODEL),
    passes_on=Example({**LOCAL_MODEL, "parallel.strategy": "zero2"}, TWO_H100, BNB_MODEL),
)
def prequantized_model_sharded(case: Case) -> str | None:
    """Published quantized weights are integer tensors, which FSDP and ZeRO-3 do not shard: every device keeps a full
    copy of them. FSDP1 raises an error for those that are parameters (bitsandbytes and HQQ)."""
    row = _trainable_format(case)
    if row is None or not case.strategy.shards_weights or case.strategy.engine == "tensor":
        return None
    return f"{case.strategy.label} shards weights, and this model's weights are integers in {row.label} format."


@error(
    "QNT016",
    fields=("lora.use_dora", "model.path", "model.hub_id"),
    title="GPTQ and AWQ models do not support DoRA",
    source="peft 0.21 tuners/lora/gptq.py GPTQLoraLinear, tuners/lora/awq.py AwqLoraLinear: does not support DoRA yet",
    fixes=(NO_DORA,),
    manual_fix="Alternatively, use the unquantized model with method.quantization nf4, which supports DoRA.",
    fails_on=Example({**LOCAL_MODEL, "lora.use_dora": True}, GPTQ_H100, GPTQ_MODEL),
    passes_on=Example({**LOCAL_MODEL, "lora.use_dora": True}, HQQ_H100, HQQ_MODEL),
)
def dora_on_gptq_or_awq(case: Case) -> str | None:
    """DoRA computes the norm of each output row of the base weight, and peft cannot dequantize GPTQ and AWQ weights for
    that."""
    wanted = case.spec.method.kind == "lora" and case.spec.lora.use_dora
    if not wanted or case.facts.quant_method not in ("gptq", "awq"):
        return None
    label = registry.PREQUANTIZED[case.facts.quant_method].label
    return f"lora.use_dora is on, and the model's weights are quantized with {label}."


@advice(
    "QNT017",
    fields=("precision.compute", "model.path", "model.hub_id"),
    title="AWQ models are loaded in fp16 instead of bf16",
    source="transformers 5.23 quantizers/quantizer_awq.py update_dtype: bfloat16 is cast to float16 on cuda and xpu",
    fixes=(Fix("Use fp16", {"precision.compute": "fp16"}, safe=False, cost="narrow value range, needs loss scaling"),),
    fails_on=Example({**LOCAL_MODEL, "precision.compute": "bf16"}, GPTQ_H100, AWQ_MODEL),
    passes_on=Example({**LOCAL_MODEL, "precision.compute": "fp16"}, GPTQ_H100, AWQ_MODEL),
)
def awq_in_bf16(case: Case) -> str | None:
    """AWQ's GPU kernels do not support bf16, so transformers loads the weights that are not quantized in fp16."""
    on_gpu = case.run.device in ("cuda", "xpu")
    if case.facts.quant_method != "awq" or not on_gpu or case.run.compute_dtype != "bf16":
        return None
    return "The model is quantized with AWQ, whose unquantized layers are loaded in fp16; this run computes in bf16."


@warning(
    "QNT018",
    fields=("method.quantization",),
    title="Quantization skips the experts of an MoE model",
    source="transformers 5.23 integrations/bitsandbytes.py replace_with_bnb_linear: only nn.Linear is replaced, and "
    "the experts of a layer are one stacked parameter",
    fails_on=Example(NF4_SPEC, H100, replace(DEMO, shape=MOE)),
    passes_on=Example({}, H100, replace(DEMO, shape=MOE)),
)
def experts_not_quantized(case: Case) -> str | None:
    """Only nn.Linear layers are quantized. transformers stores the experts of a layer as one stacked parameter, which
    stays in the compute dtype, and the experts hold most of the weights of an MoE model."""
    if case.shape is None or not _quantization(case).bits or not case.shape.most_experts:
        return None
    stacked = sum(leaf.parameters * leaf.count for leaf in case.shape.modules() if leaf.stacked > 1)
    share, dtype = stacked / case.shape.parameters, case.run.compute_dtype
    return f"With {_quantization(case).label}, {share:.0%} of the model's weights (the experts) would stay in {dtype}."


@error(
    "QNT020",
    fields=("method.quantization", "model.path", "model.hub_id"),
    title="This architecture cannot be quantized",
    source="transformers 5.23 models/rwkv/modeling_rwkv.py, _rescale_layers; models/mamba/modeling_mamba.py: "
    "dt_proj.weight; models/gemma3n/modeling_gemma3n.py: prediction_coefs.weight.data.clamp_; "
    "models/dots3_note/modeling_dots3_note.py: weights_proj.weight.dtype; bitsandbytes 0.50 autograd/_functions.py",
    fixes=(UNQUANTIZED,),
    fails_on=Example(NF4_SPEC, H100, replace(DEMO, model_type="rwkv")),
    passes_on=Example({}, H100, replace(DEMO, model_type="rwkv")),
)
def architecture_without_quantization(case: Case) -> str | None:
    """Quantized weights are packed integers, and the output of a quantized layer is a view. Some architectures use the
    weights of linear layers themselves, or change outputs in place, which fails or silently gives other values."""
    kinds = sorted(case.model_types & registry.UNQUANTIZABLE.keys())
    if not kinds or not _quantization(case).bits:
        return None
    reason, label = registry.UNQUANTIZABLE[kinds[0]], _quantization(case).label
    return f"The architecture {kinds[0]} {reason}, which does not work with {label}."


ODD = replace(SMOL, layer=(ModuleSpec("mlp.up_proj", 58 * 51, 58, 51),))


@error(
    "QNT019",
    fields=("method.quantization", "parallel.strategy"),
    title="The 4-bit weights of a layer cannot be sharded",
    source="bitsandbytes 0.50 functional.py quantize_4bit: two weights in a byte, viewed as the storage dtype",
    fixes=(ZERO2, DDP),
    fails_on=Example({**NF4_SPEC, "parallel.strategy": "fsdp2"}, TWO_H100, replace(DEMO, shape=ODD)),
    passes_on=Example({**NF4_SPEC, "parallel.strategy": "zero2"}, TWO_H100, replace(DEMO, shape=ODD)),
)
def four_bit_weights_of_an_odd_size(case: Case) -> str | None:
    """To be sharded, 4-bit weights are stored in the compute dtype, so the bytes of each weight must be a
    multiple of that dtype's size."""
    if case.shape is None or not case.strategy.shards_weights or _quantization(case).bits != 4:
        return None
    size, dtype = DTYPE_BYTES[case.run.compute_dtype], case.run.compute_dtype
    for leaf in quantized.quantized_modules(case.spec, case.shape):
        length = -(-leaf.in_features * leaf.out_features // 2)
        if length % size:
            shape = f"{leaf.in_features} x {leaf.out_features}"
            return f"{leaf.path} ({shape}) takes {length:,} bytes in 4 bits; {dtype} needs a multiple of {size}."
    return None


V100 = replace(T4, gpus=(replace(T4.gpus[0], name="V100", capability=(7, 0)),))


# --- What the registry row requires ---


@error(
    "QNT001",
    fields=("method.quantization",),
    title="The quantization library is not installed",
    source="transformers 5.23 quantizer_bnb_4bit.py: validate_environment",
    fixes=(UNQUANTIZED,),
    fails_on=Example(NF4_SPEC, without("bitsandbytes")),
    passes_on=Example(NF4_SPEC),
)
def quantization_package_missing(case: Case) -> str | None:
    """The base model is quantized while it is loaded, with the layers and kernels of bitsandbytes."""
    return missing_package(case, quantization(case))


@error(
    "QNT008",
    fields=("method.quantization",),
    title="8-bit quantization needs a Turing or later GPU",
    source="bitsandbytes' installation guide: LLM.int8() needs compute capability 7.5",
    fixes=(NF4,),
    fails_on=Example(INT8_SPEC, V100),
    passes_on=Example(INT8_SPEC, T4),
)
def int8_needs_turing(case: Case) -> str | None:
    """LLM.int8() multiplies int8 matrices on tensor cores, which NVIDIA GPUs have from Turing (compute capability 7.5)
    on. 4-bit weights are dequantized before the multiplication and work on older GPUs."""
    return unsupported_capability(case, quantization(case), any_vendor=True)


@error(
    "QNT011",
    fields=("model.path", "model.hub_id"),
    title="The library of the model's quantization format is not installed",
    source="transformers 5.23 quantizers: validate_environment",
    manual_fix="Alternatively, use the unquantized version of the model.",
    fails_on=Example(LOCAL_MODEL, H100, GPTQ_MODEL),
    passes_on=Example(LOCAL_MODEL, GPTQ_H100, GPTQ_MODEL),
)
def prequantized_model_package_missing(case: Case) -> str | None:
    """Each quantization format needs a different package to load it."""
    return missing_package(case, prequantized(case))


@error(
    "QNT013",
    fields=("launch.device", "model.path", "model.hub_id"),
    title="This quantization format needs a GPU",
    source="transformers 5.23 quantizer_hqq.py: a device map with the CPU is refused",
    manual_fix="Run on a GPU, or use the unquantized version of the model.",
    fails_on=Example(LOCAL_MODEL, replace(LAPTOP, versions=HQQ_H100.versions), HQQ_MODEL),
    passes_on=Example(LOCAL_MODEL, HQQ_H100, HQQ_MODEL),
)
def prequantized_model_needs_gpu(case: Case) -> str | None:
    """HQQ creates its layers directly on the device that runs them, and transformers does not accept a CPU there."""
    return unsupported_device(case, prequantized(case))
