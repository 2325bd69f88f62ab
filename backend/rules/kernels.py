"""Rules of how layers are computed: attention, Liger, torch.compile.

Floor 3. Imports: below.
"""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.machine import Machine
from backend.rules.base import Case, Example, Fix, names, rule
from backend.rules.common_fixes import BF16
from backend.rules.examples import DEMO, GPT2, H100, INSTALLED, LAPTOP, SMOL

AUTO = Fix("Choose it automatically", {"model.attn_implementation": "auto"}, cost="SDPA: as exact, slower on long rows")
FLASH = {"model.attn_implementation": "flash_attention_2"}
THREE = {"model.attn_implementation": "flash_attention_3"}
BOTH = {**INSTALLED, "flash_attn": "2.8.3", "flash_attn_3": "3.0.0"}
HALF = {"precision.compute": "fp16"}
B200 = replace(H100, gpus=(replace(H100.gpus[0], name="B200", capability=(10, 0)),))


def _with(machine: Machine) -> Machine:
    return replace(machine, versions=BOTH)


def _flash(case: Case) -> registry.Attention | None:
    asked = case.spec.model.attn_implementation
    return registry.ATTENTIONS[asked] if asked in registry.FLASH_ATTENTIONS else None


@rule(
    "KRN001",
    "error",
    fields=("model.attn_implementation", "launch.device"),
    title="This attention needs a GPU",
    source="transformers 5.23 modeling_utils.py: FlashAttention on a CPU is refused; seen with torch 2.13: "
    "FlexAttention has no backward pass on a CPU",
    fixes=(AUTO,),
    fails_on=Example({"model.attn_implementation": "flex_attention"}),
    passes_on=Example({"model.attn_implementation": "eager"}),
    proof="launch",
)
def attention_without_gpu(case: Case) -> str | None:
    """FlashAttention and FlexAttention are kernels for GPUs."""
    asked = case.spec.model.attn_implementation
    if asked not in (*registry.FLASH_ATTENTIONS, "flex_attention") or case.run.device not in ("cpu", "mps"):
        return None
    return f"{registry.ATTENTIONS[asked].label} was asked for, and the run is for a {case.run.device.upper()}."


@rule(
    "KRN002",
    "error",
    fields=("model.attn_implementation",),
    title="The attention's package is missing",
    source="transformers 5.23 modeling_flash_attention_utils.py: FLASH_ATTENTION_COMPATIBILITY_MATRIX",
    fixes=(AUTO,),
    fails_on=Example(FLASH, H100),
    passes_on=Example(FLASH, _with(H100)),
)
def missing_attention(case: Case) -> str | None:
    """FlashAttention is a package of its own, built for one torch and one CUDA: flash-attn for version 2, flash-attn-3
    (from the folder hopper of its sources) for version 3."""
    row = _flash(case)
    if row is None or case.run.device != "cuda" or not case.machine.versions or row.package in case.machine.versions:
        return None
    return f"{row.label} needs {row.package.replace('_', '-')}: pip install it with --no-build-isolation."


@rule(
    "KRN003",
    "error",
    fields=("model.attn_implementation",),
    title="This attention is not for this GPU",
    source="flash-attention csrc/flash_attn/flash_api.cpp: Ampere or newer; its README: version 3 is for Hopper",
    fixes=(AUTO,),
    fails_on=Example({**THREE, **HALF}, _with(B200)),
    passes_on=Example(THREE, _with(H100)),
)
def attention_capability(case: Case) -> str | None:
    """Each version is written for the units of certain GPUs."""
    row = _flash(case)
    if row is None or case.run.device != "cuda":
        return None
    newest = row.max_capability if row.max_capability > (0, 0) else (99, 0)
    wrong = [gpu for gpu in case.machine.gpus if gpu.capability > (0, 0) and not row.min_capability <= gpu.capability <= newest]
    if not wrong:
        return None
    major, minor = wrong[0].capability
    return f"{wrong[0].name} has compute capability {major}.{minor}. {row.help}"


@rule(
    "KRN004",
    "error",
    fields=("model.attn_implementation", "precision.compute"),
    title="FlashAttention does not compute in full precision",
    source="transformers 5.23 modeling_utils.py, _flash_attn_can_dispatch, warns: only fp16 and bf16; flash-attention "
    "csrc/flash_attn/flash_api.cpp refuses",
    fixes=(AUTO, BF16),
    fails_on=Example({**FLASH, "precision.compute": "fp32"}, _with(H100)),
    passes_on=Example(FLASH, _with(H100)),
)
def full_precision_flash(case: Case) -> str | None:
    """Its kernels multiply numbers of 16 bits."""
    plain = _flash(case) is not None and case.run.device == "cuda" and case.run.compute_dtype == "fp32"
    return "The run computes in fp32." if plain else None


