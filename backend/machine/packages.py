"""Which packages are installed, and whether they want others than those that are.

Floor 1. Imports: catalog.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from contextlib import suppress

from packaging.requirements import Requirement

from backend import registry

TABLES = (registry.REPORTERS, registry.OPTIMIZERS, registry.FP8_BACKENDS)
# Distributions whose presence or version some rule asks about.
PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "trl", "datasets", "deepspeed", "gguf", "torch_npu",
    "flash_attn", "flash_attn_3", "liger-kernel", "unsloth",
    *(name for row in registry.PREQUANTIZED.values() for name in row.packages),
    *(row.package for table in TABLES for row in table.values() if row.package),
)  # fmt: skip


def versions() -> dict[str, str]:
    """Package -> version, of those that are installed."""
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def unmet(name: str, installed: Mapping[str, str]) -> str:
    """What the package `name` asks of others among the `installed` and does not get: 'transformers <=5.17.0'."""
    found = []
    for line in importlib.metadata.requires(name) or () if name in installed else ():
        wanted = Requirement(line)
        version = installed.get(wanted.name)
        if version and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            found += [f"{wanted.name} {part}" for part in wanted.specifier if not part.contains(version, True)]
    return ", ".join(found)
