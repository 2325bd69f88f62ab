"""Packages that other libraries import whenever they are installed, and that a run does not use.

peft and transformers import bitsandbytes and torchao, which import torch's compiler: a fifth of the CPU time of all
imports. A run that can be known not to need them hides them, so that they look as if they were not installed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from backend import registry
from backend.config import RunSpec
from backend.inspect.json_files import read_json_object
from backend.inspect.model_folder import local_folder

PACKAGES = ("bitsandbytes", "torchao")


def hide(spec: RunSpec, base: Path) -> None:
    """Make `import` fail for them, unless something in the spec or in the model may use them. Call it before importing
    peft and transformers; what is imported already stays. `base`: the folder of relative paths."""
    if may_use_any(spec, base):
        return
    for name in PACKAGES:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type] # importlib then reports that it is missing


def may_use_any(spec: RunSpec, base: Path) -> bool:
    """Whether quantized weights, the optimizer (its package may import them), FP8, Unsloth or the model's own code may
    need one of the packages. True also if the model's config.json is not there yet."""
    if spec.method.quantization != "none" or registry.OPTIMIZERS[spec.train.optim].package:
        return True
    if spec.precision.compute == "fp8" or spec.train.use_unsloth or spec.model.trust_remote_code:
        return True
    folder = local_folder(spec, base, os.environ)
    try:
        return not folder or "quantization_config" in str(read_json_object(folder / "config.json"))
    except (OSError, ValueError):
        return True
