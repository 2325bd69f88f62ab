"""Trains the run's folder that it is started in as `python -m backend.train .` does, and writes down what really
computed: the names of all operators and kernels that torch's profiler saw, to seen.json."""

import json
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from backend.train import __main__ as training
from backend.train import exit

sys.argv[1:] = ["."]
kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
with profile(activities=kinds) as seen:
    training.main()
Path("seen.json").write_text(json.dumps(sorted({event.name for event in seen.events()})))
exit.exit_now()