@rule(
    "KRN005",
    "error",
    fields=("model.attn_implementation",),
    title="The model's heads do not fit FlashAttention",
    source="flash-attention csrc/flash_attn/flash_api.cpp: head dimension at most 256, a multiple of 8",
    fixes=(AUTO,),
    fails_on=Example(FLASH, _with(H100), replace(DEMO, shape=replace(SMOL, head_dim=36))),
    passes_on=Example(FLASH, _with(H100)),
)
def odd_heads(case: Case) -> str | None:
    """Its kernels are made for heads of certain widths."""
    if _flash(case) is None or case.run.device != "cuda" or case.shape is None:
        return None
    width = case.shape.head_dim
    return f"A head is {width} wide." if width > 256 or width % 8 else None


LIGER = {"train.use_liger_kernel": True}
PLAIN = Fix("Without Liger", {"train.use_liger_kernel": False})
WITH_LIGER = replace(H100, versions={**INSTALLED, "liger-kernel": "0.8.5"})
# Model types that Footplate counts and Liger does not know.
STRANGERS = ("gpt2", "gpt_neox", "phi")


@rule(
    "KRN006",
    "error",
    fields=("train.use_liger_kernel", "launch.device"),
    title="Liger's kernels need a GPU",
    source="liger-kernel 0.8: Triton kernels",
    fixes=(PLAIN,),
    fails_on=Example(LIGER),
    passes_on=Example(LIGER, WITH_LIGER),
    proof="launch",
)
def liger_without_gpu(case: Case) -> str | None:
    """They are written in Triton, for NVIDIA, AMD and Intel GPUs."""
    return (
        "The run is for another device."
        if case.spec.train.use_liger_kernel and case.run.device not in ("cuda", "xpu")
        else None
    )


@rule(
    "KRN007",
    "error",
    fields=("train.use_liger_kernel",),
    title="Liger is not installed",
    source="transformers 5.23 integrations/liger.py: apply_liger_kernel asks for the package",
    fixes=(PLAIN,),
    fails_on=Example(LIGER, H100),
    passes_on=Example(LIGER, WITH_LIGER),
)
def missing_liger(case: Case) -> str | None:
    """Its kernels are a package of their own."""
    asked = case.spec.train.use_liger_kernel and case.run.device in ("cuda", "xpu") and case.machine.versions
    return "pip install liger-kernel." if asked and "liger-kernel" not in case.machine.versions else None


@rule(
    "KRN008",
    "error",
    fields=("train.use_liger_kernel",),
    title="Liger has no kernels for this model",
    source="liger-kernel 0.8.5 monkey_patch.py: MODEL_TYPE_TO_APPLY_LIGER_FN; another type is passed over in silence",
    fixes=(PLAIN,),
    fails_on=Example(LIGER, WITH_LIGER, replace(DEMO, shape=GPT2)),
    passes_on=Example(LIGER, WITH_LIGER),
)
def liger_stranger(case: Case) -> str | None:
    """It replaces layers of the architectures that it knows."""
    shape = case.shape
    return (
        f"It does not know {shape.model_type}."
        if case.spec.train.use_liger_kernel and shape and shape.model_type in STRANGERS
        else None
    )


@rule(
    "KRN009",
    "error",
    fields=("train.torch_compile", "launch.device"),
    title="torch.compile needs a C++ compiler on a CPU",
    source="torch 2.13 _inductor/cpp_builder.py: its code for a CPU is C++",
    fixes=(Fix("Without compiling", {"train.torch_compile": False}),),
    manual_fix="On Debian: apt-get install g++ python3-dev.",
    fails_on=Example({"train.torch_compile": True}, replace(LAPTOP, compiler=False)),
    passes_on=Example({"train.torch_compile": True}),
)
def no_compiler_for_compile(case: Case) -> str | None:
    """What it compiles for a CPU is C++."""
    asked = case.spec.train.torch_compile and case.run.device == "cpu" and not case.machine.compiler
    return "There is no c++ on the path, or Python has no headers." if asked else None


@rule(
    "KRN010",
    "advice",
    fields=("train.torch_compile", "launch.device"),
    title="Compiling for a CPU takes longer than it saves",
    source="torch 2.13 _inductor: C++ is written and compiled at the first step; two minutes for a model of four "
    "small layers on two busy cores",
    fixes=(Fix("Without compiling", {"train.torch_compile": False}),),
    fails_on=Example({"train.torch_compile": True}),
    passes_on=Example({"train.torch_compile": True}, H100),
)
def compiled_for_cpu(case: Case) -> str | None:
    """Every new length of a row may be compiled again."""
    return "The run is for the CPU." if case.spec.train.torch_compile and case.run.device == "cpu" else None


