"""Rules about kernels: attention implementations, Liger, torch.compile and the compilers that they need."""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.machine import Machine
from backend.rules.base import Case, Example, Fix, Violation, advice, error, names
from backend.rules.common_fixes import BF16
from backend.rules.examples import DEMO, GPT2, H100, INSTALLED, LAPTOP, SMOL
from backend.rules.requirements import (
    attention,
    flash_attention,
    is_older,
    liger,
    missing_package,
    unsupported_capability,
    unsupported_device,
    unsupported_head_dim,
)

DEFAULT_ATTENTION = Fix(
    "Set attention to auto",
    {"model.attn_implementation": "auto"},
    cost="SDPA, or eager attention for a model without it: slower on long sequences",
)
NO_LIGER = Fix("Turn off Liger kernels", {"train.use_liger_kernel": False}, cost="slower, and more activation memory")
NO_COMPILE = Fix("Turn off torch.compile", {"train.torch_compile": False})
FLASH_2_SPEC = {"model.attn_implementation": "flash_attention_2"}
FLASH_3_SPEC = {"model.attn_implementation": "flash_attention_3"}
FLEX_SPEC = {"model.attn_implementation": "flex_attention"}
LIGER_SPEC = {"train.use_liger_kernel": True}
COMPILE_SPEC = {"train.torch_compile": True}
LIGER_H100 = replace(H100, versions={**INSTALLED, "liger-kernel": "0.8.5"})
# Stages whose loss TRL 1.16 computes with a Triton kernel on GPUs.
TRITON_LOSS_STAGES = ("pretraining", "sft", "dpo", "kto")


def with_flash_attention(machine: Machine) -> Machine:
    """The machine with FlashAttention 2 and 3 installed."""
    return replace(machine, versions={**INSTALLED, "flash_attn": "2.8.3", "flash_attn_3": "3.0.0"})


@error(
    "KRN004",
    fields=("model.attn_implementation", "precision.compute"),
    title="FlashAttention does not support fp32",
    source="transformers 5.23 modeling_utils.py, _flash_attn_can_dispatch, warns: only fp16 and bf16; flash-attention "
    "csrc/flash_attn/flash_api.cpp refuses",
    fixes=(DEFAULT_ATTENTION, BF16),
    fails_on=Example({**FLASH_2_SPEC, "precision.compute": "fp32"}, with_flash_attention(H100)),
    passes_on=Example(FLASH_2_SPEC, with_flash_attention(H100)),
)
def flash_attention_in_fp32(case: Case) -> str | None:
    """FlashAttention's kernels exist for fp16 and bf16 only. In fp32 the first forward pass fails."""
    name = case.spec.model.attn_implementation
    if name not in registry.FLASH_ATTENTIONS or case.run.device != "cuda" or case.run.compute_dtype != "fp32":
        return None
    return f"{registry.ATTENTIONS[name].label} needs fp16 or bf16; this run computes in fp32."


@error(
    "KRN008",
    fields=("train.use_liger_kernel",),
    title="Liger has no kernels for this architecture",
    source="liger-kernel 0.8.5 monkey_patch.py: MODEL_TYPE_TO_APPLY_LIGER_FN; other model types are silently ignored",
    fixes=(NO_LIGER,),
    fails_on=Example(LIGER_SPEC, LIGER_H100, replace(DEMO, shape=GPT2)),
    passes_on=Example(LIGER_SPEC, LIGER_H100),
)
def liger_unsupported_architecture(case: Case) -> str | None:
    """Liger replaces the layers of architectures that it knows, and silently leaves all others as they are."""
    if not case.spec.train.use_liger_kernel or not case.shape or case.shape.model_type in registry.LIGER_TYPES:
        return None
    if is_older(registry.LIGER_VERSION, case.versions.get("liger-kernel", "")):
        return None
    return f"use_liger_kernel is on, but Liger has no kernels for the model type {case.shape.model_type}."


@error(
    "KRN009",
    fields=("train.torch_compile", "launch.device"),
    title="torch.compile on a CPU needs a C++ compiler",
    source="torch 2.13 _inductor/cpp_builder.py: it generates C++ for a CPU",
    fixes=(NO_COMPILE,),
    manual_fix="On Debian or Ubuntu: apt-get install g++ python3-dev.",
    fails_on=Example(COMPILE_SPEC, replace(LAPTOP, has_cpp_compiler=False)),
    passes_on=Example(COMPILE_SPEC),
)
def torch_compile_without_cpp_compiler(case: Case) -> str | None:
    """For a CPU, TorchInductor generates C++ and compiles it at the first step."""
    if not case.spec.train.torch_compile or case.run.device != "cpu" or case.machine.has_cpp_compiler:
        return None
    return "torch_compile is on, and this machine has no C++ compiler or no Python headers."


