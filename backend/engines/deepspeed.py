"""DeepSpeed's configuration: the file `deepspeed.json` of a plan.

Floor 2. Imports catalog, spec. Pure. "auto" is what the Trainer fills in from its own arguments, so that batch,
clipping and precision stand in one place only.
"""

from __future__ import annotations

import json
from typing import Any

from backend import registry
from backend.config import RunSpec, merge

MIB = 1024**2
NONE, NVME = "none", "nvme"


def configuration(spec: RunSpec) -> dict[str, Any]:
    """The keys that DeepSpeed reads; sources: deepspeed 0.19 runtime/zero/config.py, transformers 5.23
    integrations/deepspeed.py."""
    bucket = spec.parallel.bucket_cap_mb * MIB // 2  # DeepSpeed counts numbers; they travel in two bytes each
    zero: dict[str, Any] = {
        "stage": registry.STRATEGIES[spec.parallel.strategy].stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if zero["stage"] == 3:
        zero |= {"stage3_gather_16bit_weights_on_model_save": True}
    zero |= _offload(spec)
    found: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # any of the Trainer's optimizers
    }
    if NVME in (_optimizer(spec), _weights(spec)):
        found["aio"] = _aio(spec)
    return merge.over(found, merge.parse(spec.parallel.extra_config))


def _optimizer(spec: RunSpec) -> str:
    return spec.parallel.offload_optimizer if registry.STRATEGIES[spec.parallel.strategy].stage else NONE


def _weights(spec: RunSpec) -> str:
    return spec.parallel.offload_param if registry.STRATEGIES[spec.parallel.strategy].stage == 3 else NONE


def _offload(spec: RunSpec) -> dict[str, Any]:
    """Where state and weights lie; source: deepspeed 0.19 runtime/zero/offload_config.py."""
    found: dict[str, Any] = {}
    parallel = spec.parallel
    disk = {"nvme_path": parallel.nvme_path, "buffer_count": parallel.nvme_buffer_count}
    for key, device in (("offload_optimizer", _optimizer(spec)), ("offload_param", _weights(spec))):
        if device != NONE:
            found[key] = {"device": device, "pin_memory": parallel.pin_memory, **(disk if device == NVME else {})}
    if _weights(spec) == NVME:
        found["offload_param"]["buffer_size"] = parallel.nvme_buffer_size_mb * MIB // 2  # numbers of two bytes
    return found


def _aio(spec: RunSpec) -> dict[str, Any]:
    """How the disk is asked; source: deepspeed 0.19 runtime/swap_tensor/constants.py."""
    parallel = spec.parallel
    return {
        "block_size": parallel.aio_block_size_kb * 1024,
        "queue_depth": parallel.aio_queue_depth,
        "intra_op_parallelism": parallel.aio_intra_op_parallelism,
        "single_submit": False,
        "overlap_events": True,
    }


def text(spec: RunSpec) -> str:
    """As a file."""
    return json.dumps(configuration(spec), indent=2) + "\n"
