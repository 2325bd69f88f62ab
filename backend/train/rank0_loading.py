"""One rank reads the weights of an FSDP2 run, and sends the others their parts.

Beside the floors. Imports spec, engine, model, quantized, work. accelerate 1.15 sends from rank 0 of all
nodes, once the optimizer is made (utils/fsdp_utils.py, fsdp2_load_full_state_dict); transformers 5.23 reads the file on
every rank all the same. So until then the others hold the model hollow: its weights are on the meta device, without
numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, GenerationConfig

from backend.config import RunSpec
from backend.train import model, quantized
from backend.train.context import TrainContext
from backend.train.engines.fsdp import load_on_every_rank, loads_on_rank0


def load(work: TrainContext, config: Any, source: model.Source, tokens: Any, sliced: Mapping[str, Any]) -> Any:
    """The untouched model, hollow on all ranks but the first; whole on each where it cannot be sent, which `config` is
    told. All ranks must call it. Raises TrainError, Stopped."""
    spec, group = work.spec, work.group

    def read() -> Any:
        return model.load(spec, source, work.precision, tokens, sliced)

    if not loads_on_rank0(config):
        return read()
    found = _hollow(spec, source, work.precision, tokens) if _sendable(spec, source) else None
    whole = None
    if all(group.gather(found is not None)):
        whole = work.first(read)
        found = found if group.rank else whole
        # A file may hold apart what its configuration ties: then the names are others, and nothing would fit.
        if all(outline == _outline(found) for outline in group.gather(_outline(found))):
            _share_buffers(work, found)
            return found
    work.run_log.info("Every rank reads the weights: those of this model cannot be sent from one to the others.")
    load_on_every_rank(config)
    return read() if whole is None else whole


def _sendable(spec: RunSpec, source: model.Source) -> bool:
    """Whether a model without numbers can be made into what is trained; further keys may ask where it cannot. What
    stands beside packed numbers, and what code of the model's own computes, is not known before it was read."""
    return not (spec.modifies_loaded_weights or quantized.came_as(source.name, source.options))


def _hollow(spec: RunSpec, source: model.Source, precision: str, tokens: Any) -> Any:
    """The model without numbers; None if it cannot be made so. Leaves the random numbers as they are."""
    try:
        with torch.random.fork_rng(devices=[]):
            made = model.load(spec, source, precision, tokens, make=_make)
    except Exception:  # the reading, which follows, says why in its own words
        return None
    weights, all_names = dict(made.named_parameters()), dict(made.named_parameters(remove_duplicate=False))
    # accelerate sends all that is in the state, and expects it to be spread: buffers are not. Afterwards it ties
    # weights again, and would not know a trained copy of one of them.
    buffered, tied = made.state_dict().keys() - all_names.keys(), len(weights) < len(all_names)
    return None if buffered or (tied and spec.method.kind == "lora" and spec.lora.modules_to_save) else made


def _make(kind: Any, name: str, dtype: torch.dtype, how: Mapping[str, Any]) -> Any:
    """As `from_pretrained`, without the weights. What is no weight has its numbers."""
    attention = {key: how[key] for key in how if key == "attn_implementation"}
    config = AutoConfig.from_pretrained(name, **{key: how[key] for key in how if key not in attention})
    with init_empty_weights(include_buffers=False):
        made = kind.from_config(config, dtype=dtype, **attention)
    made.tie_weights()  # each weight that was put on the meta device became one of its own
    if made.can_generate():
        place = {key: how[key] for key in how if key in ("revision", "local_files_only")}
        with contextlib.suppress(OSError):  # without a file of its own it follows from the configuration
            made.generation_config = GenerationConfig.from_pretrained(name, **place)
    return made.eval()


def _outline(made: nn.Module) -> list[tuple[str, str, str]]:
    """What must be the same on all ranks."""
    both = (*made.named_parameters(), *made.named_buffers())
    return [(name, str(tuple(tensor.shape)), str(tensor.dtype)) for name, tensor in both]


def _share_buffers(work: TrainContext, made: nn.Module) -> None:
    """Rank 0's buffers on all ranks: they are not sent with the weights."""
    buffers = dict(made.named_buffers())
    for name, tensor in work.group.share(buffers).items():
        buffers[name].copy_(tensor)


def stand_in(made: nn.Module) -> None:
    """Put room that is never touched, and so takes none, in the place of hollow weights that learn: accelerate tells an
    optimizer's weights apart by their addresses, and fused optimizers refuse what has none."""
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for module in made.modules():
        for name, old in module.named_parameters(recurse=False, remove_duplicate=False):
            if old.is_meta and old.requires_grad:
                if old not in fresh:  # tied ones stay one
                    fresh[old] = nn.Parameter(torch.empty_like(old, device="cpu"))
                setattr(module, name, fresh[old])