# Stages whose loss is a Triton kernel on GPUs.
FUSED = ("pretraining", "sft", "dpo", "kto")


@rule(
    "KRN011",
    "error",
    fields=("launch.device", "train.stage", "train.torch_compile", "train.use_liger_kernel"),
    title="No C compiler for kernels on the GPU",
    source="triton 3.9 runtime/build.py _find_compiler: Failed to find C compiler; trl 1.16 kernels/chunked_logprob.py "
    "_use_triton: the loss of SFT, DPO and KTO is a Triton kernel on cuda and xpu",
    fixes=(Fix("On the CPU", {"launch.device": "cpu"}, safe=False),),
    manual_fix="On Debian: apt-get install gcc python3-dev.",
    fails_on=Example(machine=replace(H100, triton=False)),
    passes_on=Example(machine=H100),
)
def no_compiler_for_triton(case: Case) -> str | None:
    """Triton launches its kernels by a piece of C that it compiles on first use. Images made for running, and not for
    building, have no compiler; the loss of most stages is such a kernel, and so is what torch.compile makes."""
    spec, wanted = case.spec, []
    if case.run.device not in ("cuda", "xpu") or case.machine.triton:
        return None
    if spec.train.stage in FUSED:
        wanted.append(f"the loss of {registry.STAGES[spec.train.stage].label}")
    wanted += [name for name in ("torch_compile", "use_liger_kernel", "use_unsloth") if getattr(spec.train, name)]
    wanted += [name for name in (spec.model.attn_implementation,) if name == "flex_attention"]
    wanted += [registry.OPTIMIZERS[spec.train.optim].label] if registry.OPTIMIZERS[spec.train.optim].compiled else []
    return f"There is none on the path, or Python has no headers; for {names(wanted)}." if wanted else None


# What transformers 5.23 has for the architectures that Footplate counts, and one of them has not.
LACKS = {("gemma2", "sdpa"), ("gpt2", "flex_attention"), ("olmoe", "flex_attention")}


@rule(
    "KRN012",
    "error",
    fields=("model.attn_implementation", "parallel.sequence_parallel_size"),
    title="The architecture has no such attention",
    source="transformers 5.23 models/gemma2/modeling_gemma2.py: _supports_sdpa is false; models/gpt2/modeling_gpt2.py "
    "and models/olmoe/modeling_olmoe.py: no _supports_flex_attn",
    fixes=(AUTO, Fix("Whole rows", {"parallel.sequence_parallel_size": 1})),
    fails_on=Example({"model.attn_implementation": "flex_attention"}, H100, replace(DEMO, shape=GPT2)),
    passes_on=Example({"model.attn_implementation": "flex_attention"}, H100),
)
def unknown_attention(case: Case) -> str | None:
    """Most models take any attention; Gemma 2 bends its scores in a way that SDPA does not, and GPT-2 was not
    prepared for FlexAttention. Sequence parallel asks for SDPA by itself."""
    shape, spec = case.shape, case.spec
    shared = case.strategy.engine == "deepspeed" and spec.parallel.sequence_parallel_size > 1
    asked = "sdpa" if shared and spec.model.attn_implementation == "auto" else spec.model.attn_implementation
    if shape is None or (shape.model_type, asked) not in LACKS:
        return None
    return f"{shape.architecture} has no {registry.ATTENTIONS[asked].label}."


EXACT = {"train.torch_compile": True, "precision.compute": "fp32"}


@rule(
    "PRC013",
    "warning",
    fields=("precision.compute", "train.torch_compile"),
    title="Compiled, full precision becomes TF32",
    source="accelerate 1.15 state.py: allow_tf32 is switched on where a model is compiled without mixed precision; "
    "transformers 5.23 training_args.py likewise",
    fixes=(
        Fix("Say so: TF32", {"precision.compute": "tf32"}),
        Fix("Without compiling", {"train.torch_compile": False}, cost="slower steps"),
    ),
    fails_on=Example(EXACT, H100),
    passes_on=Example({**EXACT, "precision.compute": "tf32"}, H100),
    proof="gpu",
)
def compiled_to_tf32(case: Case) -> str | None:
    """On NVIDIA's GPUs since Ampere the libraries multiply with ten bits of mantissa then, whatever was asked for."""
    asked = case.spec.train.torch_compile and case.spec.precision.compute == "fp32" and case.run.device == "cuda"
    newer = any(gpu.capability >= (8, 0) for gpu in case.machine.gpus)
    return "fp32 was asked for, and compiling." if asked and newer else None
