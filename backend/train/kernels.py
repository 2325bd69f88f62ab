"""How the layers are computed: attention, Liger, torch.compile; as asked for, or not at all.

Beside the floors. Imports spec, catalog, journal.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from accelerate.utils import is_compiled_module
from transformers import TrainerCallback

from backend import registry
from backend.config import RunSpec
from backend.train.run_log import TrainError


def check(spec: RunSpec, family: str, precision: str) -> None:
    """Raise TrainError for what would fail at the first step only."""
    asked = spec.model.attn_implementation
    if asked in registry.FLASH_ATTENTIONS and precision == "fp32":
        raise TrainError(f"model.attn_implementation: {asked} computes in bf16 or fp16: set precision.compute to bf16.")
    if asked == "flex_attention" and family in ("cpu", "mps"):
        raise TrainError("model.attn_implementation: flex_attention has no backward pass on this device: take sdpa.")

    if spec.train.use_liger_kernel and family not in ("cuda", "xpu"):
        raise TrainError("train.use_liger_kernel: its kernels are for GPUs with Triton: switch it off.")
    if spec.train.use_liger_kernel and importlib.util.find_spec("liger_kernel") is None:
        raise TrainError("train.use_liger_kernel needs the package liger-kernel: pip install it.")


def loading(spec: RunSpec) -> dict[str, Any]:
    """What `from_pretrained` is told."""
    asked = attention(spec)
    return {} if asked == "auto" else {"attn_implementation": asked}


def attention(spec: RunSpec) -> str:
    """The attention to ask for: sequence parallel goes around one that is named."""
    asked = spec.model.attn_implementation
    shared = (
        registry.STRATEGIES[spec.parallel.strategy].engine == "deepspeed" and spec.parallel.sequence_parallel_size > 1
    )
    return "sdpa" if shared and asked == "auto" else asked


def refused(spec: RunSpec, error: Exception) -> str:
    """A sentence about an attention that could not be had; '' if the error is about something else."""
    words = str(error)
    if spec.model.attn_implementation == "auto" or "ttention" not in words:
        return ""
    return f"model.attn_implementation: {spec.model.attn_implementation} cannot be used here: {words.strip().splitlines()[0]}"


def check_attention(spec: RunSpec, model: Any) -> None:
    """Raise TrainError unless the model computes attention as asked for: the library may take something like it."""
    asked, found = spec.model.attn_implementation, model.config.get_text_config()._attn_implementation
    if asked not in ("auto", found):
        raise TrainError(
            f"model.attn_implementation: {asked} was asked for, and the library took {found}: choose that, or sdpa."
        )


def patch(spec: RunSpec, model: Any) -> None:
    """Give the layers Liger's kernels. Raises TrainError where it knows none for the model: it would say nothing.

    Its loss is left out, since TRL computes the loss in tiles by itself.
    """
    if not spec.train.use_liger_kernel:
        return
    liger: Any = importlib.import_module("liger_kernel.transformers")
    liger._apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    forwards = (getattr(module.forward, "__func__", None) for module in model.modules())
    if not any(getattr(forward, "__module__", "").startswith("liger_kernel") for forward in forwards):
        raise TrainError(f"train.use_liger_kernel: Liger has no kernels for {model.config.model_type}: switch it off.")


class Compiled(TrainerCallback):
    """Ends a run whose model was not compiled although it should be: the engines pass over it without a word."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The engine is ready. Raises TrainError."""
        wrapped = self.trainer.model_wrapped
        if not (is_compiled_module(wrapped) or getattr(wrapped, "is_compiled", False)):
            raise TrainError("train.torch_compile: the model was not compiled with this strategy: switch it off.")
