"""Rules of Unsloth: where its way of loading and computing a model fits.

Floor 3. Imports: below.
"""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.rules.base import Case, Example, Fix, names, rule
from backend.rules.common_fixes import DDP, ZERO2
from backend.rules.examples import H100, INSTALLED, NPU, TWO_H100

ASKED = {"train.use_unsloth": True}
WITHOUT = Fix("Without Unsloth", {"train.use_unsloth": False}, cost="slower, and more memory")
WITH = {**INSTALLED, "unsloth": "2026.10.9"}
ONE, TWO = replace(H100, versions=WITH), replace(TWO_H100, versions=WITH)
WHOLE = ("single", "ddp", "zero0", "zero1", "zero2")  # strategies that leave weights whole


def _asked(case: Case) -> bool:
    return case.spec.train.use_unsloth


@rule(
    "UNS001",
    "error",
    fields=("train.use_unsloth",),
    title="Unsloth is not installed",
    source="Unsloth's README",
    fixes=(WITHOUT,),
    manual_fix="Beside the others' newest releases: pip install --no-deps unsloth unsloth_zoo.",
    fails_on=Example(ASKED, H100),
    passes_on=Example(ASKED, ONE),
)
def missing(case: Case) -> str | None:
    """It is a package of its own."""
    known = case.machine.versions
    return "It is not here." if _asked(case) and known and "unsloth" not in known else None


@rule(
    "UNS002",
    "warning",
    fields=("train.use_unsloth",),
    title="Unsloth was made for other versions",
    source="Unsloth 2026.10.9's metadata; on a CPU it trains with transformers 5.23 and TRL 1.16 as well: launched",
    fixes=(WITHOUT,),
    fails_on=Example(ASKED, replace(ONE, unsloth_wants="transformers <=5.17.0")),
    passes_on=Example(ASKED, ONE),
)
def other_versions(case: Case) -> str | None:
    """It rewrites parts of transformers and TRL while it is imported, and knows those of certain releases."""
    wants = case.machine.unsloth_wants
    return f"It asks for {wants}. Look at the first losses." if _asked(case) and wants else None


@rule(
    "UNS003",
    "error",
    fields=("train.use_unsloth", "parallel.strategy"),
    title="Unsloth needs whole weights",
    source="Unsloth 2026.10.9 loader_utils.py and fsdp2_launch.py: it names a device for every weight, which ZeRO-3 "
    "refuses, and spreads by a wrapping of its own; launched",
    fixes=(WITHOUT, ZERO2, DDP),
    fails_on=Example({**ASKED, "parallel.strategy": "zero3"}, TWO),
    passes_on=Example({**ASKED, "parallel.strategy": "zero2"}, TWO),
)
def spread_weights(case: Case) -> str | None:
    """Its kernels read a layer's weights as they are, and under ZeRO-3, FSDP and tensor parallel a device has a part of
    them. Several GPUs were once too many for it; with DDP and ZeRO-0 to 2 it trains."""
    name = case.spec.parallel.strategy
    return f"{registry.STRATEGIES[name].label} spreads them." if _asked(case) and name not in WHOLE else None


@rule(
    "UNS004",
    "error",
    fields=("train.use_unsloth", "launch.device"),
    title="Unsloth is not for this device",
    source="Unsloth 2026.10.9 device_type.py: NVIDIA, AMD and Intel GPUs and CPUs; Apple's by another library",
    fixes=(WITHOUT,),
    fails_on=Example(ASKED, replace(NPU, versions={**WITH, "torch_npu": "2.13.0"})),
    passes_on=Example(ASKED, ONE),
)
def other_device(case: Case) -> str | None:
    """Its kernels are written in Triton, with a plain way for CPUs."""
    wrong = _asked(case) and case.run.device not in ("cuda", "xpu", "cpu")
    return f"The run is for {registry.DEVICES[case.run.device].label}." if wrong else None


