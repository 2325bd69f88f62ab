"""TorchInductor declares a C++ variable twice if two outputs are the same sum in bf16 or fp16.

_inductor/codegen/cpp.py, `CppVecKernel.store_reduction`: it names the converted sum after the sum, without looking
whether it has converted it before. The biases of two layers whose outputs are added have the same gradient, such as
those of attention and MLP in GPT-NeoX and Phi. Without the patch full fine-tuning of these models in pure bf16 on a CPU
with torch_compile ends when the first step is compiled.
"""

from __future__ import annotations

import functools
from typing import Any

LIBRARY, SEEN_IN = "torch", "2.13.0"


def apply() -> None:
    """Let the variables of each output have a scope of their own."""
    from torch._inductor.codegen.cpp import CppVecKernel  # noqa: PLC0415 - it takes seconds, and few runs compile

    original = CppVecKernel.store_reduction
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def store_reduction(kernel: Any, *args: Any) -> None:
        kernel.reduction_suffix.writeline("{")
        original(kernel, *args)
        kernel.reduction_suffix.writeline("}")

    CppVecKernel.store_reduction = store_reduction