@advice(
    "KRN010",
    fields=("train.torch_compile", "launch.device"),
    title="torch.compile rarely pays off on a CPU",
    source="torch 2.13 _inductor: C++ is written and compiled at the first step; measured: two minutes for a model of "
    "four small layers on two busy CPU cores",
    fixes=(NO_COMPILE,),
    fails_on=Example(COMPILE_SPEC),
    passes_on=Example(COMPILE_SPEC, H100),
)
def torch_compile_on_cpu(case: Case) -> str | None:
    """TorchInductor compiles C++ at the first step, and may compile again for each new sequence length. That takes
    minutes, usually longer than the run saves."""
    if not case.spec.train.torch_compile or case.run.device != "cpu":
        return None
    return "torch_compile is on, and this run would use the CPU, where compilation takes minutes."


@error(
    "KRN011",
    fields=("launch.device", "train.stage", "train.torch_compile", "train.use_liger_kernel"),
    title="Triton kernels need a C compiler",
    source="triton 3.9 runtime/build.py _find_compiler: Failed to find C compiler; trl 1.16 kernels/chunked_logprob.py "
    "_use_triton: the loss of SFT, DPO and KTO is a Triton kernel on cuda and xpu",
    fixes=(Fix("Run on the CPU", {"launch.device": "cpu"}, safe=False, cost="much slower"),),
    manual_fix="On Debian or Ubuntu: apt-get install gcc python3-dev.",
    fails_on=Example(machine=replace(H100, triton_can_compile=False)),
    passes_on=Example(machine=H100),
)
def triton_without_c_compiler(case: Case) -> str | None:
    """Triton compiles a small C launcher when it first runs a kernel. Runtime-only container images have no compiler,
    and TRL's loss for most stages, torch.compile, Liger and FlexAttention all use Triton kernels."""
    spec = case.spec
    if case.run.device not in ("cuda", "xpu") or case.machine.triton_can_compile:
        return None
    users = (
        [f"TRL's loss for {registry.STAGES[spec.train.stage].label}"] if spec.train.stage in TRITON_LOSS_STAGES else []
    )
    users += [name for name in ("torch_compile", "use_liger_kernel", "use_unsloth") if getattr(spec.train, name)]
    users += [name for name in (spec.model.attn_implementation,) if name == "flex_attention"]
    users += [registry.OPTIMIZERS[spec.train.optim].label] if registry.OPTIMIZERS[spec.train.optim].compiled else []
    if not users:
        return None
    return f"This machine has no C compiler or no Python headers, and Triton needs both for {names(users)}."


NO_SEQUENCE_PARALLELISM = Fix(
    "Turn off sequence parallelism", {"parallel.sequence_parallel_size": 1}, cost="more activation memory"
)


@error(
    "KRN012",
    fields=("model.attn_implementation", "parallel.sequence_parallel_size"),
    title="The architecture does not support this attention implementation",
    source="transformers 5.23 modeling_utils.py, _sdpa_can_dispatch, _flash_attn_can_dispatch and "
    "_flex_attn_can_dispatch: refused unless the model class sets _supports_sdpa, _supports_flash_attn or "
    "_supports_flex_attn; _check_and_adjust_attn_implementation: _compatible_flash_implementations",
    fixes=(DEFAULT_ATTENTION, NO_SEQUENCE_PARALLELISM),
    fails_on=Example(FLEX_SPEC, H100, replace(DEMO, shape=GPT2)),
    passes_on=Example(FLEX_SPEC, H100),
)
def attention_unsupported_by_architecture(case: Case) -> str | Violation | None:
    """transformers loads a model only with an attention implementation that its class supports. Gemma 2 soft-caps its
    attention scores, which SDPA cannot do; BLOOM and MPT have eager attention only. For gpt-oss, which has attention
    sinks, FlashAttention 2 is replaced by another kernel. DeepSpeed sequence parallelism uses SDPA when attention is
    auto."""
    shape, spec = case.shape, case.spec
    ulysses = case.run.sequence_parallel_size > 1
    name = "sdpa" if ulysses and spec.model.attn_implementation == "auto" else spec.model.attn_implementation
    if shape is None or name not in shape.unsupported_attentions:
        return None
    message = f"transformers does not support {registry.ATTENTIONS[name].label} for {shape.architecture}."
    needs_sdpa = ulysses and "sdpa" in shape.unsupported_attentions
    return Violation(message, (NO_SEQUENCE_PARALLELISM,)) if needs_sdpa else message


B200 = replace(H100, gpus=(replace(H100.gpus[0], name="B200", capability=(10, 0)),))


# --- What the registry row requires ---


