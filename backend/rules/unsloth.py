"""Rules about Unsloth: which strategies, devices, quantizations and kernels it supports."""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.rules.base import Case, Example, Fix, error, names, warning
from backend.rules.common_fixes import DDP, ZERO2
from backend.rules.examples import H100, INSTALLED, NPU, TWO_H100

UNSLOTH = {"train.use_unsloth": True}
WITHOUT_UNSLOTH = Fix("Train without Unsloth", {"train.use_unsloth": False}, cost="slower, more memory")
VERSIONS = {**INSTALLED, "unsloth": "2026.10.9"}
WITH_UNSLOTH, TWO_WITH_UNSLOTH = replace(H100, versions=VERSIONS), replace(TWO_H100, versions=VERSIONS)


def _uses_unsloth(case: Case) -> bool:
    return case.spec.train.use_unsloth


@error(
    "UNS001",
    fields=("train.use_unsloth",),
    title="Unsloth is not installed",
    source="Unsloth's README",
    fixes=(WITHOUT_UNSLOTH,),
    manual_fix="To keep the newest releases of the other packages: pip install --no-deps unsloth unsloth_zoo.",
    fails_on=Example(UNSLOTH, H100),
    passes_on=Example(UNSLOTH, WITH_UNSLOTH),
)
def unsloth_not_installed(case: Case) -> str | None:
    """Unsloth is a separate package, which Footplate does not install."""
    installed = case.versions
    if not _uses_unsloth(case) or not installed or "unsloth" in installed:
        return None
    return "train.use_unsloth is on, and the package unsloth is not installed."


@warning(
    "UNS002",
    fields=("train.use_unsloth",),
    title="Unsloth requires other package versions",
    source="Unsloth 2026.10.9's metadata; verified by running on a CPU: it also trains with transformers 5.23 and TRL "
    "1.16",
    fixes=(WITHOUT_UNSLOTH,),
    fails_on=Example(UNSLOTH, replace(WITH_UNSLOTH, unsloth_unmet_requirements="transformers <=5.17.0")),
    passes_on=Example(UNSLOTH, WITH_UNSLOTH),
)
def unsloth_version_mismatch(case: Case) -> str | None:
    """Unsloth patches transformers and TRL while it is imported and is written for certain releases of them. With other
    releases a patch may raise an error or compute wrong values."""
    required = case.machine.unsloth_unmet_requirements
    if not _uses_unsloth(case) or not required or not case.versions:
        return None
    return f"Unsloth requires {required}; another version is installed. Check the first losses of the run."


@error(
    "UNS003",
    fields=("train.use_unsloth", "parallel.strategy"),
    title="Unsloth does not support sharded weights",
    source="Unsloth 2026.10.9 loader_utils.py and fsdp2_launch.py: Unsloth passes a device_map, which ZeRO-3 rejects, "
    "and wraps the model for FSDP2 with its own code; verified by running",
    fixes=(WITHOUT_UNSLOTH, ZERO2, DDP),
    fails_on=Example({**UNSLOTH, "parallel.strategy": "zero3"}, TWO_WITH_UNSLOTH),
    passes_on=Example({**UNSLOTH, "parallel.strategy": "zero2"}, TWO_WITH_UNSLOTH),
)
def unsloth_with_sharded_weights(case: Case) -> str | None:
    """Unsloth's kernels read the complete weights of a layer. Under ZeRO-3, FSDP and tensor parallelism each device
    holds only a shard of them. DDP and ZeRO-0 to ZeRO-2 work."""
    if not _uses_unsloth(case) or not case.strategy.shards_weights:
        return None
    return f"train.use_unsloth is on, and {case.strategy.label} shards the weights."


@error(
    "UNS004",
    fields=("train.use_unsloth", "launch.device"),
    title="Unsloth does not support this device type",
    source="Unsloth 2026.10.9 device_type.py: NVIDIA, AMD and Intel GPUs and CPUs; Apple GPUs are supported by "
    "another library",
    fixes=(WITHOUT_UNSLOTH,),
    fails_on=Example(UNSLOTH, replace(NPU, versions={**VERSIONS, "torch_npu": "2.13.0"})),
    passes_on=Example(UNSLOTH, WITH_UNSLOTH),
)
def unsloth_on_unsupported_device(case: Case) -> str | None:
    """Unsloth's kernels are written in Triton for NVIDIA, AMD and Intel GPUs, with an implementation in PyTorch for
    CPUs."""
    if not _uses_unsloth(case) or case.run.device in ("cuda", "xpu", "cpu"):
        return None
    return f"train.use_unsloth is on, and the device type of this run is {registry.DEVICES[case.run.device].label}."


