"""Rules generated from registry rows: what a chosen row needs of packages, device types, GPUs and the model.

A row of the registry says which package it needs in which version, on which device types and compute capabilities it
runs, and which head dimensions it takes. Each generator below turns that into one rule; the calls at the end list all
of them. Rules that compare two options are written by hand in the modules of their families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from packaging.version import InvalidVersion, Version

from backend import registry
from backend.machine import Gpu, Machine
from backend.modelspec import ModelShape
from backend.rules.base import Case, Check, Example, Fix, Violation, names, rule, set_to
from backend.rules.common_fixes import ADAMW
from backend.rules.examples import (
    DEMO,
    EQUIPPED,
    EQUIPPED_H100,
    H100,
    INSTALLED,
    LAPTOP,
    LOCAL_MODEL,
    NPU,
    SMOL,
    T4,
    TORCH_ONLY,
)
from backend.rules.kernels import (
    DEFAULT_ATTENTION,
    FLASH_2_SPEC,
    FLASH_3_SPEC,
    FLEX_SPEC,
    LIGER_H100,
    LIGER_SPEC,
    NO_LIGER,
    with_flash_attention,
)
from backend.rules.precision import AUTO_PRECISION, FP8_SPEC, TF32_SPEC
from backend.rules.quantization import (
    GPTQ_H100,
    GPTQ_MODEL,
    HQQ_H100,
    HQQ_MODEL,
    INT8_SPEC,
    NF4,
    NF4_SPEC,
    UNQUANTIZED,
)

# How to install what `pip install NAME` alone does not install correctly.
INSTALL_COMMANDS = {
    "flash_attn": "pip install flash-attn --no-build-isolation",
    "flash_attn_3": "python setup.py install in the hopper folder of the flash-attention repository",
}
BASE_PACKAGES = dict.fromkeys(("torch", "transformers", "accelerate", "peft", "trl", "datasets"), "")
B200 = replace(H100, gpus=(replace(H100.gpus[0], name="B200", capability=(10, 0)),))
V100 = replace(T4, gpus=(replace(T4.gpus[0], name="V100", capability=(7, 0)),))
GALORE_SPEC = {"method.kind": "full", "train.learning_rate": 2e-5, "train.optim": "galore_adamw"}
DEEPSPEED_LAUNCHER_SPEC = {"parallel.strategy": "ddp", "launch.launcher": "deepspeed"}
Capability = tuple[int, int]


def without(package: str) -> Machine:
    """A machine on which one package is not installed."""
    return replace(LAPTOP, versions={name: version for name, version in INSTALLED.items() if name != package})


# --- Which registry rows a run uses ---


def tracker(case: Case) -> registry.Choice:
    """The row of the experiment tracker."""
    return registry.REPORTERS[case.spec.logging.report_to]


def optimizer(case: Case) -> registry.Choice:
    """The row of the optimizer."""
    return case.optimizer


def quantization(case: Case) -> registry.Choice:
    """The row of the quantization that is applied while loading; it has an effect for LoRA only."""
    kind = case.spec.method.quantization if case.spec.method.kind == "lora" else "none"
    return registry.QUANTIZATIONS[kind]


def attention(case: Case) -> registry.Attention:
    """The row of the attention implementation."""
    return registry.ATTENTIONS[case.spec.model.attn_implementation]


def flash_attention(case: Case) -> registry.Attention | None:
    """The row of FlashAttention on CUDA. NPUs have it in torch_npu; for XPUs transformers loads a kernel of the Hub."""
    return attention(case) if attention(case).package and case.run.device == "cuda" else None


def liger(case: Case) -> registry.Choice | None:
    """The row of Liger, if it is used."""
    return registry.LIGER if case.spec.train.use_liger_kernel else None


def liger_package(case: Case) -> registry.Choice | None:
    """The row of Liger where it can run at all; elsewhere the rule on its device types reports it."""
    return liger(case) if case.run.device in registry.LIGER.devices else None


def fp8_backend(case: Case) -> registry.Choice | None:
    """The row of the fp8 library, if the run uses fp8."""
    if case.spec.precision.compute != "fp8":
        return None
    row = registry.FP8_BACKENDS[case.spec.precision.fp8_backend]
    return replace(row, label=f"fp8 with {row.label}")


def tf32(case: Case) -> registry.Choice | None:
    """The row of TF32, if the run uses it."""
    return registry.PRECISIONS["tf32"] if case.spec.precision.compute == "tf32" else None


def device(case: Case) -> registry.Choice:
    """The row of the device type."""
    return registry.DEVICES[case.run.device]


def prequantized(case: Case) -> registry.PrequantizedFormat | None:
    """The row of the format of a model that was quantized before it was published."""
    return registry.PREQUANTIZED.get(case.facts.quant_method)


def deepspeed_launcher(case: Case) -> registry.Choice | None:
    """The deepspeed launcher with a strategy that does not need DeepSpeed itself."""
    package = "deepspeed"
    used = case.spec.launch.launcher == package and case.strategy.package != package
    return registry.Choice("The deepspeed launcher", package=package) if used else None


def projection_rank(case: Case) -> int:
    """The rank of GaLore's and APOLLO's projection; 0 for other optimizers."""
    low_rank = case.optimizer.state_layout == "low_rank"
    return case.spec.train.projection_rank if low_rank else 0


Row = Callable[[Case], registry.Choice | None]


def packages_of(row: registry.Choice | None) -> Mapping[str, str]:
    """Package -> minimum version ('' for any) of a row."""
    if isinstance(row, registry.PrequantizedFormat):
        return row.packages
    return {row.package: row.package_min_version} if row and row.package else {}


# --- Generators ---


def missing_package(
    code: str, slug: str, reason: str, *, row: Row | None = None, packages: Mapping[str, str] | None = None, **more: Any
) -> Check:
    """A rule: a package that the `row` of a case needs, or one of `packages`, is not installed."""

    def check(case: Case) -> str | None:
        used = row(case) if row else None
        needed = packages if packages is not None else packages_of(used)
        missing = [name for name in needed if name not in case.machine.versions]
        if not missing or not case.machine.versions:
            return None
        label, one = used.label if used else "Training", len(missing) == 1
        what = f"the package {missing[0]}, which is" if one else f"the packages {names(missing)}, which are"
        return f"{label} requires {what} not installed. Install with: {install_command(missing)}."

    return _added(check, code, slug, reason, **more)


def install_command(packages: list[str]) -> str:
    """The command that installs packages."""
    return INSTALL_COMMANDS.get(packages[0], f"pip install {' '.join(packages)}")


def outdated_package(code: str, slug: str, reason: str, *, rows: Mapping[str, Row], **more: Any) -> Check:
    """A rule: the package of one of the rows is installed in a version below the row's minimum."""

    def check(case: Case) -> Violation | None:
        installed = case.machine.versions
        old: dict[str, str] = {}
        fields: list[str] = []
        for field, row in rows.items():
            for name, minimum in packages_of(row(case)).items():
                if minimum and is_older(installed.get(name, ""), minimum):
                    old[name] = max(minimum, old.get(name, minimum), key=Version)
                    fields.append(field)
        if not old:
            return None
        said = [
            f"{name} {installed[name]} is installed; {minimum} or later is required" for name, minimum in old.items()
        ]
        command = " ".join(f"'{name}>={minimum}'" for name, minimum in old.items())
        return Violation(
            f"{'. '.join(said)}. Upgrade with: pip install -U {command}.", (), tuple(dict.fromkeys(fields))
        )

    return _added(check, code, slug, reason, fields=tuple(rows), **more)