@error(
    "KRN001",
    fields=("model.attn_implementation", "launch.device"),
    title="This attention implementation needs a GPU",
    source="transformers 5.23 modeling_utils.py, _flash_attn_import_error: FlashAttention is not available on a CPU; "
    "torch 2.13 nn/attention/flex_attention.py, _validate_device: no backward pass on CPU and MPS",
    fixes=(DEFAULT_ATTENTION,),
    fails_on=Example(FLEX_SPEC),
    passes_on=Example({"model.attn_implementation": "eager"}),
    proof="launch",
)
def attention_needs_gpu(case: Case) -> str | None:
    """On a CPU or an Apple GPU, FlexAttention has no backward pass. FlashAttention is compiled for GPUs, and
    transformers refuses it on a CPU."""
    return unsupported_device(case, attention(case))


@error(
    "KRN002",
    fields=("model.attn_implementation",),
    title="FlashAttention is not installed",
    source="transformers 5.23 modeling_flash_attention_utils.py: FLASH_ATTENTION_COMPATIBILITY_MATRIX",
    fixes=(DEFAULT_ATTENTION,),
    fails_on=Example(FLASH_2_SPEC, H100),
    passes_on=Example(FLASH_2_SPEC, with_flash_attention(H100)),
)
def flash_attention_missing(case: Case) -> str | None:
    """FlashAttention is a separate package that is compiled for one torch and one CUDA version: flash-attn for version
    2, flash-attn-3 for version 3."""
    return missing_package(case, flash_attention(case))


@error(
    "KRN003",
    fields=("model.attn_implementation",),
    title="FlashAttention does not support this GPU generation",
    source="flash-attention csrc/flash_attn/flash_api.cpp: Ampere or newer; its README: version 3 is optimized for "
    "Hopper; hopper/setup.py: kernels for sm_90a, and for sm_80 unless FLASH_ATTENTION_DISABLE_SM80 is set",
    fixes=(DEFAULT_ATTENTION,),
    fails_on=Example({**FLASH_3_SPEC, "precision.compute": "fp16"}, with_flash_attention(B200)),
    passes_on=Example(FLASH_3_SPEC, with_flash_attention(H100)),
)
def flash_attention_unsupported_on_gpu(case: Case) -> str | None:
    """FlashAttention's kernels are compiled for certain GPU generations: version 2 for Ampere and later. Version 3 is
    written for Hopper; its build includes kernels for Ampere and Ada unless they are disabled, and none for
    Blackwell."""
    return unsupported_capability(case, flash_attention(case), any_vendor=True)


@error(
    "KRN005",
    fields=("model.attn_implementation",),
    title="FlashAttention does not support the model's head dimension",
    source="flash-attention csrc/flash_attn/flash_api.cpp: head dimension at most 256, a multiple of 8",
    fixes=(DEFAULT_ATTENTION,),
    fails_on=Example(FLASH_2_SPEC, with_flash_attention(H100), replace(DEMO, shape=replace(SMOL, head_dim=36))),
    passes_on=Example(FLASH_2_SPEC, with_flash_attention(H100)),
)
def flash_attention_unsupported_head_dim(case: Case) -> str | None:
    """FlashAttention's kernels are compiled for head dimensions up to 256 that are multiples of 8."""
    return unsupported_head_dim(case, flash_attention(case))


@error(
    "KRN006",
    fields=("train.use_liger_kernel", "launch.device"),
    title="Liger kernels need a GPU",
    source="liger-kernel 0.8 setup.py: Triton on CUDA, ROCm and XPU; on NPUs triton-ascend with an exact torch version",
    fixes=(NO_LIGER,),
    fails_on=Example(LIGER_SPEC),
    passes_on=Example(LIGER_SPEC, LIGER_H100),
    proof="launch",
)
def liger_needs_gpu(case: Case) -> str | None:
    """Liger's kernels are written in Triton, which compiles for NVIDIA, AMD and Intel GPUs, not for CPUs. On Ascend
    NPUs, Liger needs triton-ascend and one particular torch version; Footplate has not verified that."""
    return unsupported_device(case, liger(case))


@error(
    "KRN007",
    fields=("train.use_liger_kernel",),
    title="Liger is not installed",
    source="transformers 5.23 integrations/liger.py: apply_liger_kernel raises an error without the package",
    fixes=(NO_LIGER,),
    fails_on=Example(LIGER_SPEC, H100),
    passes_on=Example(LIGER_SPEC, LIGER_H100),
)
def liger_missing(case: Case) -> str | None:
    """Liger's kernels are a separate package, and transformers refuses use_liger_kernel without it."""
    can_run = case.run.device in registry.LIGER.devices  # elsewhere KRN006 reports it
    return missing_package(case, liger(case)) if can_run else None