@rule(
    "UNS005",
    "error",
    fields=("train.use_unsloth", "method.quantization"),
    title="Unsloth packs into NF4 alone",
    source="Unsloth 2026.10.9 models/loader.py: a configuration of its own, NF4 with packed scales; 8 bit becomes 16 "
    "on a CPU: launched",
    fixes=(
        WITHOUT,
        Fix(
            "NF4",
            {"method.quantization": "nf4", "method.bnb_4bit_use_double_quant": True},
            False,
            "coarser than 8 bits",
        ),
    ),
    fails_on=Example({**ASKED, "method.quantization": "int8"}, ONE),
    passes_on=Example({**ASKED, "method.quantization": "nf4"}, ONE),
)
def other_packing(case: Case) -> str | None:
    """Asked for another, it takes what it has."""
    method = case.spec.method
    if not _asked(case) or method.quantization == "none":
        return None
    if method.quantization == "nf4":
        return None if method.bnb_4bit_use_double_quant else "It always packs the scales too."
    return f"{registry.QUANTIZATIONS[method.quantization].label} was asked for."


@rule(
    "UNS006",
    "error",
    fields=("train.use_unsloth", "data.packing", "train.optim", "precision.compute"),
    title="On a CPU Unsloth does without these",
    source="unsloth_zoo 2026.10.9 cpu/trainer.py: it switches them off, or takes something else; launched",
    fixes=(WITHOUT,),
    fails_on=Example({**ASKED, "data.packing": True}, replace(ONE, device="cpu", gpus=())),
    passes_on=Example({**ASKED, "data.packing": True}, ONE),
)
def changed_on_cpu(case: Case) -> str | None:
    """It changes arguments that it takes for slow or unsafe on a CPU, and goes on."""
    spec = case.spec
    if not _asked(case) or case.run.device != "cpu":
        return None
    row = registry.OPTIMIZERS[spec.train.optim]
    tags = ("8bit", "paged", "bnb", "npu", "xla", "apex")
    wrong = {
        "packing": spec.data.packing,
        row.label: any(tag in row.name for tag in tags),
        "fp16": case.run.compute_dtype == "fp16",
        "bf16": case.run.compute_dtype == "bf16"
        and not case.machine.cpu_bf16
        and spec.precision.compute != "pure_bf16",
    }
    found = [name for name, holds in wrong.items() if holds]
    return f"Asked for: {names(found)}." if found else None


@rule(
    "UNS007",
    "error",
    fields=("train.use_unsloth", "train.use_liger_kernel", "train.torch_compile"),
    title="Two things would compute the same layers",
    source="Unsloth 2026.10.9 models/llama.py and unsloth_zoo compiler.py: its kernels stand where Liger's would, and "
    "it compiles the rest itself",
    fixes=(Fix("Unsloth alone", {"train.use_liger_kernel": False, "train.torch_compile": False}), WITHOUT),
    fails_on=Example(
        {**ASKED, "train.use_liger_kernel": True}, replace(ONE, versions={**WITH, "liger-kernel": "0.8.5"})
    ),
    passes_on=Example(ASKED, ONE),
)
def twice(case: Case) -> str | None:
    """Liger, torch.compile and Unsloth each replace how layers are computed."""
    train = case.spec.train
    others = [name for name, on in (("Liger", train.use_liger_kernel), ("torch.compile", train.torch_compile)) if on]
    return f"{names(others)} was asked for too." if _asked(case) and others else None


@rule(
    "UNS008",
    "error",
    fields=("train.use_unsloth", "lora.init"),
    title="With Unsloth an adapter starts beside the weights",
    source="LLaMA-Factory model/adapter.py passes over PiSSA in silence where Unsloth is asked for; "
    "Unsloth 2026.10.9 models/lora_init.py saves such adapters in a way of its own",
    fixes=(WITHOUT, Fix("Start at zero", {"lora.init": "default"}, safe=False, cost="learns a little slower")),
    fails_on=Example({**ASKED, "lora.init": "pissa"}, ONE),
    passes_on=Example(ASKED, ONE),
)
def moved_weights(case: Case) -> str | None:
    """PiSSA, OLoRA and orthogonal starts take something out of the base weights, which the saved adapter must know."""
    row = registry.LORA_INITS[case.spec.lora.init]
    return (
        f"{row.label} was asked for."
        if _asked(case) and case.spec.method.kind == "lora" and row.changes_base_weights
        else None
    )