def is_older(installed: str, minimum: str) -> bool:
    """Whether a version is below another; False where either is not known or not a version."""
    try:
        return Version(installed) < Version(minimum)
    except InvalidVersion:
        return False


def unsupported_device(code: str, slug: str, reason: str, *, row: Row, **more: Any) -> Check:
    """A rule: the row does not run on the device type of the run."""

    def check(case: Case) -> str | None:
        used = row(case)
        if used is None or not used.devices or case.run.device in used.devices:
            return None
        return wrong_device(case, used)

    return _added(check, code, slug, reason, **more)


def wrong_device(case: Case, row: registry.Choice) -> str:
    """The sentence about a row that does not run on the device type of the run."""
    supported = names([registry.DEVICES[name].label for name in row.devices])
    types = "device type" if len(row.devices) == 1 else "device types"
    used = registry.DEVICES[case.run.device].label
    return f"{row.label} supports only the {types} {supported}; this run would use {used}."


def unsupported_capability(code: str, slug: str, reason: str, *, row: Row, any_vendor: bool, **more: Any) -> Check:
    """A rule: a selected GPU has a compute capability outside the range of the row. Without `any_vendor` the rule also
    refuses other device types than the row's, and GPUs that have no compute capability."""

    def check(case: Case) -> str | None:
        used = row(case)
        if used is None:
            return None
        if case.run.device != "cuda":
            return None if any_vendor or case.run.device in used.devices else wrong_device(case, used)
        gpus = [g for g in case.gpus if g.capability > (0, 0) or not any_vendor]
        wrong = [g for g in gpus if not in_range(g.capability, used)]
        if not wrong:
            return None
        return f"{used.label} requires {capability_range(used)}; {capabilities(wrong)}."

    return _added(check, code, slug, reason, **more)


