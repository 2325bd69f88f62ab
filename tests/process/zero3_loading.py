"""`python zero3_loading.py RESULT TYPE ...`: loads a small model of each type as a run with ZeRO-3 does, and writes the
errors to the file RESULT as JSON: model type -> first line of the error, or the parameters whose values differ from the
saved ones."""

import json
import os
import sys
import tempfile
from pathlib import Path

import deepspeed
import torch
from architectures import build
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from backend.train.patches import transformers_frozen_parameters

CONFIG = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}


def problem(kind: str) -> str:
    """Why the model cannot be loaded; '' if it can."""
    model = build(kind)
    saved = {name: value.detach().clone() for name, value in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        active = HfDeepSpeedConfig(CONFIG)  # from_pretrained shards the parameters as long as it exists
        try:
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            transformers_frozen_parameters.apply(loaded)
        except Exception as error:
            return (str(error).strip().splitlines() or [type(error).__name__])[0]
        finally:
            del active
    with deepspeed.zero.GatheredParameters(list(loaded.parameters())):
        return ", ".join(n for n, p in loaded.named_parameters() if n in saved and not torch.equal(p.cpu(), saved[n]))


if __name__ == "__main__":
    result, *kinds = sys.argv[1:]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    deepspeed.init_distributed("gloo", verbose=False, init_method=f"file://{result}.store", rank=0, world_size=1)
    Path(result).write_text(json.dumps({kind: found for kind in kinds if (found := problem(kind))}))
