"""DeepSpeed's configuration: the file `deepspeed.json` of a plan.

Floor 2. Imports catalog, spec. Pure. "auto" is what the Trainer fills in from its own arguments, so that batch,
clipping and precision stand in one place only.
"""

from __future__ import annotations

import json
from typing import Any

from backend import catalog
from backend.spec import RunSpec

MIB = 1024**2


def configuration(spec: RunSpec) -> dict[str, Any]:
    """The keys that DeepSpeed reads; sources: deepspeed 0.19 runtime/zero/config.py, transformers 5.23
    integrations/deepspeed.py."""
    bucket = spec.parallel.bucket_mb * MIB // 2  # DeepSpeed counts numbers; they travel in two bytes each
    zero: dict[str, Any] = {
        "stage": catalog.STRATEGIES[spec.parallel.strategy].stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if zero["stage"] == 3:
        zero |= {"stage3_gather_16bit_weights_on_model_save": True}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # any of the Trainer's optimizers
    }


def text(spec: RunSpec) -> str:
    """As a file."""
    return json.dumps(configuration(spec), indent=2) + "\n"