def in_range(capability: Capability, row: registry.Choice) -> bool:
    """Whether a compute capability is in the range of a row."""
    return row.min_capability <= capability and (row.max_capability == (0, 0) or capability <= row.max_capability)


def capability_range(row: registry.Choice) -> str:
    """'compute capability 8.0 or later', or 'compute capability 9.0' for a range of one."""
    low, high = (".".join(map(str, limit)) for limit in (row.min_capability, row.max_capability))
    if row.max_capability == (0, 0):
        return f"compute capability {low} or later"
    return f"compute capability {low}" if low == high else f"compute capability {low} to {high}"


def capabilities(gpus: list[Gpu]) -> str:
    """'GPU 0 (T4) has 7.5'; a GPU of another vendor has none."""
    said = [
        f"GPU {gpu.id} ({gpu.name}) has {'.'.join(map(str, gpu.capability)) if gpu.capability > (0, 0) else 'none'}"
        for gpu in gpus
    ]
    return names(said)


def head_dim_limit(
    code: str, slug: str, reason: str, *, row: Callable[[Case], registry.Attention | None], **more: Any
) -> Check:
    """A rule: the model's head dimension is not one that the kernels of the row take."""

    def check(case: Case) -> str | None:
        used, shape = row(case), case.shape
        if used is None or shape is None or not used.max_head_dim:
            return None
        if shape.head_dim <= used.max_head_dim and shape.head_dim % used.head_dim_multiple == 0:
            return None
        limits = f"at most {used.max_head_dim} that is a multiple of {used.head_dim_multiple}"
        return f"{used.label} requires a head dimension of {limits}; this model's head dimension is {shape.head_dim}."

    return _added(check, code, slug, reason, **more)


def exceeds_model(
    code: str,
    slug: str,
    reason: str,
    *,
    value: Callable[[Case], int],
    limit: Callable[[ModelShape], int],
    message: str,
    fix: Callable[[ModelShape], Fix],
    **more: Any,
) -> Check:
    """A rule: a number (0: not used by this run) is above a limit of the model. `message` gets {value} and {limit}."""

    def check(case: Case) -> Violation | None:
        if case.shape is None or value(case) <= limit(case.shape):
            return None
        return Violation(message.format(value=f"{value(case):,}", limit=f"{limit(case.shape):,}"), (fix(case.shape),))

    return _added(check, code, slug, reason, **more)