@error(
    "UNS005",
    fields=("train.use_unsloth", "method.quantization"),
    title="Unsloth quantizes only to NF4 with double quantization",
    source="Unsloth 2026.10.9 models/loader.py: its own BitsAndBytesConfig, NF4 with double quantization; on a CPU "
    "8-bit becomes 16-bit: verified by running",
    fixes=(
        WITHOUT_UNSLOTH,
        Fix(
            "Use NF4 with double quantization",
            {"method.quantization": "nf4", "method.bnb_4bit_use_double_quant": True},
            False,
            "less precise than 8-bit",
        ),
    ),
    fails_on=Example({**UNSLOTH, "method.quantization": "int8"}, WITH_UNSLOTH),
    passes_on=Example({**UNSLOTH, "method.quantization": "nf4"}, WITH_UNSLOTH),
)
def unsloth_with_other_quantization(case: Case) -> str | None:
    """Unsloth builds its own quantization config and silently ignores a different one."""
    method = case.spec.method
    if not _uses_unsloth(case) or method.quantization == "none":
        return None
    if method.quantization == "nf4":
        off = "train.use_unsloth is on and method.bnb_4bit_use_double_quant is off; Unsloth would turn it on."
        return None if method.bnb_4bit_use_double_quant else off
    label = registry.QUANTIZATIONS[method.quantization].label
    return f"train.use_unsloth is on, and method.quantization is {label}."


@error(
    "UNS006",
    fields=("train.use_unsloth", "data.packing", "train.optim", "precision.compute"),
    title="Unsloth changes these settings on a CPU",
    source="unsloth_zoo 2026.10.9 cpu/trainer.py: it turns these settings off or replaces them; verified by running",
    fixes=(WITHOUT_UNSLOTH,),
    fails_on=Example({**UNSLOTH, "data.packing": True}, replace(WITH_UNSLOTH, device="cpu", gpus=())),
    passes_on=Example({**UNSLOTH, "data.packing": True}, WITH_UNSLOTH),
)
def unsloth_overrides_on_cpu(case: Case) -> str | None:
    """On a CPU Unsloth replaces training arguments that it considers slow or unsafe there, and the run continues with
    settings that differ from its spec."""
    spec = case.spec
    if not _uses_unsloth(case) or case.run.device != "cpu":
        return None
    optimizer = registry.OPTIMIZERS[spec.train.optim]
    unsupported = ("8bit", "paged", "bnb", "npu", "xla", "apex")
    bf16 = case.run.compute_dtype == "bf16" and not case.machine.cpu_bf16 and spec.precision.compute != "pure_bf16"
    replaced = {
        "packing": spec.data.packing,
        f"the optimizer {optimizer.label}": any(tag in optimizer.trainer_optim for tag in unsupported),
        "fp16": case.run.compute_dtype == "fp16",
        "bf16": bf16,
    }
    used = [name for name, applies in replaced.items() if applies]
    return f"This run would use a CPU, where Unsloth turns off or replaces {names(used)}." if used else None


@error(
    "UNS007",
    fields=("train.use_unsloth", "train.use_liger_kernel", "train.torch_compile"),
    title="Unsloth conflicts with Liger and torch.compile",
    source="Unsloth 2026.10.9 models/llama.py and unsloth_zoo compiler.py: its kernels replace the layers that Liger "
    "would replace, and it compiles the rest itself",
    fixes=(
        Fix("Use only Unsloth", {"train.use_liger_kernel": False, "train.torch_compile": False}),
        WITHOUT_UNSLOTH,
    ),
    fails_on=Example(
        {**UNSLOTH, "train.use_liger_kernel": True},
        replace(WITH_UNSLOTH, versions={**VERSIONS, "liger-kernel": "0.8.5"}),
    ),
    passes_on=Example(UNSLOTH, WITH_UNSLOTH),
)
def unsloth_with_other_kernels(case: Case) -> str | None:
    """Unsloth, Liger and torch.compile each replace the forward pass of the same layers."""
    train = case.spec.train
    options = ("use_liger_kernel", train.use_liger_kernel), ("torch_compile", train.torch_compile)
    others = [f"train.{name}" for name, on in options if on]
    return f"train.use_unsloth is on along with {names(others)}." if _uses_unsloth(case) and others else None


@error(
    "UNS008",
    fields=("train.use_unsloth", "lora.init"),
    title="Unsloth does not support LoRA initialization from the base weights",
    source="LLaMA-Factory model/adapter.py silently ignores PiSSA with Unsloth; Unsloth 2026.10.9 models/lora_init.py "
    "saves such adapters in its own way",
    fixes=(
        WITHOUT_UNSLOTH,
        Fix("Use the default initialization", {"lora.init": "default"}, safe=False, cost="slower convergence"),
    ),
    fails_on=Example({**UNSLOTH, "lora.init": "pissa"}, WITH_UNSLOTH),
    passes_on=Example(UNSLOTH, WITH_UNSLOTH),
)
def unsloth_with_weight_based_init(case: Case) -> str | None:
    """PiSSA and OLoRA subtract the initial adapter from the base weights, and the saved adapter has to account for
    that. Unsloth saves such adapters in its own format."""
    init = registry.LORA_INITS[case.spec.lora.init]
    if not _uses_unsloth(case) or case.spec.method.kind != "lora" or not init.changes_base_weights:
        return None
    return f"train.use_unsloth is on, and lora.init is {init.label}."
