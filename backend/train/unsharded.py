"""Weights that are spread over the ranks, whole on each of them for a while.

Beside the floors. Imports catalog, spec. Layers that are gathered one by one must be used by all ranks equally often;
answers are of different lengths, so that ranks would wait for one another without end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.fsdp import FSDPModule
from trl.models.utils import unwrap_model_for_generation

from backend import registry
from backend.config import RunSpec


@contextmanager
def _uncompared(coordinator: Any) -> Iterator[None]:
    """DeepSpeed's ranks compare what they fetched whenever a forward pass begins, and would wait for one that answers
    nothing. TRL takes away the other hooks, and leaves this one."""
    coordinator.reset_step = lambda: None
    try:
        yield
    finally:
        del coordinator.reset_step


@contextmanager
def gathered(spec: RunSpec, trainer: Any) -> Iterator[Any]:
    """The model, ready to be called by each rank as it likes; the ranks of tensor parallel still call it together.
    All ranks must enter and leave it. The engine must have started."""
    if registry.STRATEGIES[spec.parallel.strategy].zero_stage == 3:
        again, engine = trainer.args.gradient_checkpointing_kwargs, trainer.model_wrapped
        with (
            unwrap_model_for_generation(engine, trainer.accelerator, gradient_checkpointing_kwargs=again) as model,
            _uncompared(engine.optimizer.parameter_offload.get_param_coordinator()),
        ):
            yield model
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield model
    finally:
        for part in parts:
            part.set_reshard_after_forward(spec.parallel.reshard_after_forward, recurse=False)
            part.reshard()
        # FSDP fetches ahead in the next backward pass by what was called before; a rank that had more to answer, or
        # anything at all, would fetch what the others do not, and all would wait for ever.
        if parts and parts[0]._get_fsdp_state()._is_root:  # unknown before the first call
            parts[0].reset_iter_state()