def _added(check: Callable[[Case], str | Violation | None], code: str, slug: str, reason: str, **more: Any) -> Check:
    """Give a generated check the name and docstring that `rule` makes slug and reason of, and add the rule."""
    check.__name__, check.__doc__ = slug.replace("-", "_"), reason
    return rule(more.pop("level", "error"), code, **more)(check)


# --- Packages ---

missing_package(
    "HW002",
    "base-package-missing",
    "The trainer imports these packages, in the Python environment that starts the run.",
    packages=BASE_PACKAGES,
    fields=("launch.device",),
    title="A required package is not installed",
    source="pyproject.toml",
    manual_fix="Alternatively, set up Footplate's own environment again with `make run`.",
    fails_on=Example(machine=TORCH_ONLY),
    passes_on=Example(),
)
missing_package(
    "HW003",
    "torch-npu-missing",
    "PyTorch supports Ascend NPUs only through the package torch_npu.",
    row=device,
    fields=("launch.device",),
    title="Ascend NPUs need torch_npu",
    source="torch 2.13: torch.npu exists only with torch_npu",
    manual_fix="Choose the torch_npu release that matches the installed torch.",
    fixes=(Fix("Run on the CPU", {"launch.device": "cpu"}, safe=False, cost="much slower"),),
    fails_on=Example(machine=NPU),
    passes_on=Example(machine=replace(NPU, versions={**NPU.versions, "torch_npu": "2.13.0"})),
)
missing_package(
    "HW004",
    "tracker-package-missing",
    "The Trainer imports the tracker's package after the model is loaded, and stops if it is missing.",
    row=tracker,
    fields=("logging.report_to",),
    title="The experiment tracker is not installed",
    source="transformers 5.23 integrations: the callback raises an error without its package",
    fixes=(Fix("Turn off the tracker", {"logging.report_to": "none"}),),
    fails_on=Example({"logging.report_to": "wandb"}),
    passes_on=Example({"logging.report_to": "wandb"}, replace(LAPTOP, versions={**LAPTOP.versions, "wandb": "0.23"})),
    proof="launch",
)
missing_package(
    "PRC007",
    "fp8-library-missing",
    "PyTorch alone does not train in fp8: accelerate replaces the linear layers by those of a library.",
    row=fp8_backend,
    fields=("precision.fp8_backend",),
    title="The fp8 library is not installed",
    source="accelerate 1.15 accelerator.py: no FP8-compatible backend was installed",
    fixes=(AUTO_PRECISION,),
    fails_on=Example(FP8_SPEC, H100),
    passes_on=Example(FP8_SPEC, EQUIPPED_H100),
)
missing_package(
    "KRN002",
    "flash-attention-missing",
    "FlashAttention is a separate package that is compiled for one torch and one CUDA version: flash-attn for version "
    "2, flash-attn-3 for version 3.",
    row=flash_attention,
    fields=("model.attn_implementation",),
    title="FlashAttention is not installed",
    source="transformers 5.23 modeling_flash_attention_utils.py: FLASH_ATTENTION_COMPATIBILITY_MATRIX",
    fixes=(DEFAULT_ATTENTION,),
    fails_on=Example(FLASH_2_SPEC, H100),
    passes_on=Example(FLASH_2_SPEC, with_flash_attention(H100)),
)
missing_package(
    "KRN007",
    "liger-missing",
    "Liger's kernels are a separate package, and transformers refuses use_liger_kernel without it.",
    row=liger_package,
    fields=("train.use_liger_kernel",),
    title="Liger is not installed",
    source="transformers 5.23 integrations/liger.py: apply_liger_kernel raises an error without the package",
    fixes=(NO_LIGER,),
    fails_on=Example(LIGER_SPEC, H100),
    passes_on=Example(LIGER_SPEC, LIGER_H100),
)
missing_package(
    "OPT001",
    "optimizer-package-missing",
    "This optimizer is in a separate package. Install exactly the package that is named: similar names on PyPI, such "
    "as muon, are unrelated projects, and Muon itself is part of torch.",
    row=optimizer,
    fields=("train.optim",),
    title="The optimizer's package is not installed",
    source="transformers 5.23 trainer_optimizer.py: ImportError once the model is loaded",
    fixes=(ADAMW,),
    fails_on=Example(GALORE_SPEC, LAPTOP),
    passes_on=Example(GALORE_SPEC, EQUIPPED),
)
missing_package(
    "QNT001",
    "quantization-package-missing",
    "The base model is quantized while it is loaded, with the layers and kernels of bitsandbytes.",
    row=quantization,
    fields=("method.quantization",),
    title="The quantization library is not installed",
    source="transformers 5.23 quantizer_bnb_4bit.py: validate_environment",
    fixes=(UNQUANTIZED,),
    fails_on=Example(NF4_SPEC, without("bitsandbytes")),
    passes_on=Example(NF4_SPEC),
)
missing_package(
    "QNT011",
    "prequantized-model-package-missing",
    "Each quantization format is loaded by a package of its own.",
    row=prequantized,
    fields=("model.path", "model.hub_id"),
    title="The library of the model's quantization format is not installed",
    source="transformers 5.23 quantizers: validate_environment",
    manual_fix="Alternatively, use the unquantized version of the model.",
    fails_on=Example(LOCAL_MODEL, H100, GPTQ_MODEL),
    passes_on=Example(LOCAL_MODEL, GPTQ_H100, GPTQ_MODEL),
)
missing_package(
    "NOD013",
    "deepspeed-launcher-missing",
    "The deepspeed launcher is part of the package deepspeed.",
    row=deepspeed_launcher,
    fields=("launch.launcher",),
    title="The deepspeed launcher is not installed",
    source="arithmetic: the list of installed packages",
    fixes=(Fix("Use torchrun", {"launch.launcher": "torchrun"}),),
    fails_on=Example(DEEPSPEED_LAUNCHER_SPEC, without("deepspeed")),
    passes_on=Example(DEEPSPEED_LAUNCHER_SPEC),
)
outdated_package(
    "HW007",
    "package-too-old",
    "transformers treats a package below its minimum version as not installed, and reports this only after the model "
    "is loaded.",
    rows={
        "train.optim": optimizer,
        "method.quantization": quantization,
        "model.attn_implementation": attention,
        "train.use_liger_kernel": liger,
        "model.path": prequantized,
    },
    title="A package is too old",
    source="transformers 5.23 utils/import_utils.py, trainer_optimizer.py and quantizers/quantizer_awq.py: an older "
    "version counts as not installed",
    manual_fix="Check that the new version is compatible with the installed torch.",
    fails_on=Example(NF4_SPEC, replace(LAPTOP, versions={**INSTALLED, "bitsandbytes": "0.43.0"})),
    passes_on=Example(NF4_SPEC, EQUIPPED),
)

