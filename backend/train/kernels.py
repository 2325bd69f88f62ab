"""Attention implementation, Liger kernels and torch.compile: what was requested is used, or the run ends."""

from __future__ import annotations

import importlib
from typing import Any

from accelerate.utils import is_compiled_module
from transformers import TrainerCallback

from backend.config import RunSpec
from backend.engines import engine_of
from backend.train.run_log import TrainError


def load_arguments(spec: RunSpec) -> dict[str, Any]:
    """Arguments of `from_pretrained`."""
    implementation = attn_implementation(spec)
    return {} if implementation == "auto" else {"attn_implementation": implementation}


def attn_implementation(spec: RunSpec) -> str:
    """The attention implementation; Ulysses wraps one that must be named."""
    requested = spec.model.attn_implementation
    ulysses = engine_of(spec.parallel.strategy).sequence_parallel_size(spec) > 1
    return "sdpa" if ulysses and requested == "auto" else requested


def attention_error(spec: RunSpec, error: Exception) -> str:
    """The message for an attention implementation that could not be used; '' if the error is about something else."""
    words = str(error)
    if spec.model.attn_implementation == "auto" or "ttention" not in words:
        return ""
    reason = words.strip().splitlines()[0]
    return f"model.attn_implementation: {spec.model.attn_implementation} cannot be used here: {reason}"


def check_attention(spec: RunSpec, model: Any) -> None:
    """Raise TrainError unless the model uses the requested attention: transformers may replace it by another."""
    requested, used = spec.model.attn_implementation, model.config.get_text_config()._attn_implementation
    if requested not in ("auto", used):
        raise TrainError(
            f"model.attn_implementation: {requested} was requested, but transformers uses {used}. Set it to {used} or "
            "sdpa."
        )


def apply_liger(spec: RunSpec, model: Any) -> None:
    """Replace layers by Liger's. Raises TrainError if Liger has none for the model; Liger itself silently ignores it.

    Liger's loss is left out, because TRL computes the loss in chunks.
    """
    if not spec.train.use_liger_kernel:
        return
    liger: Any = importlib.import_module("liger_kernel.transformers")
    liger._apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    forwards = (getattr(module.forward, "__func__", None) for module in model.modules())
    if not any(getattr(forward, "__module__", "").startswith("liger_kernel") for forward in forwards):
        raise TrainError(
            f"train.use_liger_kernel: Liger has no kernels for {model.config.model_type}. Set it to false."
        )


class CompileCheckCallback(TrainerCallback):
    """Ends a run whose model should be compiled but is not: some engines ignore torch.compile silently."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Check once the engine has started. Raises TrainError."""
        wrapped = self.trainer.model_wrapped
        if not (is_compiled_module(wrapped) or getattr(wrapped, "is_compiled", False)):
            raise TrainError(
                "train.torch_compile: this strategy did not compile the model. Set train.torch_compile to false."
            )
