"""Sharded weights, temporarily gathered in full on every rank.

Layers that are gathered one by one must be used by all ranks equally often, but generated outputs have different
lengths: ranks would wait for one another forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.fsdp import FSDPModule
from trl.models.utils import unwrap_model_for_generation

from backend import registry
from backend.config import RunSpec
from backend.train.patches import deepspeed_zero3_generation


@contextmanager
def unsharded_model(spec: RunSpec, trainer: Any) -> Iterator[Any]:
    """The model, which each rank may call as often as it likes; with tensor parallelism the ranks of a group still call
    it together. All ranks must enter and leave the context. The engine must have started."""
    if registry.STRATEGIES[spec.parallel.strategy].zero_stage == 3:
        checkpointing, engine = trainer.args.gradient_checkpointing_kwargs, trainer.model_wrapped
        with (
            unwrap_model_for_generation(
                engine, trainer.accelerator, gradient_checkpointing_kwargs=checkpointing
            ) as model,
            deepspeed_zero3_generation.apply(engine.optimizer.parameter_offload.get_param_coordinator()),
        ):
            yield model
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    modules = getattr(trainer, "units_before_merge", None) or _fsdp_modules(trainer.model_wrapped)  # also the root
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    # transformers registers `generate` as a forward method, after which FSDP shards the root's weights again: a rank
    # with one batch more than the others would gather them alone, and wait forever. It also tells FSDP the root, which
    # peft does not call to generate.
    registered = vars(model).pop("generate", None) if modules else None
    if modules:
        modules[0]._get_fsdp_state()._lazy_init()
    try:
        yield model
    finally:
        if registered:
            model.generate = registered
        for module in modules:
            module.set_reshard_after_forward(spec.parallel.reshard_after_forward, recurse=False)
            module.reshard()
        # FSDP prefetches in the next backward pass what the last forward passes have called. A rank that generated more
        # than the others would prefetch what they do not, and all would wait forever.
        if modules:
            modules[0].reset_iter_state()


def reshard(model: Any) -> None:
    """Free the full weights that FSDP2 keeps after a forward pass without a backward pass: those of the root module,
    and without parallel.reshard_after_forward those of all layers. Otherwise an adapter would be merged into these
    copies only, and lost, and the next step would not see what a schedule-free optimizer has written to the shards."""
    for module in _fsdp_modules(model):
        module.reshard()


def merge_adapter(trainer: Any) -> None:
    """Replace the trainer's model by one with the adapter merged into its weights. peft's wrapper of an embedding, a
    unit of FSDP2, leaves the model; the embedding is still gathered with this unit."""
    trainer.units_before_merge = _fsdp_modules(trainer.model_wrapped)
    trainer.model = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()


def _fsdp_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