# --- Device types ---

unsupported_device(
    "OPT002",
    "optimizer-unsupported-on-device",
    "This optimizer's package calls one device type's API directly, and its first step fails on any other device type.",
    row=optimizer,
    fields=("train.optim", "launch.device"),
    title="The optimizer does not support this device type",
    source="galore-torch 1.0 adamw8bit.py and lomo-optim 0.1.1 adalomo.py call torch.cuda; bitsandbytes 0.50 on a CPU: "
    "no managed memory for AdEMAMix; torch_npu supports Ascend NPUs only",
    fixes=(ADAMW,),
    fails_on=Example({**GALORE_SPEC, "train.optim": "galore_adamw_8bit"}, EQUIPPED),
    passes_on=Example({**GALORE_SPEC, "train.optim": "galore_adamw_8bit"}, EQUIPPED_H100),
    proof="launch",
)
unsupported_device(
    "KRN001",
    "attention-needs-gpu",
    "On a CPU or an Apple GPU, FlexAttention has no backward pass. FlashAttention is compiled for GPUs, and "
    "transformers refuses it on a CPU.",
    row=attention,
    fields=("model.attn_implementation", "launch.device"),
    title="This attention implementation needs a GPU",
    source="transformers 5.23 modeling_utils.py, _flash_attn_import_error: FlashAttention is not available on a CPU; "
    "torch 2.13 nn/attention/flex_attention.py, _validate_device: no backward pass on CPU and MPS",
    fixes=(DEFAULT_ATTENTION,),
    fails_on=Example(FLEX_SPEC),
    passes_on=Example({"model.attn_implementation": "eager"}),
    proof="launch",
)
unsupported_device(
    "KRN006",
    "liger-needs-gpu",
    "Liger's kernels are written in Triton, which compiles for NVIDIA, AMD and Intel GPUs, not for CPUs. On Ascend "
    "NPUs, Liger needs triton-ascend and one particular torch version; Footplate has not verified that.",
    row=liger,
    fields=("train.use_liger_kernel", "launch.device"),
    title="Liger kernels need a GPU",
    source="liger-kernel 0.8 setup.py: Triton on CUDA, ROCm and XPU; on NPUs triton-ascend with an exact torch version",
    fixes=(NO_LIGER,),
    fails_on=Example(LIGER_SPEC),
    passes_on=Example(LIGER_SPEC, LIGER_H100),
    proof="launch",
)
unsupported_device(
    "QNT013",
    "prequantized-model-needs-gpu",
    "HQQ creates its layers on their final device, and transformers refuses a CPU as that device.",
    row=prequantized,
    fields=("launch.device", "model.path", "model.hub_id"),
    title="This quantization format needs a GPU",
    source="transformers 5.23 quantizer_hqq.py: a device map with the CPU is refused",
    manual_fix="Run on a GPU, or use the unquantized version of the model.",
    fails_on=Example(LOCAL_MODEL, replace(LAPTOP, versions=HQQ_H100.versions), HQQ_MODEL),
    passes_on=Example(LOCAL_MODEL, HQQ_H100, HQQ_MODEL),
)

