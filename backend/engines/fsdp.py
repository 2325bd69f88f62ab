"""FSDP's configuration: the file `fsdp.json` of a plan, as the Trainer's `fsdp_config` reads it.

Floor 2. Imports catalog, derived, spec. Pure. Precision and mesh are the Trainer's own arguments (`train/engine.py`).
"""

from __future__ import annotations

import json
from typing import Any

from backend import registry
from backend.config import RunSpec, merge
from backend.resolve import reads_once

STATE_DICTS = {"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"}


def configuration(spec: RunSpec) -> dict[str, Any]:
    """The keys; source: transformers 5.23 training_args.py, _process_fsdp_args."""
    parallel = spec.parallel
    version = registry.STRATEGIES[parallel.strategy].version
    found: dict[str, Any] = {
        "version": version,  # always said: accelerate's launcher would take 1, the Trainer 2
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": parallel.reshard_after_forward if version == 2 else parallel.sharding_strategy.upper(),
        "cpu_offload": parallel.cpu_offload,
        "cpu_ram_efficient_loading": reads_once(spec),
        "state_dict_type": STATE_DICTS[parallel.state_dict_type],
    }
    if parallel.transformer_layer_cls_to_wrap:
        found["transformer_layer_cls_to_wrap"] = list(parallel.transformer_layer_cls_to_wrap)
    return merge.over(found, merge.parse(parallel.extra_config))


def text(spec: RunSpec) -> str:
    """As a file."""
    return json.dumps(configuration(spec), indent=2) + "\n"
