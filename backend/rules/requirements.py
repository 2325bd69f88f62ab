"""Rules of packages that are there, and too old for what is asked of them.

Floor 3. Imports: below.
"""

from __future__ import annotations

import re
from dataclasses import replace

from backend import registry
from backend.rules.base import Case, Example, names, rule
from backend.rules.examples import EQUIPPED, INSTALLED, LAPTOP

# Where transformers 5.23 takes an older one for none: utils/import_utils.py, trainer_optimizer.py, quantizer_awq.py.
LEAST = {
    "bitsandbytes": "0.46.1",
    "compressed-tensors": "0.15.0",
    "flash_attn": "2.3.3",
    "hqq": "0.2.1",
    "liger-kernel": "0.3.0",
    "schedulefree": "1.2.6",
    "torchao": "0.15.0",
}
FOR_AWQ, FOR_RADAM = "5.0.0", "1.4.0"
OLD = replace(LAPTOP, versions={**INSTALLED, "bitsandbytes": "0.43.0"})


def _wanted(case: Case) -> dict[str, str]:
    """Packages that the run uses, and the least version of each."""
    spec, packed = case.spec, case.facts.packed
    lora = spec.method.kind == "lora"
    used = [
        registry.OPTIMIZERS[spec.train.optim].package,
        registry.QUANTIZATIONS[spec.method.quantization if lora else "none"].package,
        registry.ATTENTIONS[spec.model.attn_implementation].package,
        "liger-kernel" if spec.train.use_liger_kernel else "",
        *(registry.PACKED[packed].packages if packed in registry.PACKED else ()),
    ]
    found = {name: LEAST[name] for name in used if name in LEAST}
    if packed == "awq":
        found["gptqmodel"] = FOR_AWQ
    if spec.train.optim == "schedule_free_radam":
        found["schedulefree"] = FOR_RADAM
    return found


def _parts(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


@rule(
    "HW007",
    "error",
    fields=("train.optim", "method.quantization", "model.attn_implementation"),
    title="A package is too old",
    source="transformers 5.23 utils/import_utils.py, trainer_optimizer.py and quantizers/quantizer_awq.py: an older "
    "one counts as none",
    manual_fix="Install a newer one: pip install -U, and its name.",
    fails_on=Example({"method.quantization": "nf4"}, OLD),
    passes_on=Example({"method.quantization": "nf4"}, EQUIPPED),
)
def too_old(case: Case) -> str | None:
    """A library that finds an older package says that it is not installed, after the model was loaded."""
    there = case.machine.versions
    old = [
        f"{name} {there[name]}, of which {least} is needed"
        for name, least in _wanted(case).items()
        if name in there and _parts(there[name]) < _parts(least)
    ]
    return f"Here is {names(old)}." if old else None