# --- Compute capabilities of the selected GPUs ---

unsupported_capability(
    "KRN003",
    "flash-attention-unsupported-on-gpu",
    "FlashAttention's kernels are compiled for certain GPU generations: version 2 for Ampere and later. Version 3 is "
    "written for Hopper; its build includes kernels for Ampere and Ada unless they are disabled, and none for "
    "Blackwell.",
    row=flash_attention,
    any_vendor=True,
    fields=("model.attn_implementation",),
    title="FlashAttention does not support this GPU generation",
    source="flash-attention csrc/flash_attn/flash_api.cpp: Ampere or newer; its README: version 3 is optimized for "
    "Hopper; hopper/setup.py: kernels for sm_90a, and for sm_80 unless FLASH_ATTENTION_DISABLE_SM80 is set",
    fixes=(DEFAULT_ATTENTION,),
    fails_on=Example({**FLASH_3_SPEC, "precision.compute": "fp16"}, with_flash_attention(B200)),
    passes_on=Example(FLASH_3_SPEC, with_flash_attention(H100)),
)
unsupported_capability(
    "QNT008",
    "int8-needs-turing",
    "LLM.int8() multiplies int8 matrices on tensor cores, which NVIDIA GPUs have from Turing (compute capability 7.5) "
    "on. 4-bit weights are dequantized before the multiplication and work on older GPUs.",
    row=quantization,
    any_vendor=True,
    fields=("method.quantization",),
    title="8-bit quantization needs a Turing or later GPU",
    source="bitsandbytes' installation guide: LLM.int8() needs compute capability 7.5",
    fixes=(NF4,),
    fails_on=Example(INT8_SPEC, V100),
    passes_on=Example(INT8_SPEC, T4),
)
unsupported_capability(
    "PRC005",
    "tf32-needs-ampere",
    "TF32 multiplies fp32 matrices with a 10-bit mantissa on the tensor cores of NVIDIA GPUs from Ampere on. "
    "transformers refuses tf32 on all other devices, also on AMD GPUs, some of which have TF32 through hipBLASLt.",
    row=tf32,
    any_vendor=False,
    fields=("precision.compute", "launch.device"),
    title="TF32 needs an Ampere or later GPU",
    source="transformers 5.23 training_args.py: --tf32 requires Ampere or newer; utils/import_utils.py "
    "is_torch_tf32_available: false in a torch build without CUDA",
    fixes=(Fix("Use fp32", {"precision.compute": "fp32"}),),
    fails_on=Example(TF32_SPEC),
    passes_on=Example(TF32_SPEC, H100),
    proof="launch",
)
unsupported_capability(
    "PRC006",
    "fp8-needs-ada-or-hopper",
    "Tensor cores for fp8 came with Ada and Hopper (compute capability 8.9 and 9.0). On older GPUs, accelerate "
    "logs a warning and uses fp16. On a CPU, only torchao's fp8 training works.",
    row=fp8_backend,
    any_vendor=False,
    fields=("precision.compute", "launch.device"),
    title="fp8 needs an Ada, Hopper or later GPU",
    source="accelerate 1.15 state.py: below capability 8.9 it warns and uses fp16; torchao 0.18 and Transformer "
    "Engine support no other vendor's GPUs here",
    fixes=(AUTO_PRECISION,),
    fails_on=Example(FP8_SPEC, replace(EQUIPPED_H100, gpus=T4.gpus)),
    passes_on=Example(FP8_SPEC, EQUIPPED_H100),
    proof="gpu",
)

