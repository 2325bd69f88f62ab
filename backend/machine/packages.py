"""Versions of installed packages, and their unmet requirements."""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress

from packaging.requirements import Requirement

from backend import registry

TABLES = (registry.REPORTERS, registry.OPTIMIZERS, registry.FP8_BACKENDS)
# Distributions whose presence or version a rule needs.
PACKAGES = dict.fromkeys((
    "torch", "transformers", "accelerate", "peft", "trl", "datasets", "deepspeed", "gguf", "torch_npu",
    "flash_attn", "flash_attn_3", "liger-kernel", "unsloth", "causal_conv1d", "mamba_ssm", "flash-linear-attention",
    "comet_ml",
    *(name for row in registry.PREQUANTIZED.values() for name in row.packages),
    *(row.package for table in TABLES for row in table.values() if row.package),
))  # fmt: skip

# How to install what `pip install NAME` alone does not install correctly.
INSTALL_COMMANDS = {
    "autoawq": "pip install autoawq --no-build-isolation",
    "flash_attn": "pip install flash-attn --no-build-isolation",
    "flash_attn_3": "python setup.py install in the hopper folder of the flash-attention repository",
}


def install_command(packages: Sequence[str], environment: str = "") -> str:
    """The command that installs packages. `environment`: the folder of a Python environment, if that is not the one of
    Footplate."""
    others = [shlex.quote(name) for name in packages if name not in INSTALL_COMMANDS]
    commands = [f"pip install {' '.join(others)}"] if others else []
    commands += [INSTALL_COMMANDS[name] for name in packages if name in INSTALL_COMMANDS]
    programs = shlex.quote(f"{environment}/bin/") if environment else ""
    return " && ".join(programs + command for command in commands)


def versions() -> dict[str, str]:
    """Package -> version, for the installed packages."""
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def unmet(name: str, installed: Mapping[str, str]) -> str:
    """Requirements of the package `name` that the `installed` versions do not meet: 'transformers <=5.17.0'."""
    found = []
    for line in importlib.metadata.requires(name) or () if name in installed else ():
        requirement = Requirement(line)
        version = installed.get(requirement.name)
        if version and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found += [
                f"{requirement.name} {part}" for part in requirement.specifier if not part.contains(version, True)
            ]
    return ", ".join(found)
