"""What a registry row requires of packages, device types, GPUs and the model, as the message of a rule.

A row says which package it needs in which version, on which device types and compute capabilities it runs, and which
head dimensions it takes. The rules are in the modules of their families.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from packaging.version import InvalidVersion, Version

from backend import registry
from backend.machine import Gpu, Machine, install_command
from backend.rules.base import Case, Violation, names
from backend.rules.examples import INSTALLED, LAPTOP

Capability = tuple[int, int]


def without(package: str) -> Machine:
    """A machine on which one package is not installed."""
    return replace(LAPTOP, versions={name: version for name, version in INSTALLED.items() if name != package})


# --- Which registry rows a run uses ---


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


def fp8_backend(case: Case) -> registry.Choice | None:
    """The row of the fp8 library, if the run uses fp8."""
    if case.spec.precision.compute != "fp8":
        return None
    row = registry.FP8_BACKENDS[case.spec.precision.fp8_backend]
    return replace(row, label=f"fp8 with {row.label}")


def prequantized(case: Case) -> registry.PrequantizedFormat | None:
    """The row of the format of a model that was quantized before it was published."""
    return registry.PREQUANTIZED.get(case.facts.quant_method)


def packages_of(row: registry.Choice | None) -> Mapping[str, str]:
    """Package -> minimum version ('' for any) of a row."""
    if isinstance(row, registry.PrequantizedFormat):
        return row.packages
    return {row.package: row.package_min_version} if row and row.package else {}


# --- Packages ---


def missing_package(case: Case, row: registry.Choice | None) -> str | None:
    """A package that the row needs is not installed."""
    return missing_packages(case, row.label if row else "", packages_of(row))


def missing_packages(case: Case, label: str, needed: Collection[str]) -> str | None:
    """Packages that `label` needs are not installed. None if the versions are not known."""
    missing = [name for name in needed if name not in case.versions]
    if not missing or not case.versions:
        return None
    one = len(missing) == 1
    what = f"the package {missing[0]}, which is" if one else f"the packages {names(missing)}, which are"
    return f"{label} requires {what} not installed. Install with: {install_command(missing)}."


def outdated_package(case: Case, rows: Mapping[str, registry.Choice | None]) -> Violation | None:
    """The package of a row is installed in a version below the row's minimum. `rows`: option -> its row."""
    installed = case.versions
    old: dict[str, str] = {}
    fields: list[str] = []
    for field, row in rows.items():
        for name, minimum in packages_of(row).items():
            if minimum and is_older(installed.get(name, ""), minimum):
                old[name] = max(minimum, old.get(name, minimum), key=Version)
                fields.append(field)
    if not old:
        return None
    said = [f"{name} {installed[name]} is installed; {minimum} or later is required" for name, minimum in old.items()]
    command = " ".join(f"'{name}>={minimum}'" for name, minimum in old.items())
    return Violation(f"{'. '.join(said)}. Upgrade with: pip install -U {command}.", (), tuple(dict.fromkeys(fields)))


def is_older(installed: str, minimum: str) -> bool:
    """Whether a version is below another; False where either is not known or not a version."""
    try:
        return Version(installed) < Version(minimum)
    except InvalidVersion:
        return False


# --- Devices ---


def unsupported_device(case: Case, row: registry.Choice | None) -> str | None:
    """The row does not run on the device type of the run."""
    if row is None or not row.devices or case.run.device in row.devices:
        return None
    return wrong_device(case, row)


def wrong_device(case: Case, row: registry.Choice) -> str:
    """The sentence about a row that does not run on the device type of the run."""
    supported = names([registry.DEVICES[name].label for name in row.devices])
    types = "device type" if len(row.devices) == 1 else "device types"
    used = registry.DEVICES[case.run.device].label
    return f"{row.label} supports only the {types} {supported}; this run would use {used}."


def unsupported_capability(case: Case, row: registry.Choice | None, any_vendor: bool) -> str | None:
    """A selected GPU has a compute capability outside the range of the row. Without `any_vendor`, other device types
    than the row's are refused too, and GPUs that have no compute capability."""
    if row is None:
        return None
    if case.run.device != "cuda":
        return None if any_vendor or case.run.device in row.devices else wrong_device(case, row)
    gpus = [gpu for gpu in case.gpus if gpu.capability > (0, 0) or not any_vendor]
    wrong = [gpu for gpu in gpus if not in_range(gpu.capability, row)]
    return f"{row.label} requires {capability_range(row)}; {capabilities(wrong)}." if wrong else None


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


def unsupported_head_dim(case: Case, row: registry.Attention | None) -> str | None:
    """The model's head dimension is not one that the kernels of the row take."""
    shape = case.shape
    if row is None or shape is None or not row.max_head_dim:
        return None
    if shape.head_dim <= row.max_head_dim and shape.head_dim % row.head_dim_multiple == 0:
        return None
    limits = f"at most {row.max_head_dim} that is a multiple of {row.head_dim_multiple}"
    return f"{row.label} requires a head dimension of {limits}; this model's head dimension is {shape.head_dim}."