# --- Limits of the model ---

head_dim_limit(
    "KRN005",
    "flash-attention-unsupported-head-dim",
    "FlashAttention's kernels are compiled for head dimensions up to 256 that are multiples of 8.",
    row=flash_attention,
    fields=("model.attn_implementation",),
    title="FlashAttention does not support the model's head dimension",
    source="flash-attention csrc/flash_attn/flash_api.cpp: head dimension at most 256, a multiple of 8",
    fixes=(DEFAULT_ATTENTION,),
    fails_on=Example(FLASH_2_SPEC, with_flash_attention(H100), replace(DEMO, shape=replace(SMOL, head_dim=36))),
    passes_on=Example(FLASH_2_SPEC, with_flash_attention(H100)),
)
exceeds_model(
    "OPT010",
    "projection-rank-too-high",
    "GaLore and APOLLO save memory because the projected gradients are smaller than the weight matrices. A projection "
    "of full rank saves nothing and adds its own memory and time.",
    level="warning",
    value=projection_rank,
    limit=lambda shape: shape.hidden - 1,
    message="train.projection_rank is {value}; the model's hidden size makes {limit} the highest useful rank.",
    fix=lambda shape: Fix(
        set_to("train.projection_rank", f"{max(1, shape.hidden // 4):,}"),
        {"train.projection_rank": max(1, shape.hidden // 4)},
        safe=False,
        cost="a quarter of the hidden size",
    ),
    fields=("train.projection_rank",),
    title="The projection rank is as large as the weight matrices",
    source="arithmetic: galore-torch 1.0 galore_projector.py cannot use a rank above the dimensions of the matrix",
    fails_on=Example({**GALORE_SPEC, "train.projection_rank": 1024}, EQUIPPED),
    passes_on=Example({**GALORE_SPEC, "train.projection_rank": 128}, EQUIPPED),
)
